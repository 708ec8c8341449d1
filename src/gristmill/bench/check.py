"""Is it the same function? Asked of every implementation before it is timed.

A gate, not a conformance test: it has to let through another order of summation and one rounding
more or less, and to stop a wrong weight, a missing row, a NaN, or a gradient of cross entropy that
is right only where the target is.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

# Four units in the last place for 16-bit results, one for FP8. fp32 sums over a quarter of a
# million terms may differ by some sqrt(terms) * eps between two good orders of summation.
TOLERANCE = {
    torch.float8_e4m3fn: torch.finfo(torch.float8_e4m3fn).eps,
    torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps,
    torch.float16: 4 * torch.finfo(torch.float16).eps,
    torch.float32: 1e-4,
}
_CHUNK = 1 << 26
_SHORT = 32  # elements of a line


class WrongResultError(Exception):
    """An implementation's outputs are not those of the reference."""


def check(
    outputs: Any, expected: Any, *, coarse: bool = False, terms: torch.Tensor | None = None
) -> float:
    """The largest relative error over all outputs; WrongResultError if out of bounds.

    An element's error is measured against its own size or the mean size in its tensor, whichever is
    larger: near zero only the latter means anything. The mean, not the root mean square: a gradient
    of cross entropy has one entry of size 1 in a row of thousands, which would hide the others.

    `coarse`: this implementation is known to round in between. Its outputs may be of a narrower
    dtype, and may be off by three times as much as others of that dtype. `terms`: the magnitudes of
    the rounded terms, for each element of the first output. Errors are then relative to these, with
    the usual tolerance, because the difference of terms that cancel may be arbitrarily small.
    """
    got, want = _tensors(outputs), _tensors(expected)
    if len(got) != len(want):
        raise WrongResultError(f"gives {len(got)} outputs instead of {len(want)}")
    worst = 0.0
    for index, (left, right) in enumerate(zip(got, want, strict=True)):
        narrower = coarse and left.dtype in TOLERANCE
        if left.shape != right.shape or (left.dtype != right.dtype and not narrower):
            raise WrongResultError(
                f"output {index} is {tuple(left.shape)} {left.dtype} "
                f"instead of {tuple(right.shape)} {right.dtype}"
            )
        sizes = terms if coarse and index == 0 else None
        error = _error(left, right, sizes)
        limit = TOLERANCE.get(left.dtype, 1e-4) * (3 if coarse and sizes is None else 1)
        if not error <= limit:  # also when it is NaN
            raise WrongResultError(
                f"output {index} is off by {error:.2g} (relative; {limit:.2g} is ok)"
            )
        worst = max(worst, error)
    return worst


def check_lines(outputs: torch.Tensor, expected: torch.Tensor, *, limit: float) -> float:
    """For results of inputs that were rounded: the largest relative error of a row or column.

    Single elements of such a result may be off by several times what rounding does on average, so
    lines are looked at, by their norms: those of a matrix of independent errors are all alike, and
    one wrong row or column stands out. Short lines, of which some are close to zero by chance, are
    measured by the size of all, and may be off by four times as much. WrongResultError if one is
    off by more than `limit`.
    """
    if outputs.shape != expected.shape or outputs.dtype != expected.dtype:
        raise WrongResultError(
            f"output 0 is {tuple(outputs.shape)} {outputs.dtype} "
            f"instead of {tuple(expected.shape)} {expected.dtype}"
        )
    got, want = outputs.reshape(-1, outputs.shape[-1]), expected.reshape(-1, expected.shape[-1])
    errors = {}
    for dim, line in enumerate(("column", "row")):
        off, size = _line_norms(got, want, dim)
        usual = max(float(size.square().mean().sqrt()), torch.finfo(torch.float64).tiny)
        if want.shape[dim] < _SHORT:
            errors[line] = float((off / size.clamp_min(usual)).max()) / 4
        else:  # also of a line of hardly anything the size of the others counts
            errors[line] = float((off / size.clamp_min(usual / 64)).max())
    line, worst = max(errors.items(), key=lambda one: one[1])
    if not all(error <= limit for error in errors.values()):  # also when one is NaN
        raise WrongResultError(f"a {line} is off by {worst:.2g} (relative; {limit:.2g} is ok)")
    return worst


def _line_norms(
    got: torch.Tensor, want: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norms along `dim` of the difference and of `want`, in fp64; by chunks of lines."""
    step = max(1, _CHUNK // max(1, want.shape[dim]))
    off, size = [], []
    for a, b in zip(got.split(step, 1 - dim), want.split(step, 1 - dim), strict=True):
        a, b = a.double(), b.double()
        off.append(torch.linalg.vector_norm(a - b, dim=dim))
        size.append(torch.linalg.vector_norm(b, dim=dim))
    return torch.cat(off), torch.cat(size)


def _tensors(outputs: Any) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


def _error(left: torch.Tensor, right: torch.Tensor, terms: torch.Tensor | None) -> float:
    if right.numel() == 0:
        return 0.0
    parts = [None] if terms is None else terms.reshape(-1).split(_CHUNK)
    # In chunks: a comparison in fp32 of a tensor that fills half the device must not fail it.
    lefts, rights = left.reshape(-1).split(_CHUNK), right.reshape(-1).split(_CHUNK)
    sizes = [_finite(part.float()).abs().sum(dtype=torch.float64) for part in rights]
    floor = max(float(sum(sizes)) / right.numel(), torch.finfo(torch.float32).tiny)
    worst = 0.0
    for a, b, part in zip(lefts, rights, itertools.cycle(parts), strict=False):
        a, b = a.float(), b.float()
        size = _finite(b).abs().clamp_min(floor)
        relative = (a - b).abs() / (size if part is None else size.maximum(_finite(part.float())))
        # What is not finite has to be the same on both sides.
        same = (a == b) | (a.isnan() & b.isnan())
        error = float(relative.masked_fill(same, 0.0).max())
        if error != error:
            return error
        worst = max(worst, error)
    return worst


def _finite(values: torch.Tensor) -> torch.Tensor:
    return values.nan_to_num(0.0, 0.0, 0.0)
