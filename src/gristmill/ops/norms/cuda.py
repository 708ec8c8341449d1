"""The CUDA variants of the forward norms: one kernel template (kernels/cuda/norm.cu) for all.

An op's own variants derive from `NormForward` and bind its plans to `launcher`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from gristmill.jit import Program
from gristmill.ops import launch
from gristmill.ops.norms import configs
from gristmill.ops.norms.problem import Details
from gristmill.ops.norms.semantics import sum_dtype
from gristmill.ops.rows.config import AHEAD, ASYNC, RINGS, STRAIGHT, TWICE, RowConfig, row_bytes
from gristmill.ops.rows.problem import packed
from gristmill.ops.rows.variant import RowVariant
from gristmill.select.problem import Problem

# ForwardParams: x, residual, rows, y, sum, weight, meeting, columns and share, floats, bias, scale
# and amax.
FORWARD_PARAMS = struct.Struct(
    "<QqqQqq qq QqqQqq Q QQI4x II fff 4x QQQ".replace(" ", "")  # as norm.cu has it
)

# Called with x, residual, weight, bias, y, sum, eps, weight_offset and, for FP8, scale and amax;
# launches, and returns nothing.
Run = Callable[..., None]


class NormForward(RowVariant):
    """What the forward variants of all norms have in common.

    `scale` and `amax` of a launch are fp32 tensors, or None: the given scale, or room for one per
    row; room for the largest |z|, which must be zero before.
    """

    block_keeps, long = configs.BLOCK_KEEPS, configs.LONG
    feeds_by_scope: ClassVar = {
        "WARP": (STRAIGHT, AHEAD),
        "BLOCK": (STRAIGHT, ASYNC, TWICE, *RINGS),
        "CLUSTER": (STRAIGHT, ASYNC, TWICE, *RINGS),
        "GRID": (AHEAD,),
    }
    configs_by_scope: ClassVar = {
        "WARP": configs.warp_forward,
        "BLOCK": configs.block_forward,
        "CLUSTER": configs.cluster_forward,
        "GRID": configs.cooperative_forward,
    }

    def longest(self, problem: Problem) -> int:
        return configs.longest_forward(self.scope, problem, problem.layout)

    def feeds(self, problem: Problem) -> set[int]:
        found, details = super().feeds(problem), problem.layout
        return found if details.rereadable else found - {TWICE}

    def declines(self, problem: Problem) -> str | None:
        # LayerNorm, 4096x65536: 276 us by clusters, 343 by blocks. Of odd rows, whose vectors are
        # short, 997x5003: 53 us by clusters where a block does RMSNorm in 11.
        details: Details = problem.layout
        long = details.centered and row_bytes(details) > 16 * configs.LONG
        if (
            self.scope == "BLOCK"
            and long
            and self.sibling("cuda_cluster").supports(problem) is None
        ):
            return "several blocks keep weight and bias of such long rows beside them"
        return super().declines(problem)

    def program(self, problem: Problem, config: RowConfig) -> Program:
        details: Details = problem.layout
        arguments = (
            details.type(0),
            details.type(1),
            details.weight,
            details.bias,
            details.type(2),
            details.type(3),
            details.held,
            details.normalised,
            details.product,
            str(details.centered).lower(),
            details.scaling,
            str(details.amax).lower(),
            self.template(details, config),
        )
        kernel = "norm_forward_twice" if config.feed == TWICE else "norm_forward"
        return Program("norm.cu", (f"{kernel}<{','.join(arguments)}>",))

    def launcher(self, problem: Problem, config: RowConfig) -> Run:
        """What a plan calls once it has made its outputs."""
        details: Details = problem.layout
        layout = details.layout
        if layout.rows == 0 or layout.columns == 0:
            return lambda *args: None
        device = problem.device.index
        program = self.program(problem, config)
        start, teams = self.prepare(problem, config, program, FORWARD_PARAMS)
        (xo, xi), (ro, ri), (yo, yi), (so, si) = (layout.strides(index) for index in range(4))
        rows, inner_rows, columns = layout.rows, layout.inner_rows, layout.columns
        share, inverse = self.share(details, config), 1.0 / columns
        members = self.members(config)
        stream = launch.current_stream

        def run(
            x: torch.Tensor,
            residual: torch.Tensor | None,
            weight: torch.Tensor | None,
            bias: torch.Tensor | None,
            y: torch.Tensor,
            total: torch.Tensor | None,
            eps: float,
            weight_offset: float,
            scale: torch.Tensor | None = None,
            amax: torch.Tensor | None = None,
        ) -> None:
            arrivals = partials = 0
            if members:
                meeting = self.meeting(teams, members, x.device)
                arrivals = meeting.data_ptr()
                partials = arrivals + 4 * teams
            start(
                stream(device),
                x.data_ptr(),
                xo,
                xi,
                residual.data_ptr() if residual is not None else 0,
                ro,
                ri,
                rows,
                inner_rows,
                y.data_ptr(),
                yo,
                yi,
                total.data_ptr() if total is not None else 0,
                so,
                si,
                weight.data_ptr() if weight is not None else 0,
                arrivals,
                partials,
                members,
                columns,
                share,
                inverse,
                eps,
                weight_offset,
                bias.data_ptr() if bias is not None else 0,
                scale.data_ptr() if scale is not None else 0,
                amax.data_ptr() if amax is not None else 0,
            )

        return launch.on_device(device, run)


def plan_norm(run: Run, details: Details) -> Callable[..., torch.Tensor]:
    """A plan over x, weight, bias, eps, weight_offset and out_dtype."""
    copied, strided = details.copied, details.strided

    def plan(
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        weight_offset: float,
        out_dtype: torch.dtype | None,
    ) -> torch.Tensor:
        if strided:
            weight, bias = packed(weight), packed(bias)
        y = torch.empty_like(x) if out_dtype is None else torch.empty_like(x, dtype=out_dtype)
        if copied:
            dense = launch.dense(y)
            run(packed(x), None, weight, bias, dense, None, eps, weight_offset)
            return y if dense is y else y.copy_(dense)
        run(x, None, weight, bias, y, None, eps, weight_offset)
        return y

    return plan


def plan_add_norm(run: Run, details: Details) -> Callable[..., Any]:
    """A plan over x, residual, weight, bias, eps, weight_offset and out_dtype."""
    copied, strided = details.copied, details.strided

    def plan(
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        weight_offset: float,
        out_dtype: torch.dtype | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if strided:
            weight, bias = packed(weight), packed(bias)
        y = torch.empty_like(x) if out_dtype is None else torch.empty_like(x, dtype=out_dtype)
        total = torch.empty_like(x, dtype=sum_dtype(x, residual))
        if copied:
            x, residual = packed(x), packed(residual)
            dense, dense_total = launch.dense(y), launch.dense(total)
            run(x, residual, weight, bias, dense, dense_total, eps, weight_offset)
            return (
                y if dense is y else y.copy_(dense),
                total if dense_total is total else total.copy_(dense_total),
            )
        run(x, residual, weight, bias, y, total, eps, weight_offset)
        return y, total

    return plan
