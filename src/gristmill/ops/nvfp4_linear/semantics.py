"""What the NVFP4 linear ops take and give: checks and outputs."""

from __future__ import annotations

from typing import Any

import torch

from gristmill.errors import ArgumentError, DtypeError
from gristmill.ops import checks
from gristmill.ops.nvfp4_common import Weight, check_weight

# To what activations may be rounded on their way into the products; None: to nothing.
ACTIVATIONS = ("fp8", "nvfp4")


def check_forward(
    x: Any,
    codes: Any,
    scales: Any,
    row_scale: Any,
    bias: Any,
    layout: Any,
    out_dtype: Any,
    act: Any,
) -> None:
    op = "nvfp4_linear"
    checks.float_tensor(op, "x", x)
    checks.has_rows(op, "x", x)
    weight = Weight(codes, scales, row_scale, layout, x.shape[-1])
    check_weight(op, "", weight, 2, x.device)
    check_columns(op, x, row_scale, weight.columns)
    if bias is not None:
        checks.float_tensor(op, "bias", bias)
        checks.same_device(op, "bias", bias, "x", x.device)
        if tuple(bias.shape) != (weight.rows,):
            raise ArgumentError(
                f"{op}: bias must have shape ({weight.rows},), one for each row of the weight, "
                f"got {tuple(bias.shape)}"
            )
    checks.float_dtype(op, "out_dtype", out_dtype)
    if act is not None and act not in ACTIVATIONS:
        names = " or ".join(map(repr, ACTIVATIONS))
        raise ArgumentError(f"{op}: act must be None, {names}, got {act!r}")


def check_columns(op: str, x: Any, row_scale: torch.Tensor, columns: int) -> None:
    """That x, if it has any, has the columns of a weight of so many and of these rows."""
    if isinstance(x, torch.Tensor) and x.dim() and x.shape[-1] != columns:
        shape = (*row_scale.shape, columns)
        raise ArgumentError(
            f"{op}: x must end in K = {columns}, the columns of the weight {shape}, "
            f"got shape {tuple(x.shape)}"
        )


def check_backward(
    dy: Any, codes: Any, scales: Any, row_scale: Any, layout: Any, columns: Any, dtype: Any
) -> None:
    op = "nvfp4_linear_backward"
    checks.float_tensor(op, "dy", dy)
    checks.has_rows(op, "dy", dy)
    _check_integer(op, "columns", columns)
    weight = Weight(codes, scales, row_scale, layout, columns)
    check_weight(op, "", weight, 2, dy.device)
    if columns != weight.columns:
        raise ArgumentError(
            f"{op}: columns must be K = {weight.columns}, those of the weight "
            f"({weight.rows}, {weight.columns}), got {columns}"
        )
    if dy.shape[-1] != weight.rows:
        raise ArgumentError(
            f"{op}: dy must end in N = {weight.rows}, the rows of the weight "
            f"({weight.rows}, {weight.columns}), got shape {tuple(dy.shape)}"
        )
    if dtype not in checks.FLOATS:
        got = checks.listed((dtype,)) if isinstance(dtype, torch.dtype) else type(dtype).__name__
        raise DtypeError(f"{op}: dtype must be one of {checks.listed(checks.FLOATS)}, got {got}")


def _check_integer(op: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise DtypeError(f"{op}: {name} must be an int, got {type(value).__name__}")


def outputs_forward(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    layout: str,
    out_dtype: torch.dtype | None,
    act: str | None,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], row_scale.shape[0]), dtype=out_dtype)


def outputs_backward(
    dy: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    layout: str,
    columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    return dy.new_empty((*dy.shape[:-1], columns), dtype=dtype)
