"""The variant that has kernels of ours around torch's grouped mm: three launches and its own.

One puts tokens in the order of their experts (ops/experts/routing.py), one stands between the
products, one adds up (ops/experts/combine.py); with a bias behind the second product there is one
more.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import torch

from gristmill.jit import Program
from gristmill.ops import launch
from gristmill.ops.experts.combine import TYPES, Combine
from gristmill.ops.experts.routing import Routing, misfit
from gristmill.ops.experts.semantics import Activation
from gristmill.ops.experts.slots import GROUPS, grouped_mm
from gristmill.ops.moe.library import no_groups, operand
from gristmill.ops.moe.problem import Details
from gristmill.ops.moe.semantics import Call
from gristmill.select.device import Device
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

SOURCE = "moe_activate.cu"
ACTIVATIONS = {"silu": 0, "gelu": 1, "swiglu_oai": 2}  # as in the kernel
PARAMS = struct.Struct("<4Q2f3I4x")  # ActivateParams
THREADS, COLUMNS, ROWS = 128, 8, 4  # as in the kernel

Start = Callable[..., None]


class GroupedMm(Variant):
    name = "grouped_mm"
    summary = "torch's grouped mm, with kernels of ours before, between and behind its products"

    def supports(self, problem: Problem) -> str | None:
        details: Details = problem.layout
        if problem.device.kind != "cuda":
            return f"needs a CUDA device, not {problem.device.kind}"
        reason = no_groups(problem)
        if reason is not None:
            return reason
        if 0 in (problem.rows, *(size for _, size in problem.dims)):
            return "nothing to compute"
        for kind in (details.weights, details.w13_bias, details.w2_bias):
            if kind is not None and kind not in TYPES:
                return f"takes topk_weights and biases of fp32, bf16 or fp16, not {kind}"
        if not details.biases_dense:
            return "takes biases that are contiguous"
        if problem.dim("E") > GROUPS:
            return f"torch's grouped mm takes at most {GROUPS} groups"
        if problem.rows * problem.dim("k") >= 2**31:
            return f"takes fewer than {2**31} entries of topk_ids"
        return misfit(problem.device, problem.dim("E"))

    def programs(self, problem: Problem, config: None) -> tuple[Program, ...]:
        found = [_routing(problem).program(), activate_program(problem)]
        if problem.layout.w2_bias is not None:
            found.append(shift_program(problem))
        return (*found, _combine(problem).program())

    def bind(self, problem: Problem, config: None) -> Callable[..., Any]:
        return launch.on_device(problem.device.index, _plan(problem))


def activate_program(problem: Problem) -> Program:
    details: Details = problem.layout
    bias = "Absent" if details.w13_bias is None else TYPES[details.w13_bias]
    number = ACTIVATIONS[details.act.name]
    return Program(SOURCE, (f"moe_activate<{TYPES[details.x]},{bias},{number}>",))


def shift_program(problem: Problem) -> Program:
    details: Details = problem.layout
    assert details.w2_bias is not None
    return Program(SOURCE, (f"moe_shift<{TYPES[details.x]},{TYPES[details.w2_bias]}>",))


def _routing(problem: Problem) -> Routing:
    details: Details = problem.layout
    return Routing(
        device=problem.device,
        ids=details.ids,
        experts=problem.dim("E"),
        row_bytes=problem.dim("H") * details.x.itemsize,
        row_stride=details.x_stride * details.x.itemsize,
        access=details.x_access,
        positions=True,
    )


def _combine(problem: Problem) -> Combine:
    details: Details = problem.layout
    return Combine(
        device=problem.device,
        ids=details.ids,
        experts=problem.dim("E"),
        hidden=problem.dim("H"),
        partial=details.x if details.w2_bias is None else torch.float32,
        out=details.x,
        sorted=True,
        weights=details.weights,
        weights_strides=details.weights_strides,
    )


def _plan(problem: Problem) -> Callable[..., torch.Tensor]:
    details: Details = problem.layout
    device, experts = problem.device, problem.dim("E")
    hidden, inner = problem.dim("H"), problem.dim("I")
    route, combine = _routing(problem).prepare(), _combine(problem).prepare()
    slots = details.ids.slots
    activate = _start(activate_program(problem), device, slots, experts, inner, details.act)
    shift = None
    if details.w2_bias is not None:
        shift = _start(shift_program(problem), device, slots, experts, hidden, details.act)
    current_stream, index = launch.current_stream, device.index

    def plan(*args: Any) -> torch.Tensor:
        call = Call(*args)
        x, stream = details.x_of(call.hidden_states), current_stream(index)
        routed = route(stream, call.topk_ids, call.expert_map, x)
        ends, ends_at = routed.ends, routed.ends_at
        both = grouped_mm(routed.x_sorted, operand(call.w13.transpose(-2, -1)), offs=ends)
        h = both.new_empty((slots, inner))
        activate(stream, both, h, call.w13_bias, ends_at)
        out = grouped_mm(h, operand(call.w2.transpose(-2, -1)), offs=ends)
        if shift is not None:
            rounded, out = out, out.new_empty((slots, hidden), dtype=torch.float32)
            shift(stream, rounded, out, call.w2_bias, ends_at)
        y = x.new_empty((problem.rows, hidden))
        weights_at = call.topk_weights.data_ptr()
        combine(stream, out.data_ptr(), y.data_ptr(), routed.position_of_at, 0, weights_at)
        return y

    return plan


def _start(
    program: Program, device: Device, slots: int, experts: int, width: int, act: Activation
) -> Start:
    """``start(stream, in, out, bias, ends_at)`` of a kernel of moe_activate.cu."""
    across = math.ceil(width / (THREADS * COLUMNS))
    call = launch.KernelCall(
        program,
        program.names[0],
        grid=math.ceil(slots / ROWS) * across,
        block=THREADS,
        shared=0,
        params=PARAMS,
        dependent=device.capability >= (9, 0),
    )
    begin = launch.prepare(call, device.index)
    constants = (math.inf if act.limit is None else act.limit, act.slope, experts, width, across)

    def start(
        stream: int,
        values: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None,
        ends_at: int,
    ) -> None:
        bias_at = 0 if bias is None else bias.data_ptr()
        begin(stream, values.data_ptr(), out.data_ptr(), bias_at, ends_at, *constants)

    return start
