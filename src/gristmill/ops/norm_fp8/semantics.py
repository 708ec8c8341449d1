"""What a norm into FP8 takes and gives besides the norm itself: the scale, the largest value.

With z the norm in fp32 (fp64 for fp64 inputs), as it would be rounded to another dtype:

    scale = the given one, or max(max |z of the row| / 448, 2^-126)
    y     = e4m3(z * (1 / scale)), beyond 448 the largest number, for NaN a NaN
    amax  = max |z| of the whole tensor

Scale and amax are fp32. NaN in a row makes its scale, its y and amax NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gristmill.errors import ArgumentError, DtypeError, NoGradientError
from gristmill.ops import checks

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of E4M3
SMALLEST_SCALE = 2.0**-126  # the least normal number: its inverse is finite

Tensors = Sequence[torch.Tensor | None]


def asked(op: str, out_dtype: Any, scale: Any, return_amax: Any) -> bool:
    """Whether the function `op` is to give FP8; else the options that go with it must not be set.

    `op` is the function that a user calls; the op that it becomes has a name of its own.
    """
    checks.boolean(op, "return_amax", return_amax)
    if out_dtype is FP8:
        return True
    if out_dtype is not None and out_dtype not in checks.FLOATS:
        got = checks.listed((out_dtype,)) if isinstance(out_dtype, torch.dtype) else None
        raise DtypeError(
            f"{op}: out_dtype must be None or one of {checks.listed((*checks.FLOATS, FP8))}, "
            f"got {got or type(out_dtype).__name__}"
        )
    for name, given in (("scale", scale is not None), ("return_amax", return_amax)):
        if given:
            dtype = "None" if out_dtype is None else checks.listed((out_dtype,))
            raise ArgumentError(
                f"{op}: {name} goes with out_dtype=torch.float8_e4m3fn, got out_dtype {dtype}"
            )
    return False


def check_quantisation(op: str, scale: Any, amax: Any, x: torch.Tensor) -> None:
    """`scale` must be None or a tensor of one fp32 element on x's device, `amax` a bool."""
    if scale is not None:
        if not isinstance(scale, torch.Tensor):
            raise DtypeError(f"{op}: scale must be a torch.Tensor, got {type(scale).__name__}")
        if scale.dtype != torch.float32:
            raise DtypeError(
                f"{op}: scale must have dtype float32, got {checks.listed((scale.dtype,))}"
            )
        checks.float_tensor(op, "scale", scale)  # dense
        checks.same_device(op, "scale", scale, "x", x.device)
        if scale.numel() != 1:
            raise ArgumentError(
                f"{op}: scale must have one element, for the whole tensor, "
                f"got shape {tuple(scale.shape)}; leave it out for a scale per row"
            )
    checks.boolean(op, "amax", amax)


def outputs(
    x: torch.Tensor, scale: torch.Tensor | None, amax: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last results, scale and amax: without elements where given or not wanted."""
    rows = (0,) if scale is not None else (*x.shape[:-1], 1)
    return (
        x.new_empty(rows, dtype=torch.float32),
        x.new_empty(() if amax else (0,), dtype=torch.float32),
    )


def returned(results: Tensors, scale: torch.Tensor | None, return_amax: bool) -> Any:
    """What a user gets of an op's results, the last of which are scale and amax."""
    *first, row_scale, amax = results
    kept = [*first, *([row_scale] if scale is None else []), *([amax] if return_amax else [])]
    return kept[0] if len(kept) == 1 else tuple(kept)


def refuse_gradient(op: str, tensors: Tensors) -> None:
    """FP8 results have no gradient: raised at once, not at the end of a forward pass."""
    if torch.is_grad_enabled() and any(
        isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors
    ):
        raise NoGradientError(
            f"{op}: a norm into FP8 has no gradient, and an argument requires one; call it under "
            f"torch.no_grad(), detach the argument, or leave out_dtype out and quantise afterwards"
        )
