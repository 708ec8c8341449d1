"""What `linear` and `matmul` must answer, in fp64."""

from __future__ import annotations

import math

import torch
from conformance_truth_core import Truth, accumulator_of, unit, walk
from conformance_truth_nvfp4 import CHAIN

Tensor = torch.Tensor


def activation_of(name: str | None, h: Tensor) -> Tensor:
    if name is None:
        return h
    if name == "relu":
        return torch.where(h <= 0, torch.zeros_like(h), h)  # NaN stays NaN
    if name == "silu":
        return h / (1 + torch.exp(-h))
    if name == "gelu":
        return h / 2 * torch.erfc(-h / math.sqrt(2))
    assert name == "gelu_tanh"
    inner = math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)
    return h / (1 + torch.exp(-2 * inner))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> list[Truth]:
    return [_activated(x, weight, bias, activation)]


def linear_with_pre(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> list[Truth]:
    return [_activated(x, weight, bias, activation), _activated(x, weight, bias, None)]


def matmul(a: Tensor, b: Tensor) -> list[Truth]:
    value = torch.matmul(a.double(), b.double())
    terms = torch.matmul(a.double().abs(), b.double().abs())
    ends = _composed((value, value), _may_overflow(terms, a.dtype))
    terms = _chained(terms, a, b)
    return [Truth(value, value, terms, accumulator_of(a.dtype), composed_range=ends)]


def _activated(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Truth:
    h, terms = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    if bias is not None:
        h, terms = h + bias.double(), terms + bias.double().abs()
    overflow = _may_overflow(terms, x.dtype)
    terms, accumulator = _chained(terms, x, weight.t()), accumulator_of(x.dtype)
    value = activation_of(activation, h)
    if activation is None:
        ends = _composed((value, value), overflow)
        return Truth(value, value, terms, accumulator, composed_range=ends)
    # Where e to the power of -h overflows nothing is left of h / (1 + that).
    lost = value.abs() < 2 * torch.finfo(accumulator).tiny * h.abs()
    ends = torch.where(lost, value.clamp(max=0), value), torch.where(lost, 0.0, value)
    # Of infinities torch's own kernels make NaN or the limit: for -inf, and in gelu for both.
    unknown = torch.zeros_like(h, dtype=torch.bool)
    if activation != "relu":
        unknown = h.isinf() if activation == "gelu" else h == -torch.inf
    low, high = (
        torch.where(unknown, sign * torch.inf, end) for sign, end in zip((-1, 1), ends, strict=True)
    )
    # The argument is off by its own error, the activation by a few roundings of its own: torch
    # writes gelu with 1 + erf (or tanh), which for negative h cancels to what is left of h.
    own = 2 * value.abs() + (h.abs() if "gelu" in activation else 0)
    return Truth(
        low,
        high,
        _moved(activation, h, terms, accumulator) + own,
        accumulator,
        composed_terms=_moved(activation, h, terms, x.dtype)
        + own * (unit(accumulator) / unit(x.dtype)),
        composed_range=_composed(ends, unknown | overflow),
    )


def _chained(terms: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """What partial sums are rounded by; NaN where the terms are."""
    if not left.numel():
        return terms
    return torch.maximum(CHAIN * terms, walk(left, right))


def _may_overflow(size: Tensor, dtype: torch.dtype) -> Tensor:
    """Where parts of a sum may not fit the dtype, however small the sum is: by its terms' sizes.

    cuBLAS may round the parts of a split sum to 16 bits, as torch lets it: of one that is infinite
    an infinity is left, of two a NaN, and of -inf a relu makes 0. And a product that is rounded to
    16 bits before the activation may have become infinite.
    """
    return size.isfinite() & (size > 0.99 * torch.finfo(dtype).max)


def _composed(ends: tuple[Tensor, Tensor], unknown: Tensor) -> tuple[Tensor, Tensor]:
    low, high = ends
    return torch.where(unknown, -torch.inf, low), torch.where(unknown, torch.inf, high)


def _moved(activation: str, h: Tensor, terms: Tensor, each: torch.dtype) -> Tensor:
    """How far the activation moves where h is off by one rounding of its terms; in roundings."""
    off = unit(each) * terms
    value = activation_of(activation, h)
    ends = [(activation_of(activation, h + sign * off) - value).abs() for sign in (-1, 1)]
    return torch.maximum(*ends) / unit(each)
