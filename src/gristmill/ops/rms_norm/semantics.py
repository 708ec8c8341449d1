"""What the RMSNorm ops take and give: dtypes, checks, outputs. Shared by all that follows."""

from __future__ import annotations

from typing import Any

import torch

from gristmill.ops import checks

CASTINGS = ("once", "llama")


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and products."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def epsilon(eps: float | None, dtype: torch.dtype) -> float:
    """None means the epsilon of the accumulator's dtype, as torch.nn.RMSNorm computes it."""
    return torch.finfo(accumulator(dtype)).eps if eps is None else eps


def sum_dtype(x: torch.Tensor, residual: torch.Tensor) -> torch.dtype:
    """The dtype of x + residual, hence of the residual that goes on."""
    return torch.promote_types(x.dtype, residual.dtype)


def check_forward(
    x: Any, weight: Any, eps: Any, weight_offset: Any, casting: Any, out_dtype: Any
) -> None:
    _check_x("rms_norm", x)
    _check_options("rms_norm", x, weight, eps, weight_offset, casting, out_dtype)


def check_add(
    x: Any, residual: Any, weight: Any, eps: Any, weight_offset: Any, casting: Any, out_dtype: Any
) -> None:
    _check_x("add_rms_norm", x)
    _check_row_tensor("add_rms_norm", "residual", residual, x)
    _check_options("add_rms_norm", x, weight, eps, weight_offset, casting, out_dtype)


def check_fused_add(x: Any, residual: Any, weight: Any, eps: Any) -> None:
    op = "fused_add_rms_norm_"
    _check_x(op, x)
    _check_row_tensor(op, "residual", residual, x)
    checks.weight_of(op, "weight", weight, x)
    checks.number(op, "eps", eps, minimum=0.0)
    checks.writable(op, "x", x)
    checks.writable(op, "residual", residual)


def check_backward(
    dy: Any, x: Any, weight: Any, dsum: Any, eps: Any, weight_offset: Any, weight_grad: Any
) -> None:
    op = "rms_norm_backward"
    _check_x(op, x)
    _check_row_tensor(op, "dy", dy, x)
    if dsum is not None:
        _check_row_tensor(op, "dsum", dsum, x)
    checks.weight_of(op, "weight", weight, x)
    if eps is not None:
        checks.number(op, "eps", eps, minimum=0.0)
    checks.number(op, "weight_offset", weight_offset)
    checks.boolean(op, "weight_grad", weight_grad)


def outputs_forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float | None,
    weight_offset: float,
    casting: str,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    return torch.empty_like(x, dtype=out_dtype or x.dtype)


def outputs_add(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float | None,
    weight_offset: float,
    casting: str,
    out_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.empty_like(x, dtype=out_dtype or x.dtype),
        torch.empty_like(x, dtype=sum_dtype(x, residual)),
    )


def outputs_fused_add(*args: Any) -> None:
    return None


def outputs_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    dsum: torch.Tensor | None,
    eps: float | None,
    weight_offset: float,
    weight_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    dx = torch.empty_like(x)
    if weight_grad and weight is not None:
        return dx, weight.new_empty(weight.shape)
    return dx, x.new_empty(0)


def _check_x(op: str, x: Any) -> None:
    checks.float_tensor(op, "x", x)
    checks.has_rows(op, "x", x)


def _check_row_tensor(op: str, name: str, value: Any, x: torch.Tensor) -> None:
    checks.float_tensor(op, name, value)
    checks.same_device(op, name, value, "x", x.device)
    checks.same_shape(op, name, value, "x", x.shape)


def _check_options(
    op: str,
    x: torch.Tensor,
    weight: Any,
    eps: Any,
    weight_offset: Any,
    casting: Any,
    out_dtype: Any,
) -> None:
    checks.weight_of(op, "weight", weight, x)
    if eps is not None:
        checks.number(op, "eps", eps, minimum=0.0)
    checks.number(op, "weight_offset", weight_offset)
    checks.one_of(op, "casting", casting, CASTINGS)
    checks.float_dtype(op, "out_dtype", out_dtype)
