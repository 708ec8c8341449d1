"""What the RMSNorm ops take and give: dtypes, checks, outputs. Shared by all that follows."""

from __future__ import annotations

from typing import Any

import torch

from gristmill.ops import checks
from gristmill.ops.norms.semantics import accumulator, check_row_tensor, check_x, sum_dtype

__all__ = [
    "CASTINGS",
    "TORCH_AUTOCASTS",
    "accumulator",
    "check_add",
    "check_backward",
    "check_forward",
    "check_fused_add",
    "check_row_tensor",
    "check_x",
    "epsilon",
    "outputs_add",
    "outputs_backward",
    "outputs_forward",
    "outputs_fused_add",
    "sum_dtype",
]

CASTINGS = ("once", "llama")
# Torch learned late that rms_norm belongs with layer_norm among what autocast computes in fp32.
TORCH_AUTOCASTS = torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")


def epsilon(eps: float | None, dtype: torch.dtype) -> float:
    """None means the epsilon of the accumulator's dtype, as torch.nn.RMSNorm computes it."""
    return torch.finfo(accumulator(dtype)).eps if eps is None else eps


def check_forward(x: Any, *options: Any, op: str = "rms_norm") -> None:
    check_x(op, x)
    _check_options(op, x, *options)


def check_add(x: Any, residual: Any, *options: Any, op: str = "add_rms_norm") -> None:
    check_x(op, x)
    check_row_tensor(op, "residual", residual, x)
    _check_options(op, x, *options)


def check_fused_add(x: Any, residual: Any, weight: Any, eps: Any) -> None:
    op = "fused_add_rms_norm_"
    check_x(op, x)
    check_row_tensor(op, "residual", residual, x)
    checks.weight_of(op, "weight", weight, x)
    checks.number(op, "eps", eps, minimum=0.0)
    checks.writes(op, {"x": x, "residual": residual}, {"weight": weight})


def check_backward(
    dy: Any, x: Any, weight: Any, dsum: Any, eps: Any, weight_offset: Any, weight_grad: Any
) -> None:
    op = "rms_norm_backward"
    check_x(op, x)
    check_row_tensor(op, "dy", dy, x)
    if dsum is not None:
        check_row_tensor(op, "dsum", dsum, x)
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
