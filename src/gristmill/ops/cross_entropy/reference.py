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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    v = _capped(logits, softcap)
    rows = _rows(target, weight, ignore_index, 0, logits.shape[-1], v.dtype)
    if return_lse:
        _, largest, total = _shifted(v)
        lse, stats = largest + total.log(), _stats(largest, total)
    # Whatever an ignored row holds: no NaN of it may reach a gradient.
    v = v.masked_fill(rows.ignored.unsqueeze(-1), 0.0)
    shifted, largest, total = _shifted(v)
    log_sum = total.log()
    counted = largest + log_sum
    # lse - v, with what all logits of a row have in common gone before anything is rounded.
    loss = (1.0 - label_smoothing) * rows.weight * (log_sum - _at(shifted, target))
    if label_smoothing:
        distances = log_sum.unsqueeze(-1) - shifted
        if weight is not None:
            distances = distances * weight.to(v.dtype)
        loss = loss + label_smoothing / max(1, logits.shape[-1]) * distances.sum(-1)
    loss = loss.masked_fill(rows.wrong, float("nan")).masked_fill(rows.ignored, 0.0)
    penalty = (z_loss * counted * counted).masked_fill(rows.ignored, 0.0) if z_loss else None
    if not return_lse:
        lse = counted.masked_fill(rows.ignored, 0.0)
        stats = _stats(largest, total).masked_fill(rows.ignored.unsqueeze(-1), 0.0)
    denominators = v.new_empty(0)
    if reduction == "none":
        return (loss if penalty is None else loss + penalty), lse, denominators, stats
    loss = loss.sum()
    if penalty is not None:
        penalty = penalty.sum()
    if reduction == "mean":
        denominators = _denominators(rows)
        loss = loss / denominators[0]
        penalty = None if penalty is None else penalty / denominators[1]
    return (loss if penalty is None else loss + penalty), lse, denominators, stats


def cross_entropy_backward(
    dloss: torch.Tensor,
    dlse: torch.Tensor | None,
    logits: torch.Tensor,
    target: torch.Tensor,
    stats: torch.Tensor,
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
    largest, sums = stats.unbind(-1)
    columns = v.shape[-1]
    classes = classes or columns
    rows = _rows(target, weight, ignore_index, first_class, classes, v.dtype)
    # dloss may be close to the largest number: it is multiplied last, so that no intermediate is
    # larger than the result.
    g = gz = dloss.new_ones(())
    if reduction == "mean":
        g, gz = 1.0 / denominators
    target_share = own_share = rows.weight
    if label_smoothing:  # else a weight that is NaN, of a class that no row has, would be in all
        share = label_smoothing / max(1, classes)
        each = v.new_ones(columns) if weight is None else weight.to(v.dtype)
        total = classes if weight is None else each.sum()
        peak = (1.0 - label_smoothing) * rows.weight
        # With one class both are bitwise equal, so the gradient is exactly 0.
        target_share, own_share = peak + share * rows.weight, peak + share * total
        if weight is None:
            target_share, own_share = target_share.clamp(max=1.0), own_share.clamp(max=1.0)
    own_share = own_share * g
    if z_loss:  # 0 times an infinite lse would be NaN
        own_share = own_share + 2.0 * z_loss * (largest + sums.log()) * gz
    slope = dloss * (own_share / sums)
    slope = slope.masked_fill(rows.wrong, float("nan")).masked_fill(rows.ignored, 0.0)
    if dlse is not None:
        slope = slope + dlse / sums
    # Not exp(v - lse): with large logits, rounding lse loses log(sum). Clamped, because recomputed
    # logits may round above the saved largest one.
    dv: torch.Tensor = (v - largest.unsqueeze(-1)).clamp(max=0.0).exp() * slope.unsqueeze(-1)
    here = torch.arange(first_class, first_class + columns, device=v.device)
    hit = (target.unsqueeze(-1) == here) & ~(rows.ignored | rows.wrong).unsqueeze(-1)
    taken = torch.where(hit, (dloss * (target_share * g)).unsqueeze(-1), 0.0)
    if label_smoothing:
        everywhere = (dloss * (share * g)).expand(target.shape).masked_fill(rows.ignored, 0.0)
        taken = torch.where(hit, taken, everywhere.unsqueeze(-1) * each)
    dv = dv - taken
    if softcap is not None:
        dv = dv * (1.0 - (v / softcap).square())
    # Rows that take no part were perhaps not even read: whatever is in them, they get zeros.
    nothing = rows.ignored if dlse is None else rows.ignored & (dlse == 0.0)
    return dv.masked_fill(nothing.unsqueeze(-1), 0.0).to(logits.dtype)


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
    shifted = v - _base(largest).unsqueeze(-1)
    total = shifted.exp().sum(-1)
    inside = (local >= 0) & (local < logits.shape[-1]) & ~rows.ignored
    logit = torch.where(inside, _at(v, local), 0.0)
    logit = logit.masked_fill(rows.wrong, float("nan"))
    numbers = [largest, total, logit]
    return torch.stack([*numbers, shifted.sum(-1)] if sums else numbers, -1)


def cross_entropy_one_pass(
    logits: torch.Tensor, target: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    loss, lse, denominators, stats = cross_entropy(logits, target, *options)
    rest = (logits, target, stats, denominators, *options[:-1], 0, 0)
    return loss, lse, cross_entropy_backward(loss.new_ones(()), None, *rest)


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
    """v - largest, largest, and the sum of exp(v - largest)."""
    base = _base(_largest(v.detach()))
    shifted = v - base.unsqueeze(-1)
    return shifted, base, shifted.exp().sum(-1)


def _stats(largest: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """The stats of each row: largest and sum, both NaN if the row has a NaN or +infinity."""
    return torch.stack((torch.where(total.isnan(), total, largest), total), -1).detach()


def stats_of(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Of each row the largest v and the sum of exp(v - largest), as the forward pass gives them."""
    _, largest, total = _shifted(_capped(logits, softcap))
    return _stats(largest, total)


def _at(values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of each row the target's value; some value or other where the target is none of them."""
    if values.shape[-1] == 0:
        return values.new_zeros(target.shape)
    safe = target.clamp(0, values.shape[-1] - 1).long()
    return values.gather(-1, safe.unsqueeze(-1)).squeeze(-1)
