"""What the linear cross entropy ops must answer, in fp64.

Logits are rounded to x's dtype on the way, and so is their gradient: where a sum in fp32 may fall
on either side of a tie the truth is a range.
"""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

import torch
from conformance_truth_core import BEFORE_ROUNDING, Truth, accumulator_of, unit

Tensor = torch.Tensor

# As for every matmul: its chain of additions rounds every partial sum.
CHAIN = 4


class Logits(NamedTuple):
    """Capped logits: their values, by how much rounding may shift them, and the size of their
    error in the accumulator; and the cap's slope."""

    values: Tensor
    half: Tensor
    terms: Tensor
    slope: Tensor
    slope_half: Tensor
    slope_terms: Tensor


def _rounded_range(value: Tensor, terms: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The middle and half of the width of what `value` may be rounded to; `terms` as in Truth."""
    precise = accumulator_of(dtype)
    if dtype == precise:
        return value, torch.zeros_like(value)
    off = BEFORE_ROUNDING * unit(precise) * terms
    off = torch.where(value.isinf(), 0.0, off)
    low, high = (value - off).to(dtype).double(), (value + off).to(dtype).double()
    return (low + high) / 2, torch.where(low == high, 0.0, (high - low) / 2)


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None) -> Logits:
    h, w = x.double(), weight.double()
    value, terms = h @ w.t(), CHAIN * (h.abs() @ w.abs().t())
    if bias is not None:
        value, terms = value + bias.double(), terms + bias.double().abs()
    value, half = _rounded_range(value, terms, x.dtype)
    terms = torch.where(value.isinf(), 0.0, terms)
    if x.dtype != accumulator_of(x.dtype):
        terms = torch.zeros_like(terms)  # what was rounded is exact from here on
    if softcap is None:
        one, none = torch.ones_like(value), torch.zeros_like(value)
        return Logits(value, half, terms, one, none, none)
    capped, low, high = (
        softcap * torch.tanh(one / softcap) for one in (value, value - half, value + half)
    )
    slope = 1 - (capped / softcap).square()
    steep = 2 * capped.abs() / softcap**2 * slope
    return Logits(
        (low + high) / 2,
        (high - low) / 2,
        terms * slope + 4 * capped.abs(),
        slope,
        half * steep,
        terms * steep + 8 * (capped / softcap).square(),
    )


class Rows(NamedTuple):
    """What every row has, beside its logits: with class weights and without."""

    counted: Tensor
    wrong: Tensor
    hit: Tensor
    weights: Tensor
    own: Tensor


def _rows(target: Tensor, class_weight: Tensor | None, classes: int, ignore_index: int) -> Rows:
    counted = target != ignore_index
    hit = torch.arange(classes, device=target.device) == target.unsqueeze(-1)
    hit = hit & counted.unsqueeze(-1)
    weights = torch.ones(classes, dtype=torch.float64, device=target.device)
    if class_weight is not None:
        weights = class_weight.double()
    wrong = counted & ((target < 0) | (target >= classes))
    return Rows(counted, wrong, hit, weights, torch.where(wrong, 1.0, (hit * weights).sum(-1)))


def _lse(v: Tensor) -> Tensor:
    """A NaN or +inf makes its row NaN, as in torch's cross entropy."""
    return torch.logsumexp(v, -1).masked_fill((v == torch.inf).any(-1), torch.nan)


def _size(v: Tensor) -> Tensor:
    """Of what takes part: a class that is masked, -inf, has no share in any error."""
    return v.abs().masked_fill(v == -torch.inf, 0.0)


def forward(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    chunk_rows: int | None,
) -> list[Truth]:
    v = _logits(x, weight, bias, softcap)
    classes, precise = weight.shape[0], accumulator_of(x.dtype)
    rows = _rows(target, class_weight, classes, ignore_index)
    lse = _lse(v.values)
    p = torch.exp(v.values - lse.unsqueeze(-1))
    # A logit next to a tie may be a whole unit of 16 bits off: its square counts in fp32. What is
    # convex is off by more above than below.
    first = torch.where(lse.isinf(), 0.0, (p * v.half).sum(-1))
    lse_half = torch.where(lse.isinf(), 0.0, _lse(v.values + v.half) - lse).clamp(min=first)
    lse_terms = 1 + lse.abs() + (p * (v.terms + _size(v.values))).sum(-1)
    # The loss is a sum over classes of share * (lse - v), with shares that smoothing gives.
    shares = (1 - label_smoothing) * rows.own.unsqueeze(-1) * rows.hit
    shares = shares + label_smoothing / classes * rows.weights * rows.counted.unsqueeze(-1)
    whole = shares.sum(-1)
    distances = lse.unsqueeze(-1) - v.values
    loss = torch.where(shares == 0, 0.0, shares * distances).sum(-1)
    loss = loss.masked_fill(rows.wrong, torch.nan)
    slopes = whole.unsqueeze(-1) * p - shares
    terms = whole * lse_terms + (shares * (_size(v.values) + v.terms)).sum(-1)
    half = (slopes.abs() * v.half).sum(-1) + whole * (lse_half - first)
    # Rows that take no part count nowhere, whatever they hold.
    loss, half, terms, lse, lse_half, lse_terms = (
        torch.where(rows.counted, one, 0.0) for one in (loss, half, terms, lse, lse_half, lse_terms)
    )
    square = z_loss * lse.square() * rows.counted
    square_half = 2 * z_loss * lse.abs() * lse_half * rows.counted
    square_terms = 2 * z_loss * lse.abs() * lse_terms * rows.counted
    # That of a row whose target is no class, or whose logits are all masked, is nobody's business:
    # its loss is NaN, and so is every probability, be it -inf or NaN.
    unknown = rows.wrong | (lse == -torch.inf)
    lse_ends = (torch.where(unknown, sign * torch.inf, lse + sign * lse_half) for sign in (-1, 1))
    denominators = torch.stack((rows.own.sum(), rows.counted.sum().double()))
    if reduction == "none":
        parts = [(loss, half, terms), (square, square_half, square_terms)]
    else:
        divisors = denominators if reduction == "mean" else torch.ones_like(denominators)
        groups = ((loss, half, terms), (square, square_half, square_terms))
        parts = [
            tuple(one.sum() / divisor for one in group)
            for group, divisor in zip(groups, divisors, strict=True)
        ]
    loss, half, terms = (sum(pair) for pair in zip(*parts, strict=True))
    if reduction != "mean":
        denominators = denominators[:0]
    return [
        Truth(loss - half, loss + half, terms, precise),
        Truth(*lse_ends, lse_terms, precise),
        Truth(denominators, denominators, denominators, precise),
        _any((*target.shape, 2), x),
    ]


def _any(shape: tuple[int, ...], x: Tensor) -> Truth:
    """Of stats: what they are relative to is the variant's business, see the test of them."""
    ends = [torch.full(shape, end, dtype=torch.float64, device=x.device) for end in (-inf, inf)]
    return Truth(*ends, torch.zeros_like(ends[0]), accumulator_of(x.dtype))


def backward(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    dloss: Tensor,
    dlse: Tensor | None,
    stats: Tensor,
    denominators: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    chunk_rows: int | None,
    x_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
    spread: Tensor | None = None,
) -> list[Truth]:
    """`spread`: of each row, by how much the lse that the stats give may be off."""
    v = _logits(x, weight, bias, softcap)
    classes = weight.shape[0]
    rows = _rows(target, class_weight, classes, ignore_index)
    d, (base, total) = dloss.double(), stats.double().unbind(-1)
    sums = base + total.log()
    g = gz = torch.where(rows.counted, d.expand(target.shape), 0.0)
    if reduction == "mean":
        g, gz = g / denominators[0].double(), gz / denominators[1].double()
    shares = (1 - label_smoothing) * rows.own.unsqueeze(-1) * rows.hit
    shares = shares + label_smoothing / classes * rows.weights * rows.counted.unsqueeze(-1)
    parts = [g * shares.sum(-1)]
    if z_loss:
        parts.append(gz * 2 * z_loss * sums)
    if dlse is not None:
        parts.append(torch.where(rows.counted, dlse.double(), 0.0))
    factor = torch.stack(parts).sum(0).masked_fill(rows.wrong, torch.nan).unsqueeze(-1)
    size = torch.stack(parts).abs().sum(0).unsqueeze(-1)
    # Beside a large logit a unit in the last place decides on the whole probability: where rounding
    # may go either way both ends count, not the slope between them.
    half = v.half if spread is None else v.half + spread.unsqueeze(-1)
    ends = (
        torch.exp((v.values + end - base.unsqueeze(-1)).clamp(max=80.0)) / total.unsqueeze(-1)
        for end in (-half, half)
    )
    low, high = ends
    p, p_half = (low + high) / 2, torch.where(low == high, 0.0, (high - low) / 2)
    own = g.unsqueeze(-1) * shares
    dv = p * factor - own
    exponent = 2 + v.terms + _size(v.values) + sums.abs().unsqueeze(-1)
    dv_terms = p * size * exponent + own.abs()
    value = dv * v.slope
    terms = dv_terms * v.slope + dv.abs() * v.slope_terms
    shift = (p_half * factor).abs() * v.slope + dv.abs() * v.slope_half
    # Rows that take no part get zeros, whatever they hold.
    value, terms, shift = (
        torch.where(rows.counted.unsqueeze(-1), one, 0.0) for one in (value, terms, shift)
    )
    truths = _products(x, weight, value, terms, shift, (x_grad, weight_grad, bias_grad))
    if weight_grad and x.shape[-1]:
        # Of an ignored row that is not finite a product may make 0 times infinity, or leave it out.
        spoiled = ~(x.isfinite() | rows.counted.unsqueeze(-1))
        unknown = spoiled.reshape(-1, x.shape[-1]).any(0)
        low, high = (
            one.masked_fill(unknown, sign * inf)
            for one, sign in ((truths[1].low, -1), (truths[1].high, 1))
        )
        truths[1] = Truth(
            low, high, truths[1].terms.masked_fill(unknown, 0.0), truths[1].accumulator
        )
    return truths


def _products(
    x: Tensor, weight: Tensor, value: Tensor, terms: Tensor, shift: Tensor, wanted: Any
) -> list[Truth]:
    """dx, dweight and dbias of a gradient of logits that is rounded to x's dtype first."""
    precise = accumulator_of(x.dtype)
    narrow = x.dtype != precise
    if narrow:
        # Second order and the other end of the range: a tenth more.
        off = BEFORE_ROUNDING * unit(precise) * terms + 1.1 * shift
        low, high = (value - off).to(x.dtype).double(), (value + off).to(x.dtype).double()
        # Rounding may decide whether it fits x's dtype, or which infinity it is.
        unknown = (low.isinf() | high.isinf()) & (low != high)
        value = torch.where(unknown, 0.0, (low + high) / 2)
        half = torch.where(unknown | (low == high), 0.0, (high - low) / 2)
        terms = torch.zeros_like(terms)
    else:
        unknown, half = torch.zeros_like(value, dtype=torch.bool), torch.zeros_like(value)
    terms = terms + value.abs()
    classes, columns = weight.shape
    rows = x.shape[:-1].numel()  # -1 would be ambiguous where there are no columns or classes
    w, h = weight.double(), x.double().reshape(rows, columns)
    flat = [one.reshape(rows, classes) for one in (value, half, terms)]
    anything = unknown.double(), unknown.reshape(rows, classes).double()
    empty = [x.new_empty(0, dtype=torch.float64)] * 3
    dx, dweight, dbias = empty, empty, empty
    if wanted[0]:
        found = value @ w, half @ w.abs(), CHAIN * (terms @ w.abs())
        dx = _unless(anything[0] @ (w != 0).double(), *found)
    if wanted[1]:
        found = flat[0].t() @ h, flat[1].t() @ h.abs(), CHAIN * (flat[2].t() @ h.abs())
        dweight = _unless(anything[1].t() @ (h != 0).double(), *found)
    if wanted[2]:
        found = flat[0].sum(0), flat[1].sum(0), flat[2].sum(0)
        dbias = _unless(anything[1].sum(0), *found)
    return [Truth(a, b, c, precise) for a, b, c in (dx, dweight, dbias)]


def _unless(anything: Tensor, value: Tensor, half: Tensor, terms: Tensor) -> list[Tensor]:
    """The ends of a range and its terms; from -inf to inf where `anything` is not 0."""
    low, high = value - half, value + half
    return [
        torch.where(anything > 0, -inf, low),
        torch.where(anything > 0, inf, high),
        torch.where(anything > 0, 0.0, terms),
    ]
