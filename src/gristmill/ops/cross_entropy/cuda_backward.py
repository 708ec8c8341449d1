"""The CUDA variants of cross_entropy_backward and of scale_gradient_: element by element."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from gristmill.jit import Program
from gristmill.ops import launch
from gristmill.ops.cross_entropy import configs
from gristmill.ops.cross_entropy.cuda import (
    LABELS,
    OPTIONS,
    StreamVariant,
    class_weights,
    labels_of,
    options_of,
)
from gristmill.ops.cross_entropy.problem import Details
from gristmill.ops.rows.config import RowConfig
from gristmill.ops.rows.problem import RowDetails, packed
from gristmill.select.problem import Problem
from gristmill.settings import settings

SOURCE = "cross_entropy_backward.cu"
# BackwardParams: logits, gradient, rows, labels, options, gradients of loss and lse, stats,
# denominators, columns, share, members, per_row.
BACKWARD_PARAMS = struct.Struct(f"<QqqQqqqq{LABELS}{OPTIONS}QQQQIIII")
# ScaleParams: gradient, rows, factor, columns, per_row.
SCALE_PARAMS = struct.Struct("<QqqqqQII")


class BackwardVariant(StreamVariant):
    configs_by_scope: ClassVar = {
        "WARP": configs.warp_backward,
        "BLOCK": configs.block_backward,
    }

    def declines(self, problem: Problem) -> str | None:
        return None

    def clusters(self, problem: Problem) -> range:
        if self.scope != "BLOCK":
            return super().clusters(problem)
        return range(1, 2 * configs.members(problem.layout) + 1)

    def shared_bytes(self, details: RowDetails, config: RowConfig) -> int:
        return 0  # nothing is agreed on

    def program(self, problem: Problem, config: RowConfig) -> Program:
        details: Details = problem.layout
        flags = (details.layout.ragged, details.capped, details.smooth, details.weights)
        arguments = (
            details.type(0),
            details.type(2),
            str(details.layout.nested).lower(),
            str(config.lanes if self.scope == "WARP" else 0),
            str(details.layout.vector),
            str(config.items),
            *(str(flag).lower() for flag in flags),
            str(self.bound(config)),
        )
        return Program(SOURCE, (f"cross_entropy_backward<{','.join(arguments)}>",))

    def bind(self, problem: Problem, config: RowConfig) -> Callable[..., Any]:
        details: Details = problem.layout
        if details.layout.rows == 0 or details.layout.columns == 0:
            return lambda dloss, dlse, logits, *rest: torch.empty_like(logits)
        run, debug = self._run(problem, config), settings().debug

        def plan(
            dloss: torch.Tensor,
            dlse: torch.Tensor | None,
            logits: torch.Tensor,
            target: torch.Tensor,
            stats: torch.Tensor,
            denominators: torch.Tensor,
            weight: torch.Tensor | None,
            ignore_index: int,
            label_smoothing: float,
            z_loss: float,
            softcap: float | None,
            reduction: str,
            first_class: int,
            classes: int,
        ) -> torch.Tensor:
            gradient = torch.empty_like(logits)
            target, weight = target.contiguous(), class_weights(weight)
            per_row = reduction == "none"
            if per_row and not any(dloss.stride()):
                dloss, per_row = dloss.reshape(-1)[:1], False  # one gradient for all rows
            dloss, stats = dloss.contiguous(), stats.contiguous()
            dlse = None if dlse is None else dlse.contiguous()
            smooth_weights = label_smoothing != 0.0 and weight is not None
            total = weight.sum() if smooth_weights and weight is not None else None
            denominators = denominators.contiguous()
            labels = labels_of(
                target, weight, ignore_index, first_class, classes or logits.shape[-1], debug
            )
            options = options_of(label_smoothing, z_loss, softcap, total)
            numbers = (
                dloss.data_ptr(),
                0 if dlse is None else dlse.data_ptr(),
                stats.data_ptr(),
                denominators.data_ptr() if reduction == "mean" else 0,
            )
            if details.copied:
                dense = launch.dense(gradient)
                run(packed(logits), dense, labels, options, numbers, per_row)
                return gradient if dense is gradient else gradient.copy_(dense)
            run(logits, gradient, labels, options, numbers, per_row)
            return gradient

        return plan

    def _run(self, problem: Problem, config: RowConfig) -> Callable[..., None]:
        details: Details = problem.layout
        layout = details.layout
        device = problem.device.index
        start, _ = self.prepare(problem, config, self.program(problem, config), BACKWARD_PARAMS)
        (xo, xi), (go, gi) = layout.strides(0), layout.strides(2)
        rows, inner_rows, columns = layout.rows, layout.inner_rows, layout.columns
        share = self.vector_share(details, config)
        stream = launch.current_stream

        def run(
            logits: torch.Tensor,
            gradient: torch.Tensor,
            labels: tuple[int, ...],
            options: tuple[float, ...],
            numbers: tuple[int, ...],
            per_row: bool,
        ) -> None:
            start(
                stream(device),
                logits.data_ptr(),
                xo,
                xi,
                gradient.data_ptr(),
                go,
                gi,
                rows,
                inner_rows,
                *labels,
                *options,
                *numbers,
                columns,
                share,
                config.cluster,
                per_row,
            )

        return launch.on_device(device, run)


class ScaleVariant(StreamVariant):
    """As many blocks as the device runs at once take rows in turn: often there is nothing to do."""

    least_threads = 32  # no reduction
    configs_by_scope: ClassVar = {"BLOCK": configs.scale}

    def declines(self, problem: Problem) -> str | None:
        return None

    def shared_bytes(self, details: RowDetails, config: RowConfig) -> int:
        return 0

    def program(self, problem: Problem, config: RowConfig) -> Program:
        details: Details = problem.layout
        nested, ragged = (
            str(flag).lower() for flag in (details.layout.nested, details.layout.ragged)
        )
        vector = details.layout.vector
        arguments = f"{details.type(0)},{nested},{vector},{config.items},{ragged}"
        return Program(SOURCE, (f"scale_gradient<{arguments},{self.bound(config)}>",))

    def bind(self, problem: Problem, config: RowConfig) -> Callable[..., None]:
        details: Details = problem.layout
        layout = details.layout
        if layout.rows == 0 or layout.columns == 0:
            return lambda gradient, factor: None
        device = problem.device.index
        program = self.program(problem, config)
        resident = self.resident_teams(problem, config, program, 0)
        start = launch.prepare(
            launch.KernelCall(
                program,
                program.names[0],
                grid=min(layout.rows, resident),
                block=config.threads,
                shared=0,
                params=SCALE_PARAMS,
                dependent=problem.device.capability >= (9, 0),
            ),
            device,
        )
        outer, inner = layout.strides(0)
        rows, inner_rows, columns = layout.rows, layout.inner_rows, layout.columns
        stream = launch.current_stream

        def run(gradient: torch.Tensor, factor: torch.Tensor) -> None:
            per_row = factor.dim() > 0
            if per_row and not any(factor.stride()):
                factor, per_row = factor.reshape(-1)[:1], False
            factor = factor.contiguous()
            start(
                stream(device),
                gradient.data_ptr(),
                outer,
                inner,
                rows,
                inner_rows,
                factor.data_ptr(),
                columns,
                per_row,
            )

        scale = launch.on_device(device, run)

        def plan(gradient: torch.Tensor, factor: torch.Tensor) -> None:
            if details.copied:
                dense = packed(gradient)
                scale(dense, factor)
                if dense is not gradient:
                    gradient.copy_(dense)
                return
            scale(gradient, factor)
            # Autograd must know that what it may have saved has changed.
            torch.autograd.graph.increment_version((gradient,))

        return plan


BACKWARD_VARIANTS = tuple(BackwardVariant(name) for name in ("cuda_warp", "cuda_block"))
SCALE_VARIANTS = (ScaleVariant("cuda_block"),)
