"""A call of a softmax op as the chooser and the kernels see it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gristmill.ops.rows.layout import ELEMENT, Layout, access, collapse
from gristmill.ops.rows.problem import RowDetails, dtypes_of, flags_of, layout_of, like
from gristmill.ops.softmax.semantics import causal_offset
from gristmill.select.device import Device
from gristmill.select.problem import Problem

MASK_LEVELS = 6  # as in softmax.cu
_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Details(RowDetails):
    """What a plan needs: where rows lie, what is added to them, how far they are seen.

    `layout.views` are x, None, y forward and y, dy, dx backward. `plain`: no mask, and larger
    exponents for larger x. `mask`: its type in the kernel, and `mask_levels` (size, stride) from
    the row of x to its row; `mask_copied`: its columns have to be laid side by side first.
    `queries`: rows of a causal square, 0 without one; row i of it sees columns up to i + `offset`.
    """

    plain: bool = False
    mask: str = "Absent"
    mask_levels: tuple[tuple[int, int], ...] = ()
    mask_copied: bool = False
    queries: int = 0
    offset: int = 0

    @property
    def masked(self) -> bool:
        return self.mask != "Absent"


def softmax_problem(
    device: Device, x: torch.Tensor, scale: float, mask: torch.Tensor | None, causal: str | None
) -> Problem:
    return _forward("softmax", device, x, scale, mask, causal)


def log_softmax_problem(
    device: Device, x: torch.Tensor, scale: float, mask: torch.Tensor | None, causal: str | None
) -> Problem:
    return _forward("log_softmax", device, x, scale, mask, causal)


def softmax_backward_problem(
    device: Device, dy: torch.Tensor, y: torch.Tensor, scale: float, causal: str | None
) -> Problem:
    return _backward("softmax_backward", device, dy, y, scale, causal)


def log_softmax_backward_problem(
    device: Device, dy: torch.Tensor, y: torch.Tensor, scale: float, causal: str | None
) -> Problem:
    return _backward("log_softmax_backward", device, dy, y, scale, causal)


def side_by_side(mask: torch.Tensor, columns: int) -> torch.Tensor:
    """The mask with `columns` columns that lie side by side, its leading dims no larger than own.

    Where it was expanded, one copy of each row is enough.
    """
    sizes = _own_sizes(mask)
    for dim, size in enumerate(sizes[: mask.dim()]):
        mask = mask.narrow(dim, 0, size)
    return mask.expand(*sizes[:-1], columns).contiguous()


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
    scale: float,
    mask: torch.Tensor | None,
    causal: str | None,
) -> Problem:
    layout, copied = layout_of((x, None, like(x, x.dtype)), ragged=True)
    mask_type, levels, mask_copied = _mask(mask, x, layout)
    queries, offset = _square(x, causal)
    # Then the largest x has the largest exponent. A factor that fp32 loses would leave none.
    plain = mask is None and scale >= _SMALLEST
    flags = [
        *(["causal"] if causal is not None else []),
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
            mask_copied=mask_copied,
            queries=queries,
            offset=offset,
        ),
    )


def _backward(
    op: str, device: Device, dy: torch.Tensor, y: torch.Tensor, scale: float, causal: str | None
) -> Problem:
    layout, copied = layout_of((y, dy, like(y, y.dtype)), ragged=True)
    queries, offset = _square(y, causal)
    flags = [
        *(["causal"] if causal is not None else []),
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


def _square(x: torch.Tensor, causal: str | None) -> tuple[int, int]:
    """Rows of a causal square, and how many columns its first row sees, less one."""
    if causal is None:
        return 0, 0
    queries, keys = x.shape[-2:]
    return queries, causal_offset(causal, queries, keys)


def _mask(
    mask: torch.Tensor | None, x: torch.Tensor, layout: Layout
) -> tuple[str, tuple[tuple[int, int], ...], bool]:
    """The mask's type in the kernel, its levels, and whether it has to be copied."""
    element = {**ELEMENT, torch.bool: "u8"}
    if mask is None or mask.dtype not in element or x.numel() == 0:
        return "Absent", (), False
    columns = layout.columns
    copied = mask.dim() == 0 or mask.shape[-1] != columns or (mask.stride(-1) != 1 and columns > 1)
    if copied:
        leading = _own_sizes(mask)[:-1]
        mask = torch.empty((*leading, columns), dtype=mask.dtype, device="meta")
    strides = [0] * (x.dim() - mask.dim()) + [
        stride if size > 1 else 0
        for size, stride in zip(mask.shape[:-1], mask.stride()[:-1], strict=True)
    ]
    levels = [(size, step[0]) for size, step in collapse(x.shape[:-1], [strides])]
    while levels and levels[0][1] == 0:
        levels.pop(0)  # the rows above it are all the same
    if layout.ragged:
        width = mask.element_size()
    else:
        width = access(mask, layout.vector, *[stride for _, stride in levels])
    return f"Tensor<{element[mask.dtype]},{width}>", tuple(levels), copied
