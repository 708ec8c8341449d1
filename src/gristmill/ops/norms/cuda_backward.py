"""The CUDA variants of the norms' gradients: the rows, then the sums over rows."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import ClassVar

import torch

from gristmill.jit import Program
from gristmill.ops import launch
from gristmill.ops.norms import configs
from gristmill.ops.norms.problem import Details
from gristmill.ops.rows.config import AHEAD, RINGS, STRAIGHT, RowConfig
from gristmill.ops.rows.problem import RowDetails, packed
from gristmill.ops.rows.variant import RowVariant
from gristmill.select.problem import Problem

# BackwardParams: x, dy, rows, dsum, dx, weight, dweight, partials, meeting, columns, share, floats,
# dbias and its partials.
BACKWARD_PARAMS = struct.Struct(
    "<QqqQqq qq QqqQqq QQQ QQI4x II fff 4x QQ".replace(" ", "")  # as norm_backward.cu has it
)
# GradientParams: partials, gradient, count, columns, width, blocks, and those of a second one.
GRADIENT_PARAMS = struct.Struct("<QQIIIIQQ")

# dx, dweight (without elements where it is not wanted) and dbias (likewise None).
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


class NormBackward(RowVariant):
    """What the backward variants of all norms have in common."""

    block_keeps, long = configs.BLOCK_KEEPS, configs.LONG
    feeds_by_scope: ClassVar = {
        "WARP": (AHEAD,),
        "BLOCK": (STRAIGHT, AHEAD, *RINGS),
        "CLUSTER": (AHEAD, *RINGS),
        "GRID": (AHEAD,),
    }
    configs_by_scope: ClassVar = {
        "WARP": configs.warp_backward,
        "BLOCK": configs.block_backward,
        "CLUSTER": configs.cluster_backward,
        "GRID": configs.cooperative_backward,
    }

    def longest(self, problem: Problem) -> int:
        return configs.longest_backward(self.scope, problem, problem.layout)

    def feeds(self, problem: Problem) -> set[int]:
        found = super().feeds(problem)
        # The rule has one partial row for each SM. A table's config may be for more: its bucket has
        # other numbers of rows, and its GPU may have more SMs.
        few = configs.few_partial_rows(problem, configs.MOST_PARTIAL_ROWS)
        return found if few else found - {STRAIGHT}

    @property
    def blocks_per_sm(self) -> range:
        # Every block leaves a partial row, and small blocks would be many.
        return range(1, 3) if self.scope == "WARP" else super().blocks_per_sm

    def program(self, problem: Problem, config: RowConfig) -> Program:
        details: Details = problem.layout
        dweight = details.weight if "weight_grad" in problem.flags else "Absent"
        arguments = (
            details.type(0),
            details.type(1),
            details.weight,
            details.type(2),
            details.type(3),
            dweight,
            details.bias,
            str(details.centered).lower(),
            self.template(details, config),
        )
        names = [f"norm_backward<{','.join(arguments)}>"]
        gradients = [_element(one) for one in (dweight, details.bias) if one != "Absent"]
        if gradients:
            names.append(f"norm_gradient<{','.join([*gradients, 'Absent'][:2])}>")
        return Program("norm_backward.cu", tuple(names))

    def shared_bytes(self, details: RowDetails, config: RowConfig) -> int:
        if self.scope == "WARP":
            # Where the block's teams add up their gradients of the weight, then of the bias.
            return config.threads // config.lanes * details.layout.columns * 4
        return super().shared_bytes(details, config)

    def plan(self, problem: Problem, config: RowConfig) -> Callable[..., Gradients]:
        """Over dy, x, weight, dsum, eps, weight_offset and the dtype of dbias."""
        details: Details = problem.layout
        weight_grad = "weight_grad" in problem.flags
        if details.layout.rows == 0 or details.layout.columns == 0:
            return _plan_nothing(weight_grad)
        run = self._run(problem, config)
        copied, strided = details.copied, details.strided

        def plan(
            dy: torch.Tensor,
            x: torch.Tensor,
            weight: torch.Tensor | None,
            dsum: torch.Tensor | None,
            eps: float,
            weight_offset: float,
            bias_dtype: torch.dtype | None,
        ) -> Gradients:
            if strided:
                weight = packed(weight)
            dx = torch.empty_like(x)
            dbias = None
            if weight_grad and weight is not None:
                dweight = torch.empty(weight.shape, dtype=weight.dtype, device=x.device)
            else:
                dweight = torch.empty(0, dtype=x.dtype, device=x.device)
            if bias_dtype is not None:
                dbias = torch.empty(x.shape[-1:], dtype=bias_dtype, device=x.device)
            if copied:
                dense = launch.dense(dx)
                dy, x, dsum = packed(dy), packed(x), packed(dsum)
                run(dy, x, weight, dsum, dense, dweight, dbias, eps, weight_offset)
                return dx if dense is dx else dx.copy_(dense), dweight, dbias
            run(dy, x, weight, dsum, dx, dweight, dbias, eps, weight_offset)
            return dx, dweight, dbias

        return plan

    def _run(self, problem: Problem, config: RowConfig) -> Callable[..., None]:
        details: Details = problem.layout
        layout = details.layout
        device = problem.device.index
        program = self.program(problem, config)
        weight_grad, bias_grad = (one in problem.flags for one in ("weight_grad", "bias_grad"))
        # Partial rows: one per team, never more than there are rows.
        start, parts = self.prepare(problem, config, program, BACKWARD_PARAMS)
        finish = None
        width, threads = configs.weight_gradient(layout.columns, parts)
        blocks = -(-layout.columns // width)
        if (weight_grad or bias_grad) and parts > 1:
            finish = launch.prepare(
                launch.KernelCall(
                    program,
                    program.names[1],
                    grid=blocks * (2 if weight_grad and bias_grad else 1),
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
        part = parts * columns  # floats of the partial rows of one gradient
        stream = launch.current_stream

        def run(
            dy: torch.Tensor,
            x: torch.Tensor,
            weight: torch.Tensor | None,
            dsum: torch.Tensor | None,
            dx: torch.Tensor,
            dweight: torch.Tensor,
            dbias: torch.Tensor | None,
            eps: float,
            weight_offset: float,
        ) -> None:
            arrivals = meetings = partials = bias_partials = 0
            if members:
                meeting = self.meeting(parts, members, x.device)
                arrivals = meeting.data_ptr()
                meetings = arrivals + 4 * parts
            if finish is not None:
                room = part * (weight_grad + bias_grad)
                workspace = torch.empty(room, dtype=torch.float32, device=x.device)
                partials = workspace.data_ptr()
                bias_partials = partials + (4 * part if weight_grad else 0)
            bias = dbias.data_ptr() if dbias is not None else 0
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
                bias,
                bias_partials,
            )
            if finish is not None:
                first = dweight.data_ptr() if weight_grad else bias
                finish(here, partials, first, parts, columns, width, blocks, bias_partials, bias)

        return launch.on_device(device, run)


def _element(gradient: str) -> str:
    """The type of a gradient that is written element by element."""
    element = gradient.removeprefix("Tensor<").partition(",")[0]
    return f"Tensor<{element},{4 if element == 'float' else 2}>"


def _plan_nothing(weight_grad: bool) -> Callable[..., Gradients]:
    """No rows: no gradient of x, and those of weight and bias are zeros."""

    def plan(
        dy: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        dsum: torch.Tensor | None,
        eps: float,
        weight_offset: float,
        bias_dtype: torch.dtype | None,
    ) -> Gradients:
        dweight, dbias = x.new_empty(0), None
        if weight_grad and weight is not None:
            dweight = weight.new_zeros(weight.shape)
        if bias_dtype is not None:
            dbias = x.new_zeros(x.shape[-1:], dtype=bias_dtype)
        return torch.empty_like(x), dweight, dbias

    return plan
