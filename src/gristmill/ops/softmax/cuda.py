"""The CUDA variants of softmax and log_softmax.

One kernel template (kernels/cuda/softmax.cu); a variant is a scope of it: who shares a row.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from gristmill.jit import Program
from gristmill.ops import launch
from gristmill.ops.rows.config import AHEAD, ASYNC, STRAIGHT, TWICE, RowConfig, few_rows
from gristmill.ops.rows.problem import packed
from gristmill.ops.rows.variant import SCOPES, RowVariant
from gristmill.ops.softmax import configs
from gristmill.ops.softmax.problem import MASK_LEVELS, Details, side_by_side
from gristmill.select.problem import Problem

# SoftmaxParams: x, no second tensor, rows, y, meeting, causal, columns and share, scale [, mask].
_PLAIN = "<QqqQqq qq Qqq QQI4x Ii II f4x"
SOFTMAX_PARAMS = struct.Struct(_PLAIN.replace(" ", ""))
MASKED_PARAMS = struct.Struct(f"{_PLAIN} Q {2 * MASK_LEVELS}q I".replace(" ", ""))


class SoftmaxVariant(RowVariant):
    """What the variants of both directions have in common."""

    block_keeps: ClassVar[int]
    long = 4096
    feeds_by_scope: ClassVar = {
        "WARP": (STRAIGHT, AHEAD),
        "BLOCK": (STRAIGHT, ASYNC, TWICE),
        "CLUSTER": (STRAIGHT, ASYNC, TWICE),
        "GRID": (AHEAD,),
    }

    def longest(self, problem: Problem) -> int:
        return configs.longest(self.scope)

    def supports(self, problem: Problem) -> str | None:
        details: Details = problem.layout
        if self.scope == "GRID" and details.layout.ragged:
            return "its teams do several rows, and these rows are aligned differently"
        if len(details.mask_levels) > MASK_LEVELS:
            return f"the leading dims of the mask take more than {MASK_LEVELS} strides"
        return super().supports(problem)

    def declines(self, problem: Problem) -> str | None:
        vectors = problem.layout.layout.vectors
        cluster = self.sibling("cuda_cluster").supports(problem) is None
        if self.scope == "GRID":
            if cluster:
                return "clusters do the same without a detour through global memory"
            if not few_rows(problem):
                return "there are rows enough for every SM to have its own"
        if self.scope == "BLOCK" and vectors > self.block_keeps:
            if cluster:
                return "the small blocks of a cluster keep more bytes of such long rows under way"
            several = self.sibling("cuda_cooperative").supports(problem) is None
            if several and vectors > self.long and few_rows(problem):
                return "few long rows leave most SMs idle; several blocks can share each"
        return None

    def template_of(self, details: Details, config: RowConfig, *flags: bool) -> str:
        """The template arguments after the tensors' types."""
        words = [str(flag).lower() for flag in (*flags, details.queries > 0, details.layout.ragged)]
        return ",".join([*words, self.template(details, config)])


class ForwardVariant(SoftmaxVariant):
    floats = 2
    block_keeps = configs.BLOCK_KEEPS
    configs_by_scope: ClassVar = {
        "WARP": configs.warp_forward,
        "BLOCK": configs.block_forward,
        "CLUSTER": configs.cluster_forward,
        "GRID": configs.cooperative,
    }

    def program(self, problem: Problem, config: RowConfig) -> Program:
        details: Details = problem.layout
        types = ",".join((details.type(0), details.mask, details.type(2)))
        log = problem.op == "log_softmax"
        template = self.template_of(details, config, log, details.plain)
        kernel = "softmax_forward_twice" if config.feed == TWICE else "softmax_forward"
        return Program("softmax.cu", (f"{kernel}<{types},{template}>",))

    def bind(self, problem: Problem, config: RowConfig) -> Callable[..., Any]:
        details: Details = problem.layout
        run = self._run(problem, config)
        copied, mask_sizes = details.copied, details.mask_sizes

        def plan(
            x: torch.Tensor, causal: int, scale: float, mask: torch.Tensor | None
        ) -> torch.Tensor:
            y = torch.empty_like(x)
            if mask_sizes and mask is not None:
                mask = side_by_side(mask, mask_sizes)
            if copied:
                dense = launch.dense(y)
                run(packed(x), mask, dense, scale)
                return y if dense is y else y.copy_(dense)
            run(x, mask, y, scale)
            return y

        return plan

    def _run(self, problem: Problem, config: RowConfig) -> Callable[..., None]:
        """Called with x, mask, y and the scale; launches, and returns nothing."""
        details: Details = problem.layout
        layout = details.layout
        if layout.rows == 0 or layout.columns == 0:
            return lambda *args: None
        device = problem.device.index
        params = MASKED_PARAMS if details.masked else SOFTMAX_PARAMS
        start, teams = self.prepare(problem, config, self.program(problem, config), params)
        x_outer, x_inner = layout.strides(0)
        y_outer, y_inner = layout.strides(2)
        rows, inner_rows, columns = layout.rows, layout.inner_rows, layout.columns
        queries, offset, share = details.queries, details.offset, self.share(details, config)
        mask_rows = _mask_rows(details)
        members = self.members(config)
        stream = launch.current_stream

        def run(x: torch.Tensor, mask: torch.Tensor | None, y: torch.Tensor, scale: float) -> None:
            arrivals = partials = 0
            if members:
                meeting = self.meeting(teams, members, x.device)
                arrivals = meeting.data_ptr()
                partials = arrivals + 4 * teams
            start(
                stream(device),
                x.data_ptr(),
                x_outer,
                x_inner,
                0,
                0,
                0,
                rows,
                inner_rows,
                y.data_ptr(),
                y_outer,
                y_inner,
                arrivals,
                partials,
                members,
                queries,
                offset,
                columns,
                share,
                scale,
                *(() if mask is None else (mask.data_ptr(), *mask_rows)),
            )

        return launch.on_device(device, run)


def _mask_rows(details: Details) -> tuple[int, ...]:
    """A MaskRows of softmax.cu but for its address: sizes, strides, how many of them."""
    levels = details.mask_levels
    padding = (0,) * (MASK_LEVELS - len(levels))
    sizes, strides = ([level[part] for level in levels] for part in (0, 1))
    return *sizes, *padding, *strides, *padding, len(levels)


FORWARD_VARIANTS = tuple(ForwardVariant(name) for name in SCOPES)
