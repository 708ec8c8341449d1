"""What the softmax ops must answer, in fp64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from conformance_truth_core import Truth, accumulator_of

Tensor = torch.Tensor
NONE = float("-inf")
BOTTOM_RIGHT = 2  # 1 is "top_left", 0 no limit

# What a power is off by, in half units of the last place, before anything else happens: the
# hardware's own is good to two units (`exp2_fast` in machine.cuh).
POWER = 4.0


@dataclass(frozen=True)
class LogTruth(Truth):
    """As Truth, where -inf may be the right answer: then nothing else is."""

    def roundings(self, actual: Tensor, *, composed: bool | torch.dtype = False) -> float:
        none = self.low == NONE
        if not torch.equal(actual == NONE, none):
            return float("inf")
        finite = [part.masked_fill(none, 0.0) for part in (self.low, self.high, self.terms)]
        truth = Truth(*finite, self.accumulator)
        return truth.roundings(actual.masked_fill(none, 0.0), composed=composed)


def softmax(x: Tensor, causal: int, scale: float, mask: Tensor | None) -> list[Truth]:
    values, rounded = _values(x, causal, scale, mask)
    nobody, distance, total = _row(values)
    p = (distance.exp() / total).masked_fill(nobody, 0.0)
    # An exponent that is off by so much makes the power off by that share of it.
    terms = p * (POWER + _finite(distance).abs() + rounded)
    accumulator = accumulator_of(x.dtype)
    # Powers below the smallest normal number may be lost.
    smallest = torch.finfo(accumulator).tiny
    return [Truth(torch.where(p < 2 * smallest, 0.0, p), p, terms, accumulator)]


def log_softmax(x: Tensor, causal: int, scale: float, mask: Tensor | None) -> list[Truth]:
    values, rounded = _values(x, causal, scale, mask)
    nobody, distance, total = _row(values)
    logs = (distance - total.log()).masked_fill(nobody, NONE)
    terms = POWER + _finite(distance).abs() + rounded + total.log().masked_fill(nobody, 0.0)
    return [LogTruth(logs, logs, terms, accumulator_of(x.dtype))]


def softmax_backward(dy: Tensor, y: Tensor, causal: int, scale: float) -> list[Truth]:
    seen = _seen(y, causal)
    d, p = (torch.where(seen, one.double(), 0.0) for one in (dy, y))
    products = d * p
    dx = scale * p * (d - products.sum(-1, keepdim=True))
    dx = dx.masked_fill(~seen, 0.0)  # also of a sum that is NaN
    terms = abs(scale) * p * (d.abs() + products.abs().sum(-1, keepdim=True))
    return [Truth(dx, dx, terms.masked_fill(~seen, 0.0), accumulator_of(y.dtype))]


def log_softmax_backward(dy: Tensor, y: Tensor, causal: int, scale: float) -> list[Truth]:
    logs = torch.where(_seen(y, causal), y.double(), NONE)
    none = logs == NONE
    d = dy.double().masked_fill(none, 0.0)
    p = logs.exp()
    total = d.sum(-1, keepdim=True)
    dx = scale * (d - p * total).masked_fill(none, 0.0)
    powers = p * (POWER + _finite(logs).abs())
    terms = abs(scale) * (d.abs() + powers * d.abs().sum(-1, keepdim=True))
    accumulator = accumulator_of(y.dtype)
    # Powers below the smallest normal number may be lost: of an infinite sum NaN is left.
    lost = (p < 2 * torch.finfo(accumulator).tiny) & ~total.isfinite() & ~none
    low, high = (torch.where(lost, sign * torch.inf, dx) for sign in (-1, 1))
    return [Truth(low, high, terms.masked_fill(none, 0.0), accumulator)]


def _values(x: Tensor, causal: int, scale: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """What the softmax is of, and the size of what was rounded when that was put together."""
    values = x.double() * scale
    sizes = torch.zeros_like(values) if scale == 1.0 else values.abs()
    if mask is not None and mask.dtype != torch.bool:
        sizes = values.abs() + mask.double().abs()
        values = values + mask.double()
    elif mask is not None:
        values = torch.where(mask, values, NONE)
    if causal:
        values = torch.where(_seen(x, causal), values, NONE)
    sizes = sizes.masked_fill(values == NONE, 0.0)
    if sizes.shape[-1] == 0:
        return values, sizes
    return values, sizes + sizes.amax(-1, keepdim=True)


def _seen(x: Tensor, causal: int) -> Tensor:
    """What is within the causal limit: the rest is never read."""
    if not causal:
        return torch.ones((), dtype=torch.bool, device=x.device)
    queries, keys = x.shape[-2:]
    seen = torch.ones(queries, keys, dtype=torch.bool, device=x.device)
    return seen.tril(keys - queries if causal == BOTTOM_RIGHT else 0)


def _row(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which rows have nobody in them; distances from the largest; the sum of their powers."""
    if values.shape[-1] == 0:
        return values == NONE, values, values.sum(-1, keepdim=True)
    nobody = (values == NONE).all(-1, keepdim=True)
    distance = values - values.amax(-1, keepdim=True).masked_fill(nobody, 0.0)
    return nobody, distance, distance.exp().sum(-1, keepdim=True)


def _finite(values: Tensor) -> Tensor:
    return values.masked_fill(values == NONE, 0.0)
