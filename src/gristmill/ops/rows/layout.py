"""How the kernels of row ops see tensors: rows in one or two levels of strides, and vectors.

Leading dims are collapsed for all tensors of a call together. One level is left for dense and for
sliced tensors, two for a transpose or the heads of a fused qkv; only what needs more, or has a last
dim that is not contiguous, is copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

ELEMENT = {
    torch.float32: "float",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float8_e4m3fn: "f8",
}
_WIDEST = 16  # bytes of one access
LONGEST_RAGGED = 2**30  # kernels count the columns of ragged rows with a sign


@dataclass(frozen=True)
class View:
    """One tensor: strides in elements between rows, bytes of its widest access, element type."""

    outer: int
    inner: int
    access: int
    dtype: torch.dtype

    @property
    def type(self) -> str:
        """The tensor as a template argument of a kernel."""
        return f"Tensor<{ELEMENT[self.dtype]},{self.access}>"

    @property
    def bulk(self) -> bool:
        """Whether bulk copies can fetch its rows."""
        return self.access == _WIDEST


@dataclass(frozen=True)
class Layout:
    """All row tensors of a call, in the order given; None where a tensor is absent."""

    rows: int
    inner_rows: int
    columns: int
    vector: int
    views: tuple[View | None, ...]
    ragged: bool = False  # vectors are aligned, and stick out of the rows at both ends

    @property
    def nested(self) -> bool:
        return self.inner_rows > 1

    @property
    def narrowest(self) -> int:
        """Bytes of the narrowest element that counts."""
        return narrowest(view.dtype for view in self.views if view is not None)

    @property
    def vectors(self) -> int:
        """Vectors in a row; the most that a ragged one can touch."""
        if self.ragged:
            return (self.columns + 2 * self.vector - 2) // self.vector
        return self.columns // self.vector

    @property
    def canonical(self) -> bool:
        """Whether a kernel does with these rows what it does with dense, aligned ones.

        Only the step from one row to the next may be another.
        """
        widest = {
            view.access == math.gcd(_WIDEST, self.vector * view.dtype.itemsize)
            for view in self.views
            if view is not None
        }
        return not self.nested and not self.ragged and widest == {True}

    def strides(self, index: int) -> tuple[int, int]:
        view = self.views[index]
        return (view.outer, view.inner) if view is not None else (0, 0)


def row_layout(tensors: Sequence[torch.Tensor | None]) -> Layout | None:
    """The layout of tensors of one shape; None if some rows cannot be addressed without a copy."""
    present = [tensor for tensor in tensors if tensor is not None]
    shape = present[0].shape
    columns = shape[-1]
    if any(tensor.stride(-1) != 1 for tensor in present) and columns > 1:
        return None
    if 0 in shape[:-1]:
        levels = [(0, (0,) * len(present))]
    else:
        levels = collapse(shape[:-1], [tensor.stride()[:-1] for tensor in present])
    if len(levels) > 2:
        return None
    levels = [(1, (0,) * len(present))] * (2 - len(levels)) + levels
    (outer_rows, outer), (inner_rows, inner) = levels
    if outer_rows == 1:
        # One level: it is the outer one, and there is nothing to divide by.
        outer_rows, outer, inner_rows, inner = inner_rows, inner, 1, (0,) * len(present)
    vector = math.gcd(columns, _WIDEST // narrowest(tensor.dtype for tensor in present))
    vector = vector if columns else 1
    views = iter(
        [
            View(
                outer[i],
                inner[i],
                access(tensor, vector, outer[i] * (outer_rows > 1), inner[i] * (inner_rows > 1)),
                tensor.dtype,
            )
            for i, tensor in enumerate(present)
        ]
    )
    return Layout(
        rows=outer_rows * inner_rows,
        inner_rows=inner_rows,
        columns=columns,
        vector=vector,
        views=tuple(next(views) if tensor is not None else None for tensor in tensors),
    )


def ragged_layout(tensors: Sequence[torch.Tensor | None]) -> Layout | None:
    """The layout of tensors of one shape whose rows are covered by aligned vectors of 16 bytes.

    For rows whose length or alignment forbids whole vectors. Every row must lie alike in all
    tensors, by the same number of elements beyond a multiple of 16 bytes; else None.
    """
    layout = row_layout(tensors)
    # A team does one ragged row, and kernels number their teams in 32 bits.
    if layout is None or not 0 < layout.columns < LONGEST_RAGGED or layout.rows >= 2**31:
        return None
    present = [tensor for tensor in tensors if tensor is not None]
    views = [view for view in layout.views if view is not None]
    sizes = {tensor.element_size() for tensor in present}
    bases = {tensor.data_ptr() % _WIDEST for tensor in present}
    if len(sizes) > 1 or len(bases) > 1:
        return None
    size = sizes.pop()
    if bases.pop() % size:
        return None
    outer_rows = layout.rows // max(1, layout.inner_rows)
    outer = {view.outer * size % _WIDEST for view in views if outer_rows > 1}
    inner = {view.inner * size % _WIDEST for view in views if layout.inner_rows > 1}
    if len(outer) > 1 or len(inner) > 1:
        return None
    return replace(
        layout,
        vector=_WIDEST // size,
        views=tuple(view and replace(view, access=_WIDEST) for view in layout.views),
        ragged=True,
    )


def narrowest(dtypes: Iterable[torch.dtype]) -> int:
    """Bytes of the narrowest element, which decides how long vectors are.

    FP8 does not count: its vectors have fewer bytes, so that those of the rest take few registers.
    """
    return min(dtype.itemsize for dtype in dtypes if dtype.itemsize > 1)


def is_packed(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies as a new one of its shape does: contiguous, and aligned."""
    return tensor.is_contiguous() and tensor.data_ptr() % _WIDEST == 0


def access(tensor: torch.Tensor, vector: int, *strides: int) -> int:
    """The widest access in bytes that the address, the strides and the vector length allow."""
    size = tensor.element_size()
    steps = (tensor.data_ptr(), vector * size, *[stride * size for stride in strides])
    return math.gcd(_WIDEST, *steps)


def vector_type(tensor: torch.Tensor | None, vector: int) -> str:
    """A tensor of one row (a weight) as a template argument of a kernel."""
    if tensor is None:
        return "Absent"
    return f"Tensor<{ELEMENT[tensor.dtype]},{access(tensor, vector)}>"


def collapse(
    sizes: Sequence[int], strides: Sequence[Sequence[int]]
) -> list[tuple[int, tuple[int, ...]]]:
    """Leading dims as few (size, strides) levels, outermost first."""
    levels: list[tuple[int, tuple[int, ...]]] = []
    for dim, size in enumerate(sizes):
        if size == 1:
            continue
        step = tuple(stride[dim] for stride in strides)
        if levels:
            above_size, above = levels[-1]
            if all(up == down * size for up, down in zip(above, step, strict=True)):
                levels[-1] = (above_size * size, step)
                continue
        levels.append((size, step))
    return levels
