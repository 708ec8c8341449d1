"""A call of an op over dense experts as the chooser and the kernels see it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from gristmill.ops.experts.ids import IdFacts
from gristmill.ops.experts.semantics import Activation
from gristmill.ops.moe.semantics import Call
from gristmill.select.device import Device
from gristmill.select.problem import Problem

WIDEST = 16  # bytes of one access


@dataclass(frozen=True)
class Details:
    """What a plan has to know of a call beyond what a choice depends on; `problem.layout`.

    A plan takes `x_of(hidden_states)`, whose elements are contiguous and whose rows lie `x_stride`
    elements apart; several may be one. `x_access`: bytes that can be read at once.
    """

    x: torch.dtype
    x_stride: int
    x_access: int
    copied: bool  # `x_of` makes a dense copy
    act: Activation
    ids: IdFacts  # of topk_ids and expert_map
    weights: torch.dtype  # of topk_weights, and their strides, in elements
    weights_strides: tuple[int, int]
    w13_bias: torch.dtype | None
    w2_bias: torch.dtype | None
    biases_dense: bool  # those that there are

    def x_of(self, x: torch.Tensor) -> torch.Tensor:
        """x, or a dense copy where it does not lie as kernels need it."""
        return x.clone(memory_format=torch.contiguous_format) if self.copied else x


def forward_problem(device: Device, *args: Any) -> Problem:
    call = Call(*args)
    return _problem("moe", device, call, {"x": call.hidden_states.dtype}, weight_grad=False)


def backward_problem(device: Device, dy: torch.Tensor, *args: Any) -> Problem:
    *given, weight_grad = args
    call = Call(*given)
    dtypes = {"dy": dy.dtype, "x": call.hidden_states.dtype}
    return _problem("moe_backward", device, call, dtypes, weight_grad=weight_grad)


def _problem(
    op: str, device: Device, call: Call, dtypes: dict[str, torch.dtype], *, weight_grad: bool
) -> Problem:
    words = {
        "bias": call.w13_bias is not None or call.w2_bias is not None,
        "mapped": call.expert_map is not None,
        "weight_grad": weight_grad,
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
    copied = hidden > 1 and x.stride(1) != 1
    stride = hidden if copied or rows < 2 else x.stride(0)
    start = 0 if copied else x.data_ptr()
    size = x.element_size()
    biases = [one for one in (call.w13_bias, call.w2_bias) if one is not None]
    return Details(
        x=x.dtype,
        x_stride=stride,
        x_access=math.gcd(WIDEST, hidden * size, stride * size, start),
        copied=copied,
        act=call.act,
        ids=IdFacts.of(call.topk_ids, call.expert_map),
        weights=weights.dtype,
        weights_strides=(weights.stride(0), weights.stride(1)),
        w13_bias=None if call.w13_bias is None else call.w13_bias.dtype,
        w2_bias=None if call.w2_bias is None else call.w2_bias.dtype,
        biases_dense=all(bias.is_contiguous() for bias in biases),
    )
