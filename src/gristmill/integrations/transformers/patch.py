"""`patch`: a model's norms, its loss and, on request, its linears and experts on gristmill."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from gristmill.errors import ArgumentError, DtypeError
from gristmill.integrations.transformers.norms import patch_norms, unpatch_norms
from gristmill.integrations.transformers.report import PatchReport

LOSSES = ("cross_entropy", "linear_cross_entropy")


def patch(
    model: torch.nn.Module,
    *,
    norms: bool = True,
    loss: str | None = "cross_entropy",
    nvfp4: bool | str | Iterable[str] | Callable[[str, torch.nn.Module], bool] | None = None,
) -> PatchReport:
    """Let a model run on gristmill, in place: this instance, and no other of its class.

    Classes, parameters (names, order, identity), the state dict, hooks and modes stay; only what
    runs inside changes, and only where gristmill gives what the module gave, but for roundings.

    Args:
        model: any module; of a model of transformers, its loss, too.
        norms: whether RMSNorms and LayerNorms run on `gristmill.rms_norm` and
            `gristmill.layer_norm`. They are recognised by what they compute, not by their names.
        loss: ``"cross_entropy"`` computes the model's own loss on its logits as they are, without
            a copy in fp32; ``"linear_cross_entropy"`` computes it in training from the hidden
            states, and logits are never made; None leaves it.
        nvfp4: which linears and experts are quantised to NVFP4: None for none, True for all but
            the output head and routers, patterns for names of modules
            (``"model.layers.*.mlp.*"``), or a function of name and module. This loses precision
            and cannot be undone.

    Returns:
        A report of what was replaced, and what was not and why. Patching twice changes nothing.
    """
    _check_model("patch", model)
    if not isinstance(norms, bool):
        raise DtypeError(f"patch: norms must be True or False, got {norms!r}")
    if loss is not None and loss not in LOSSES:
        raise ArgumentError(f"patch: loss must be one of {LOSSES} or None, got {loss!r}")
    which = _check_nvfp4(nvfp4)
    report = PatchReport()
    if which is not None:
        from gristmill.integrations.transformers.nvfp4 import quantize_modules

        report += quantize_modules(model, which)
    if norms:
        report += patch_norms(model)
    if loss is not None:
        from gristmill.integrations.transformers.loss import patch_loss

        report += patch_loss(model, loss)
    return report


def unpatch(model: torch.nn.Module) -> PatchReport:
    """Give a model back what it ran before :func:`patch`.

    Returns:
        A report of what was given back. What was quantised to NVFP4 stays so: the weights it had
        are gone, and the report says so. Of a model that was never patched it is empty.
    """
    from gristmill.integrations.transformers.loss import unpatch_loss
    from gristmill.integrations.transformers.nvfp4 import left_quantized

    _check_model("unpatch", model)
    report = unpatch_loss(model) + unpatch_norms(model)
    return report + PatchReport(left=left_quantized(model))


def _check_model(function: str, model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise DtypeError(
            f"{function}: model must be an instance of torch.nn.Module, got {_kind(model)}"
        )


def _check_nvfp4(nvfp4: Any) -> Any:
    """None where nothing is to be quantised; patterns as a tuple."""
    if nvfp4 is None or nvfp4 is False:
        return None
    if nvfp4 is True or (callable(nvfp4) and not isinstance(nvfp4, type)):
        return nvfp4
    patterns = (nvfp4,) if isinstance(nvfp4, str) else nvfp4
    if isinstance(patterns, (list, tuple, set, frozenset)):
        patterns = tuple(patterns)
        if patterns and all(isinstance(pattern, str) and pattern for pattern in patterns):
            return patterns
    raise ArgumentError(
        "patch: nvfp4 must be None, True, a pattern or patterns for names of modules, or a "
        f"function of name and module, got {nvfp4!r}"
    )


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
