"""What kernels may answer that quantise a norm to FP8, from the range that the norm is in."""

from __future__ import annotations

import torch
from exact import UNIT, Range

LARGEST, SMALLEST_SCALE = 448.0, 2.0**-126
# Roundings of fp32 on the way: the quotient of a row's scale, its inverse, the product.
ROUNDINGS = 3.0


def quantised(z: Range, scale: torch.Tensor | None) -> tuple[Range, Range, Range]:
    """y, the scale (of each row, or the given one) and amax, each from the least to the largest."""
    sizes = _sizes(z)
    amax = Range(*(_largest(end.reshape(-1)) for end in sizes))
    if scale is None:
        ends = [_largest(end).unsqueeze(-1) / LARGEST for end in sizes]
        scales = Range(*(end.clamp(min=SMALLEST_SCALE) for end in ends))
        scales = scales.widened(scales.high * UNIT)
    else:
        scales = Range(scale.double().reshape(()), scale.double().reshape(()))
    # Away from zero a smaller scale leads, towards zero a larger one.
    off = ROUNDINGS * UNIT
    low = torch.where(z.low < 0, z.low / scales.low, z.low / scales.high)
    high = torch.where(z.high < 0, z.high / scales.high, z.high / scales.low)
    y = Range(low - low.abs() * off, high + high.abs() * off)
    return Range(_e4m3(y.low), _e4m3(y.high)), scales, amax


def _sizes(z: Range) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest size of a number in the range."""
    least = torch.minimum(z.low.abs(), z.high.abs())
    return torch.where((z.low < 0) & (z.high > 0), torch.zeros_like(least), least), z.size()


def _largest(values: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, 1)).amax(-1)


def _e4m3(value: torch.Tensor) -> torch.Tensor:
    return value.clamp(-LARGEST, LARGEST).float().to(torch.float8_e4m3fn).double()
