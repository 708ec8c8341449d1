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
    """c / sqrt(mean(c^2) + eps) and 1 / sqrt(mean(c^2) + eps), with c = h or center(h).

    Rows whose squares fp32 cannot hold are scaled by a power of two. Eager CPU calls first check
    whether any row needs it; other eager calls compute a scale for every row, usually 1. Compiled
    graphs use the plain formula, because the extra reduction would cost every call.
    """
    compiling = torch.compiler.is_compiling()
    if compiling or (h.device.type == "cpu" and not _is_traced()):
        c = h if center is None else center(h)
        square = c.square().mean(-1, keepdim=True).add_(eps)
        if compiling or h.numel() == 0 or _has_squares(square):
            root = square.rsqrt_()
            return c * root, root
    scale = _scale_of_rows(h, eps)
    c = h * scale if center is None else center(h * scale)
    square = c.square().mean(-1, keepdim=True)
    # If h equals its mean, only eps remains under the root.
    scale = torch.where(square == 0, 1.0, scale)
    root = torch.rsqrt(square + eps * scale * scale)
    return c * root, root * scale


def _has_squares(square: torch.Tensor) -> bool:
    """Whether these mean squares are far from underflow and overflow in fp32."""
    low, high = torch.aminmax(square.detach())
    return float(low) >= 2.0**-96 and float(high) <= 2.0**64


def _is_traced() -> bool:
    if is_transformed() or torch._ops._len_torch_dispatch_stack_pre_dispatch():
        return True
    return torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack() > 0


def _scale_of_rows(h: torch.Tensor, eps: float) -> torch.Tensor:
    """A power of two for each row of h.

    It scales the row's largest magnitude, or sqrt(eps) if that is larger, to about 2^40, unless it
    is between 2^-40 and 2^40. Zero and non-finite rows keep 1.
    """
    if h.shape[-1] == 0:
        return h.new_ones((*h.shape[:-1], 1))
    size = torch.linalg.vector_norm(h.detach(), math.inf, -1, keepdim=True)
    largest_exponent = 1000 if h.dtype == torch.float64 else 126
    exponent = (40 - size.clamp(min=math.sqrt(eps)).log2().floor()).clamp(max=largest_exponent)
    needs_scale = ((exponent > 80) | (exponent < 0)) & (size > 0) & size.isfinite()
    return torch.where(needs_scale, exponent, 0.0).exp2()


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
