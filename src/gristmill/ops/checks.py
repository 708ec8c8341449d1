"""Argument checks with errors that name the op, the argument, what came and what is right."""

from __future__ import annotations

from typing import Any

import torch

from gristmill.errors import ArgumentError, DtypeError

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


def writable(op: str, name: str, value: torch.Tensor) -> None:
    """A tensor whose elements each have memory of their own."""
    if value.numel() and any(
        stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride(), strict=True)
    ):
        raise ArgumentError(
            f"{op}: {name} is overwritten, so its rows must not share memory; got an expanded "
            f"tensor of strides {value.stride()}"
        )


def one_of(op: str, name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        choices = " or ".join(repr(choice) for choice in allowed)
        raise ArgumentError(f"{op}: {name} must be {choices}, got {value!r}")


def float_dtype(op: str, name: str, value: Any) -> None:
    """None, or a dtype that results can have."""
    if value is not None and value not in FLOATS:
        got = listed((value,)) if isinstance(value, torch.dtype) else type(value).__name__
        raise DtypeError(f"{op}: {name} must be None or one of {listed(FLOATS)}, got {got}")
