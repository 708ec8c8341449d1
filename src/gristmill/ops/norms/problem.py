"""A call of a norm as the chooser and the kernels see it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gristmill.ops.rows.layout import ELEMENT, Layout
from gristmill.ops.rows.problem import (
    RowDetails,
    dtypes_of,
    flags_of,
    layout_of,
    like,
    weight_types,
)
from gristmill.select.device import Device
from gristmill.select.problem import Problem


@dataclass(frozen=True)
class Details(RowDetails):
    """What a plan needs: where rows lie, and the kernel's types.

    `layout.views` are x, residual, y, sum forward and x, dy, dsum, dx backward. `centered`: the
    mean is taken away (LayerNorm). `offset`: something is added to the weight. `strided`: the
    plan copies weight or bias first. `scaling` and `amax` are for FP8 results, as norm.cu has them.
    """

    weight: str
    bias: str = "Absent"
    strided: bool = False
    offset: bool = False
    centered: bool = False
    held: str = "float"
    normalised: str = "float"
    product: str = "float"
    scaling: str = "UNSCALED"
    amax: bool = False

    @property
    def rereadable(self) -> bool:
        """Whether what is normalised stands in memory after the first pass: x itself, or the sum.

        The in-place op normalises the sum before it is rounded, so there it does not.
        """
        total = self.layout.views[3]
        return total is None or ELEMENT.get(total.dtype) == self.held

    @property
    def wide(self) -> bool:
        """An fp32 weight or bias beside bf16 rows counts, too."""
        beside = "float" in self.weight or "float" in self.bias
        return super().wide or (beside and 4 * self.layout.vector > 16)


def forward_problem(
    op: str,
    device: Device,
    tensors: Sequence[torch.Tensor | None],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight_offset: float,
    *,
    held: torch.dtype,
    centered: bool,
    casting: str = "once",
    scaling: str = "UNSCALED",
    amax: bool = False,
) -> Problem:
    """`tensors` are x, residual, y and sum; `held` is the dtype that is normalised."""
    layout, copied = layout_of(tensors)
    x, residual, y, _ = tensors
    normalised = product = torch.float32
    if casting == "llama":
        normalised = held
        product = held if weight is None else torch.promote_types(held, weight.dtype)
    elif casting == "weight" and weight is not None:
        normalised = product = weight.dtype
    flags = {"llama": casting == "llama", "row_scale": scaling == "PER_ROW", "amax": amax}
    (weight_type, bias_type), strided = weight_types(layout, weight, bias)
    details = Details(
        layout=layout,
        copied=copied,
        weight=weight_type,
        bias=bias_type,
        strided=strided,
        offset=weight is not None and weight_offset != 0.0,
        centered=centered,
        held=ELEMENT.get(held, "float"),
        normalised=ELEMENT.get(normalised, "float"),
        product=ELEMENT.get(product, "float"),
        scaling=scaling,
        amax=amax,
    )
    return Problem(
        op=op,
        rows=layout.rows,
        dims=(("N", layout.columns),),
        dtypes=dtypes_of(x=x, residual=residual, weight=weight, bias=bias, out=y),
        flags=(*(name for name, on in flags.items() if on), *flags_of(layout, copied)),
        device=device,
        layout=details,
    )


def backward_problem(
    op: str,
    device: Device,
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    dsum: torch.Tensor | None,
    weight_offset: float,
    weight_grad: bool,
    bias_dtype: torch.dtype | None = None,
    *,
    centered: bool,
) -> Problem:
    """`bias_dtype`: that of the bias's gradient, or None where none is wanted."""
    layout, copied = layout_of((x, dy, dsum, like(x, x.dtype)))
    (weight_type,), strided = weight_types(layout, weight)
    dtypes = dtypes_of(x=x, dy=dy, weight=weight, dsum=dsum)
    if bias_dtype is not None:
        dtypes += (("bias", str(bias_dtype).removeprefix("torch.")),)
    flags = {
        "weight_grad": weight_grad and weight is not None,
        "bias_grad": bias_dtype is not None,
    }
    return Problem(
        op=op,
        rows=layout.rows,
        dims=(("N", layout.columns),),
        dtypes=dtypes,
        flags=(*(name for name, on in flags.items() if on), *flags_of(layout, copied)),
        device=device,
        layout=Details(
            layout=layout,
            copied=copied,
            weight=weight_type,
            bias=_fresh(bias_dtype, layout),
            strided=strided,
            offset=weight is not None and weight_offset != 0.0,
            centered=centered,
        ),
    )


def _fresh(dtype: torch.dtype | None, layout: Layout) -> str:
    """A new tensor of one value per column, which is aligned, as a template argument."""
    if dtype not in ELEMENT:
        return "Absent"
    return f"Tensor<{ELEMENT[dtype]},{math.gcd(16, layout.vector * dtype.itemsize)}>"
