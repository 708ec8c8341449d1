"""Cross entropy in plain PyTorch: the semantics, the CPU's kernels, what is inlined.

Sums are taken in fp32, or fp64 for fp64 logits. The forward functions are made of ordinary torch
ops: autograd, vmap and compilers see through them. A target that is no class is never looked up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gristmill.ops.cross_entropy.semantics import accumulator
from gristmill.settings import settings


class _Rows(NamedTuple):
    """What is known of the targets: ignored rows, rows whose target is no class, and weights."""

    ignored: torch.Tensor
    wrong: torch.Tensor
    weight: torch.Tensor  # of the target; 1 without class weights


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    v = _capped(logits, softcap)
    rows = _rows(target, weight, ignore_index, 0, logits.shape[-1], v.dtype)
    if return_lse:
        lse = _shifted(v)[2]
    # Whatever an ignored row holds: no NaN of it may reach a gradient.
    v = v.masked_fill(rows.ignored.unsqueeze(-1), 0.0)
    shifted, log_sum, counted = _shifted(v)
    # lse - v, with what all logits of a row have in common gone before anything is rounded.
    loss = (1.0 - label_smoothing) * rows.weight * (log_sum - _at(shifted, target))
    if label_smoothing:
        distances = log_sum.unsqueeze(-1) - shifted
        if weight is not None:
            distances = distances * weight.to(v.dtype)
        loss = loss + label_smoothing / max(1, logits.shape[-1]) * distances.sum(-1)
    loss = loss.masked_fill(rows.wrong, float("nan")).masked_fill(rows.ignored, 0.0)
    penalty = (z_loss * counted.square()).masked_fill(rows.ignored, 0.0) if z_loss else None
    if not return_lse:
        lse = counted.masked_fill(rows.ignored, 0.0)
    denominators = v.new_empty(0)
    if reduction == "none":
        return (loss if penalty is None else loss + penalty), lse, denominators
    loss = loss.sum()
    if penalty is not None:
        penalty = penalty.sum()
    if reduction == "mean":
        denominators = _denominators(rows)
        loss = loss / denominators[0]
        penalty = None if penalty is None else penalty / denominators[1]
    return (loss if penalty is None else loss + penalty), lse, denominators


def cross_entropy_backward(
    dloss: torch.Tensor,
    dlse: torch.Tensor | None,
    logits: torch.Tensor,
    target: torch.Tensor,
    lse: torch.Tensor,
    denominators: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    first_class: int,
    classes: int,
) -> torch.Tensor:
    v = _capped(logits, softcap)
    p = (v - lse.unsqueeze(-1)).exp()
    gradients = (dloss, dlse, lse, denominators)
    options = (weight, ignore_index, label_smoothing, z_loss, softcap, reduction)
    return _gradient(p, v, target, gradients, options, first_class, classes).to(logits.dtype)


def _gradient(
    p: torch.Tensor,
    v: torch.Tensor,
    target: torch.Tensor,
    gradients: tuple[Any, ...],
    options: tuple[Any, ...],
    first_class: int,
    classes: int,
) -> torch.Tensor:
    """From each class's probability to the gradient of its logit."""
    dloss, dlse, lse, denominators = gradients
    weight, ignore_index, label_smoothing, z_loss, softcap, reduction = options
    columns = v.shape[-1]
    classes = classes or columns
    rows = _rows(target, weight, ignore_index, first_class, classes, v.dtype)
    g = gz = dloss
    if reduction == "mean":
        g, gz = dloss / denominators[0], dloss / denominators[1]
    at_target = g * (1.0 - label_smoothing) * rows.weight
    everywhere = g * label_smoothing / max(1, classes)
    total = classes if weight is None else weight.to(v.dtype).sum()
    slope = at_target + gz * 2.0 * z_loss * lse
    if label_smoothing:  # else a weight that is NaN, of a class that no row has, would be in all
        slope = slope + everywhere * total
    slope = slope.masked_fill(rows.wrong, float("nan")).masked_fill(rows.ignored, 0.0)
    if dlse is not None:
        slope = slope + dlse
    dv: torch.Tensor = p * slope.unsqueeze(-1)
    if label_smoothing:
        each = v.new_ones(columns) if weight is None else weight.to(v.dtype)
        everywhere = everywhere.expand(target.shape).masked_fill(rows.ignored, 0.0)
        dv = dv - everywhere.unsqueeze(-1) * each
    here = torch.arange(first_class, first_class + columns, device=v.device)
    hit = (target.unsqueeze(-1) == here) & ~(rows.ignored | rows.wrong).unsqueeze(-1)
    dv = torch.where(hit, dv - at_target.unsqueeze(-1), dv)
    if softcap is not None:
        dv = dv * (1.0 - (v / softcap).square())
    # Rows that take no part were perhaps not even read: whatever is in them, they get zeros.
    nothing = rows.ignored if dlse is None else rows.ignored & (dlse == 0.0)
    return dv.masked_fill(nothing.unsqueeze(-1), 0.0)


def cross_entropy_shard(
    logits: torch.Tensor,
    target: torch.Tensor,
    first_class: int,
    classes: int,
    ignore_index: int,
    softcap: float | None,
    sums: bool,
) -> torch.Tensor:
    v = _capped(logits, softcap)
    rows = _rows(target, None, ignore_index, first_class, classes, v.dtype)
    local = target - first_class
    largest = _largest(v)
    total = (v - _base(largest).unsqueeze(-1)).exp().sum(-1)
    inside = (local >= 0) & (local < logits.shape[-1]) & ~rows.ignored
    logit = torch.where(inside, _at(v, local), 0.0)
    logit = logit.masked_fill(rows.wrong, float("nan"))
    numbers = [largest, total, logit]
    return torch.stack([*numbers, v.sum(-1)] if sums else numbers, -1)


def cross_entropy_one_pass(
    logits: torch.Tensor, target: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    loss, lse, denominators = cross_entropy(logits, target, *options)
    return loss, lse, one_pass_gradient(denominators, logits, target, *options)


def one_pass_gradient(
    denominators: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, *options: Any
) -> torch.Tensor:
    """For a unit gradient of the loss, without knowing lse beforehand."""
    v = _capped(logits, options[4])
    shifted, log_sum, own = _shifted(v)
    p = (shifted - log_sum.unsqueeze(-1)).exp()
    gradients = (own.new_ones(()), None, own, denominators)
    return _gradient(p, v, target, gradients, options[:-1], 0, 0).to(logits.dtype)


def cross_entropy_one_pass_(
    logits: torch.Tensor, target: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    loss, lse, gradient = cross_entropy_one_pass(logits, target, *options)
    logits.copy_(gradient)
    return loss, lse


def scale_gradient_(gradient: torch.Tensor, factor: torch.Tensor) -> None:
    precise = gradient.to(accumulator(gradient.dtype))
    gradient.copy_(precise * (factor if factor.dim() == 0 else factor.unsqueeze(-1)))


def _capped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    v = logits.to(accumulator(logits.dtype))
    return v if softcap is None else softcap * torch.tanh(v / softcap)


def _rows(
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    first_class: int,
    classes: int,
    dtype: torch.dtype,
) -> _Rows:
    ignored = target == ignore_index
    wrong = ~ignored & ((target < 0) | (target >= classes))
    if not torch.compiler.is_compiling() and settings().debug:
        torch._assert_async(
            ~wrong.any(), f"cross_entropy: a target is no class: not within [0, {classes})"
        )
    if weight is None or weight.numel() == 0:
        return _Rows(ignored, wrong, torch.ones_like(target, dtype=dtype))
    safe = target.clamp(0, weight.shape[0] - 1).long()
    # A target that is no class spoils its own row; the others keep their denominator.
    chosen = torch.where(wrong, 1.0, weight.to(dtype)[safe])
    return _Rows(ignored, wrong, chosen)


def _denominators(rows: _Rows) -> torch.Tensor:
    weights = rows.weight.masked_fill(rows.ignored, 0.0).sum()
    count = (~rows.ignored).sum().to(weights.dtype)
    return torch.stack([weights, count])


def _largest(v: torch.Tensor) -> torch.Tensor:
    """Of each row, and -infinity of a row without classes."""
    if v.shape[-1] == 0:
        return v.new_full(v.shape[:-1], -torch.inf)
    return v.amax(-1)


def _base(largest: torch.Tensor) -> torch.Tensor:
    """What is subtracted from a row: never -infinity, which would leave NaN behind."""
    return largest.masked_fill(largest == -torch.inf, 0.0)


def _shifted(v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """v less its largest, the logarithm of the sum of its powers of e, and that of v itself."""
    base = _base(_largest(v.detach()))
    shifted = v - base.unsqueeze(-1)
    log_sum = shifted.exp().sum(-1).log()
    return shifted, log_sum, base + log_sum


def _at(values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of each row the target's value; some value or other where the target is none of them."""
    if values.shape[-1] == 0:
        return values.new_zeros(target.shape)
    safe = target.clamp(0, values.shape[-1] - 1).long()
    return values.gather(-1, safe.unsqueeze(-1)).squeeze(-1)
