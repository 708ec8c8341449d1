"""The CUDA variants of the forward ops: rms_norm, add_rms_norm and fused_add_rms_norm_.

One kernel template (kernels/cuda/rms_norm.cu); a variant is a scope of it: who shares a row.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from gristmill.jit import Program
from gristmill.ops import launch
from gristmill.ops.rms_norm import configs
from gristmill.ops.rms_norm.problem import Details
from gristmill.ops.rms_norm.semantics import epsilon, sum_dtype
from gristmill.ops.rows.config import TWICE, RowConfig
from gristmill.ops.rows.variant import SCOPES, RowVariant
from gristmill.select.problem import Problem

# ForwardParams: x, residual, rows, y, sum, weight, meeting, columns and share, floats.
FORWARD_PARAMS = struct.Struct("<QqqQqq qq QqqQqq Q QQI4x II fff".replace(" ", ""))

# Called with x, residual, weight, y, sum, eps and weight_offset; launches, and returns nothing.
Run = Callable[..., None]


class ForwardVariant(RowVariant):
    block_keeps, long = configs.BLOCK_KEEPS, configs.LONG
    configs_by_scope: ClassVar = {
        "WARP": configs.warp_forward,
        "BLOCK": configs.block_forward,
        "CLUSTER": configs.cluster_forward,
        "GRID": configs.cooperative,
    }

    def longest(self, problem: Problem) -> int:
        return configs.longest_forward(self.scope, problem, problem.layout)

    def program(self, problem: Problem, config: RowConfig) -> Program:
        details: Details = problem.layout
        types = (
            details.type(0),
            details.type(1),
            details.weight,
            details.type(2),
            details.type(3),
            details.held,
            details.normalised,
            details.product,
        )
        kernel = "rms_norm_forward_twice" if config.feed == TWICE else "rms_norm_forward"
        name = f"{kernel}<{','.join(types)},{self.template(details, config)}>"
        return Program("rms_norm.cu", (name,))

    def bind(self, problem: Problem, config: RowConfig) -> Callable[..., Any]:
        details: Details = problem.layout
        run = self._run(problem, config)
        return {
            "rms_norm": _plan_rms_norm,
            "add_rms_norm": _plan_add_rms_norm,
            "fused_add_rms_norm_": _plan_fused_add,
        }[problem.op](run, details)

    def _run(self, problem: Problem, config: RowConfig) -> Run:
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
            y: torch.Tensor,
            total: torch.Tensor | None,
            eps: float,
            weight_offset: float,
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
            )

        return launch.on_device(device, run)


def _plan_rms_norm(run: Run, details: Details) -> Callable[..., torch.Tensor]:
    copied, strided_weight = details.copied, details.strided_weight

    def plan(
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float | None,
        weight_offset: float,
        casting: str,
        out_dtype: torch.dtype | None,
    ) -> torch.Tensor:
        if eps is None:
            eps = epsilon(eps, x.dtype)
        if strided_weight and weight is not None:
            weight = weight.contiguous()
        y = torch.empty_like(x) if out_dtype is None else torch.empty_like(x, dtype=out_dtype)
        if copied:
            dense = launch.dense(y)
            run(x.contiguous(), None, weight, dense, None, eps, weight_offset)
            return y if dense is y else y.copy_(dense)
        run(x, None, weight, y, None, eps, weight_offset)
        return y

    return plan


def _plan_add_rms_norm(run: Run, details: Details) -> Callable[..., Any]:
    copied, strided_weight = details.copied, details.strided_weight

    def plan(
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float | None,
        weight_offset: float,
        casting: str,
        out_dtype: torch.dtype | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total_dtype = sum_dtype(x, residual)
        if eps is None:
            eps = epsilon(eps, total_dtype)
        if strided_weight and weight is not None:
            weight = weight.contiguous()
        y = torch.empty_like(x) if out_dtype is None else torch.empty_like(x, dtype=out_dtype)
        total = torch.empty_like(x, dtype=total_dtype)
        if copied:
            dense, dense_total = launch.dense(y), launch.dense(total)
            run(
                x.contiguous(),
                residual.contiguous(),
                weight,
                dense,
                dense_total,
                eps,
                weight_offset,
            )
            return (
                y if dense is y else y.copy_(dense),
                total if dense_total is total else total.copy_(dense_total),
            )
        run(x, residual, weight, y, total, eps, weight_offset)
        return y, total

    return plan


def _plan_fused_add(run: Run, details: Details) -> Callable[..., None]:
    copied, strided_weight = details.copied, details.strided_weight

    def plan(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float
    ) -> None:
        if strided_weight and weight is not None:
            weight = weight.contiguous()
        if copied:
            y, total = x.contiguous(), residual.contiguous()
            run(y, total, weight, y, total, eps, 0.0)
            x.copy_(y)
            residual.copy_(total)
            return
        run(x, residual, weight, x, residual, eps, 0.0)
        # Autograd must know that what it may have saved has changed.
        torch.autograd.graph.increment_version((x, residual))

    return plan


FORWARD_VARIANTS = tuple(ForwardVariant(name) for name in SCOPES)
