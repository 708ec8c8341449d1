"""Which loss a model has, found by what it does.

The present loss is called with a few small rows on the CPU, and so is each of ours; one that gives
the same results, gradients and dtypes for every way of calling may take its place. Names and
identities do not count: a user's wrapper around transformers' loss is as good as the original.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from types import CellType, CodeType, FunctionType, SimpleNamespace
from typing import Any

import torch

from gristmill.integrations.transformers.forwards import own_forward
from gristmill.integrations.transformers.loss_functions import (
    CausalLMLoss,
    Loss,
    MaskedLMLoss,
    TokenClassificationLoss,
)

_CLASSES = 11
_SHAPE = (2, 6)
_SPECIAL = 16  # tokens that are looked at one by one: a vocabulary's numbers for each


def find_kind(present: Callable[..., Any], config: Any = None) -> type[Loss] | str:
    """The loss of ours that does what `present` does, or why there is none.

    `config` is the model's: a loss that is not of transformers may treat its special tokens
    otherwise than others.
    """
    best, difference = 0, ""
    theirs = str(getattr(present, "__module__", "")).startswith("transformers.")
    special = partial(_special_calls, config=None if theirs else config)
    for kind in (CausalLMLoss, MaskedLMLoss, TokenClassificationLoss):
        for equal, (what, call) in enumerate(chain(_calls(kind), special(kind))):
            if not _does_the_same(present, kind(), call):
                if equal > best:
                    best, difference = equal, f"it differs from {kind.called} in {what}"
                break
        else:
            return kind
    return difference or "its results are not a cross entropy of tokens"


def asks_for_loss_function(module: torch.nn.Module) -> bool:
    """Whether the module's forward, or what it calls on itself, names `loss_function`.

    Models that compute their loss by hand have the property, too, and would not notice.
    """
    own = own_forward(module)
    mentioned = [_names_of(own) if own is not None else set()]
    seen: set[str] = set()
    waiting = ["forward"]
    while waiting:
        name = waiting.pop()
        seen.add(name)
        mentioned += _names_in(type(module), name)
        waiting += {one for names in mentioned for one in names} - seen - set(waiting)
        if any("loss_function" in names for names in mentioned):
            return True
        mentioned.clear()
    return False


def _names_in(kind: type, method: str) -> Iterator[set[str]]:
    """The names that a method's code mentions, of each class that has it up to the models' base."""
    for owner in kind.__mro__:
        if owner.__module__ in ("transformers.modeling_utils", "torch.nn.modules.module"):
            return
        if method in owner.__dict__:
            names = _names_of(owner.__dict__[method])
            yield names
            if "super" not in names:
                return


def _names_of(callable_: Any) -> set[str]:
    """The names in a function's code, and in that of the functions it is wrapped around."""
    names: set[str] = set()
    waiting, seen = [callable_], set[int]()
    while waiting:
        one = waiting.pop()
        one = getattr(one, "__func__", one)
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, CodeType):
            names |= set(one.co_names)
            waiting += one.co_consts
        elif isinstance(one, FunctionType):
            waiting.append(one.__code__)
            waiting += [cell.cell_contents for cell in one.__closure__ or () if _is_filled(cell)]
            waiting.append(getattr(one, "__wrapped__", None))
    return names


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that was never given a value
        return False


def _calls(kind: type[Loss]) -> list[tuple[str, dict[str, Any]]]:
    """Arguments that show how a loss behaves, the plainest first."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(*_SHAPE, _CLASSES, generator=generator, dtype=torch.float32)
    labels = torch.randint(0, _CLASSES, _SHAPE, generator=generator)
    labels[0, 2] = labels[1, 5] = -100
    plain: dict[str, Any] = {"logits": logits, "labels": labels}
    if kind is TokenClassificationLoss:
        plain["config"] = SimpleNamespace(num_labels=_CLASSES)
    else:
        plain["vocab_size"] = _CLASSES
    calls = [
        ("its results", plain),
        ("large logits", {**plain, "logits": logits * 100}),
        ("logits of bf16", {**plain, "logits": logits.bfloat16()}),
        ("logits of fp16", {**plain, "logits": logits.half()}),
        ("num_items_in_batch", {**plain, "num_items_in_batch": 5}),
        ("num_items_in_batch", {**plain, "num_items_in_batch": torch.tensor(7)}),
        ("ignore_index", {**plain, "labels": labels.clamp(min=0), "ignore_index": 3}),
        ("label_smoothing", {**plain, "label_smoothing": 0.3}),
        ("labels that are all ignored", {**plain, "labels": torch.full(_SHAPE, -100)}),
    ]
    if kind is CausalLMLoss:
        calls.append(("shift_labels", {**plain, "shift_labels": labels.flip(1)}))
    return calls


def _special_calls(kind: type[Loss], config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """A row for each special token of the model, in its whole vocabulary."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    classes = getattr(text, "vocab_size", None)
    if kind is TokenClassificationLoss or not isinstance(classes, int) or classes < 2:
        return
    found: list[Any] = [0, classes - 1]
    for source in {id(one): one for one in (text, config)}.values():
        for name, value in vars(source).items():
            if "token" in name and name.endswith(("_id", "_ids", "_index")):
                found += value if isinstance(value, (list, tuple)) else [value]
    ids = [one for one in dict.fromkeys(found) if isinstance(one, int) and 0 <= one < classes]
    generator = torch.Generator().manual_seed(11)
    # The first has no row where each token predicts the next.
    labels = torch.tensor([[1, *ids[:_SPECIAL]]])
    logits = torch.randn(*labels.shape, classes, generator=generator, dtype=torch.float32)
    yield "special tokens", {"logits": logits, "labels": labels, "vocab_size": classes}


def _does_the_same(
    present: Callable[..., Any], ours: Callable[..., Any], call: dict[str, Any]
) -> bool:
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        expected = _result(present, call)
        found = _result(ours, call)
    if expected is None or found is None:
        return False
    # Sums of a dozen numbers in fp32; gradients come in the dtype of the logits.
    coarse = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
    return all(
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.allclose(one, other, rtol=coarse[one.dtype], atol=1e-6, equal_nan=True)
        for one, other in zip(expected, found, strict=True)
    )


def _result(
    loss: Callable[..., Any], call: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The loss and the gradient of the logits; None where it gives no such thing."""
    logits = call["logits"].clone().requires_grad_()
    try:
        result = loss(**{**call, "logits": logits, "labels": call["labels"].clone()})
        if not isinstance(result, torch.Tensor) or result.dtype != torch.float32 or result.dim():
            return None
        (gradient,) = torch.autograd.grad(result, logits)
    except Exception:  # whatever a loss of somebody else raises: it is not the one we look for
        return None
    return result.detach(), gradient
