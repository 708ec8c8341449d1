"""NVFP4 linear in plain PyTorch: the semantics, the kernel for anything, the truth in tests.

The weight is dequantised whole, and activations keep their dtype whatever `act` permits. Products
and sums are taken in fp32, or fp64 for fp64 inputs.
"""

from __future__ import annotations

from typing import Any

import torch

from gristmill.ops.by_row import by_row
from gristmill.ops.nvfp4_common import Weight, accumulator


def nvfp4_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    layout: str,
    out_dtype: torch.dtype | None,
    act: str | None,
) -> torch.Tensor:
    weight = Weight(codes, scales, row_scale, layout, x.shape[-1]).whole(accumulator(x.dtype))
    return _affine(x, weight.t(), bias, out_dtype or x.dtype)


def nvfp4_linear_backward(
    dy: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    layout: str,
    columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    weight = Weight(codes, scales, row_scale, layout, columns).whole(accumulator(dtype))
    return _affine(dy, weight, None, dtype)


def nvfp4_linear_by_row(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    layout: str,
    out_dtype: torch.dtype | None,
    act: str | None,
) -> Any:
    """With every row computed alone, for where rows must not depend on the batch."""
    weight = Weight(codes, scales, row_scale, layout, x.shape[-1]).whole(accumulator(x.dtype))
    return _affine_by_row(x, weight.t(), bias, out_dtype or x.dtype)


def nvfp4_linear_backward_by_row(
    dy: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    layout: str,
    columns: int,
    dtype: torch.dtype,
) -> Any:
    weight = Weight(codes, scales, row_scale, layout, columns).whole(accumulator(dtype))
    return _affine_by_row(dy, weight, None, dtype)


def _affine(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    y = x.to(weight.dtype) @ weight
    if bias is not None:
        y = y + bias.to(weight.dtype)
    return y.to(dtype)


_affine_by_row = by_row(_affine, rows=(0,))
