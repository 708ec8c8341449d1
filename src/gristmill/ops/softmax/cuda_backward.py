"""The CUDA variants of softmax_backward and log_softmax_backward."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from gristmill.jit import Program
from gristmill.ops import launch
from gristmill.ops.rows.config import TWICE, RowConfig
from gristmill.ops.rows.problem import packed
from gristmill.ops.rows.variant import SCOPES
from gristmill.ops.softmax import configs
from gristmill.ops.softmax.cuda import SoftmaxVariant
from gristmill.ops.softmax.problem import Details
from gristmill.select.problem import Problem

# SoftmaxBackwardParams: y, dy, rows, dx, meeting, causal, columns and share, scale.
BACKWARD_PARAMS = struct.Struct("<QqqQqq qq Qqq QQI4x Ii II f".replace(" ", ""))


class BackwardVariant(SoftmaxVariant):
    floats = 1
    block_keeps = configs.BLOCK_KEEPS_BACKWARD
    configs_by_scope: ClassVar = {
        "WARP": configs.warp_backward,
        "BLOCK": configs.block_backward,
        "CLUSTER": configs.cluster_backward,
        "GRID": configs.cooperative,
    }

    def program(self, problem: Problem, config: RowConfig) -> Program:
        details: Details = problem.layout
        types = ",".join(details.type(index) for index in range(3))
        template = self.template_of(details, config, problem.op == "log_softmax_backward")
        kernel = "softmax_backward_twice" if config.feed == TWICE else "softmax_backward"
        return Program("softmax_backward.cu", (f"{kernel}<{types},{template}>",))

    def bind(self, problem: Problem, config: RowConfig) -> Callable[..., Any]:
        details: Details = problem.layout
        run = self._run(problem, config)
        copied = details.copied

        def plan(dy: torch.Tensor, y: torch.Tensor, causal: int, scale: float) -> torch.Tensor:
            dx = torch.empty_like(y)
            if copied:
                dense = launch.dense(dx)
                run(packed(dy), packed(y), dense, scale)
                return dx if dense is dx else dx.copy_(dense)
            run(dy, y, dx, scale)
            return dx

        return plan

    def _run(self, problem: Problem, config: RowConfig) -> Callable[..., None]:
        """Called with dy, y, dx and the scale; launches, and returns nothing."""
        details: Details = problem.layout
        layout = details.layout
        if layout.rows == 0 or layout.columns == 0:
            return lambda *args: None
        device = problem.device.index
        program = self.program(problem, config)
        start, teams = self.prepare(problem, config, program, BACKWARD_PARAMS)
        (y_outer, y_inner), (dy_outer, dy_inner), (dx_outer, dx_inner) = (
            layout.strides(index) for index in range(3)
        )
        rows, inner_rows, columns = layout.rows, layout.inner_rows, layout.columns
        queries, offset, share = details.queries, details.offset, self.share(details, config)
        members = self.members(config)
        stream = launch.current_stream

        def run(dy: torch.Tensor, y: torch.Tensor, dx: torch.Tensor, scale: float) -> None:
            arrivals = partials = 0
            if members:
                meeting = self.meeting(teams, members, y.device)
                arrivals = meeting.data_ptr()
                partials = arrivals + 4 * teams
            start(
                stream(device),
                y.data_ptr(),
                y_outer,
                y_inner,
                dy.data_ptr(),
                dy_outer,
                dy_inner,
                rows,
                inner_rows,
                dx.data_ptr(),
                dx_outer,
                dx_inner,
                arrivals,
                partials,
                members,
                queries,
                offset,
                columns,
                share,
                scale,
            )

        return launch.on_device(device, run)


BACKWARD_VARIANTS = tuple(BackwardVariant(name) for name in SCOPES)
