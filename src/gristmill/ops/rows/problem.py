"""A call of a row op as the chooser and the kernels see it: what all such ops have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import torch

from gristmill.ops.rows.layout import (
    ELEMENT,
    Layout,
    is_packed,
    ragged_layout,
    row_layout,
    vector_type,
)
from gristmill.select.overrides import is_batch_invariant


@dataclass(frozen=True)
class RowDetails:
    """What a plan needs to know of the rows; ops add their own.

    The first two of `layout.views` are what comes through the kernel's feed (x and its companion,
    or None). `copied`: some rows cannot be taken where they are, so the plan works on tensors that
    are contiguous and aligned, those that are not being copied.
    """

    layout: Layout
    copied: bool

    def type(self, index: int) -> str:
        """A row tensor as a template argument of a kernel."""
        view = self.layout.views[index]
        return view.type if view is not None else "Absent"

    @property
    def vector_bytes(self) -> int:
        """Of a vector of the widest tensor."""
        views = [view for view in self.layout.views if view is not None]
        return max(view.dtype.itemsize for view in views) * self.layout.vector

    @property
    def wide(self) -> bool:
        """Whether a vector of some tensor takes more than 16 bytes, hence more registers."""
        return self.vector_bytes > 16

    def bulk(self, *indices: int) -> bool:
        """Whether the hardware can fetch rows of these tensors in bulk."""
        views = [self.layout.views[index] for index in indices]
        return all(view is None or view.bulk for view in views)


def layout_of(
    tensors: Sequence[torch.Tensor | None], *, ragged: bool = False, by_element: bool = False
) -> tuple[Layout, bool]:
    """The layout of row tensors, and whether it is that of packed copies of some of them.

    `ragged`: the kernels know ragged rows, which then take the place of narrow vectors.
    `by_element`: nothing is summed up, so that results do not depend on who takes which column.
    Where rows must not depend on the batch, on where they lie and on their neighbours, the layout
    is canonical: one launch and one kernel for every tensor of so many columns.
    """
    canonical = is_batch_invariant() and not by_element
    layout = row_layout(tensors)
    if layout is not None and (layout.canonical or not canonical):
        return (_widened(layout, tensors) if ragged and not canonical else layout), False
    # torch calls a tensor without elements contiguous, whatever its strides.
    copies = [
        tensor if tensor is None or (is_packed(tensor) and tensor.numel()) else _fresh(tensor)
        for tensor in tensors
    ]
    dense = row_layout(copies)
    if dense is None:
        raise RuntimeError("contiguous tensors always have a layout")
    return (_widened(dense, copies) if ragged and not canonical else dense), True


@overload
def packed(tensor: torch.Tensor) -> torch.Tensor: ...
@overload
def packed(tensor: torch.Tensor | None) -> torch.Tensor | None: ...
def packed(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """What a plan that works on copies takes in the place of a tensor; None for None."""
    if tensor is None or is_packed(tensor):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    """Where a copy of it will lie: aligned, as all new tensors are."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _widened(layout: Layout, tensors: Sequence[torch.Tensor | None]) -> Layout:
    """`layout`, or a ragged one where that gives wider accesses."""
    views = [view for view in layout.views if view is not None]
    if all(view.bulk for view in views):
        return layout
    return ragged_layout(tensors) or layout


def like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What torch.empty_like(x) gives, for its strides."""
    if x.is_contiguous():
        return torch.empty(x.shape, dtype=dtype, device="meta")
    # A real one, for a moment: empty_like of a meta tensor takes torch 0.3 s the first time.
    return torch.empty_like(x, dtype=dtype)


def weight_types(layout: Layout, *weights: torch.Tensor | None) -> tuple[tuple[str, ...], bool]:
    """Tensors of one value per column as template arguments, and whether the plan copies them.

    Those whose elements do not lie side by side it does. Where rows must not depend on the batch,
    one kernel is for every weight, too, wherever it lies.
    """
    canonical = is_batch_invariant()
    movable = any(
        weight is not None and not (is_packed(weight) if canonical else weight.is_contiguous())
        for weight in weights
    )
    types = []
    for weight in weights:
        if weight is None or weight.dtype not in ELEMENT:
            types.append("Absent")
        else:
            taken = weight if not movable or is_packed(weight) else _fresh(weight)
            types.append(vector_type(taken, layout.vector))
    return tuple(types), movable


def dtypes_of(**tensors: torch.Tensor | None) -> tuple[tuple[str, str], ...]:
    return tuple(
        (name, str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
        if tensor is not None
    )


def flags_of(layout: Layout, copied: bool) -> list[str]:
    """Where rows must not depend on the batch, the words must not tell how a tensor lies, either:
    they are in a table's keys.
    """
    # A vector of FP8 has fewer bytes than an access could.
    wide = [view for view in layout.views if view is not None and view.dtype.itemsize > 1]
    words = {
        "nested": layout.nested,
        "ragged": layout.ragged,
        "narrow": any(not view.bulk for view in wide),
        "copied": copied and not is_batch_invariant(),
    }
    return [word for word, present in words.items() if present]
