"""What all norms take: dtypes of sums and of accumulation, and checks of row tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from gristmill.ops import checks
from gristmill.ops.direct import is_transformed


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and products."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def normalised(
    h: torch.Tensor, eps: float, center: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """c / sqrt(mean(c^2) + eps), with c = h or center(h), and 1 over that root.

    Where fp32 has no such squares the row is taken times a power of two. An eager CPU call checks
    whether one is needed; elsewhere each row has its own, mostly 1. A compiled graph has the plain
    formula, because the extra reduction would cost every call.
    """
    compiling = torch.compiler.is_compiling()
    if compiling or (h.device.type == "cpu" and not _is_traced()):
        c = h if center is None else center(h)
        square = c.square().mean(-1, keepdim=True).add_(eps)
        if compiling or h.numel() == 0 or _has_squares(square):
            root = square.rsqrt_()
            return c * root, root
    unit = _unit_of_rows(h, eps)
    c = h * unit if center is None else center(h * unit)
    square = c.square().mean(-1, keepdim=True)
    # Where all that is left of a row is its mean, eps alone is under the root.
    unit = torch.where(square == 0, 1.0, unit)
    root = torch.rsqrt(square + eps * unit * unit)
    return c * root, root * unit


def _has_squares(square: torch.Tensor) -> bool:
    """Whether fp32 holds the squares that these mean squares are made of."""
    low, high = torch.aminmax(square.detach())
    return float(low) >= 2.0**-96 and float(high) <= 2.0**64


def _is_traced() -> bool:
    if is_transformed():
        return True
    return torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack() > 0


def _unit_of_rows(h: torch.Tensor, eps: float) -> torch.Tensor:
    """A power of two for each row of h.

    It brings the largest of a row, or the root of eps if that is larger, near 2^40, unless it is
    between 2^-40 and 2^40 already. Zeros, and rows that are not finite, stay as they are.
    """
    if h.shape[-1] == 0:
        return h.new_ones((*h.shape[:-1], 1))
    size = torch.linalg.vector_norm(h.detach(), math.inf, -1, keepdim=True)
    most = 1000 if h.dtype == torch.float64 else 126
    up = (40 - size.clamp(min=math.sqrt(eps)).log2().floor()).clamp(max=most)
    far = ((up > 80) | (up < 0)) & (size > 0) & size.isfinite()
    return torch.where(far, up, 0.0).exp2()


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
