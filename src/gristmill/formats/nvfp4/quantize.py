"""From ordinary weights to NVFP4: how the scale of a block of 16 is chosen, and the rounding.

E4M3 scales leave a choice: whatever the scale, the values of a block snap to eight steps of it, and
the scale that maps the block's largest value to the largest step is seldom the one with the least
error. Relative rms error of a 512 x 4096 weight, normal / Student's t with 5 degrees of freedom:

==================  ======  ======
``amax``            9.51 %  9.23 %
``four_over_six``   8.69 %  8.67 %
``scale_sweep``     8.12 %  8.21 %
==================  ======  ======
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from gristmill.errors import ArgumentError, DtypeError
from gristmill.formats.nvfp4 import e2m1
from gristmill.formats.nvfp4.tensor import BLOCK, DTYPES, LARGEST_SCALE, NVFP4Tensor

METHODS = ("amax", "four_over_six", "scale_sweep")

# The block scale that the largest value of a matrix gets when it is mapped to 6. Methods that may
# want a larger scale than that leave room above it: mapped to 4, 256 becomes 384.
_TOP_SCALE = {"amax": LARGEST_SCALE, "four_over_six": 256.0, "scale_sweep": 256.0}

# Where the sweep looks, as steps between E4M3 codes from the scale of amax; eight make a factor of
# two. On nine kinds of weights (normal, t, Laplace, uniform, sparse, with outliers, with uneven
# rows or columns) -8 to 28 gives the same error to four digits and picks a scale outside of this
# range for 0 to 2 blocks of 131072; -2 to 5 would lose 0.3 %, -1 to 7 would lose 0.1 %.
_SWEEP = (0, -1, -2, 1, 2, 3, 4, 5, 6, 7)
_LARGEST_SCALE_CODE = 0x7E

# Elements worked on at a time, so that temporaries stay near a hundred megabytes.
_PIECE = 1 << 21


def quantize(w: torch.Tensor, *, method: str = "amax") -> NVFP4Tensor:
    r"""A weight, or each of a stack of them, rounded to NVFP4.

    .. math::
        g = \max|w| / (6 \cdot 448), \quad
        s_b = \mathrm{e4m3}(\max_b|w| / 6 g), \quad
        e_{nk} = \mathrm{e2m1}(w_{nk} / s_b g)

    in fp32, to nearest with ties to even. A block whose scale rounds to zero becomes zeros; a
    matrix of zeros gets g = 1.

    Args:
        w: ``(..., N, K)`` of fp32, bf16, fp16 or fp64 with any strides; K a multiple of 16.
        method: how the block scales are chosen. ``"amax"`` is the formula above, what checkpoints
            use. The others take 256 in the place of 448, and then for every block the scale with
            the least squared error: ``"four_over_six"`` of two, that map the largest value of the
            block to 6 or to 4; ``"scale_sweep"`` of the ten around them.

    Returns:
        One global scale per matrix, on the device of `w`. Temporaries stay small whatever the size
        of `w`, and the same values give the same bits whatever the size of the stack.
    """
    _check(w, method)
    *stack, rows, columns = w.shape
    with torch.no_grad():
        global_scale = _global_scale(w, method)
        lines, device = (*stack, rows), w.device
        codes = torch.empty((*lines, columns // 2), dtype=torch.uint8, device=device)
        scales = torch.empty((*lines, columns // BLOCK), dtype=torch.float8_e4m3fn, device=device)
        _fill(codes, scales, w, global_scale, method)
    return NVFP4Tensor(codes, scales, global_scale)


def _check(w: Any, method: Any) -> None:
    if not isinstance(w, torch.Tensor) or w.dtype not in DTYPES:
        got = w.dtype if isinstance(w, torch.Tensor) else type(w).__name__
        raise DtypeError(f"quantize: w must be a tensor of fp32, bf16, fp16 or fp64, got {got}")
    if w.layout != torch.strided or w.is_nested:
        raise ArgumentError("quantize: w must be a dense tensor")
    if w.device.type == "meta":
        raise ArgumentError(
            "quantize: w is on the meta device and has no values; quantize it where it has"
        )
    if w.dim() < 2 or w.shape[-1] % BLOCK:
        raise ArgumentError(
            f"quantize: w must have shape (..., N, K) with K a multiple of {BLOCK}, "
            f"got {tuple(w.shape)}"
        )
    if method not in METHODS:
        names = ", ".join(map(repr, METHODS))
        raise ArgumentError(f"quantize: method must be one of {names}, got {method!r}")


def _global_scale(w: torch.Tensor, method: str) -> torch.Tensor:
    """One fp32 scale per matrix; the only place that waits for the device."""
    if w.numel() == 0:
        return torch.ones(w.shape[:-2], dtype=torch.float32, device=w.device)
    whole = (-2, -1)
    # Not w.abs().amax(): that would be a copy of w.
    amax = torch.maximum(w.amax(whole), -w.amin(whole)).float()
    finite = amax.isfinite()
    if not bool(finite.all()):
        where = "" if w.dim() == 2 else f" in matrix {(~finite).nonzero()[0].tolist()}"
        raise ArgumentError(f"quantize: w must be finite in fp32, found NaN or infinity{where}")
    # By a tensor: a GPU would multiply by the reciprocal of a number, which rounds differently.
    scale = amax / torch.full_like(amax, e2m1.LARGEST * _TOP_SCALE[method])
    # Not below the normal numbers, where the scale itself would lose its bits.
    scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def _fill(
    codes: torch.Tensor,
    scales: torch.Tensor,
    w: torch.Tensor,
    global_scale: torch.Tensor,
    method: str,
) -> None:
    """Write the codes and scales of a stack of any dims."""
    if w.dim() > 3 and not w.is_contiguous():
        # As one stack of matrices it might have to be copied.
        for part in range(w.shape[0]):
            _fill(codes[part], scales[part], w[part], global_scale[part], method)
        return
    matrices = math.prod(w.shape[:-2])
    codes, scales, source = (part.view(matrices, *part.shape[-2:]) for part in (codes, scales, w))
    factor = global_scale.view(matrices, 1, 1)
    for piece in _pieces(*source.shape):
        blocks = source[piece].float().unflatten(-1, (-1, BLOCK))
        scales[piece] = _block_scales(blocks, factor[piece[0]], method)
        codes[piece] = _codes(blocks, scales[piece], factor[piece[0]])


def _pieces(matrices: int, rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Slices of matrices and of rows that cover the stack: rows of one, or some whole ones."""
    if matrices * rows * columns == 0:
        return
    some = max(1, _PIECE // (rows * columns))
    some_rows = max(1, _PIECE // columns)
    for first in range(0, matrices, some):
        for row in range(0, rows, some_rows):
            yield slice(first, first + some), slice(row, row + some_rows)


def _block_scales(blocks: torch.Tensor, factor: torch.Tensor, method: str) -> torch.Tensor:
    """The E4M3 scale of every block of ``(..., 16)``."""
    largest = blocks.abs().amax(-1)
    # Within a rounding error of the top scale at most, so the casts never see more than 448.
    by_amax = (largest / (e2m1.LARGEST * factor)).to(torch.float8_e4m3fn)
    if method == "amax":
        return by_amax
    # In units of the global scale, so that no square overflows or vanishes.
    sizes = (blocks / factor.unsqueeze(-1)).abs_()
    if method == "four_over_six":
        return _best(sizes, iter((by_amax, (largest / (4 * factor)).to(torch.float8_e4m3fn))))
    return _best(sizes, _neighbours(by_amax))


def _neighbours(scales: torch.Tensor) -> Iterator[torch.Tensor]:
    codes = scales.view(torch.uint8).to(torch.int16)
    for step in _SWEEP:
        near = (codes + step).clamp_(0, _LARGEST_SCALE_CODE)
        yield near.to(torch.uint8).view(torch.float8_e4m3fn)


def _best(sizes: torch.Tensor, candidates: Iterator[torch.Tensor]) -> torch.Tensor:
    """Of each block's candidates the one with the least squared error, the first of equals."""
    best = next(candidates).float()
    least = _squared_error(sizes, best)
    for candidate in candidates:
        scale = candidate.float()
        error = _squared_error(sizes, scale)
        best = torch.where(error < least, scale, best)
        least = torch.minimum(error, least)
    return best.to(torch.float8_e4m3fn)


def _squared_error(sizes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    wide = scale.unsqueeze(-1)
    # A scale of zero makes everything zero, and must not make a NaN on the way.
    divided = sizes / torch.where(wide == 0, torch.ones_like(wide), wide)
    step = torch.ones_like(divided).masked_fill_(divided < 2, 0.5).masked_fill_(divided >= 4, 2)
    nearest = (divided / step).round_().mul_(step).clamp_(max=e2m1.LARGEST)
    error = (sizes - nearest * wide).square_()
    # By halves: an order of summation that no device, thread count or size of the piece changes.
    while error.shape[-1] > 1:
        half = error.shape[-1] // 2
        error = error[..., :half] + error[..., half:]
    return error.squeeze(-1)


def _codes(blocks: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The packed codes ``(..., K / 2)`` of blocks ``(..., K / 16, 16)``."""
    scale = scales.float()
    divided = blocks / (scale * factor).unsqueeze(-1)
    codes = e2m1.encode(divided).masked_fill_((scale == 0).unsqueeze(-1), 0)
    return e2m1.pack(codes.flatten(-2))
