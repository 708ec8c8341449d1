"""The CUDA variants of rms_norm_backward: the rows, then the sum of their weight gradients."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from gristmill.jit import Program
from gristmill.ops import launch
from gristmill.ops.rms_norm import configs
from gristmill.ops.rms_norm.problem import Details
from gristmill.ops.rms_norm.semantics import epsilon
from gristmill.ops.rows.config import RowConfig
from gristmill.ops.rows.layout import ELEMENT
from gristmill.ops.rows.problem import RowDetails
from gristmill.ops.rows.variant import SCOPES, RowVariant
from gristmill.select.problem import Problem

# BackwardParams: x, dy, rows, dsum, dx, weight, dweight, partials, meeting, columns, share, floats.
BACKWARD_PARAMS = struct.Struct("<QqqQqq qq QqqQqq QQQ QQI4x II fff".replace(" ", ""))
# WeightGradientParams: partials, dweight, count, columns, width.
GRADIENT_PARAMS = struct.Struct("<QQIII")


class BackwardVariant(RowVariant):
    floats = 2
    block_keeps, long = configs.BLOCK_KEEPS, configs.LONG
    configs_by_scope: ClassVar = {
        "WARP": configs.warp_backward,
        "BLOCK": configs.block_backward,
        "CLUSTER": configs.cluster_backward,
        "GRID": configs.cooperative,
    }

    def longest(self, problem: Problem) -> int:
        return configs.longest_backward(self.scope, problem, problem.layout)

    def program(self, problem: Problem, config: RowConfig) -> Program:
        details: Details = problem.layout
        gradient = "weight_grad" in problem.flags
        types = (
            details.type(0),
            details.type(1),
            details.weight,
            details.type(2),
            details.type(3),
            details.weight if gradient else "Absent",
        )
        names = [f"rms_norm_backward<{','.join(types)},{self.template(details, config)}>"]
        if gradient:
            names.append(f"rms_norm_weight_gradient<{_element(problem)}>")
        return Program("rms_norm_backward.cu", tuple(names))

    def shared_bytes(self, details: RowDetails, config: RowConfig) -> int:
        if self.scope == "WARP":
            # Where the block's teams add up their weight gradients.
            return config.threads // config.lanes * details.layout.columns * 4
        return super().shared_bytes(details, config)

    def bind(self, problem: Problem, config: RowConfig) -> Callable[..., Any]:
        details: Details = problem.layout
        gradient = "weight_grad" in problem.flags
        if details.layout.rows == 0 or details.layout.columns == 0:
            return _plan_nothing
        run = self._run(problem, config)
        strided_weight = details.strided_weight

        def plan(
            dy: torch.Tensor,
            x: torch.Tensor,
            weight: torch.Tensor | None,
            dsum: torch.Tensor | None,
            eps: float | None,
            weight_offset: float,
            weight_grad: bool,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            if eps is None:
                eps = epsilon(eps, x.dtype)
            if strided_weight and weight is not None:
                weight = weight.contiguous()
            dx = torch.empty_like(x)
            if gradient and weight is not None:
                dweight = torch.empty(weight.shape, dtype=weight.dtype, device=x.device)
            else:
                dweight = torch.empty(0, dtype=x.dtype, device=x.device)
            if details.copied:
                dense = launch.dense(dx)
                dsum = dsum.contiguous() if dsum is not None else None
                run(
                    dy.contiguous(),
                    x.contiguous(),
                    weight,
                    dsum,
                    dense,
                    dweight,
                    eps,
                    weight_offset,
                )
                return dx if dense is dx else dx.copy_(dense), dweight
            run(dy, x, weight, dsum, dx, dweight, eps, weight_offset)
            return dx, dweight

        return plan

    def _run(self, problem: Problem, config: RowConfig) -> Callable[..., None]:
        details: Details = problem.layout
        layout = details.layout
        device = problem.device.index
        program = self.program(problem, config)
        gradient = "weight_grad" in problem.flags
        # Partial rows: one per team, never more than there are rows.
        start, parts = self.prepare(problem, config, program, BACKWARD_PARAMS)
        finish = None
        width, threads = configs.weight_gradient(layout.columns, parts)
        if gradient and parts > 1:
            finish = launch.prepare(
                launch.KernelCall(
                    program,
                    program.names[1],
                    grid=-(-layout.columns // width),
                    block=threads,
                    shared=4 * threads,
                    params=GRADIENT_PARAMS,
                    dependent=problem.device.capability >= (9, 0),
                ),
                device,
            )
        (xo, xi), (do, di), (so, si), (oo, oi) = (layout.strides(index) for index in range(4))
        rows, inner_rows, columns = layout.rows, layout.inner_rows, layout.columns
        share, inverse = self.share(details, config), 1.0 / columns
        members = self.members(config)
        stream = launch.current_stream

        def run(
            dy: torch.Tensor,
            x: torch.Tensor,
            weight: torch.Tensor | None,
            dsum: torch.Tensor | None,
            dx: torch.Tensor,
            dweight: torch.Tensor,
            eps: float,
            weight_offset: float,
        ) -> None:
            arrivals = meetings = partials = 0
            if members:
                meeting = self.meeting(parts, members, x.device)
                arrivals = meeting.data_ptr()
                meetings = arrivals + 4 * parts
            if finish is not None:
                workspace = torch.empty(parts * columns, dtype=torch.float32, device=x.device)
                partials = workspace.data_ptr()
            here = stream(device)
            start(
                here,
                x.data_ptr(),
                xo,
                xi,
                dy.data_ptr(),
                do,
                di,
                rows,
                inner_rows,
                dsum.data_ptr() if dsum is not None else 0,
                so,
                si,
                dx.data_ptr(),
                oo,
                oi,
                weight.data_ptr() if weight is not None else 0,
                dweight.data_ptr(),
                partials,
                arrivals,
                meetings,
                members,
                columns,
                share,
                inverse,
                eps,
                weight_offset,
            )
            if finish is not None:
                finish(here, partials, dweight.data_ptr(), parts, columns, width)

        return launch.on_device(device, run)


def _element(problem: Problem) -> str:
    dtype: torch.dtype = getattr(torch, problem.dtype("weight") or "float32")
    return ELEMENT[dtype]


def _plan_nothing(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    dsum: torch.Tensor | None,
    eps: float | None,
    weight_offset: float,
    weight_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """No rows: no gradient of x, and a weight gradient of zeros."""
    if weight_grad and weight is not None:
        return torch.empty_like(x), torch.zeros_like(weight, memory_format=torch.contiguous_format)
    return torch.empty_like(x), x.new_empty(0)


BACKWARD_VARIANTS = tuple(BackwardVariant(name) for name in SCOPES)
