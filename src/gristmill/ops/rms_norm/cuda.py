"""The CUDA variants of the forward ops: rms_norm, add_rms_norm and fused_add_rms_norm_.

One kernel template (kernels/cuda/rms_norm.cu); a variant is a scope of it: who shares a row.
"""

from __future__ import annotations

import struct
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from gristmill.jit import Program
from gristmill.ops import launch
from gristmill.ops.rms_norm import configs
from gristmill.ops.rms_norm.configs import ASYNC, ONE_ROW, TWICE, RowConfig
from gristmill.ops.rms_norm.problem import Details
from gristmill.ops.rms_norm.semantics import epsilon, sum_dtype
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

# Largest blocks that kernels are compiled for: the fewer threads, the more registers for each.
BOUNDS = (128, 256, 512, 640, 768, 896, 1024)
SCOPES = {
    "cuda_warp": "WARP",
    "cuda_block": "BLOCK",
    "cuda_cluster": "CLUSTER",
    "cuda_cooperative": "GRID",
}
SUMMARIES = {
    "cuda_warp": "lanes of a warp share a row",
    "cuda_block": "a block shares a row",
    "cuda_cluster": "a cluster of blocks shares a row (sm_90 and up)",
    "cuda_cooperative": "several blocks share a row, by cooperative launch",
}

# ForwardParams: x, residual, rows, y, sum, weight, meeting, columns and share, floats.
FORWARD_PARAMS = struct.Struct("<QqqQqq qq QqqQqq Q QQI4x II fff".replace(" ", ""))

# Called with x, residual, weight, y, sum, eps and weight_offset; launches, and returns nothing.
Run = Callable[..., None]


class RowVariant(Variant):
    """What the CUDA variants of all RMSNorm ops have in common."""

    config_type = RowConfig
    values = 1  # sums taken at once
    configs_by_scope: ClassVar[Mapping[str, Callable[[Problem, Details], RowConfig]]]

    def __init__(self, name: str) -> None:
        self.name = name
        self.scope = SCOPES[name]
        self.summary = SUMMARIES[name]

    def supports(self, problem: Problem) -> str | None:
        if problem.device.kind != "cuda":
            return f"needs a CUDA device, not {problem.device.kind}"
        if problem.device.capability < (8, 0):
            return f"needs compute capability 8.0 or later, not {problem.device.arch}"
        wide = [f"{name} is {dtype}" for name, dtype in problem.dtypes if dtype == "float64"]
        if wide:
            return f"computes in fp32: {', '.join(wide)}"
        if self.scope == "CLUSTER" and problem.device.capability < (9, 0):
            return f"needs clusters (compute capability 9.0), not {problem.device.arch}"
        details: Details = problem.layout
        columns = problem.dim("N")
        if columns >= configs.ANY_LENGTH or details.layout.vectors > self.longest(problem, details):
            whom = {"WARP": "a warp", "BLOCK": "one block", "CLUSTER": "a cluster"}
            return f"rows of {columns} columns are too long for {whom.get(self.scope, 'a grid')}"
        members = self.config(problem).cluster
        if self.scope in ("BLOCK", "CLUSTER") and problem.rows * members >= 2**31:
            return f"{problem.rows} rows of {members} blocks are more than a grid has"
        if self.scope == "GRID" and members > problem.device.multiprocessors:
            return f"rows of {columns} columns need more blocks than run at once"
        return None

    def config(self, problem: Problem) -> RowConfig:
        return self.configs_by_scope[self.scope](problem, problem.layout)

    def declines(self, problem: Problem) -> str | None:
        vectors = problem.layout.layout.vectors
        cluster = type(self)("cuda_cluster").supports(problem) is None
        if self.scope == "GRID" and cluster:
            return "clusters do the same without a detour through global memory"
        if self.scope == "BLOCK" and vectors > configs.LONG:
            several = cluster or type(self)("cuda_cooperative").supports(problem) is None
            if several and vectors > configs.BLOCK_KEEPS:
                return "a block would read such long rows twice; several blocks can keep them"
            if several and configs.few_rows(problem):
                return "few long rows leave most SMs idle; several blocks can share each"
        return None

    @abstractmethod
    def longest(self, problem: Problem, details: Details) -> int:
        """The longest row of this scope, in vectors."""

    def programs(self, problem: Problem, config: RowConfig) -> tuple[Program, ...]:
        return (self.program(problem, config),)

    @abstractmethod
    def program(self, problem: Problem, config: RowConfig) -> Program:
        """The kernel of this scope for these types, and what belongs to it."""

    def resident_teams(
        self, problem: Problem, config: RowConfig, program: Program, shared: int
    ) -> int:
        """Teams (in scope WARP blocks) that the device runs at once."""
        device = problem.device
        if self.scope == "CLUSTER":
            return launch.resident_clusters(
                program, device.index, config.threads, shared, config.cluster
            )
        per_sm = launch.resident_blocks(program, device.index, config.threads, shared)
        per_sm = min(per_sm, config.blocks_per_sm or per_sm)
        return max(
            1, per_sm * device.multiprocessors // (config.cluster if self.scope == "GRID" else 1)
        )

    def shared_bytes(self, details: Details, config: RowConfig) -> int:
        """What the kernel's Team and Feed use, as team.cuh and feed.cuh lay it out."""
        barriers, slots = (16, 16 * 32) if self.scope == "CLUSTER" else (0, 32)
        team = 0 if self.scope == "WARP" else -(-(barriers + 8 * self.values * slots) // 128) * 128
        row = self.share(details, config) * configs.column_bytes(details)
        if config.feed == ASYNC:
            return team + row
        return team + 128 + config.feed * row if config.feed > 0 else team

    def share(self, details: Details, config: RowConfig) -> int:
        """Columns of a row per block."""
        layout = details.layout
        return -(-layout.vectors // config.cluster) * layout.vector

    def template(self, details: Details, config: RowConfig) -> str:
        """The template arguments that all row kernels end with."""
        bound = next(size for size in BOUNDS if config.threads <= size)
        nested, hold = str(details.layout.nested).lower(), str(config.hold).lower()
        vector, items = details.layout.vector, config.items
        if config.feed == TWICE:
            return f"{nested},{self.scope},{vector},{items},{bound}"
        feed = config.feed
        return f"{nested},{self.scope},{config.lanes},{vector},{items},{feed},{hold},{bound}"


class ForwardVariant(RowVariant):
    configs_by_scope: ClassVar = {
        "WARP": configs.warp_forward,
        "BLOCK": configs.block_forward,
        "CLUSTER": configs.cluster_forward,
        "GRID": configs.cooperative,
    }

    def longest(self, problem: Problem, details: Details) -> int:
        return configs.longest_forward(self.scope, problem, details)

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
        shared = self.shared_bytes(details, config)
        if self.scope == "WARP":
            blocks = -(-layout.rows // (config.threads // config.lanes))
        else:
            blocks = layout.rows
        resident = self.resident_teams(problem, config, program, shared)
        if config.feed not in ONE_ROW:
            blocks = min(blocks, resident)
        teams = blocks
        start = launch.prepare(
            launch.KernelCall(
                program,
                program.names[0],
                grid=blocks * config.cluster,
                block=config.threads,
                shared=shared,
                params=FORWARD_PARAMS,
                cluster=config.cluster if self.scope == "CLUSTER" else 1,
                cooperative=self.scope == "GRID",
                dependent=problem.device.capability >= (9, 0),
            ),
            device,
        )
        (xo, xi), (ro, ri), (yo, yi), (so, si) = (layout.strides(index) for index in range(4))
        rows, inner_rows, columns = layout.rows, layout.inner_rows, layout.columns
        share, inverse = self.share(details, config), 1.0 / columns
        members = config.cluster if self.scope == "GRID" else 0
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
                meeting = launch.zeros(teams + 2 * teams * members, x.device)
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
