"""What the linear cross entropy ops take and give: checks and outputs."""

from __future__ import annotations

from typing import Any

import torch

from gristmill.errors import ArgumentError, DtypeError
from gristmill.ops import checks
from gristmill.ops.cross_entropy.semantics import REDUCTIONS, TARGETS, accumulator, check_options

__all__ = [
    "REDUCTIONS",
    "accumulator",
    "check_backward",
    "check_forward",
    "outputs_backward",
    "outputs_forward",
]


def check_forward(
    x: Any,
    weight: Any,
    target: Any,
    bias: Any,
    class_weight: Any,
    ignore_index: Any,
    label_smoothing: Any,
    z_loss: Any,
    softcap: Any,
    reduction: Any,
    chunk_rows: Any,
) -> None:
    op = "linear_cross_entropy"
    _check_tensors(op, x, weight, target, bias, class_weight)
    check_options(op, x, None, ignore_index, label_smoothing, z_loss, softcap, reduction)
    _check_chunk_rows(op, chunk_rows)


def check_backward(
    x: Any,
    weight: Any,
    target: Any,
    bias: Any,
    class_weight: Any,
    dloss: Any,
    dlse: Any,
    stats: Any,
    denominators: Any,
    ignore_index: Any,
    label_smoothing: Any,
    z_loss: Any,
    softcap: Any,
    reduction: Any,
    chunk_rows: Any,
    x_grad: Any,
    weight_grad: Any,
    bias_grad: Any,
) -> None:
    op = "linear_cross_entropy_backward"
    _check_tensors(op, x, weight, target, bias, class_weight)
    check_options(op, x, None, ignore_index, label_smoothing, z_loss, softcap, reduction)
    _check_chunk_rows(op, chunk_rows)
    rows = target.shape if reduction == "none" else torch.Size()
    shapes = {
        "dloss": (dloss, rows),
        "dlse": (dlse, target.shape),
        "stats": (stats, torch.Size((*target.shape, 2))),
        "denominators": (denominators, torch.Size([2 if reduction == "mean" else 0])),
    }
    for name, (value, shape) in shapes.items():
        if name == "dlse" and value is None:
            continue
        checks.float_tensor(op, name, value)
        checks.same_device(op, name, value, "x", x.device)
        if value.shape != shape:
            raise ArgumentError(
                f"{op}: {name} must have shape {tuple(shape)} with reduction {reduction!r}, "
                f"got {tuple(value.shape)}"
            )
    for name, flag in (("x_grad", x_grad), ("weight_grad", weight_grad), ("bias_grad", bias_grad)):
        checks.boolean(op, name, flag)


def _check_tensors(op: str, x: Any, weight: Any, target: Any, bias: Any, class_weight: Any) -> None:
    checks.float_tensor(op, "x", x)
    checks.has_rows(op, "x", x)
    _check_partner(op, "weight", weight, x)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ArgumentError(
            f"{op}: weight must have shape (V, {x.shape[-1]}), its columns the last dim of x "
            f"{tuple(x.shape)}, got {tuple(weight.shape)}"
        )
    _check_target(op, target, x)
    classes = weight.shape[0]
    if bias is not None:
        _check_partner(op, "bias", bias, x)
    if class_weight is not None:
        checks.float_tensor(op, "class_weight", class_weight)
        checks.same_device(op, "class_weight", class_weight, "x", x.device)
    for name, value in (("bias", bias), ("class_weight", class_weight)):
        if value is not None and tuple(value.shape) != (classes,):
            raise ArgumentError(
                f"{op}: {name} must have shape ({classes},), one for each row of weight, "
                f"got {tuple(value.shape)}"
            )


def _check_partner(op: str, name: str, value: Any, x: torch.Tensor) -> None:
    """What is multiplied with x or added to the product: of its dtype, as torch's linear wants."""
    checks.float_tensor(op, name, value)
    checks.same_device(op, name, value, "x", x.device)
    if value.dtype != x.dtype:
        raise DtypeError(
            f"{op}: {name} must have the dtype of x, {checks.listed((x.dtype,))}, got "
            f"{checks.listed((value.dtype,))}; convert it, or run under torch.autocast"
        )


def _check_target(op: str, target: Any, x: torch.Tensor) -> None:
    if not isinstance(target, torch.Tensor):
        raise DtypeError(f"{op}: target must be a torch.Tensor, got {type(target).__name__}")
    if target.dtype not in TARGETS:
        raise DtypeError(
            f"{op}: target must hold class indices of dtype {checks.listed(TARGETS)}, got "
            f"{checks.listed((target.dtype,))}"
        )
    if target.layout != torch.strided or target.is_nested:
        raise ArgumentError(f"{op}: target must be a dense tensor, got layout {target.layout}")
    checks.same_device(op, "target", target, "x", x.device)
    if target.shape != x.shape[:-1]:
        raise ArgumentError(
            f"{op}: target must have the shape of x without its last dim, "
            f"{tuple(x.shape[:-1])}, got {tuple(target.shape)}"
        )


def _check_chunk_rows(op: str, chunk_rows: Any) -> None:
    if chunk_rows is None:
        return
    if isinstance(chunk_rows, bool) or not isinstance(chunk_rows, int):
        raise DtypeError(
            f"{op}: chunk_rows must be None or an int, got {type(chunk_rows).__name__}"
        )
    if chunk_rows < 1:
        raise ArgumentError(f"{op}: chunk_rows must be at least 1, got {chunk_rows}")


def outputs_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    chunk_rows: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dtype = accumulator(x.dtype)
    loss = x.new_empty(target.shape if reduction == "none" else (), dtype=dtype)
    lse = x.new_empty(target.shape, dtype=dtype)
    denominators = x.new_empty((2 if reduction == "mean" else 0,), dtype=dtype)
    return loss, lse, denominators, x.new_empty((*target.shape, 2), dtype=dtype)


def outputs_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    dloss: torch.Tensor,
    dlse: torch.Tensor | None,
    stats: torch.Tensor,
    denominators: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    chunk_rows: int | None,
    x_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dx = torch.empty_like(x) if x_grad else x.new_empty((0,))
    dweight = torch.empty_like(weight) if weight_grad else weight.new_empty((0,))
    classes = weight.shape[0] if bias_grad else 0
    return dx, dweight, x.new_empty((classes,))
