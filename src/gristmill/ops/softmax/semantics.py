"""What the softmax ops take and give: checks, outputs, the causal limit. Shared by what follows."""

from __future__ import annotations

from typing import Any

import torch

from gristmill.errors import ArgumentError, DtypeError
from gristmill.ops import checks

# A causal limit is a word to users and an int, early in the schema, to torch: DTensor remembers a
# sharding rule's answer by the arguments from the first int on, and this one changes the rule.
EVERYTHING, TOP_LEFT, BOTTOM_RIGHT = range(3)
CAUSAL: dict[str | None, int] = {
    None: EVERYTHING,
    "top_left": TOP_LEFT,
    "bottom_right": BOTTOM_RIGHT,
}


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of exponents and sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def causal_code(op: str, causal: Any) -> int:
    """The op's int for a user's word."""
    if causal is None:
        return EVERYTHING
    if not isinstance(causal, str) or causal not in CAUSAL:
        raise _unknown_word(op, causal)
    return CAUSAL[causal]


def causal_offset(causal: int, queries: int, keys: int) -> int:
    """Row i sees columns up to i plus this."""
    return keys - queries if causal == BOTTOM_RIGHT else 0


def check_softmax(x: Any, causal: Any, scale: Any, mask: Any) -> None:
    _check_forward("softmax", x, causal, scale, mask)


def check_log_softmax(x: Any, causal: Any, scale: Any, mask: Any) -> None:
    _check_forward("log_softmax", x, causal, scale, mask)


def check_softmax_backward(dy: Any, y: Any, causal: Any, scale: Any) -> None:
    _check_backward("softmax_backward", dy, y, causal, scale)


def check_log_softmax_backward(dy: Any, y: Any, causal: Any, scale: Any) -> None:
    _check_backward("log_softmax_backward", dy, y, causal, scale)


def outputs(x: torch.Tensor, causal: int, scale: float, mask: torch.Tensor | None) -> torch.Tensor:
    return torch.empty_like(x)


def outputs_backward(dy: torch.Tensor, y: torch.Tensor, causal: int, scale: float) -> torch.Tensor:
    return torch.empty_like(y)


def normal_dim(op: str, x: Any, dim: Any) -> int:
    """`dim` counted from the front."""
    checks.float_tensor(op, "x", x)
    checks.has_rows(op, "x", x)
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise DtypeError(f"{op}: dim must be an int, got {type(dim).__name__}")
    if not -x.dim() <= dim < x.dim():
        raise ArgumentError(
            f"{op}: dim must be from {-x.dim()} to {x.dim() - 1} for a tensor of {x.dim()} dims, "
            f"got {dim}"
        )
    return dim % int(x.dim())


def last_dim_only(op: str, causal: Any, dim: int, x: torch.Tensor) -> None:
    """A causal limit is one between the last two dims."""
    if causal is not None:
        raise ArgumentError(
            f"{op}: causal limits the last dim by the one before it, so dim must be -1, got {dim} "
            f"of {x.dim()} dims; move the dim there first"
        )


def check_mask(op: str, mask: Any, x: torch.Tensor) -> None:
    """None, or a tensor that says who takes part or what is added, and broadcasts to x."""
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor):
        raise DtypeError(f"{op}: mask must be a torch.Tensor, got {type(mask).__name__}")
    allowed = (torch.bool, *checks.FLOATS)
    if mask.dtype not in allowed:
        raise DtypeError(
            f"{op}: mask must have dtype {checks.listed(allowed)} (True takes part; numbers are "
            f"added), got {checks.listed((mask.dtype,))}"
        )
    if mask.layout != torch.strided or mask.is_nested:
        raise ArgumentError(f"{op}: mask must be a dense tensor, got layout {mask.layout}")
    checks.same_device(op, "mask", mask, "x", x.device)
    sizes = zip(reversed(mask.shape), reversed(x.shape), strict=False)
    if mask.dim() > x.dim() or any(own not in (1, size) for own, size in sizes):
        raise ArgumentError(
            f"{op}: mask must broadcast to the shape of x, {tuple(x.shape)}, got "
            f"{tuple(mask.shape)}"
        )


def _check_forward(op: str, x: Any, causal: Any, scale: Any, mask: Any) -> None:
    checks.float_tensor(op, "x", x)
    checks.has_rows(op, "x", x)
    checks.number(op, "scale", scale)
    check_mask(op, mask, x)
    _check_causal(op, "x", x, causal)


def _check_backward(op: str, dy: Any, y: Any, causal: Any, scale: Any) -> None:
    checks.float_tensor(op, "y", y)
    checks.has_rows(op, "y", y)
    checks.float_tensor(op, "dy", dy)
    checks.same_device(op, "dy", dy, "y", y.device)
    checks.same_shape(op, "dy", dy, "y", y.shape)
    checks.number(op, "scale", scale)
    _check_causal(op, "y", y, causal)


def _check_causal(op: str, name: str, x: torch.Tensor, causal: Any) -> None:
    if isinstance(causal, str):
        raise _unknown_word(op, causal)
    whole = isinstance(causal, int) and not isinstance(causal, bool)  # 1.0 and True equal 1
    if not whole or causal not in CAUSAL.values():
        choices = ", ".join(f"{code} ({word!r})" for word, code in CAUSAL.items())
        raise ArgumentError(f"{op}: causal must be one of {choices}, got {causal!r}")
    if causal != EVERYTHING and x.dim() < 2:
        raise ArgumentError(
            f"{op}: causal limits the last dim by the one before it, so {name} must have at least "
            f"two dims, got shape {tuple(x.shape)}"
        )


def _unknown_word(op: str, causal: Any) -> ArgumentError:
    words = " or ".join(repr(word) for word in CAUSAL if word is not None)
    return ArgumentError(f"{op}: causal must be None, {words}, got {causal!r}")
