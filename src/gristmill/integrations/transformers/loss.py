"""The loss of transformers' models on gristmill: found, exchanged and given back.

A model of transformers computes its loss by its property `loss_function`, which can be set. Ours
takes the place of one that does the same, and with `"linear_cross_entropy"` the model's head and
loss are joined besides, where the model allows it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gristmill.integrations.transformers.forwards import (
    exchange_forward,
    options_of,
    original_forward,
    own_forward,
    restore_forward,
)
from gristmill.integrations.transformers.head import (
    HeadOptions,
    ModelOptions,
    forward_of_head,
    forward_of_model,
    is_hooked,
)
from gristmill.integrations.transformers.head_probe import Between, linear_head, probe_forward
from gristmill.integrations.transformers.loss_functions import (
    Handover,
    Loss,
    TokenClassificationLoss,
)
from gristmill.integrations.transformers.loss_probe import asks_for_loss_function, find_kind
from gristmill.integrations.transformers.probe import undisturbed
from gristmill.integrations.transformers.report import Left, PatchReport, Replaced

_HELD = "_loss_function"  # where the setter of transformers' property puts it


def patch_loss(model: torch.nn.Module, how: str) -> PatchReport:
    """Let the losses of a model, and of models in it, run on gristmill.

    Args:
        model: a model of transformers, or anything around one (PEFT, a data-parallel wrapper).
        how: ``"cross_entropy"``: of the logits the model makes; ``"linear_cross_entropy"``: in
            training of its hidden states, without logits.
    """
    report = PatchReport()
    with undisturbed():
        for name, module in _models_in(model):
            if asks_for_loss_function(module):
                report += _patched(name, module, how)
    if report == PatchReport():
        report += PatchReport(left=(Left("", type(model).__name__, _no_loss(model)),))
    return report


def unpatch_loss(model: torch.nn.Module) -> PatchReport:
    """Give models in `model` back the losses they had."""
    replaced = []
    for name, module in _models_in(model):
        loss = module.__dict__.get(_HELD)
        was = _run_by(module) if isinstance(loss, Loss) else ""
        _separate(module)  # also where somebody has set another loss since
        if isinstance(loss, Loss):
            _give_back(module, loss)
            replaced.append(Replaced(name, was, _name_of(loss.previous) or loss.called))
    return PatchReport(replaced=tuple(replaced))


def _models_in(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules whose loss can be set, as transformers' models have it."""
    for name, module in model.named_modules():
        found = inspect.getattr_static(type(module), "loss_function", None)
        if isinstance(found, property) and found.fset is not None:
            yield name, module


def _no_loss(model: torch.nn.Module) -> str:
    if any(True for _ in _models_in(model)):
        return "its forward never asks for loss_function: it has no loss, or computes it by itself"
    return "has no loss_function, as models of transformers do"


def _patched(name: str, module: torch.nn.Module, how: str) -> PatchReport:
    present: Any = module.loss_function
    if isinstance(present, Loss):
        return _patched_again(name, module, present, how)
    was = _name_of(present)
    if isinstance(present, torch.nn.Module):
        return PatchReport(left=(Left(name, was, "its loss function is a module of its own"),))
    kind = find_kind(present, getattr(module, "config", None))
    if isinstance(kind, str):
        return PatchReport(left=(Left(name, was, kind),))
    loss = kind(previous=module.__dict__.get(_HELD))
    # Past the setter: it refuses where a user has set a module, which only ends up beside it.
    module.__dict__[_HELD] = loss
    report = PatchReport(replaced=(Replaced(name, was, "cross_entropy"),))
    return _joined(name, module, loss, report) if how == "linear_cross_entropy" else report


def _patched_again(name: str, module: torch.nn.Module, loss: Loss, how: str) -> PatchReport:
    """A model that has our loss already: what can be joined is looked at anew.

    Its config may have another softcap since, or its vocabulary another head.
    """
    was = _run_by(module)
    already = PatchReport(left=(Left(name, loss.called, f"runs {was} already"),))
    _separate(module)
    if how == "linear_cross_entropy":
        report = _joined(name, module, loss, already)
    else:
        report = PatchReport(replaced=(Replaced(name, was, _run_by(module)),))
    return already if _run_by(module) == was and not report.left else report


def _joined(name: str, module: torch.nn.Module, loss: Loss, otherwise: PatchReport) -> PatchReport:
    """Join head and loss; where that is not possible, the report has `otherwise` and the reason."""
    found = _joinable(module, loss)
    if isinstance(found, str):
        return otherwise + PatchReport(left=(Left(name, _forward_name(module), found),))
    head_name, head, between = found
    handover = Handover()
    loss.handover, loss.scale, loss.softcap = handover, between.scale, between.softcap
    names = _positional_names(original_forward(module))
    exchange_forward(head, forward_of_head, HeadOptions(handover))
    exchange_forward(module, forward_of_model, ModelOptions(handover, head_name, names))
    was = f"{head_name} and {_name_of(loss.previous) or loss.called}"
    return PatchReport(replaced=(Replaced(name, was, _run_by(module)),))


def _joinable(module: torch.nn.Module, loss: Loss) -> tuple[str, torch.nn.Module, Between] | str:
    """The head with its name and what comes after it; or why logits have to be made."""
    if isinstance(loss, TokenClassificationLoss):
        return "logits of a token classifier are few, and made as ever"
    head = _output_head(module)
    head_name = next((one for one, found in module.named_modules() if found is head), None)
    if head is None or not head_name:
        return "it has no output head that get_output_embeddings gives"
    if options_of(head) is not None or own_forward(head) is not None or is_hooked(head):
        return f"somebody has changed or hooked {head_name}"
    problem = linear_head(head)
    if problem is not None:
        return f"{head_name} ({type(head).__name__}) is no plain linear layer: {problem}"
    base = _base_model(module, head)
    if base is None:
        return "it has no base model between its inputs and its head"
    between = probe_forward(module, base, head)
    return between if isinstance(between, str) else (head_name, head, between)


def _base_model(module: torch.nn.Module, head: torch.nn.Module) -> torch.nn.Module | None:
    """What makes the hidden states: the child that transformers names so, with no head in it."""
    for name in (getattr(module, "base_model_prefix", ""), "model"):
        base = getattr(module, name, None) if name else None
        if isinstance(base, torch.nn.Module) and all(one is not head for one in base.modules()):
            return base
    return None


def _positional_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    parameters = inspect.signature(forward).parameters.values()
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(one.name for one in parameters if one.kind in named)


def _output_head(module: torch.nn.Module) -> torch.nn.Module | None:
    give: Callable[[], Any] | None = getattr(module, "get_output_embeddings", None)
    if give is None:
        return None
    try:
        head = give()
    except (AttributeError, NotImplementedError):
        return None
    return head if isinstance(head, torch.nn.Module) else None


def _separate(module: torch.nn.Module) -> None:
    """Undo `_joined`: the model's forward and its head's are their own again."""
    options = options_of(module)
    if not isinstance(options, ModelOptions):
        return
    restore_forward(module)
    for one in module.modules():  # by what it holds: the head may have got another name (LoRA)
        found = options_of(one)
        if isinstance(found, HeadOptions) and found.handover is options.handover:
            restore_forward(one)
    loss = module.__dict__.get(_HELD)
    if isinstance(loss, Loss):
        loss.handover, loss.scale, loss.softcap = None, 1.0, None


def _give_back(module: torch.nn.Module, loss: Loss) -> None:
    if loss.previous is None:
        del module.__dict__[_HELD]
    else:
        module.__dict__[_HELD] = loss.previous


def _run_by(module: torch.nn.Module) -> str:
    """What computes the loss of a patched model, with its options."""
    loss = module.__dict__[_HELD]
    if not isinstance(options_of(module), ModelOptions):
        return "cross_entropy"
    given = {"scale": loss.scale if loss.scale != 1.0 else None, "softcap": loss.softcap}
    options = ", ".join(f"{key}={value:.6g}" for key, value in given.items() if value is not None)
    return f"linear_cross_entropy({options})" if options else "linear_cross_entropy"


def _name_of(function: Any) -> str:
    if function is None:
        return ""
    return getattr(function, "__name__", None) or type(function).__name__


def _forward_name(module: torch.nn.Module) -> str:
    return f"{type(module).__name__}.forward"
