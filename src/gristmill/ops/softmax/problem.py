"""A call of a softmax op as the chooser and the kernels see it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gristmill.ops.rows.layout import ELEMENT, Layout, access, collapse
from gristmill.ops.rows.problem import RowDetails, dtypes_of, flags_of, layout_of, like, packed
from gristmill.ops.softmax.semantics import EVERYTHING, causal_offset
from gristmill.select.device import Device
from gristmill.select.overrides import is_batch_invariant
from gristmill.select.problem import Problem

MASK_LEVELS = 6  # as in softmax.cu
_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Details(RowDetails):
    """What a plan needs: where rows lie, what is added to them, how far they are seen.

    `layout.views` are x, None, y forward and y, dy, dx backward. `plain`: no mask, and larger
    exponents for larger x. `mask`: its type in the kernel, and `mask_levels` (size, stride) from
    the row of x to its row; `mask_sizes`: those of the copy of it that the plan makes first, if so.
    `queries`: rows of a causal square, 0 without one; row i of it sees columns up to i + `offset`.
    """

    plain: bool = False
    mask: str = "Absent"
    mask_levels: tuple[tuple[int, int], ...] = ()
    mask_sizes: tuple[int, ...] = ()
    queries: int = 0
    offset: int = 0

    @property
    def masked(self) -> bool:
        return self.mask != "Absent"


def softmax_problem(
    device: Device, x: torch.Tensor, causal: int, scale: float, mask: torch.Tensor | None
) -> Problem:
    return _forward("softmax", device, x, causal, scale, mask)


def log_softmax_problem(
    device: Device, x: torch.Tensor, causal: int, scale: float, mask: torch.Tensor | None
) -> Problem:
    return _forward("log_softmax", device, x, causal, scale, mask)


def softmax_backward_problem(
    device: Device, dy: torch.Tensor, y: torch.Tensor, causal: int, scale: float
) -> Problem:
    return _backward("softmax_backward", device, dy, y, causal, scale)


def log_softmax_backward_problem(
    device: Device, dy: torch.Tensor, y: torch.Tensor, causal: int, scale: float
) -> Problem:
    return _backward("log_softmax_backward", device, dy, y, causal, scale)


def side_by_side(mask: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """The mask with these sizes, packed. Where it was expanded, one copy of each row is enough."""
    for dim, size in enumerate(_own_sizes(mask)[: mask.dim()]):
        mask = mask.narrow(dim, 0, size)
    return packed(mask.expand(sizes))


def _own_sizes(mask: torch.Tensor) -> list[int]:
    """The mask's sizes before it was expanded over leading dims; a scalar is a row of one."""
    sizes = [
        1 if stride == 0 else size
        for size, stride in zip(mask.shape[:-1], mask.stride()[:-1], strict=True)
    ]
    return [*sizes, *(mask.shape[-1:] or [1])]


def _forward(
    op: str,
    device: Device,
    x: torch.Tensor,
    causal: int,
    scale: float,
    mask: torch.Tensor | None,
) -> Problem:
    layout, copied = layout_of((x, None, like(x, x.dtype)), ragged=True)
    mask_type, levels, mask_sizes = _mask(mask, x, layout)
    queries, offset = _square(x, causal)
    # Then the largest x has the largest exponent. A factor that fp32 loses would leave none.
    plain = mask is None and scale >= _SMALLEST
    flags = [
        *(["causal"] if causal != EVERYTHING else []),
        *(["scaled"] if scale != 1.0 else []),
        *flags_of(layout, copied),
    ]
    return Problem(
        op=op,
        rows=layout.rows,
        dims=(("N", layout.columns),),
        dtypes=dtypes_of(x=x, mask=mask),
        flags=tuple(flags),
        device=device,
        layout=Details(
            layout=layout,
            copied=copied,
            plain=plain,
            mask=mask_type,
            mask_levels=levels,
            mask_sizes=mask_sizes,
            queries=queries,
            offset=offset,
        ),
    )


def _backward(
    op: str, device: Device, dy: torch.Tensor, y: torch.Tensor, causal: int, scale: float
) -> Problem:
    layout, copied = layout_of((y, dy, like(y, y.dtype)), ragged=True)
    queries, offset = _square(y, causal)
    flags = [
        *(["causal"] if causal != EVERYTHING else []),
        *(["scaled"] if scale != 1.0 else []),
        *flags_of(layout, copied),
    ]
    return Problem(
        op=op,
        rows=layout.rows,
        dims=(("N", layout.columns),),
        dtypes=dtypes_of(y=y, dy=dy),
        flags=tuple(flags),
        device=device,
        layout=Details(layout, copied, queries=queries, offset=offset),
    )


def _square(x: torch.Tensor, causal: int) -> tuple[int, int]:
    """Rows of a causal square, and how many columns its first row sees, less one."""
    if causal == EVERYTHING:
        return 0, 0
    queries, keys = x.shape[-2:]
    return queries, causal_offset(causal, queries, keys)


def _mask(
    mask: torch.Tensor | None, x: torch.Tensor, layout: Layout
) -> tuple[str, tuple[tuple[int, int], ...], tuple[int, ...]]:
    """The mask's type in the kernel, its levels, and the sizes of the copy that has to be made."""
    element = {**ELEMENT, torch.bool: "u8"}
    if mask is None or mask.dtype not in element or x.numel() == 0:
        return "Absent", (), ()
    columns = layout.columns
    if mask.dim() and mask.shape[-1] == columns and (mask.stride(-1) == 1 or columns == 1):
        levels, width = _mask_levels(mask, x, layout)
        if not is_batch_invariant() or (width == _widest(mask, layout) and _few(levels)):
            return f"Tensor<{element[mask.dtype]},{width}>", levels, ()
    # What is expanded stays so, unless rows must not depend on the batch and a kernel cannot
    # follow: another kernel would make other bits.
    sizes = (*_own_sizes(mask)[:-1], columns)
    copy = torch.empty(sizes, dtype=mask.dtype, device="meta")
    levels, width = _mask_levels(copy, x, layout)
    if is_batch_invariant() and not _few(levels):
        sizes = tuple(x.shape)
        copy = torch.empty(sizes, dtype=mask.dtype, device="meta")
        levels, width = _mask_levels(copy, x, layout)
    return f"Tensor<{element[mask.dtype]},{width}>", levels, sizes


def _mask_levels(
    mask: torch.Tensor, x: torch.Tensor, layout: Layout
) -> tuple[tuple[tuple[int, int], ...], int]:
    """(size, stride) of each level, and the widest access to the mask's rows."""
    strides = [0] * (x.dim() - mask.dim()) + [
        stride if size > 1 else 0
        for size, stride in zip(mask.shape[:-1], mask.stride()[:-1], strict=True)
    ]
    levels = [(size, step[0]) for size, step in collapse(x.shape[:-1], [strides])]
    while levels and levels[0][1] == 0:
        levels.pop(0)  # the rows above it are all the same
    if layout.ragged:
        return tuple(levels), mask.element_size()
    return tuple(levels), access(mask, layout.vector, *[stride for _, stride in levels])


def _widest(mask: torch.Tensor, layout: Layout) -> int:
    """The access that a packed mask allows."""
    return math.gcd(16, layout.vector * mask.element_size())


def _few(levels: Sequence[tuple[int, int]]) -> bool:
    return len(levels) <= MASK_LEVELS
