"""What the NVFP4 linear ops take and give: checks and outputs."""

from __future__ import annotations

from typing import Any

import torch

from gristmill.errors import ArgumentError
from gristmill.ops import checks
from gristmill.ops.nvfp4_common import Weight, check_weight


def check_forward(
    x: Any, codes: Any, scales: Any, row_scale: Any, bias: Any, layout: Any, out_dtype: Any
) -> None:
    op, weight = "nvfp4_linear", Weight(codes, scales, row_scale, layout)
    checks.float_tensor(op, "x", x)
    checks.has_rows(op, "x", x)
    check_weight(op, "", weight, 2, x.device)
    if x.shape[-1] != weight.columns:
        raise ArgumentError(
            f"{op}: x must end in K = {weight.columns}, the columns of the weight "
            f"({weight.rows}, {weight.columns}), got shape {tuple(x.shape)}"
        )
    if bias is not None:
        checks.float_tensor(op, "bias", bias)
        checks.same_device(op, "bias", bias, "x", x.device)
        if tuple(bias.shape) != (weight.rows,):
            raise ArgumentError(
                f"{op}: bias must have shape ({weight.rows},), one for each row of the weight, "
                f"got {tuple(bias.shape)}"
            )
    checks.float_dtype(op, "out_dtype", out_dtype)


def check_backward(
    dy: Any, codes: Any, scales: Any, row_scale: Any, layout: Any, dtype: Any
) -> None:
    op, weight = "nvfp4_linear_backward", Weight(codes, scales, row_scale, layout)
    checks.float_tensor(op, "dy", dy)
    checks.has_rows(op, "dy", dy)
    check_weight(op, "", weight, 2, dy.device)
    if dy.shape[-1] != weight.rows:
        raise ArgumentError(
            f"{op}: dy must end in N = {weight.rows}, the rows of the weight "
            f"({weight.rows}, {weight.columns}), got shape {tuple(dy.shape)}"
        )
    checks.float_dtype(op, "dtype", dtype)


def outputs_forward(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    layout: str,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]), dtype=out_dtype or x.dtype)


def outputs_backward(
    dy: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    layout: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    return dy.new_empty((*dy.shape[:-1], codes.shape[1] * 2), dtype=dtype)
