"""What all norms take: dtypes of sums and of accumulation, and checks of row tensors."""

from __future__ import annotations

from typing import Any

import torch

from gristmill.ops import checks


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and products."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sum_dtype(x: torch.Tensor, residual: torch.Tensor) -> torch.dtype:
    """The dtype of x + residual, hence of the residual that goes on."""
    return torch.promote_types(x.dtype, residual.dtype)


def check_x(op: str, x: Any) -> None:
    checks.float_tensor(op, "x", x)
    checks.has_rows(op, "x", x)


def check_row_tensor(op: str, name: str, value: Any, x: torch.Tensor) -> None:
    checks.float_tensor(op, name, value)
    checks.same_device(op, name, value, "x", x.device)
    checks.same_shape(op, name, value, "x", x.shape)
