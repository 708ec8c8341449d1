"""Cross entropy of DTensors: each rank reads its own part of the logits, and no other.

Of logits whose rows are shared out four numbers go over the ranks, of logits whose classes are,
three or four for each row; the backward pass sends nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate

from gristmill.distributed import places
from gristmill.distributed.places import Places
from gristmill.distributed.vocab_parallel import (
    Options,
    by_row,
    gather_numbers,
    keep,
    logits_gradient,
    rounded,
    shard_numbers,
)
from gristmill.ops.cross_entropy import CROSS_ENTROPY
from gristmill.ops.cross_entropy.one_pass import refuse_weight_gradient

NAME = "cross_entropy"
_INSTEAD = "torch.nn.functional.cross_entropy"


def cross_entropy_of(
    logits: Any, target: Any, weight: Any, *options: Any
) -> tuple[torch.Tensor, torch.Tensor, None, None]:
    """:func:`gristmill.cross_entropy` where one of the tensors is a DTensor: loss and lse."""
    CROSS_ENTROPY.check(logits, target, weight, *options)
    tensors = {"logits": logits, "target": target, "weight": weight}
    mesh = places.check_meshes(NAME, "logits", tensors)
    refuse_weight_gradient(weight is not None and weight.requires_grad and torch.is_grad_enabled())
    last, classes = logits.dim() - 1, logits.shape[-1]
    # Class weights belong to whole rows.
    chosen = places.settled(logits.placements, last, rows_instead=weight is not None)
    rows = places.without(chosen, last)
    everywhere = tuple(Replicate() for _ in rows)
    own = places.moved(logits, chosen).to_local(grad_placements=chosen)
    targets = places.local_of(target, mesh, rows)
    weights = None if weight is None else places.local_of(weight, mesh, everywhere)
    here = places.places_of(mesh, chosen, classes, last)
    loss, lse = _loss_and_lse(own, targets, weights, here, *options)
    reduction = options[-2]
    return (
        places.wrapped(loss, mesh, rows, target.shape)
        if reduction == "none"
        else places.wrapped(loss, mesh, everywhere, torch.Size()),
        places.wrapped(lse, mesh, rows, target.shape),
        None,
        None,
    )


def _loss_and_lse(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    here: Places,
    *more: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all rows the loss, of this rank's rows lse."""
    if here.vocabulary or here.rows:
        options = Options(here.first_class, here.classes, *more)
        groups = here.vocabulary, here.rows
        loss, lse = _Function.apply(logits, target, weight, *groups, options)  # type: ignore[no-untyped-call]
        return loss, lse
    if torch.compiler.is_compiling():
        loss, lse, *_ = CROSS_ENTROPY.overload(logits, target, weight, *more)
        return loss, lse
    logits = _Once.apply(logits)  # type: ignore[no-untyped-call]
    tensors = (logits, target, weight)
    loss, lse, *_ = CROSS_ENTROPY.call(tensors, (*tensors, *more))
    return loss, lse


class _Once(torch.autograd.Function):
    """Passes a tensor through, and refuses a gradient that is to have one of its own."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        places.refuse_second_gradient(NAME, _INSTEAD)
        return gradient


class _Function(torch.autograd.Function):
    """The forward with all that is sent, and the backward, which knows the denominators."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        vocabulary: tuple[dist.ProcessGroup, ...],
        rows: tuple[dist.ProcessGroup, ...],
        options: Options,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if vocabulary:
            own = shard_numbers(logits, target, options)
            numbers = gather_numbers(own, logits.shape[-1], vocabulary, options)
            each, exact, exact_stats = by_row(numbers, target, options)
            dtype = own.dtype
            lse, stats = rounded(exact, dtype), rounded(exact_stats, dtype)
            loss = rounded(each, dtype) if options.reduction == "none" else each.sum()
            penalty = None
        else:
            loss, penalty, lse, stats = _local_parts(logits, target, weight, options)
            dtype = lse.dtype
        denominators = lse.new_empty(0)
        if options.reduction != "none":
            counts = counts_of(target, weight, logits.shape[-1], options)
            loss, denominators = reduced(loss, penalty, counts, rows, dtype)
        keep(ctx, (logits, target, stats, denominators, weight), options)
        return loss, lse

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        places.refuse_second_gradient(NAME, _INSTEAD)
        return logits_gradient(ctx, *gradients), None, None, None, None, None


def _local_parts(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, options: Options
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Of rows with all their classes: loss, the part of z_loss if it is apart, lse and stats."""
    # Where the weights' sum is one denominator and the count of rows the other.
    is_apart = options.reduction == "mean" and weight is not None and options.z_loss > 0
    reduction = "none" if options.reduction == "none" else "sum"
    z_loss = 0.0 if is_apart else options.z_loss
    args = (
        logits,
        target,
        weight,
        options.ignore_index,
        options.label_smoothing,
        z_loss,
        options.softcap,
        reduction,
        options.return_lse,
    )
    if torch.compiler.is_compiling():
        loss, lse, _, stats = CROSS_ENTROPY.overload(*args)
    else:
        loss, lse, _, stats = CROSS_ENTROPY.call((logits, target, weight), args)
    if not is_apart:
        return loss, None, lse, stats
    counted = rounded(lse, torch.float64).masked_fill(target == options.ignore_index, 0.0)
    return loss, options.z_loss * counted.square().sum(), lse, stats


def counts_of(
    target: torch.Tensor, weight: torch.Tensor | None, classes: int, options: Options
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """This rank's parts of a mean's denominators: the sum of weights, the number of rows."""
    if options.reduction != "mean":
        return None
    counted = target != options.ignore_index
    count = counted.sum().double()
    if weight is None or not classes:
        return count, count
    # A target that is no class spoils its own row; the others keep their denominator.
    wrong = (target < 0) | (target >= classes)
    found = weight.double()[target.clamp(0, classes - 1).long()]
    return torch.where(wrong, 1.0, found).masked_fill(~counted, 0.0).sum(), count


def reduced(
    loss: torch.Tensor,
    penalty: torch.Tensor | None,
    counts: tuple[torch.Tensor, torch.Tensor] | None,
    rows: tuple[dist.ProcessGroup, ...],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss over the rows of all ranks, of these parts of it, and the denominators."""
    if counts is None:
        whole = rounded(loss, torch.float64)
        total = _over(whole if penalty is None else whole + penalty, rows)
        return rounded(total, dtype), total.new_empty(0, dtype=dtype)
    apart = torch.zeros_like(counts[0]) if penalty is None else penalty
    parts = _over(torch.stack((rounded(loss, torch.float64), apart, *counts)), rows)
    total = parts[0] / parts[2]
    if penalty is not None:
        total = total + parts[1] / parts[3]
    return rounded(total, dtype), rounded(parts[2:], dtype)


def _over(numbers: torch.Tensor, groups: tuple[dist.ProcessGroup, ...]) -> torch.Tensor:
    """The sum over the ranks of these groups."""
    total = numbers.clone()
    for group in groups:
        dist.all_reduce(total, group=group)
    return total
