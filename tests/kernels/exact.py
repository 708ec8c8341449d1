"""What the kernels of norms may answer: the exact result, give or take a few roundings of fp32.

Everything is computed in fp64 from the very inputs. A kernel sums and multiplies in fp32, so each
value it rounds lies within a small multiple of 2^-24 of the exact one; what may come out is what
the smallest and the largest such value round to. For bf16 and fp16 that is nearly always a single
number. Nothing here is scaled by the size of the error that a kernel happens to make.
"""

from __future__ import annotations

from typing import Any

import torch

UNIT = 2.0**-24  # half a unit in the last place of fp32


class Range:
    """Numbers from `low` to `high`, elementwise, in fp64."""

    def __init__(self, low: torch.Tensor, high: torch.Tensor) -> None:
        self.low, self.high = low, high

    def widened(self, by: torch.Tensor) -> Range:
        return Range(self.low - by, self.high + by)

    def rounded(self, dtype: torch.dtype) -> Range:
        return Range(*(end.float().to(dtype).double() for end in (self.low, self.high)))

    def times(self, factor: torch.Tensor) -> Range:
        ends = self.low * factor, self.high * factor
        return Range(torch.minimum(*ends), torch.maximum(*ends))

    def size(self) -> torch.Tensor:
        return torch.maximum(self.low.abs(), self.high.abs())

    def check(self, actual: torch.Tensor, what: str) -> None:
        """Fails with the worst element unless all of `actual` lies within, rounded to its dtype."""
        allowed = self.rounded(actual.dtype)
        value = actual.double()
        inside = (allowed.low <= value) & (value <= allowed.high)
        if inside.all():
            return
        outside = (~inside).nonzero()
        where = tuple(outside[0].tolist())
        raise AssertionError(
            f"{what}: {len(outside)} of {value.numel()} wrong, the first at {list(where)}: "
            f"{value[where].item()} is not within "
            f"[{allowed.low[where].item()}, {allowed.high[where].item()}]"
        )


def forward(
    h: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    *,
    normalised: torch.dtype,
    product: torch.dtype,
    roundings: float,
) -> Range:
    """h * rstd, rounded to `normalised`, times the weight, rounded to `product`."""
    exact = h.double()
    inverse = torch.rsqrt(exact.square().mean(-1, keepdim=True) + _fp32(eps))
    value = exact * inverse
    error = roundings * UNIT
    range_ = Range(value, value).widened(value.abs() * error).rounded(normalised)
    if weight is None:
        return range_.rounded(product)
    factor = weight.float() + weight_offset
    range_ = range_.times(factor.double())
    # Two narrow numbers multiply exactly.
    if weight_offset or torch.float32 in (normalised, weight.dtype):
        range_ = range_.widened(range_.size() * 2 * UNIT)
    return range_.rounded(product)


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    dsum: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    *,
    roundings: float,
) -> tuple[Range, Range]:
    """dx and dweight. Terms that cancel leave their roundings behind, so errors are absolute."""
    h, d = x.double(), dy.double()
    inverse = torch.rsqrt(h.square().mean(-1, keepdim=True) + _fp32(eps))
    g = d if weight is None else d * (weight.double() + weight_offset)
    slope = inverse**3 * (g * h).mean(-1, keepdim=True)
    largest_slope = inverse**3 * (g * h).abs().mean(-1, keepdim=True)
    dx = inverse * g - h * slope
    size = inverse * g.abs() + h.abs() * largest_slope
    if dsum is not None:
        dx = dx + dsum.double()
        size = size + dsum.double().abs()
    leading = list(range(x.dim() - 1))
    products = d * h * inverse
    dweight = products.sum(leading) if leading else products
    dweight_size = products.abs().sum(leading) if leading else products.abs()
    error = roundings * UNIT
    return (
        Range(dx, dx).widened(size * error),
        Range(dweight, dweight).widened(dweight_size * error),
    )


def _fp32(value: float) -> float:
    """A number as the kernels get it."""
    single: Any = torch.tensor(value, dtype=torch.float32)
    return float(single)


def layer_norm(
    h: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    *,
    roundings: float,
) -> Range:
    """The mean of a row is off by roundings of the distances from it, not of its own size."""
    value, error, _ = _normalised(h, eps, roundings)
    range_ = Range(value, value).widened(error)
    if weight is not None:
        range_ = range_.times((weight.float() + weight_offset).double())
        range_ = range_.widened(range_.size() * 2 * UNIT)
    if bias is not None:
        shift = bias.double()
        range_ = Range(range_.low + shift, range_.high + shift)
        range_ = range_.widened((range_.size() + shift.abs()) * UNIT)
    return range_


def layer_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    dsum: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    *,
    roundings: float,
) -> tuple[Range, Range, Range]:
    """dx, dweight and dbias."""
    h, h_error, inverse = _normalised(x, eps, roundings)
    h_size = h_error / (roundings * UNIT)
    d = dy.double()
    g = d if weight is None else d * (weight.double() + weight_offset)
    g_size = g.abs()
    mean_g, mean_gh = g.mean(-1, keepdim=True), (g * h).mean(-1, keepdim=True)
    dx = inverse * (g - mean_g - h * mean_gh)
    size = g_size + g_size.mean(-1, keepdim=True)
    size = inverse * (size + h_size * (g_size * h_size).mean(-1, keepdim=True))
    if dsum is not None:
        dx, size = dx + dsum.double(), size + dsum.double().abs()
    error = roundings * UNIT
    sums = (
        (over_rows(d * h), over_rows(d.abs() * h_size)),
        (over_rows(d), over_rows(d.abs())),
    )
    dweight, dbias = (Range(value, value).widened(terms * error) for value, terms in sums)
    return Range(dx, dx).widened(size * error), dweight, dbias


def over_rows(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1, values.shape[-1]).sum(0)


def _normalised(
    h: torch.Tensor, eps: float, roundings: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(h - mean) / deviation, what it may be off by, and 1 / deviation."""
    exact = h.double()
    distance = exact - exact.mean(-1, keepdim=True)
    inverse = torch.rsqrt(distance.square().mean(-1, keepdim=True) + _fp32(eps))
    value = distance * inverse
    size = value.abs() + distance.abs().mean(-1, keepdim=True) * inverse
    return value, size * (roundings * UNIT), inverse
