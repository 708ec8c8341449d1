"""What the cross entropy ops must answer, in fp64, with the size of what fp32 may lose on the way.

The formulas are written here a second time, from the documentation. Each result comes as a pair:
its value, and its terms, the size of the numbers it is put together from. A result that is computed
in fp32 may be off by a few roundings of its terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]

# What a power is off by, in half units of the last place. (The fuzz judge has one of its own.)
POWER = 1.0


@dataclass(frozen=True)
class Rows:
    """The rows of a call, in fp64."""

    v: Tensor  # the logits, capped
    off: Tensor  # by how much each may be off: a cap is computed
    largest: Tensor  # 0 if all are -inf
    total: Tensor  # the sum of exp(v - largest)
    log_sum: Tensor  # its logarithm: of large logits fp64 has no room for the sum of both
    lse: Tensor
    spread: Tensor  # by how much the logarithm of the sum may be off
    ignored: Tensor
    wrong: Tensor  # whose target is no class, and not ignored
    weight: Tensor  # of the target
    hit: Tensor  # where the target is


def rows_of(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    softcap: float | None,
    first: int = 0,
    classes: int = 0,
) -> Rows:
    """Of all classes, or with `first` and `classes` of a shard of them."""
    v = logits.double()
    off = torch.zeros_like(v)
    if softcap is not None:
        v = softcap * torch.tanh(v / softcap)
        off = v.abs()
    # A NaN or +inf makes its row NaN, as in torch's cross entropy.
    top = v.amax(-1) if v.shape[-1] else v.new_full(v.shape[:-1], -torch.inf)
    largest = top.masked_fill(top == -torch.inf, 0.0).masked_fill(top == torch.inf, torch.nan)
    total = (v - largest.unsqueeze(-1)).exp().sum(-1)
    log_sum = total.log()
    lse = largest + log_sum
    p = (v - largest.unsqueeze(-1) - log_sum.unsqueeze(-1)).exp()
    far = v - top.unsqueeze(-1)
    spread = 1.0 + (p * (far.abs() + off)).nan_to_num(0.0).sum(-1)
    ignored = target == ignore_index
    here = torch.arange(first, first + v.shape[-1], device=v.device)
    hit = (target.unsqueeze(-1) == here) & ~ignored.unsqueeze(-1)
    weights = torch.ones(v.shape[-1:], dtype=v.dtype, device=v.device)
    weights = weights if weight is None else weight.double()
    own = torch.where(hit, weights, 0.0).sum(-1) if weight is not None else (~ignored).double()
    wrong = ~ignored & ((target < 0) | (target >= (classes or v.shape[-1])))
    # It spoils its own row; the others keep their denominator.
    own = torch.where(wrong, 1.0, own)
    return Rows(v, off, largest, total, log_sum, lse, spread, ignored, wrong, own, hit)


def forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    return_lse: bool,
) -> list[Pair]:
    """Loss, lse, the denominators and stats."""
    rows = rows_of(logits, target, weight, ignore_index, softcap)
    distance = (rows.largest.unsqueeze(-1) - rows.v) + rows.log_sum.unsqueeze(-1)
    size = distance.abs() + rows.off + rows.spread.unsqueeze(-1)
    loss = (1 - label_smoothing) * rows.weight * torch.where(rows.hit, distance, 0.0).sum(-1)
    terms = (1 - label_smoothing) * rows.weight * torch.where(rows.hit, size, 0.0).sum(-1)
    if label_smoothing:
        each = 1.0 if weight is None else weight.double()
        loss = loss + label_smoothing * (each * distance).mean(-1)
        terms = terms + label_smoothing * (each * size).mean(-1)
    loss = loss.masked_fill(rows.wrong, torch.nan)
    loss, terms = loss.masked_fill(rows.ignored, 0.0), terms.masked_fill(rows.ignored, 0.0)
    count = (~rows.ignored).sum().double()
    penalty = torch.zeros_like(loss)
    if z_loss:
        penalty = z_loss * rows.lse.square().masked_fill(rows.ignored, 0.0)
    penalty_terms = 2 * z_loss * rows.lse.abs() * (rows.lse.abs() + rows.spread)
    penalty_terms = penalty_terms.masked_fill(rows.ignored, 0.0)
    lse, lse_terms = rows.lse, rows.lse.abs() + rows.spread
    if not return_lse:
        lse = lse.masked_fill(rows.ignored, 0.0)
        lse_terms = lse_terms.masked_fill(rows.ignored, 0.0)
    denominators = loss.new_empty(0)
    if reduction == "none":
        loss, terms = loss + penalty, terms + penalty_terms
    else:
        shares = loss.new_ones(2)
        if reduction == "mean":
            denominators = shares = torch.stack([rows.weight.sum(), count])
        loss = loss.sum() / shares[0] + penalty.sum() / shares[1]
        terms = terms.sum() / shares[0] + penalty_terms.sum() / shares[1]
    own, own_terms = stats_of(rows)
    if not return_lse:
        own = own.masked_fill(rows.ignored.unsqueeze(-1), 0.0)
        own_terms = own_terms.masked_fill(rows.ignored.unsqueeze(-1), 0.0)
    return [(loss, terms), (lse, lse_terms), (denominators, denominators), (own, own_terms)]


def stats_of(rows: Rows) -> Pair:
    """Of each row the largest v, 0 if all are -inf, and the sum of exp(v - largest).

    All of it is NaN where there is a NaN or +inf.
    """
    total = rows.total
    off = rows.off.amax(-1) if rows.v.shape[-1] else torch.zeros_like(total)
    # Of equal logits all powers are off alike. A row's sum is also taken times a power, that of
    # what was lost of its largest logit, and is made of additions.
    terms = total * (rows.spread + 2 * POWER)
    return torch.stack((rows.largest, total), -1), torch.stack((off, terms), -1)


def backward(
    dloss: Tensor,
    dlse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    stats: Tensor,
    denominators: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    first_class: int,
    classes: int,
    spread: Tensor | None = None,
    *,
    lost: bool = False,
) -> Pair:
    """The gradient of the logits; `spread`: by how much stats are off that were made on the way.

    `lost`: without the probabilities that are below the accumulator's smallest normal number.
    """
    classes = classes or logits.shape[-1]
    rows = rows_of(logits, target, weight, ignore_index, softcap, first_class, classes)
    (largest, total_power), g = stats.double().unbind(-1), dloss.double()
    log_sum = total_power.log()
    lse = largest + log_sum
    gz = g
    if reduction == "mean":
        g, gz = g / denominators[0].double(), g / denominators[1].double()
    each = torch.ones(logits.shape[-1:], dtype=g.dtype, device=logits.device)
    each = each if weight is None else weight.double()
    total = classes if weight is None else each.sum()
    at_target = g * (1 - label_smoothing) * rows.weight
    everywhere = (g * label_smoothing / max(1, classes)).expand(target.shape)
    penalty = gz * 2 * z_loss * lse if z_loss else torch.zeros_like(lse)
    keep = ~rows.ignored
    slope = at_target + everywhere * total + penalty
    # The penalty is a product of four numbers, of which lse is a sum.
    slope_terms = at_target.abs() + everywhere.abs() * total + 2 * penalty.abs()
    slope = torch.where(keep, slope.masked_fill(rows.wrong, torch.nan), 0.0)
    slope_terms = torch.where(keep, slope_terms, 0.0)
    if dlse is not None:
        slope, slope_terms = slope + dlse.double(), slope_terms + dlse.double().abs()
    exponent = (rows.v - largest.unsqueeze(-1)) - log_sum.unsqueeze(-1)
    p = exponent.exp()
    if lost:
        precise = torch.promote_types(logits.dtype, torch.float32)
        p = p.masked_fill(p < 2 * torch.finfo(precise).tiny, 0.0)
    size = POWER + exponent.abs() + rows.off
    if spread is not None:
        size = size + spread.unsqueeze(-1)
    size = (p * size).nan_to_num(0.0)
    shared = torch.where(keep, everywhere, 0.0).unsqueeze(-1) * each
    peak = torch.where(rows.hit, at_target.unsqueeze(-1), 0.0)
    value = p * slope.unsqueeze(-1) - shared - peak
    terms = size * slope_terms.unsqueeze(-1) + shared.abs() + peak.abs()
    if softcap is not None:
        ratio = (rows.v / softcap).abs()
        # By how much the ratio is off: a tanh times a number, and back. In one pass it comes from
        # the exponent of a power, which is a distance from the largest.
        ratio_terms = 2 * ratio
        if spread is not None and ratio.shape[-1]:
            ratio_terms = ratio_terms + (rows.v.amax(-1, keepdim=True) - rows.v) / softcap
        # Near the cap 1 - ratio^2 cancels: all of 2 * ratio times that is in what is left of it.
        slope_of_cap, off = 1 - ratio.square(), 2 * ratio * ratio_terms
        terms = (terms * slope_of_cap + value.abs() * off).nan_to_num(0.0, torch.inf)
        value = value * slope_of_cap
    nothing = rows.ignored if dlse is None else rows.ignored & (dlse == 0)
    nothing = nothing.unsqueeze(-1)
    return value.masked_fill(nothing, 0.0), terms.masked_fill(nothing, 0.0)


def one_pass(logits: Tensor, target: Tensor, *options: Any, lost: bool = False) -> list[Pair]:
    """Loss, lse and the gradient for a unit gradient of the loss; `lost`: see `backward`."""
    weight, ignore_index, smoothing, z_loss, softcap, reduction, _ = options
    loss, lse, denominators, _ = forward(logits, target, *options)
    rows = rows_of(logits, target, weight, ignore_index, softcap)
    spread = rows.spread
    if z_loss:
        spread = spread + rows.lse.abs()
    gradient = backward(
        torch.ones_like(loss[0]),
        None,
        logits,
        target,
        stats_of(rows)[0],
        denominators[0],
        weight,
        ignore_index,
        smoothing,
        z_loss,
        softcap,
        reduction,
        0,
        0,
        spread,
        lost=lost,
    )
    return [loss, lse, gradient]


def shard(
    logits: Tensor,
    target: Tensor,
    first_class: int,
    classes: int,
    ignore_index: int,
    softcap: float | None,
    sums: bool,
) -> Pair:
    """The largest v, the sum of exp(v - largest), the target's v, and the sum of v - largest."""
    rows = rows_of(logits, target, None, ignore_index, softcap, first_class, classes)
    largest = rows.v.amax(-1)
    base = largest.masked_fill(largest == -torch.inf, 0.0)  # of a shard of nothing else
    total = (rows.v - base.unsqueeze(-1)).exp().sum(-1)
    logit = torch.where(rows.hit, rows.v, 0.0).sum(-1).masked_fill(rows.wrong, torch.nan)
    values = [largest, total, logit]
    terms = [largest.abs(), total * (rows.spread + largest.abs()), logit.abs()]
    if sums:
        distances = rows.v - base.unsqueeze(-1)
        values.append(distances.sum(-1))
        terms.append((distances.abs() + rows.off).sum(-1))
    return torch.stack(values, -1), torch.stack(terms, -1)


def shard_unknown(logits: Tensor, softcap: float | None, sums: bool) -> Tensor:
    """Which numbers of a shard nobody counts on: a row of a NaN or +inf has a NaN for its sum of
    powers; its largest v and the sum of distances are then of no use."""
    v = logits.double() if softcap is None else torch.tanh(logits.double())
    spoiled = (v.isnan() | (v == torch.inf)).any(-1, keepdim=True)
    numbers = torch.tensor([True, False, False, True][: 4 if sums else 3], device=v.device)
    return spoiled & numbers


def scale(gradient: Tensor, factor: Tensor) -> Pair:
    value = gradient.double() * (factor if factor.dim() == 0 else factor.unsqueeze(-1)).double()
    return value, value.abs()
