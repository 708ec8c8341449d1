"""Training without logits: a model's own forward, whose head and loss are joined.

The model's forward stays what it is, with everything a model does between its layers and its
result: losses of routers, images, caches, its class of output. Only where it comes to its head, and
nothing but the loss is wanted, the head does not multiply: it hands its input and its weights over,
and gives the model a column of zeros to work on. The loss takes what was handed over and computes
the cross entropy of the product without ever holding it. What the model does to logits in between
(a scale, a softcap) was found out beforehand, by `head_probe`, and is part of the loss.

In every other case, with no labels, in evaluation, without gradients, with hooks on the head, the
head makes logits as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gristmill.errors import GristmillError
from gristmill.integrations.transformers.forwards import options_of, original_forward
from gristmill.integrations.transformers.loss_functions import Handover, Loss
from gristmill.ops.direct import PLAIN

# What a forward may be asked for that only logits can answer, by the names transformers has used.
_KEPT = ("logits_to_keep", "num_logits_to_keep")


@dataclass(frozen=True)
class ModelOptions:
    """Of a model whose loss may go without logits; `head` is its head's name in it.

    `parameters` are the names of its forward's positional parameters, for those who pass labels
    without saying so.
    """

    handover: Handover
    head: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class HeadOptions:
    """Of a head that may hand its work over."""

    handover: Handover


def forward_of_model(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The model's own forward; without logits in its output where only a loss is wanted."""
    options: ModelOptions = options_of(model)
    original: Callable[..., Any] = original_forward(model)
    if not _wants_a_loss_alone(model, options, args, kwargs):
        return original(*args, **kwargs)
    handover = options.handover
    handover.open()
    try:
        output = original(*args, **kwargs)
        if handover.hidden is not None:
            raise GristmillError(
                f"patch: {type(model).__name__}.forward was given labels, called {options.head} "
                "and then no loss_function, which it did when it was patched; use "
                "loss='cross_entropy', or unpatch the model"
            )
        is_taken = handover.is_taken
    finally:
        handover.close()
    if not is_taken:
        return output
    return type(output)(**{name: value for name, value in output.items() if name != "logits"})


def forward_of_head(head: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The head's own forward, or what its work needs put aside and zeros in its place."""
    handover: Handover = options_of(head).handover
    if not handover.is_open or kwargs or len(args) != 1 or not _is_plain(head):
        return original_forward(head)(*args, **kwargs)
    (hidden,) = args
    handover.put(hidden, *_weights(head))
    # Nothing a model does to one column costs anything, and nothing it does in place harms x.
    return hidden.new_zeros((*hidden.shape[:-1], 1))


def is_hooked(module: torch.nn.Module) -> bool:
    """Whether somebody watches a module's calls: sharding, offloading, debugging."""
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
    )


def _wants_a_loss_alone(
    model: torch.nn.Module, options: ModelOptions, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    if not model.training or not torch.is_grad_enabled() or options.handover.is_open:
        return False
    given = dict(zip(options.parameters, args, strict=False)) | kwargs
    if given.get("labels") is None or any(_asks_for(given.get(name)) for name in _KEPT):
        return False
    # A tuple would shift what comes after the logits to their place.
    return_dict = given.get("return_dict")
    if return_dict is None:
        return_dict = getattr(getattr(model, "config", None), "return_dict", True)
    if not return_dict or getattr(model, "_is_replica", False):
        return False  # replicas of DataParallel run at the same time, and share the handover
    # What was patched may since have been wrapped (LoRA), exchanged or given another loss.
    loss = getattr(model, "_loss_function", None)
    if not isinstance(loss, Loss) or loss.handover is not options.handover:
        return False
    found = options_of(model.get_submodule(options.head))
    return isinstance(found, HeadOptions) and found.handover is options.handover


def _asks_for(kept: Any) -> bool:
    """Whether `logits_to_keep` is more than its default: all of them."""
    return kept is not None and not (isinstance(kept, int) and kept == 0)


def _is_plain(head: torch.nn.Module) -> bool:
    """Whether the weights are whole and are all there is: not sharded, quantised or watched."""
    weight, bias = _weights(head)
    return type(weight) in PLAIN and (bias is None or type(bias) in PLAIN) and not is_hooked(head)


def _weights(head: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight: Any = head.weight
    return weight, getattr(head, "bias", None)
