"""What `linear` and `matmul` take and give: checks and outputs."""

from __future__ import annotations

from typing import Any

import torch

from gristmill.errors import ArgumentError, DtypeError
from gristmill.formats.nvfp4 import NVFP4Tensor, PackedNVFP4
from gristmill.ops import checks

# "gelu" is the exact one, by erf; "gelu_tanh" the approximation of that name.
ACTIVATIONS = ("relu", "silu", "gelu", "gelu_tanh")
# Those whose gradient needs what they were applied to; relu's needs its result alone.
NEED_PRE = ("silu", "gelu", "gelu_tanh")


def check_linear(x: Any, weight: Any, bias: Any, activation: Any) -> None:
    _check_linear("linear", x, weight, bias)
    if activation is not None and activation not in ACTIVATIONS:
        _unknown("linear", activation, "None, ")


def check_linear_with_pre(x: Any, weight: Any, bias: Any, activation: Any) -> None:
    _check_linear("linear_with_pre", x, weight, bias)
    if activation not in ACTIVATIONS:
        _unknown("linear_with_pre", activation, "")


def check_matmul(a: Any, b: Any) -> None:
    op = "matmul"
    checks.float_tensor(op, "a", a)
    checks.float_tensor(op, "b", b)
    checks.same_device(op, "b", b, "a", a.device)
    _same_dtype(op, "b", b, "a", a)
    for name, value in (("a", a), ("b", b)):
        if value.dim() < 2:
            raise ArgumentError(
                f"{op}: {name} must have at least two dims, got shape {tuple(value.shape)}; "
                f"torch.matmul takes vectors, or unsqueeze it to a matrix"
            )
    if a.shape[-1] != b.shape[-2]:
        raise ArgumentError(
            f"{op}: b must have K = {a.shape[-1]} rows, as many as a has columns, got shapes "
            f"{tuple(a.shape)} and {tuple(b.shape)}"
        )
    try:
        leading_dims(a, b)
    except RuntimeError:
        raise ArgumentError(
            f"{op}: the dims before the last two must broadcast to each other, got shapes "
            f"{tuple(a.shape)} and {tuple(b.shape)}"
        ) from None


def linear_outputs(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def linear_with_pre_outputs(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*x.shape[:-1], weight.shape[0])
    return x.new_empty(shape), x.new_empty(shape)


def matmul_outputs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty(result_shape(a, b))


def result_shape(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    return (*leading_dims(a, b), a.shape[-2], b.shape[-1])


def leading_dims(a: torch.Tensor, b: torch.Tensor) -> torch.Size:
    """The dims of the result before its last two; RuntimeError if a's and b's do not go together.

    A matrix has none to add. Torch's own function is not asked then: it imports sympy, for 0.2 s.
    """
    ours, theirs = a.shape[:-2], b.shape[:-2]
    if not theirs:
        return ours
    return torch.broadcast_shapes(ours, theirs) if ours else theirs


def _check_linear(op: str, x: Any, weight: Any, bias: Any) -> None:
    checks.float_tensor(op, "x", x)
    checks.has_rows(op, "x", x)
    if isinstance(weight, (NVFP4Tensor, PackedNVFP4)):
        raise DtypeError(
            f"{op}: weight must be a torch.Tensor, got {type(weight).__name__}; "
            f"gristmill.nvfp4.linear takes it"
        )
    checks.float_tensor(op, "weight", weight)
    checks.same_device(op, "weight", weight, "x", x.device)
    _same_dtype(op, "weight", weight, "x", x)
    if weight.dim() != 2:
        raise ArgumentError(f"{op}: weight must have shape (N, K), got {tuple(weight.shape)}")
    if x.shape[-1] != weight.shape[1]:
        raise ArgumentError(
            f"{op}: x must end in K = {weight.shape[1]}, the columns of the weight "
            f"{tuple(weight.shape)}, got shape {tuple(x.shape)}"
        )
    if bias is None:
        return
    checks.float_tensor(op, "bias", bias)
    checks.same_device(op, "bias", bias, "x", x.device)
    _same_dtype(op, "bias", bias, "x", x)
    if bias.dim() != 1 or bias.shape[0] != weight.shape[0]:
        raise ArgumentError(
            f"{op}: bias must have shape ({weight.shape[0]},), one for each row of the weight, "
            f"got {tuple(bias.shape)}"
        )


def _same_dtype(op: str, name: str, value: torch.Tensor, other: str, first: torch.Tensor) -> None:
    if value.dtype != first.dtype and not _converts(value.device.type):
        raise DtypeError(
            f"{op}: {name} is {checks.listed((value.dtype,))}, {other} is "
            f"{checks.listed((first.dtype,))}; all must have one dtype"
        )


def _converts(device: str) -> bool:
    """Whether autocast is still to give the tensors one dtype; inside the op it has done so."""
    return device in ("cuda", "cpu") and torch.is_autocast_enabled(device)


def _unknown(op: str, activation: Any, before: str) -> None:
    names = ", ".join(map(repr, ACTIVATIONS[:-1]))
    raise ArgumentError(
        f"{op}: activation must be {before}{names} or {ACTIVATIONS[-1]!r}, got {activation!r}"
    )
