"""How far results are from those of fp64: told for every implementation beside its time."""

from __future__ import annotations

import math
from typing import Any

import torch

from gristmill.ops.op import Arguments, Op

_CHUNK = 1 << 25


def in_fp64(op: Op, args: Arguments) -> torch.Tensor:
    """What the op's reference gives for the first argument in fp64: nothing is rounded on the way.

    A quantised weight enters with the values that its codes and scales stand for.
    """
    x, *others = args
    result: torch.Tensor = op.reference(x.double(), *others)
    return result.double()


def precision(outputs: Any, exact: torch.Tensor) -> dict[str, float | None]:
    """The error of a result, by its size and by its worst element; nothing for another form.

    `fp64_error`: norm of the difference over the norm of `exact`, both of all elements.
    `fp64_roundings`: the largest error of an element in units of what rounding to the dtype of
    the outputs may add, half its epsilon times the element (or the root mean square of all, where
    that is larger). A result that was rounded once has at most 1, and in bf16 an error of 0.0017.
    None for both if an element is not a number.
    """
    if not isinstance(outputs, torch.Tensor) or outputs.shape != exact.shape or not exact.numel():
        return {}
    pairs = list(
        zip(outputs.reshape(-1).split(_CHUNK), exact.reshape(-1).split(_CHUNK), strict=True)
    )
    size = sum(float(right.square().sum()) for _, right in pairs)
    floor = max((size / exact.numel()) ** 0.5, torch.finfo(torch.float64).tiny)
    unit = torch.finfo(outputs.dtype).eps / 2
    total, worst = 0.0, 0.0
    for left, right in pairs:
        off = (left.double() - right).abs_()
        total += float(off.square().sum())
        worst = max(worst, float(off.div_(right.abs().clamp_min(floor)).max()) / unit)
    error = (total / size) ** 0.5 if size else float(total > 0)
    if not math.isfinite(error):  # what is not a number is no error either
        return {"fp64_error": None, "fp64_roundings": None}
    return {"fp64_error": float(f"{error:.4g}"), "fp64_roundings": float(f"{worst:.4g}")}
