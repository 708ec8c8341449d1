"""What the cross entropy ops take and give: checks, dtypes, outputs. Shared by all that follows."""

from __future__ import annotations

from typing import Any

import torch

from gristmill.errors import ArgumentError, DtypeError
from gristmill.ops import checks

REDUCTIONS = ("mean", "sum", "none")
TARGETS = (torch.int64, torch.int32)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, of the loss and of lse."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_forward(
    logits: Any,
    target: Any,
    weight: Any,
    ignore_index: Any,
    label_smoothing: Any,
    z_loss: Any,
    softcap: Any,
    reduction: Any,
    return_lse: Any,
) -> None:
    op = "cross_entropy"
    check_rows(op, logits, target)
    options = (ignore_index, label_smoothing, z_loss, softcap, reduction)
    check_options(op, logits, weight, *options)
    checks.boolean(op, "return_lse", return_lse)


def check_one_pass_(*args: Any) -> None:
    """Modes of one function, whose name is the one that users know."""
    check_forward(*args)
    logits, target, weight, *_ = args
    checks.writes("cross_entropy", {"logits": logits}, {"target": target, "weight": weight})


def check_backward(
    dloss: Any,
    dlse: Any,
    logits: Any,
    target: Any,
    stats: Any,
    denominators: Any,
    weight: Any,
    ignore_index: Any,
    label_smoothing: Any,
    z_loss: Any,
    softcap: Any,
    reduction: Any,
    first_class: Any,
    classes: Any,
) -> None:
    op = "cross_entropy_backward"
    check_rows(op, logits, target)
    options = (ignore_index, label_smoothing, z_loss, softcap, reduction)
    check_options(op, logits, weight, *options)
    own = accumulator(logits.dtype)
    rows = target.shape if reduction == "none" else torch.Size()
    _check_numbers(op, "dloss", dloss, rows, own, logits)
    if dlse is not None:
        _check_numbers(op, "dlse", dlse, target.shape, own, logits)
    _check_numbers(op, "stats", stats, torch.Size((*target.shape, 2)), own, logits)
    many = torch.Size([2 if reduction == "mean" else 0])
    _check_numbers(op, "denominators", denominators, many, own, logits)
    _check_shard(op, logits, first_class, classes, whole=True)
    if classes and weight is not None:
        raise ArgumentError(
            f"{op}: weight must be None where the logits are a shard of {classes} classes, got "
            f"a tensor of shape {tuple(weight.shape)}"
        )


def check_shard(
    logits: Any,
    target: Any,
    first_class: Any,
    classes: Any,
    ignore_index: Any,
    softcap: Any,
    sums: Any,
) -> None:
    op = "cross_entropy_shard"
    check_rows(op, logits, target)
    _check_shard(op, logits, first_class, classes, whole=False)
    _check_integer(op, "ignore_index", ignore_index)
    _check_softcap(op, softcap)
    checks.boolean(op, "sums", sums)


def check_scale(gradient: Any, factor: Any) -> None:
    op = "scale_gradient_"
    checks.float_tensor(op, "gradient", gradient)
    checks.has_rows(op, "gradient", gradient)
    rows = gradient.shape[:-1]
    if isinstance(factor, torch.Tensor) and factor.dim() == 0:
        rows = torch.Size()
    _check_numbers(op, "factor", factor, rows, accumulator(gradient.dtype), gradient)
    checks.writes(op, {"gradient": gradient}, {"factor": factor})


def check_rows(op: str, logits: Any, target: Any) -> None:
    """Logits with their classes in the last dim, and one target for each row."""
    checks.float_tensor(op, "logits", logits)
    checks.has_rows(op, "logits", logits)
    if not isinstance(target, torch.Tensor):
        raise DtypeError(f"{op}: target must be a torch.Tensor, got {type(target).__name__}")
    if target.dtype not in TARGETS:
        hint = "; class probabilities are not supported" if target.is_floating_point() else ""
        raise DtypeError(
            f"{op}: target must hold class indices of dtype {checks.listed(TARGETS)}, got "
            f"{checks.listed((target.dtype,))}{hint}"
        )
    if target.layout != torch.strided or target.is_nested:
        raise ArgumentError(f"{op}: target must be a dense tensor, got layout {target.layout}")
    checks.same_device(op, "target", target, "logits", logits.device)
    if target.shape != logits.shape[:-1]:
        raise ArgumentError(
            f"{op}: target must have the shape of logits without its last dim, "
            f"{tuple(logits.shape[:-1])}, got {tuple(target.shape)}"
        )


def outputs_forward(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    own = accumulator(logits.dtype)
    return (
        logits.new_empty(target.shape if reduction == "none" else (), dtype=own),
        logits.new_empty(target.shape, dtype=own),
        logits.new_empty(2 if reduction == "mean" else 0, dtype=own),
        logits.new_empty((*target.shape, 2), dtype=own),
    )


def outputs_one_pass(
    logits: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    loss, lse, *_ = outputs_forward(logits, *options)
    return loss, lse, torch.empty_like(logits)


def outputs_one_pass_(logits: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    loss, lse, *_ = outputs_forward(logits, *options)
    return loss, lse


def outputs_backward(
    dloss: torch.Tensor, dlse: torch.Tensor | None, logits: torch.Tensor, *rest: Any
) -> torch.Tensor:
    return torch.empty_like(logits)


def outputs_shard(logits: torch.Tensor, target: torch.Tensor, *options: Any) -> torch.Tensor:
    count = 4 if options[-1] else 3
    return logits.new_empty((*target.shape, count), dtype=accumulator(logits.dtype))


def outputs_scale(*args: Any) -> None:
    return None


def check_options(
    op: str,
    logits: torch.Tensor,
    weight: Any,
    ignore_index: Any,
    label_smoothing: Any,
    z_loss: Any,
    softcap: Any,
    reduction: Any,
) -> None:
    if weight is not None:
        checks.float_tensor(op, "weight", weight)
        checks.same_device(op, "weight", weight, "logits", logits.device)
        if weight.shape != logits.shape[-1:]:
            raise ArgumentError(
                f"{op}: weight must have shape ({logits.shape[-1]},), one for each class, "
                f"got {tuple(weight.shape)}"
            )
    _check_integer(op, "ignore_index", ignore_index)
    checks.number(op, "label_smoothing", label_smoothing, minimum=0.0)
    if label_smoothing > 1.0:
        raise ArgumentError(
            f"{op}: label_smoothing must be between 0 and 1, got {label_smoothing!r}"
        )
    checks.number(op, "z_loss", z_loss, minimum=0.0)
    _check_softcap(op, softcap)
    checks.one_of(op, "reduction", reduction, REDUCTIONS)


def _check_softcap(op: str, softcap: Any) -> None:
    if softcap is None:
        return
    checks.number(op, "softcap", softcap)
    if softcap <= 0:
        raise ArgumentError(f"{op}: softcap must be None or greater than 0, got {softcap!r}")


def _check_integer(op: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise DtypeError(f"{op}: {name} must be an integer, got {type(value).__name__}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ArgumentError(f"{op}: {name} must fit into 64 bits, got {value}")


def _check_shard(
    op: str, logits: torch.Tensor, first_class: Any, classes: Any, *, whole: bool
) -> None:
    """Where a shard lies among all classes; `whole`: 0 and 0 stand for no shard."""
    _check_integer(op, "first_class", first_class)
    _check_integer(op, "classes", classes)
    if whole and first_class == 0 and classes == 0:
        return
    if first_class < 0 or first_class + logits.shape[-1] > classes:
        raise ArgumentError(
            f"{op}: a shard of {logits.shape[-1]} classes from first_class on must lie within "
            f"0 to classes, got first_class {first_class} of classes {classes}"
        )


def _check_numbers(
    op: str,
    name: str,
    value: Any,
    shape: torch.Size,
    dtype: torch.dtype,
    logits: torch.Tensor,
) -> None:
    """A tensor of the accumulator's dtype."""
    if not isinstance(value, torch.Tensor):
        raise DtypeError(f"{op}: {name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype != dtype:
        raise DtypeError(
            f"{op}: {name} must have dtype {checks.listed((dtype,))}, got "
            f"{checks.listed((value.dtype,))}"
        )
    checks.dense(op, name, value)
    checks.same_device(op, name, value, "logits", logits.device)
    if value.shape != shape:
        raise ArgumentError(
            f"{op}: {name} must have shape {tuple(shape)}, got {tuple(value.shape)}"
        )
