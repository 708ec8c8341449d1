"""A call of an RMSNorm op as the chooser and the kernels see it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gristmill.ops.rms_norm.semantics import sum_dtype
from gristmill.ops.rows.layout import ELEMENT
from gristmill.ops.rows.problem import (
    RowDetails,
    dtypes_of,
    flags_of,
    layout_of,
    like,
    weight_type,
)
from gristmill.select.device import Device
from gristmill.select.problem import Problem


@dataclass(frozen=True)
class Details(RowDetails):
    """What a plan needs: where rows lie, and the kernel's types.

    `layout.views` are x, residual, y, sum forward and x, dy, dsum, dx backward. `offset`: something
    is added to the weight. `strided_weight`: its elements do not lie side by side.
    """

    weight: str
    strided_weight: bool = False
    offset: bool = False
    held: str = "float"
    normalised: str = "float"
    product: str = "float"

    @property
    def rereadable(self) -> bool:
        """Whether what is normalised stands in memory after the first pass: x itself, or the sum.

        The in-place op normalises the sum before it is rounded, so there it does not.
        """
        total = self.layout.views[3]
        return total is None or ELEMENT.get(total.dtype) == self.held

    @property
    def wide(self) -> bool:
        """An fp32 weight beside bf16 rows counts, too."""
        return super().wide or ("float" in self.weight and 4 * self.layout.vector > 16)


def forward_problem(
    device: Device,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float | None,
    weight_offset: float,
    casting: str,
    out_dtype: torch.dtype | None,
) -> Problem:
    y = like(x, out_dtype or x.dtype)
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
    tensors = (x, residual, like(x, out_dtype or x.dtype), like(x, held))
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
    layout, copied = layout_of((x, dy, dsum, like(x, x.dtype)))
    flags = ["weight_grad"] if weight_grad and weight is not None else []
    return Problem(
        op="rms_norm_backward",
        rows=layout.rows,
        dims=(("N", layout.columns),),
        dtypes=dtypes_of(x=x, dy=dy, weight=weight, dsum=dsum),
        flags=(*flags, *flags_of(layout, copied)),
        device=device,
        layout=Details(
            layout=layout,
            copied=copied,
            weight=weight_type(weight, layout),
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
    layout, copied = layout_of(tensors)
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
        weight=weight_type(weight, layout),
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
        dtypes=dtypes_of(x=x, residual=residual, weight=weight, out=y),
        flags=(*(["llama"] if casting == "llama" else []), *flags_of(layout, copied)),
        device=device,
        layout=details,
    )
