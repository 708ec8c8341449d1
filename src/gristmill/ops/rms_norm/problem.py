"""A call of an RMSNorm op as the chooser and the kernels see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gristmill.ops.rms_norm.semantics import sum_dtype
from gristmill.ops.rows import ELEMENT, Layout, row_layout, vector_type
from gristmill.select.device import Device
from gristmill.select.problem import Problem


@dataclass(frozen=True)
class Details:
    """What a plan needs: where rows lie, and the kernel's types.

    `layout.views` are x, residual, y, sum forward and x, dy, dsum, dx backward. `copied`: some rows
    cannot be addressed where they are, so the plan works on contiguous copies. `offset`: something
    is added to the weight. `strided_weight`: its elements do not lie side by side.
    """

    layout: Layout
    copied: bool
    weight: str
    strided_weight: bool = False
    offset: bool = False
    held: str = "float"
    normalised: str = "float"
    product: str = "float"

    def type(self, index: int) -> str:
        view = self.layout.views[index]
        return view.type if view is not None else "Absent"

    @property
    def rereadable(self) -> bool:
        """Whether what is normalised stands in memory after the first pass: x itself, or the sum.

        The in-place op normalises the sum before it is rounded, so there it does not.
        """
        total = self.layout.views[3]
        return total is None or ELEMENT.get(total.dtype) == self.held

    @property
    def wide(self) -> bool:
        """Whether a vector of some tensor takes more than 16 bytes, hence more registers.

        An fp32 weight beside bf16 rows, for one.
        """
        views = [view for view in self.layout.views if view is not None]
        widest = max(4 if "float" in self.weight else 0, *[view.dtype.itemsize for view in views])
        return widest * self.layout.vector > 16

    def bulk(self, *indices: int) -> bool:
        """Whether the hardware can fetch rows of these tensors in bulk."""
        views = [self.layout.views[index] for index in indices]
        return all(view is None or view.bulk for view in views)


def forward_problem(
    device: Device,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float | None,
    weight_offset: float,
    casting: str,
    out_dtype: torch.dtype | None,
) -> Problem:
    y = _like(x, out_dtype or x.dtype)
    tensors = (x, None, y, None)
    return _forward("rms_norm", device, tensors, weight, x.dtype, casting, weight_offset)


def add_problem(
    device: Device,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float | None,
    weight_offset: float,
    casting: str,
    out_dtype: torch.dtype | None,
) -> Problem:
    held = sum_dtype(x, residual)
    tensors = (x, residual, _like(x, out_dtype or x.dtype), _like(x, held))
    return _forward("add_rms_norm", device, tensors, weight, held, casting, weight_offset)


def fused_add_problem(
    device: Device, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> Problem:
    # The norm is taken from the unrounded sum, and rounded to the weight's dtype.
    tensors = (x, residual, x, residual)
    return _forward("fused_add_rms_norm_", device, tensors, weight, torch.float32, "weight")


def backward_problem(
    device: Device,
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    dsum: torch.Tensor | None,
    eps: float | None,
    weight_offset: float,
    weight_grad: bool,
) -> Problem:
    layout, copied = _layout((x, dy, dsum, _like(x, x.dtype)))
    flags = ["weight_grad"] if weight_grad and weight is not None else []
    return Problem(
        op="rms_norm_backward",
        rows=layout.rows,
        dims=(("N", layout.columns),),
        dtypes=_dtypes(x=x, dy=dy, weight=weight, dsum=dsum),
        flags=(*flags, *_flags(layout, copied)),
        device=device,
        layout=Details(
            layout=layout,
            copied=copied,
            weight=_weight(weight, layout),
            strided_weight=weight is not None and not weight.is_contiguous(),
            offset=weight is not None and weight_offset != 0.0,
        ),
    )


def _forward(
    op: str,
    device: Device,
    tensors: tuple[torch.Tensor | None, ...],
    weight: torch.Tensor | None,
    held: torch.dtype,
    casting: str,
    weight_offset: float = 0.0,
) -> Problem:
    layout, copied = _layout(tensors)
    x, residual, y, _ = tensors
    normalised = product = torch.float32
    if casting == "llama":
        normalised = held
        product = held if weight is None else torch.promote_types(held, weight.dtype)
    elif casting == "weight" and weight is not None:
        normalised = product = weight.dtype
    details = Details(
        layout=layout,
        copied=copied,
        weight=_weight(weight, layout),
        strided_weight=weight is not None and not weight.is_contiguous(),
        offset=weight is not None and weight_offset != 0.0,
        held=ELEMENT.get(held, "float"),
        normalised=ELEMENT.get(normalised, "float"),
        product=ELEMENT.get(product, "float"),
    )
    return Problem(
        op=op,
        rows=layout.rows,
        dims=(("N", layout.columns),),
        dtypes=_dtypes(x=x, residual=residual, weight=weight, out=y),
        flags=(*(["llama"] if casting == "llama" else []), *_flags(layout, copied)),
        device=device,
        layout=details,
    )


def _layout(tensors: Sequence[torch.Tensor | None]) -> tuple[Layout, bool]:
    layout = row_layout(tensors)
    if layout is not None:
        return layout, False
    # What is contiguous stays where it is, aligned or not; a copy is aligned like all new tensors.
    dense = row_layout(
        [
            tensor
            if tensor is None or (tensor.is_contiguous() and tensor.numel())
            else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for tensor in tensors
        ]
    )
    if dense is None:
        raise RuntimeError("contiguous tensors always have a layout")
    return dense, True


def _like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What torch.empty_like(x) gives, for its strides."""
    if x.is_contiguous():
        return torch.empty(x.shape, dtype=dtype, device="meta")
    # A real one, for a moment: empty_like of a meta tensor takes torch 0.3 s the first time.
    return torch.empty_like(x, dtype=dtype)


def _weight(weight: torch.Tensor | None, layout: Layout) -> str:
    if weight is None or weight.dtype not in ELEMENT:
        return "Absent"
    return vector_type(weight, layout.vector)


def _dtypes(**tensors: torch.Tensor | None) -> tuple[tuple[str, str], ...]:
    return tuple(
        (name, str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
        if tensor is not None
    )


def _flags(layout: Layout, copied: bool) -> list[str]:
    words = {
        "nested": layout.nested,
        "narrow": any(view is not None and not view.bulk for view in layout.views),
        "copied": copied,
    }
    return [word for word, present in words.items() if present]
