"""What norms into FP8 must answer.

The norm itself, z, is known in fp64 with the size of its terms. Sums and products in the
accumulator leave it off by a few roundings of those, so the scale of a row and z * (1 / scale) lie
within a narrow range, and y must be one of the E4M3 numbers that this range rounds to: nearly
always a single one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from conformance_truth_core import BEFORE_ROUNDING, Truth, unit

Tensor = torch.Tensor
LARGEST, SMALLEST_SCALE = 448.0, 2.0**-126
# Of fp32: the quotient, the inverse of the scale, its product with z.
QUANTISING = 4 * unit(torch.float32)


def forward(norm: Callable[..., list[Truth]], tensors: int) -> Callable[..., list[Truth]]:
    """The truth of an FP8 op, from that of its norm: `norm(tensors..., options..., out_dtype)`.

    The FP8 op takes the scale after its `tensors` tensors, and amax in the place of out_dtype.
    """

    def truth(*args: Any) -> list[Truth]:
        scale, amax = args[tensors], args[-1]
        z, *others = norm(*args[:tensors], *args[tensors + 1 : -1], None)
        y, row_scale, largest = quantised(z, scale, amax)
        return [y, *others, row_scale, largest]

    return truth


def quantised(z: Truth, scale: Tensor | None, amax: bool) -> list[Truth]:
    """y, the scale of each row and the largest value; the last two empty where not computed."""
    off = z.terms * (BEFORE_ROUNDING * unit(z.accumulator))
    low, high = z.low - off, z.high + off
    least, most = _least_size(low, high), torch.maximum(low.abs(), high.abs())
    if scale is None:
        ends = [_row_max(size) / LARGEST for size in (least, most)]
        ends = [end.clamp(min=SMALLEST_SCALE) for end in ends]
        exact = [_row_max(size) / LARGEST for size in (_least_size(z.low, z.high), _size(z))]
        exact = [end.clamp(min=SMALLEST_SCALE) for end in exact]
        terms = (_row_max(z.terms) / LARGEST).clamp(min=SMALLEST_SCALE)
        scales = Truth(exact[0], exact[1], terms, z.accumulator)
    else:
        ends = [scale.double().reshape(())] * 2
        scales = _nothing(z)
    small, large = ends[0] * (1 - QUANTISING), ends[1] * (1 + QUANTISING)
    # Away from zero a smaller scale, towards it a larger one.
    bottom = torch.where(low < 0, low / small, low / large)
    top = torch.where(high < 0, high / large, high / small)
    y = Truth(_e4m3(bottom), _e4m3(top), _e4m3(top).abs(), z.accumulator, exact=True)
    return [y, scales, _largest(z) if amax else _nothing(z)]


def _e4m3(value: Tensor) -> Tensor:
    return value.clamp(-LARGEST, LARGEST).float().to(torch.float8_e4m3fn).double()


def _size(z: Truth) -> Tensor:
    return torch.maximum(z.low.abs(), z.high.abs())


def _least_size(low: Tensor, high: Tensor) -> Tensor:
    """The least size between the two."""
    sizes = torch.minimum(low.abs(), high.abs())
    return torch.where((low < 0) & (high > 0), torch.zeros_like(sizes), sizes)


def _row_max(size: Tensor) -> Tensor:
    return torch.cat([size, size.new_zeros((*size.shape[:-1], 1))], -1).amax(-1, keepdim=True)


def _largest(z: Truth) -> Truth:
    low, high, terms = (
        torch.cat([size.reshape(-1), size.new_zeros(1)]).amax()
        for size in (_least_size(z.low, z.high), _size(z), z.terms)
    )
    return Truth(low, high, terms, z.accumulator)


def _nothing(z: Truth) -> Truth:
    empty = z.low.new_empty(0)
    return Truth(empty, empty, empty, z.accumulator)
