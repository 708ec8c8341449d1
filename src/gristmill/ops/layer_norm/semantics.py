"""What the LayerNorm ops take and give: checks and outputs. Shared by all that follows."""

from __future__ import annotations

from typing import Any

import torch

from gristmill.ops import checks
from gristmill.ops.norms.semantics import check_row_tensor, check_x, sum_dtype


def check_forward(x: Any, *options: Any, op: str = "layer_norm") -> None:
    check_x(op, x)
    _check_options(op, x, *options)


def check_add(x: Any, residual: Any, *options: Any, op: str = "add_layer_norm") -> None:
    check_x(op, x)
    check_row_tensor(op, "residual", residual, x)
    _check_options(op, x, *options)


def check_backward(
    dy: Any,
    x: Any,
    weight: Any,
    dsum: Any,
    eps: Any,
    weight_offset: Any,
    weight_grad: Any,
    bias_dtype: Any,
) -> None:
    op = "layer_norm_backward"
    check_x(op, x)
    check_row_tensor(op, "dy", dy, x)
    if dsum is not None:
        check_row_tensor(op, "dsum", dsum, x)
    checks.weight_of(op, "weight", weight, x)
    checks.number(op, "eps", eps, minimum=0.0)
    checks.number(op, "weight_offset", weight_offset)
    checks.boolean(op, "weight_grad", weight_grad)
    checks.float_dtype(op, "bias_dtype", bias_dtype)


def _check_options(
    op: str,
    x: torch.Tensor,
    weight: Any,
    bias: Any,
    eps: Any,
    weight_offset: Any,
    out_dtype: Any,
) -> None:
    checks.weight_of(op, "weight", weight, x)
    checks.weight_of(op, "bias", bias, x)
    checks.number(op, "eps", eps, minimum=0.0)
    checks.number(op, "weight_offset", weight_offset)
    checks.float_dtype(op, "out_dtype", out_dtype)


def outputs_forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    return torch.empty_like(x, dtype=out_dtype or x.dtype)


def outputs_add(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    out_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.empty_like(x, dtype=out_dtype or x.dtype),
        torch.empty_like(x, dtype=sum_dtype(x, residual)),
    )


def outputs_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    dsum: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    weight_grad: bool,
    bias_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dx, dweight, dbias = torch.empty_like(x), x.new_empty(0), x.new_empty(0)
    if weight_grad and weight is not None:
        dweight = weight.new_empty(weight.shape)
    if bias_dtype is not None:
        dbias = x.new_empty(x.shape[-1:], dtype=bias_dtype)
    return dx, dweight, dbias
