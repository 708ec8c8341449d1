"""A call of an NVFP4 mixture-of-experts op as the chooser and the kernels see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gristmill.formats.nvfp4.tensor import ROWS, TILES
from gristmill.ops.experts.ids import IdFacts
from gristmill.ops.nvfp4_common import Weight
from gristmill.ops.nvfp4_moe.semantics import Call
from gristmill.select.device import Device
from gristmill.select.problem import Problem

WIDEST = 16  # bytes of one access


@dataclass(frozen=True)
class WeightFacts:
    """How a stack of matrices lies."""

    aligned: bool  # codes and scales are at multiples of 16 bytes
    packed: bool  # aligned, and codes, scales, row_scale and bias, if there is one, contiguous
    # From matrix to matrix and from row to row, in bytes; None where the bytes of a row are not
    # side by side, and in fragments. Scales in tiles have no rows: 0.
    codes_strides: tuple[int, int] | None
    scales_strides: tuple[int, int] | None
    row_scale_strides: tuple[int, int]  # in elements; 0 between rows that share one scale

    @classmethod
    def of(cls, weight: Weight, bias: torch.Tensor | None) -> WeightFacts:
        codes, scales, row_scale = weight[:3]
        aligned = not any(part.data_ptr() % WIDEST for part in (codes, scales))
        parts = [*weight[:3], *([] if bias is None else [bias])]
        scales_strides = None
        if weight.layout == ROWS:
            scales_strides = _strides(scales)
        elif weight.layout == TILES and (scales.shape[1] < 2 or scales.stride(1) == 1):
            scales_strides = (scales.stride(0), 0)
        return cls(
            aligned=aligned,
            packed=aligned and all(part.is_contiguous() for part in parts),
            codes_strides=_strides(codes) if weight.layout in (ROWS, TILES) else None,
            scales_strides=scales_strides,
            row_scale_strides=(row_scale.stride(0), row_scale.stride(1)),
        )


@dataclass(frozen=True)
class Details:
    """What a plan has to know of a call beyond what a choice depends on; `problem.layout`.

    A plan takes `x_of(hidden_states)`, whose elements are contiguous and whose rows, at multiples
    of 16 bytes, lie `x_stride` elements apart; several may be one.
    """

    x: torch.dtype
    x_stride: int
    copied: bool  # `x_of` makes a dense copy
    layout: str
    activation: str
    limit: float | None
    slope: float
    ids: IdFacts  # of topk_ids and expert_map
    weights: torch.dtype  # of topk_weights, and their strides, in elements
    weights_strides: tuple[int, int]
    w13: WeightFacts
    w2: WeightFacts
    w13_bias: torch.dtype | None
    w2_bias: torch.dtype | None

    @property
    def expert_map(self) -> torch.dtype | None:
        return self.ids.map_dtype

    def x_of(self, x: torch.Tensor) -> torch.Tensor:
        """x, or a dense copy where it does not lie as kernels need it."""
        return x.clone(memory_format=torch.contiguous_format) if self.copied else x


def forward_problem(device: Device, *args: Any) -> Problem:
    call = Call(*args)
    return _problem("nvfp4_moe", device, call, {"x": call.hidden_states.dtype})


def backward_problem(device: Device, dy: torch.Tensor, *args: Any) -> Problem:
    call = Call(*args)
    dtypes = {"dy": dy.dtype, "x": call.hidden_states.dtype}
    return _problem("nvfp4_moe_backward", device, call, dtypes)


def _problem(op: str, device: Device, call: Call, dtypes: dict[str, torch.dtype]) -> Problem:
    words = {
        "bias": call.w13_bias is not None or call.w2_bias is not None,
        "mapped": call.expert_map is not None,
        call.layout: call.layout != ROWS,
    }
    rows, hidden = call.hidden_states.shape
    return Problem(
        op=op,
        rows=rows,
        dims=(
            ("E", call.experts),
            ("k", call.topk_ids.shape[1]),
            ("H", hidden),
            ("I", call.intermediate),
        ),
        dtypes=tuple((name, str(one).removeprefix("torch.")) for name, one in dtypes.items()),
        flags=tuple(word for word, present in words.items() if present),
        device=device,
        layout=_details(call),
    )


def _details(call: Call) -> Details:
    x, weights = call.hidden_states, call.topk_weights
    rows, hidden = x.shape
    stride = x.stride(0) if rows > 1 else hidden
    side_by_side = hidden < 2 or x.stride(1) == 1
    aligned = not (x.data_ptr() % WIDEST or stride * x.element_size() % WIDEST)
    return Details(
        x=x.dtype,
        x_stride=stride if side_by_side and aligned else hidden,
        copied=not (side_by_side and aligned),
        layout=call.layout,
        activation=call.activation,
        limit=call.limit,
        slope=call.slope,
        ids=IdFacts.of(call.topk_ids, call.expert_map),
        weights=weights.dtype,
        weights_strides=(weights.stride(0), weights.stride(1)),
        w13=WeightFacts.of(call.w13, call.w13_bias),
        w2=WeightFacts.of(call.w2, call.w2_bias),
        w13_bias=None if call.w13_bias is None else call.w13_bias.dtype,
        w2_bias=None if call.w2_bias is None else call.w2_bias.dtype,
    )


def _strides(part: torch.Tensor) -> tuple[int, int] | None:
    """Between matrices and between rows of contiguous bytes."""
    if part.shape[-1] > 1 and part.stride(-1) != 1:
        return None
    return part.stride(0), part.stride(1)
