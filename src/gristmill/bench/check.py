"""Is it the same function? Asked of every implementation before it is timed.

A gate, not a conformance test: it has to let through another order of summation and one rounding
more or less, and to stop a wrong weight, a missing row or a NaN.
"""

from __future__ import annotations

from typing import Any

import torch

# Four units in the last place for 16-bit results. fp32 sums over a quarter of a million terms may
# differ by some sqrt(terms) * eps between two good orders of summation.
TOLERANCE = {
    torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps,
    torch.float16: 4 * torch.finfo(torch.float16).eps,
    torch.float32: 1e-4,
}
_CHUNK = 1 << 26


class WrongResultError(Exception):
    """An implementation's outputs are not those of the reference."""


def check(outputs: Any, expected: Any) -> float:
    """The largest relative error over all outputs; WrongResultError if out of bounds.

    An element's error is measured against its own size or the root mean square of its tensor,
    whichever is larger: near zero only the latter means anything.
    """
    got, want = _tensors(outputs), _tensors(expected)
    if len(got) != len(want):
        raise WrongResultError(f"gives {len(got)} outputs instead of {len(want)}")
    worst = 0.0
    for index, (left, right) in enumerate(zip(got, want, strict=True)):
        if left.shape != right.shape or left.dtype != right.dtype:
            raise WrongResultError(
                f"output {index} is {tuple(left.shape)} {left.dtype} "
                f"instead of {tuple(right.shape)} {right.dtype}"
            )
        error = _error(left, right)
        limit = TOLERANCE.get(right.dtype, 1e-4)
        if not error <= limit:  # also when it is NaN
            raise WrongResultError(
                f"output {index} is off by {error:.2g} (relative; {limit:.2g} is ok)"
            )
        worst = max(worst, error)
    return worst


def _tensors(outputs: Any) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


def _error(left: torch.Tensor, right: torch.Tensor) -> float:
    if right.numel() == 0:
        return 0.0
    # In chunks: a comparison in fp32 of a tensor that fills half the device must not fail it.
    lefts, rights = left.reshape(-1).split(_CHUNK), right.reshape(-1).split(_CHUNK)
    squares = sum(float(part.float().square().sum(dtype=torch.float64)) for part in rights)
    scale = (squares / right.numel()) ** 0.5
    floor = max(scale, torch.finfo(torch.float32).tiny)
    worst = 0.0
    for a, b in zip(lefts, rights, strict=True):
        b = b.float()
        error = float(((a.float() - b).abs() / b.abs().clamp_min(floor)).max())
        if error != error:
            return error
        worst = max(worst, error)
    return worst
