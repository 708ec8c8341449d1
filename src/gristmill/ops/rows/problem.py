"""A call of a row op as the chooser and the kernels see it: what all such ops have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gristmill.ops.rows.layout import ELEMENT, Layout, ragged_layout, row_layout, vector_type


@dataclass(frozen=True)
class RowDetails:
    """What a plan needs to know of the rows; ops add their own.

    The first two of `layout.views` are what comes through the kernel's feed (x and its companion,
    or None). `copied`: some rows cannot be addressed where they are, so the plan works on
    contiguous copies.
    """

    layout: Layout
    copied: bool

    def type(self, index: int) -> str:
        """A row tensor as a template argument of a kernel."""
        view = self.layout.views[index]
        return view.type if view is not None else "Absent"

    @property
    def wide(self) -> bool:
        """Whether a vector of some tensor takes more than 16 bytes, hence more registers."""
        views = [view for view in self.layout.views if view is not None]
        return max(view.dtype.itemsize for view in views) * self.layout.vector > 16

    def bulk(self, *indices: int) -> bool:
        """Whether the hardware can fetch rows of these tensors in bulk."""
        views = [self.layout.views[index] for index in indices]
        return all(view is None or view.bulk for view in views)


def layout_of(
    tensors: Sequence[torch.Tensor | None], *, ragged: bool = False
) -> tuple[Layout, bool]:
    """The layout of row tensors, and whether it is that of contiguous copies of some of them.

    `ragged`: the kernels know ragged rows, which then take the place of narrow vectors.
    """
    layout = row_layout(tensors)
    if layout is not None:
        return (_widened(layout, tensors) if ragged else layout), False
    # What is contiguous stays where it is, aligned or not; a copy is aligned like all new tensors.
    copies = [
        tensor
        if tensor is None or (tensor.is_contiguous() and tensor.numel())
        else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for tensor in tensors
    ]
    dense = row_layout(copies)
    if dense is None:
        raise RuntimeError("contiguous tensors always have a layout")
    return (_widened(dense, copies) if ragged else dense), True


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


def weight_type(weight: torch.Tensor | None, layout: Layout) -> str:
    """A tensor of one value per column as a template argument of a kernel."""
    if weight is None or weight.dtype not in ELEMENT:
        return "Absent"
    return vector_type(weight, layout.vector)


def dtypes_of(**tensors: torch.Tensor | None) -> tuple[tuple[str, str], ...]:
    return tuple(
        (name, str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
        if tensor is not None
    )


def flags_of(layout: Layout, copied: bool) -> list[str]:
    # A vector of FP8 has fewer bytes than an access could.
    wide = [view for view in layout.views if view is not None and view.dtype.itemsize > 1]
    words = {
        "nested": layout.nested,
        "ragged": layout.ragged,
        "narrow": any(not view.bulk for view in wide),
        "copied": copied,
    }
    return [word for word, present in words.items() if present]
