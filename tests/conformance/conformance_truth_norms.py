"""What the LayerNorm ops must answer, in fp64.

Distances from the mean are what a kernel adds up, so it is they that count as terms, however large
the mean is. torch's own kernels round the mean itself: that is in `composed_terms`.
"""

from __future__ import annotations

import torch
from conformance_truth_core import Truth, accumulator_of

Tensor = torch.Tensor


class _Row:
    """Rows of h: their normalised values, and by how many roundings those may be off, as terms."""

    def __init__(self, h: Tensor, eps: float) -> None:
        h = h.double()
        self.mean = h.mean(-1, keepdim=True)
        c = h - self.mean
        self.inverse = torch.rsqrt(c.square().mean(-1, keepdim=True) + eps)
        self.normalised = c * self.inverse
        # Of the mean of the distances: a rounding of their mean size.
        self.terms = self.normalised.abs() + c.abs().mean(-1, keepdim=True) * self.inverse
        # Of a mean that was rounded, and of a variance around such a mean.
        off = self.mean.abs() * self.inverse
        self.composed_terms = self.terms + off * (1 + self.normalised.abs())


def _affine(
    row: _Row, weight: Tensor | None, bias: Tensor | None, weight_offset: float, dtype: torch.dtype
) -> Truth:
    value, terms, composed = row.normalised, row.terms, row.composed_terms
    if weight is not None:
        value = value * (weight.double() + weight_offset)
        size = weight.double().abs() + abs(weight_offset)
        terms, composed = terms * size, composed * size
    if bias is not None:
        value = value + bias.double()
        terms, composed = terms + bias.double().abs(), composed + bias.double().abs()
    return Truth(value, value, terms, dtype, composed_terms=composed)


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    weight_offset: float,
    out_dtype: torch.dtype | None,
) -> list[Truth]:
    return [_affine(_Row(x, eps), weight, bias, weight_offset, accumulator_of(x.dtype))]


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    weight_offset: float,
    out_dtype: torch.dtype | None,
) -> list[Truth]:
    dtype = torch.promote_types(x.dtype, residual.dtype)
    precise = accumulator_of(dtype)
    total = (x.to(precise) + residual.to(precise)).to(dtype)
    # The sum leaves no freedom: one addition in the accumulator, one rounding.
    exact = total.double()
    return [
        *layer_norm(total, weight, bias, eps, weight_offset, out_dtype),
        Truth(exact, exact, exact.abs(), precise, exact=True),
    ]


def layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    dsum: Tensor | None,
    eps: float,
    weight_offset: float,
    weight_grad: bool,
    bias_dtype: torch.dtype | None,
) -> list[Truth]:
    accumulator = accumulator_of(x.dtype)
    row, d = _Row(x, eps), dy.double()
    g, size = d, d.abs()
    if weight is not None:
        g = d * (weight.double() + weight_offset)
        size = d.abs() * (weight.double().abs() + abs(weight_offset))
    h = row.normalised
    mean_g, mean_gh = g.mean(-1, keepdim=True), (g * h).mean(-1, keepdim=True)
    dx = row.inverse * (g - mean_g - h * mean_gh)
    added = torch.zeros_like(dx) if dsum is None else dsum.double()

    def dx_terms(h_size: Tensor) -> Tensor:
        mean_terms = (size * h_size).mean(-1, keepdim=True)
        sizes = size + size.mean(-1, keepdim=True) + h_size * mean_terms
        return row.inverse * sizes + added.abs()

    truths = [
        Truth(
            dx + added,
            dx + added,
            dx_terms(row.terms),
            accumulator,
            composed_terms=dx_terms(row.composed_terms),
        )
    ]
    nothing = Truth(*[x.new_empty(0, dtype=torch.float64)] * 3, accumulator)
    if weight_grad and weight is not None:
        dweight, terms, composed = (
            _over_rows(one) for one in (d * h, d.abs() * row.terms, d.abs() * row.composed_terms)
        )
        truths.append(Truth(dweight, dweight, terms, accumulator, composed_terms=composed))
    else:
        truths.append(nothing)
    if bias_dtype is not None:
        dbias = _over_rows(d)
        truths.append(Truth(dbias, dbias, _over_rows(d.abs()), accumulator))
    else:
        truths.append(nothing)
    return truths


def _over_rows(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1]).sum(0)
