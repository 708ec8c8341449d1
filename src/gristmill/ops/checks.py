"""Argument checks with errors that name the op, the argument, what came and what is right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gristmill.errors import ArgumentError, DtypeError
from gristmill.ops.overlap import are_overlapping, is_overlapping

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def listed(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def float_tensor(op: str, name: str, value: Any) -> None:
    """A tensor of one of the dtypes that ops compute with."""
    if not isinstance(value, torch.Tensor):
        raise DtypeError(f"{op}: {name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in FLOATS:
        raise DtypeError(
            f"{op}: {name} must have dtype {listed(FLOATS)}, got {listed((value.dtype,))}"
        )
    dense(op, name, value)


def dense(op: str, name: str, value: torch.Tensor) -> None:
    if value.layout != torch.strided or value.is_nested:
        raise ArgumentError(f"{op}: {name} must be a dense tensor, got {_kind(value)}")


def _kind(value: torch.Tensor) -> str:
    return "a nested one" if value.is_nested else f"layout {value.layout}"


def has_rows(op: str, name: str, value: torch.Tensor) -> None:
    if value.dim() == 0:
        raise ArgumentError(f"{op}: {name} must have at least one dim, got a scalar tensor")


def same_device(op: str, name: str, value: torch.Tensor, other: str, device: torch.device) -> None:
    if value.device != device:
        raise ArgumentError(
            f"{op}: {name} is on {value.device}, {other} on {device}; they must be on one device"
        )


def same_shape(op: str, name: str, value: torch.Tensor, other: str, shape: torch.Size) -> None:
    if value.shape != shape:
        raise ArgumentError(
            f"{op}: {name} must have the shape of {other}, {tuple(shape)}, got {tuple(value.shape)}"
        )


def weight_of(op: str, name: str, value: Any, x: torch.Tensor) -> None:
    """None, or one value per column of x."""
    if value is None:
        return
    float_tensor(op, name, value)
    same_device(op, name, value, "x", x.device)
    if value.dim() != 1 or value.shape[0] != x.shape[-1]:
        raise ArgumentError(
            f"{op}: {name} must have shape ({x.shape[-1]},), the last dim of x, "
            f"got {tuple(value.shape)}"
        )


def number(op: str, name: str, value: Any, *, minimum: float | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise DtypeError(f"{op}: {name} must be a number, got {type(value).__name__}")
    # The kernels take it in fp32.
    finite = abs(value) <= torch.finfo(torch.float32).max  # False for a NaN, too
    if not finite or (minimum is not None and value < minimum):
        bound = "finite in fp32" + ("" if minimum is None else f" and at least {minimum:g}")
        raise ArgumentError(f"{op}: {name} must be {bound}, got {value!r}")


def size(op: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise DtypeError(f"{op}: {name} must be an int, got {type(value).__name__}")
    if value < 0:
        raise ArgumentError(f"{op}: {name} must be at least 0, got {value}")


def boolean(op: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise DtypeError(f"{op}: {name} must be True or False, got {type(value).__name__}")


def writes(op: str, written: Mapping[str, torch.Tensor], read: Mapping[str, Any]) -> None:
    """Check that written tensors overlap neither themselves nor any other argument.

    `read`: the other tensors, or None. Metadata must be right already.
    """
    for name, value in written.items():
        if value._is_zerotensor():
            raise ArgumentError(
                f"{op}: {name} is overwritten, and is a tensor of zeros without memory; use "
                f"{name}.clone()"
            )
        if is_overlapping(value):
            kind = "an expanded tensor" if 0 in value.stride() else "a tensor that overlaps itself"
            raise ArgumentError(
                f"{op}: {name} is overwritten, so its elements must not share memory; got {kind} "
                f"of shape {tuple(value.shape)} and strides {value.stride()}"
            )
    tensors = {**written, **{name: one for name, one in read.items() if one is not None}}
    for name, value in written.items():
        for other, tensor in tensors.items():
            if other != name and are_overlapping(value, tensor):
                got = "must be different tensors; got the same tensor twice"
                if value is not tensor:
                    got = "must share no memory; got tensors that overlap"
                raise ArgumentError(f"{op}: {name} is overwritten, so {name} and {other} {got}")


def one_of(op: str, name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        choices = " or ".join(repr(choice) for choice in allowed)
        raise ArgumentError(f"{op}: {name} must be {choices}, got {value!r}")


def float_dtype(op: str, name: str, value: Any) -> None:
    """None, or a dtype that results can have."""
    if value is not None and value not in FLOATS:
        got = listed((value,)) if isinstance(value, torch.dtype) else type(value).__name__
        raise DtypeError(f"{op}: {name} must be None or one of {listed(FLOATS)}, got {got}")
