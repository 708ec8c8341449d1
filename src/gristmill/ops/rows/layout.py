"""How the kernels of row ops see tensors: rows in one or two levels of strides, and vectors.

Leading dims are collapsed for all tensors of a call together. One level is left for dense and for
sliced tensors, two for a transpose or the heads of a fused qkv; only what needs more, or has a last
dim that is not contiguous, is copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

ELEMENT = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "f16"}
_WIDEST = 16  # bytes of one access


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

    @property
    def nested(self) -> bool:
        return self.inner_rows > 1

    @property
    def vectors(self) -> int:
        """Vectors in a row."""
        return self.columns // self.vector

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
        levels = _collapse(shape[:-1], [tensor.stride()[:-1] for tensor in present])
    if len(levels) > 2:
        return None
    levels = [(1, (0,) * len(present))] * (2 - len(levels)) + levels
    (outer_rows, outer), (inner_rows, inner) = levels
    if outer_rows == 1:
        # One level: it is the outer one, and there is nothing to divide by.
        outer_rows, outer, inner_rows, inner = inner_rows, inner, 1, (0,) * len(present)
    narrowest = min(tensor.element_size() for tensor in present)
    vector = math.gcd(columns, _WIDEST // narrowest) if columns else 1
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


def _collapse(
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
