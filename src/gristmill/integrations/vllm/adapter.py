"""Every name of vLLM that the norms and the plugin's frame touch, in one place.

vLLM promises no stability for most of what a plugin needs, and names move in nearly every release.
So the version alone decides only what is too old; from there on each function looks for the names
and signatures it is about to use, and raises `Declined` where they are not what it knows.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from gristmill.errors import GristmillError
from gristmill.log import logger

OLDEST = (0, 22)
NEWEST = (0, 32)

RMS_NORM = "rms_norm"
FUSED_ADD_RMS_NORM = "fused_add_rms_norm"

# Parameters of vLLM's own implementations, with their defaults.
_REQUIRED = inspect.Parameter.empty
_SIGNATURES: dict[str, dict[str, Any]] = {
    RMS_NORM: {"x": _REQUIRED, "weight": _REQUIRED, "epsilon": _REQUIRED, "variance_size": None},
    FUSED_ADD_RMS_NORM: {
        "x": _REQUIRED,
        "x_residual": _REQUIRED,
        "weight": _REQUIRED,
        "epsilon": _REQUIRED,
        "variance_size": None,
    },
}
_OPTIONS = {"supported", "supports_args", "inplace"}


class Declined(GristmillError, RuntimeError):  # noqa: N818 - reads as what it says
    """This vLLM is none that gristmill can plug into; the message says why and what to do.

    It never leaves the plugin, which logs it: an exception would stop vLLM.
    """


@dataclass(frozen=True)
class NormOps:
    """The two IR ops, as vLLM's `IrOp` objects."""

    rms_norm: Any
    fused_add_rms_norm: Any


def vllm_version() -> str:
    """What vLLM calls itself: "0.32.0", "0.26.1rc0.dev1114+g5a014e3", "dev" for a bare checkout."""
    import vllm

    return str(getattr(vllm, "__version__", "of an unknown version"))


def check_version() -> None:
    """Decline what is older than the oldest vLLM that has all that is needed.

    A version that cannot be read, or is newer than what is known, is not declined here: whether it
    has what is needed shows when that is looked for.
    """
    found = re.match(r"v?(\d+)\.(\d+)", vllm_version())
    if found and (0, 0) < (int(found[1]), int(found[2])) < OLDEST:
        raise declined(f"is older than {_dotted(OLDEST)}")


def declined(what: str) -> Declined:
    """`Declined` for "vLLM X <what>"."""
    return Declined(
        f"vLLM {vllm_version()} {what}; gristmill knows vLLM {_dotted(OLDEST)} to "
        f"{_dotted(NEWEST)}: install one of these, or a gristmill that knows yours"
    )


def norm_ops() -> NormOps:
    """The IR ops of the norms, once they are known to be what the provider was written for."""
    try:
        from vllm.ir import ops
    except ImportError as error:
        raise declined(f"has no vllm.ir.ops ({error})") from error
    return NormOps(*(_norm_op(ops, name) for name in (RMS_NORM, FUSED_ADD_RMS_NORM)))


def _norm_op(ops: Any, name: str) -> Any:
    op = getattr(ops, name, None)
    if op is None:
        raise declined(f"has no vllm.ir.ops.{name}")
    try:
        native = op.impls["native"].impl_fn
        taken = {key: one.default for key, one in inspect.signature(native).parameters.items()}
        options = set(inspect.signature(op.register_impl).parameters)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise declined(
            f"keeps the implementations of vllm.ir.ops.{name} in another way "
            f"({type(error).__name__}: {error})"
        ) from error
    if taken != _SIGNATURES[name]:
        raise declined(
            f"has vllm.ir.ops.{name}({', '.join(taken)}), "
            f"not ({', '.join(_SIGNATURES[name])}) with only variance_size left out at will"
        )
    if not options >= _OPTIONS:
        lost = ", ".join(sorted(_OPTIONS - options))
        raise declined(f"has no {lost} in register_impl of vllm.ir.ops.{name}")
    if name == FUSED_ADD_RMS_NORM and not getattr(op, "allow_inplace", False):
        raise declined(f"allows no implementation in place for vllm.ir.ops.{name}")
    return op


def runs_here() -> bool:
    """Whether vLLM's platform is one that gristmill has kernels or references for."""
    platform = _platform()
    return bool(platform.is_cuda() or platform.is_cpu())


def why_not_here(capability: int) -> str | None:
    """Why gristmill has nothing for vLLM's platform, or for a GPU below `capability` (80: 8.0)."""
    platform = _platform()
    if not runs_here():
        return "gristmill runs on CUDA GPUs and CPUs"
    if platform.is_cuda() and not platform.has_device_capability(capability):
        return f"gristmill needs a GPU of compute capability {capability / 10}"
    return None


def is_batch_invariant() -> bool:
    """Whether vLLM was asked for results that do not depend on the batch (VLLM_BATCH_INVARIANT)."""
    from vllm import envs

    try:
        return bool(envs.VLLM_BATCH_INVARIANT)
    except AttributeError as error:
        raise declined("has no VLLM_BATCH_INVARIANT in vllm.envs") from error


def prepend_to_defaults(provider: str) -> None:
    """Put `provider` before the platform's default providers of both norms.

    vLLM has no hook for this, so the platform's classmethod that names the defaults is wrapped.
    What it returns goes the way of any other default: behind what the user asked for, into the
    config, its hash, and the log line in which vLLM prints the final order.
    """
    platform = type(_platform())
    _check_priority_fields()
    inner = getattr(platform, "get_default_ir_op_priority", None)
    if inner is None or list(inspect.signature(inner).parameters) != ["vllm_config"]:
        raise declined(f"has no {platform.__name__}.get_default_ir_op_priority(vllm_config)")
    if getattr(inner, "gristmill_provider", None) == provider:
        return
    platform.get_default_ir_op_priority = classmethod(_prepending(provider, inner))


def _prepending(provider: str, inner: Callable[[Any], Any]) -> Callable[..., Any]:
    def get_default_ir_op_priority(cls: type, vllm_config: Any) -> Any:
        priority = inner(vllm_config)
        try:
            for name in (RMS_NORM, FUSED_ADD_RMS_NORM):
                others = [one for one in getattr(priority, name) if one != provider]
                setattr(priority, name, [provider, *others])
        except Exception as error:  # vLLM would stop
            logger.warning("vLLM's order of norm providers was left as it is: %s", error)
        return priority

    get_default_ir_op_priority.gristmill_provider = provider  # type: ignore[attr-defined]
    return get_default_ir_op_priority


def _check_priority_fields() -> None:
    try:
        from vllm.config.kernel import IrOpPriorityConfig

        names = {field.name for field in fields(IrOpPriorityConfig)}
    except (ImportError, TypeError) as error:
        raise declined(f"has no vllm.config.kernel.IrOpPriorityConfig ({error})") from error
    lost = {RMS_NORM, FUSED_ADD_RMS_NORM} - names
    if lost:
        raise declined(f"has no {', '.join(sorted(lost))} in IrOpPriorityConfig")


def _platform() -> Any:
    from vllm.platforms import current_platform

    return current_platform


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
