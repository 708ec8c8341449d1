"""Quantisation to FP8 in plain PyTorch: what follows a norm's own reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gristmill.ops.by_row import Kinds, by_row
from gristmill.ops.norm_fp8.semantics import FP8, LARGEST, SMALLEST_SCALE


def quantised(
    z: torch.Tensor, scale: torch.Tensor | None, amax: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """z, fp32 or fp64, as y, the scale of each row and the largest value.

    The formulas are in `semantics`; the last two are without elements where `scale` is given and
    where `amax` is not wanted.
    """
    if scale is None:
        row_scale = (_row_amax(z) / LARGEST).clamp(min=SMALLEST_SCALE).float()
        factor = row_scale
    else:
        row_scale, factor = _nothing(z), scale.reshape(())
    # Beyond the largest number some versions of torch cast to NaN; clamp leaves NaN alone.
    y = (z * factor.to(z.dtype).reciprocal()).clamp(-LARGEST, LARGEST).to(FP8)
    return y, row_scale, _amax(z) if amax else _nothing(z)


def quantised_by_row(
    norm: Callable[..., Any], *, rows: tuple[int, ...], scale: int
) -> Callable[..., Any]:
    """A norm into FP8 with every row computed alone; `scale`: the position of that argument."""

    def kinds(*args: Any) -> Kinds:
        own, amax = args[scale] is None, args[-1]
        return *("row" for _ in rows), "row" if own else "whole", "max" if amax else "whole"

    return by_row(norm, rows=rows, results=kinds)


def _row_amax(z: torch.Tensor) -> torch.Tensor:
    """Of each row, as a column; 0 for rows of no columns."""
    if z.shape[-1] == 0:
        return z.new_zeros((*z.shape[:-1], 1))
    return z.abs().amax(-1, keepdim=True)


def _amax(z: torch.Tensor) -> torch.Tensor:
    if z.numel() == 0:
        return z.new_zeros((), dtype=torch.float32)
    return z.abs().amax().float()


def _nothing(z: torch.Tensor) -> torch.Tensor:
    return z.new_empty(0, dtype=torch.float32)
