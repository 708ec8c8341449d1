"""A call of an NVFP4 linear op as the chooser and the kernels see it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from gristmill.formats.nvfp4.tensor import FRAGMENTS, ROWS
from gristmill.ops.nvfp4_common import Weight
from gristmill.ops.rows.layout import collapse
from gristmill.select.device import Device
from gristmill.select.overrides import is_batch_invariant
from gristmill.select.problem import BUCKETS, Problem, Sizes, tiled

WIDEST = 16  # bytes of one access
# Tiles of kernels have multiples of eight tokens, and how much of the last one is empty changes
# which launch is the fastest.
SIZES = tiled(8)


@dataclass(frozen=True)
class Details:
    """What a plan has to know of a call beyond what a choice depends on; `problem.layout`.

    `x` stands for the rows that are multiplied: x forward, dy backward. A plan takes `x_of(x)`,
    whose elements are contiguous and whose rows lie `x_stride` elements apart, without overlap.
    """

    x_aligned: bool  # x itself has such rows, each at a multiple of 16 bytes
    x_stride: int
    # Each row of `x_of(x)` is at a multiple of 16 bytes: always forward, as K is a multiple of 16;
    # backward where N allows it. Where rows must not depend on the batch, neither does this.
    aligned: bool
    copied: bool  # `x_of` makes a dense copy
    layout: str
    bias: torch.dtype | None
    # codes, scales, row_scale and bias are dense, codes and scales at multiples of 16 bytes
    weight_packed: bool
    weight_aligned: bool  # codes and scales are at multiples of 16 bytes, whatever the others are
    # From row to row of codes and scales, in layout "rows" (of codes in "tiles", too); None where
    # the bytes of a row are not side by side, and in other layouts.
    codes_stride: int | None
    scales_stride: int | None

    def x_of(self, x: torch.Tensor) -> torch.Tensor:
        """x, or a dense copy where it does not lie as kernels need it; of x's own shape."""
        return x.clone(memory_format=torch.contiguous_format) if self.copied else x


def forward_problem(
    device: Device,
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    layout: str,
    out_dtype: torch.dtype | None,
    act: str | None,
) -> Problem:
    weight = Weight(codes, scales, row_scale, layout, x.shape[-1])
    dtypes = {"x": x.dtype, "out": out_dtype or x.dtype}
    words = {"bias": bias is not None, layout: layout != ROWS, f"act_{act}": act is not None}
    return _problem("nvfp4_linear", device, x, weight, bias, dtypes, words, SIZES)


def backward_problem(
    device: Device,
    dy: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    layout: str,
    columns: int,
    dtype: torch.dtype,
) -> Problem:
    weight = Weight(codes, scales, row_scale, layout, columns)
    dtypes, words = {"dy": dy.dtype, "x": dtype}, {layout: layout != ROWS}
    return _problem("nvfp4_linear_backward", device, dy, weight, None, dtypes, words)


def nothing_to_compute(problem: Problem) -> str | None:
    """The reason by which kernels leave calls without rows, columns or products to the reference.

    That one knows what an empty sum is.
    """
    empty = 0 in (problem.rows, problem.dim("N"), problem.dim("K"))
    return "nothing to compute" if empty else None


def _problem(
    op: str,
    device: Device,
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    dtypes: dict[str, torch.dtype],
    words: dict[str, bool],
    sizes: Sizes = BUCKETS,
) -> Problem:
    return Problem(
        op=op,
        rows=math.prod(x.shape[:-1]),
        dims=(("N", weight.rows), ("K", weight.columns)),
        dtypes=tuple((name, str(one).removeprefix("torch.")) for name, one in dtypes.items()),
        flags=tuple(word for word, present in words.items() if present),
        device=device,
        layout=_details(x, weight, bias),
        sizes=sizes,
    )


def _details(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> Details:
    columns, size = x.shape[-1], x.element_size()
    stride = _stride(x)
    in_place = stride is not None and x.data_ptr() % WIDEST == 0 and stride * size % WIDEST == 0
    as_copy = columns * size % WIDEST == 0
    copied = stride is None or (as_copy and not in_place)
    parts = [*weight[:3], *([] if bias is None else [bias])]
    weight_aligned = not any(part.data_ptr() % WIDEST for part in parts[:2])
    return Details(
        x_aligned=in_place,
        x_stride=columns if stride is None or copied or not stride else stride,
        aligned=as_copy or (in_place and not is_batch_invariant()),
        copied=copied,
        layout=weight.layout,
        bias=None if bias is None else bias.dtype,
        weight_packed=weight_aligned and all(part.is_contiguous() for part in parts),
        weight_aligned=weight_aligned,
        codes_stride=None if weight.layout == FRAGMENTS else _stride(weight.codes),
        scales_stride=_stride(weight.scales) if weight.layout == ROWS else None,
    )


def _stride(x: torch.Tensor) -> int | None:
    """Between rows of contiguous elements that do not overlap, 0 for a single one; else None."""
    columns = x.shape[-1]
    if 0 in x.shape:
        return 0
    if x.stride(-1) != 1 and columns > 1:
        return None
    levels = collapse(x.shape[:-1], [x.stride()[:-1]])
    if not levels:
        return 0
    stride = levels[0][1][0]
    return stride if len(levels) == 1 and stride >= columns else None
