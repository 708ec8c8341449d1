"""NVFP4 linear in plain PyTorch: the semantics, the kernel for anything, the truth in tests.

The weight is dequantised whole; products and sums are taken in fp32, or fp64 for fp64 inputs.
"""

from __future__ import annotations

import torch

from gristmill.ops.nvfp4_common import Weight, accumulator


def nvfp4_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    layout: str,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    precise = accumulator(x.dtype)
    weight = Weight(codes, scales, row_scale, layout).whole(precise)
    y = x.to(precise) @ weight.t()
    if bias is not None:
        y = y + bias.to(precise)
    return y.to(out_dtype or x.dtype)


def nvfp4_linear_backward(
    dy: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    layout: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    precise = accumulator(dtype)
    weight = Weight(codes, scales, row_scale, layout).whole(precise)
    return (dy.to(precise) @ weight).to(dtype)
