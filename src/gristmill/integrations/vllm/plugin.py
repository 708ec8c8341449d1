"""The entry points that vLLM calls, in each of its processes, before it does anything else.

Both register what gristmill has and change nothing: a norm of ours runs where vLLM's
`--ir-op-priority` names it, an NVFP4 method of ours where `--quantization` does. GRISTMILL_VLLM is
the switch that makes them the default. Nothing here may touch a GPU or take time, and no exception
may leave: vLLM would stop.
"""

from __future__ import annotations

from collections.abc import Callable

from gristmill.integrations.vllm import adapter
from gristmill.integrations.vllm.switch import is_switched_on, tell_once
from gristmill.log import logger


def register_norms() -> None:
    """Entry point `gristmill_norms`: the provider `gristmill` of the IR ops of RMSNorm."""
    _guarded("norms", _register_norms)


def register_nvfp4() -> None:
    """Entry point `gristmill_nvfp4`: the quantization method `gristmill_nvfp4`."""
    _guarded("nvfp4", _register_nvfp4)


def _register_norms() -> None:
    from gristmill.integrations.vllm import norms

    ops = adapter.norm_ops()
    invariant = adapter.is_batch_invariant()
    supported = adapter.runs_here()  # vLLM skips a provider that is not
    norms.register(
        ops.rms_norm, ops.fused_add_rms_norm, supported=supported, batch_invariant=invariant
    )
    mode = ", batch-invariant, as VLLM_BATCH_INVARIANT is set" if invariant else ""
    logger.info("vLLM norms: provider %s is registered%s", norms.PROVIDER, mode)
    if not is_switched_on("norms"):
        return
    if not supported:
        _say("norms", "stay vLLM's own: gristmill runs on CUDA GPUs and CPUs")
    else:
        try:
            adapter.prepend_to_defaults(norms.PROVIDER)
        except adapter.Declined as error:
            _say("norms", f"come first only where --ir-op-priority names {norms.PROVIDER}: {error}")
        else:
            logger.info("vLLM norms: provider %s comes first by default", norms.PROVIDER)


def _register_nvfp4() -> None:
    from gristmill.integrations.vllm.quantization import register_nvfp4_methods

    register_nvfp4_methods()
    logger.info("vLLM NVFP4: quantization method gristmill_nvfp4 is registered")


def _guarded(half: str, register: Callable[[], None]) -> None:
    try:
        adapter.check_version()
        register()
    except adapter.Declined as error:
        _say(half, f"stay vLLM's own: {error}")
    except Exception as error:
        logger.debug("vLLM %s could not be registered", half, exc_info=True)
        _say(half, f"could not be registered: {type(error).__name__}: {error}")


def _say(half: str, what: str) -> None:
    tell_once(f"{half} {what}", f"vLLM {half}: {what}")
