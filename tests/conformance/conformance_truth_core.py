"""How far a result is from what an op must answer.

Where an op prescribes that a value is rounded on its way (the normalised value under "llama", say),
the truth is the range of what may come of it: a sum taken in fp32 is off by a few units in the last
place, and next to a tie that decides which way the rounding goes. Elsewhere the range is a single
number.

Errors are counted in roundings: one rounding of the result to its dtype, plus one rounding of the
accumulator applied to the terms that were added up (they may be larger than their sum).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

Tensor = torch.Tensor

# By how many roundings of the accumulator a value may be off before it is rounded on the way.
BEFORE_ROUNDING = 8


def unit(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding. The truth is itself in fp64, hence the 8."""
    return torch.finfo(dtype).eps / 2 * (8 if dtype == torch.float64 else 1)


@dataclass(frozen=True)
class Truth:
    """One result: what it must be, and the size of its terms. `exact`: not a bit may differ.

    `composed_terms` and `composed_range`: the terms, and low and high, where the result is put
    together from rounded results, if they differ.
    """

    low: Tensor
    high: Tensor
    terms: Tensor
    accumulator: torch.dtype
    exact: bool = False
    composed_terms: Tensor | None = None
    composed_range: tuple[Tensor, Tensor] | None = None

    def roundings(self, actual: Tensor, *, composed: bool | torch.dtype = False) -> float:
        """The largest error of `actual`, in roundings.

        `composed`: the result was put together from results of several kernels, each rounded to
        its dtype (or to the one named), so that every term carries a rounding of that dtype.
        """
        assert actual.shape == self.low.shape
        if actual.numel() == 0:
            return 0.0
        value = actual.double()
        if not bool(value.isfinite().all()):
            return float("inf")
        low, high = self.low, self.high
        if composed and self.composed_range is not None:
            low, high = self.composed_range
        error = (low - value).clamp(min=0) + (value - high).clamp(min=0)
        if self.exact:
            return 0.0 if not bool(error.any()) else float("inf")
        size = torch.maximum(low.abs(), high.abs())
        size = size.clamp(min=torch.finfo(actual.dtype).tiny)
        each, terms = self.accumulator, self.terms
        if composed:
            each = composed if isinstance(composed, torch.dtype) else actual.dtype
            terms = terms if self.composed_terms is None else self.composed_terms
        allowed = unit(actual.dtype) * size + unit(each) * terms
        return float((error / allowed).max())


def walk(left: Tensor, right: Tensor) -> Tensor:
    """What ``left @ right`` is off by where one number of a row is larger than all others together.

    Of K products one dwarfs the others, and every partial sum from there on is rounded at its size:
    K roundings, each uniform within half a unit and so 1 / sqrt(3) = 0.58 of that on average, walk
    to 0.58 * sqrt(K) half units of that product. On a CPU, rows of 1000 ordinary numbers and one of
    2000 are off by 27 roundings of their terms, and without that one by 1. In roundings; of rows
    without such a number it is less than their terms: 0.58 * sqrt(K) of one among K.
    """
    largest, at = left.double().abs().max(-1, keepdim=True)
    right = right.double().abs()
    dims = max(at.dim(), right.dim())
    at = at[(None,) * (dims - at.dim())]
    beside = torch.take_along_dim(right[(None,) * (dims - right.dim())], at, -2)
    return (left.shape[-1] / 3) ** 0.5 * largest * beside


def accumulator_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
