"""The base of the CUDA variants of row ops: a variant is a scope, which is who shares a row."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from struct import Struct
from typing import Any, ClassVar

import torch

from gristmill.jit import Launch, Program
from gristmill.ops import launch
from gristmill.ops.rows.candidates import neighbours
from gristmill.ops.rows.config import (
    AHEAD,
    ANY_LENGTH,
    ASYNC,
    MAX_THREADS,
    MOST_ITEMS,
    ONE_ROW,
    RINGS,
    TWICE,
    RowConfig,
    bulk_copies,
    column_bytes,
    few_rows,
    most_blocks,
)
from gristmill.ops.rows.problem import RowDetails
from gristmill.select.choices import why_no_room, why_unlisted
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

# Largest blocks that kernels are compiled for: the fewer threads, the more registers for each.
BOUNDS = (128, 256, 512, 640, 768, 896, MAX_THREADS)
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


def team_bytes(scope: str, floats: int) -> int:
    """Shared memory that a Team of the kernel uses, as team.cuh lays it out."""
    if scope == "WARP":
        return 0
    barriers, results = 0, 32
    if scope == "CLUSTER":
        barriers, results = 16, 16 * 32 if floats <= 2 else 16 + 32
    return -(-(barriers + 8 * floats * results) // 128) * 128


class RowVariant(Variant):
    """What the CUDA variants of all row ops have in common."""

    config_type = RowConfig
    floats = 1  # of the largest reduction of the kernel's team
    # The longest row, in vectors, that a block keeps: beyond, a cluster of blocks does. From `long`
    # on several blocks share a row where rows are few.
    block_keeps: ClassVar[int]
    long: ClassVar[int]
    configs_by_scope: ClassVar[Mapping[str, Callable[[Problem, Any], RowConfig]]]
    # The feeds that the kernel implements. `feeds` returns those that the layout allows.
    feeds_by_scope: ClassVar[Mapping[str, Collection[int]]]
    # The least threads for rows that are read twice, unless each thread has at most 8 vectors.
    least_threads: ClassVar[int] = 256

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
        details: RowDetails = problem.layout
        columns = problem.dim("N")
        if columns >= ANY_LENGTH or details.layout.vectors > self.longest(problem):
            whom = {"WARP": "a warp", "BLOCK": "one block", "CLUSTER": "a cluster"}
            return f"rows of {columns} columns are too long for {whom.get(self.scope, 'a grid')}"
        if problem.batch_invariant and problem.rows >= 2**31:
            return f"{problem.rows} rows take another launch than fewer, and so other kernels"
        members = self.config(problem.asked()).cluster
        if self.scope in ("BLOCK", "CLUSTER") and problem.rows * members >= 2**31:
            return f"{problem.rows} rows of {members} blocks are more than a grid has"
        if self.scope == "GRID" and members > problem.device.multiprocessors:
            return f"rows of {columns} columns need more blocks than run at once"
        return None

    def config(self, problem: Problem) -> RowConfig:
        return self.configs_by_scope[self.scope](problem, problem.layout)

    def configs(self, problem: Problem) -> Sequence[RowConfig]:
        usual = self.config(problem)
        if self.declines(problem) is not None:
            return (usual,)  # far from the best: one launch is enough to see whether that holds
        found = neighbours(self.scope, problem, usual, self.feeds(problem))
        right = [config for config in found if self.rejects(problem, config) is None]
        return tuple(dict.fromkeys((usual, *right)))

    def rejects(self, problem: Problem, config: RowConfig) -> str | None:
        pairs = itertools.product(sorted(self.feeds(problem)), (False, True))
        choices = {
            "threads": range(32, MAX_THREADS + 1, 32),
            "items": range(1, MOST_ITEMS + 1),
            "lanes": self.lanes(problem),
            "cluster": self.clusters(problem),
            "blocks_per_sm": self.blocks_per_sm,
            # Rows that are read twice are not held.
            "feed hold": [(feed, hold) for feed, hold in pairs if feed != TWICE or not hold],
        }
        return why_unlisted(config, choices) or self._why_unsuited(problem, config)

    def _why_unsuited(self, problem: Problem, config: RowConfig) -> str | None:
        """Checks of several fields together: why this launch cannot process these rows."""
        details: RowDetails = problem.layout
        layout, warp = details.layout, self.scope == "WARP"
        team = config.lanes if warp else config.threads * config.cluster
        if config.feed == TWICE:
            if team < min(32 if warp else self.least_threads, -(-layout.vectors // 8)):
                return f"{team} threads are too few to add up rows of {layout.columns} columns"
        elif team * config.items < layout.vectors:
            return (
                f"{team} threads of {config.items} vectors hold "
                f"{team * config.items * layout.vector} of a row's {layout.columns} columns"
            )
        if config.feed in ONE_ROW and layout.rows * config.cluster >= 2**31:
            return f"{layout.rows} rows of {config.cluster} blocks are more than a grid has"
        return why_no_room(self.shared_bytes(details, config), problem.device)

    def feeds(self, problem: Problem) -> set[int]:
        """How these rows can come to a team, given their layout."""
        details: RowDetails = problem.layout
        found = set(self.feeds_by_scope[self.scope])
        if details.layout.ragged:
            found.discard(AHEAD)  # the next row may be shifted by another number of elements
        # Without columns nothing is launched.
        if not details.bulk(0, 1) and details.layout.columns > 0:
            found.discard(ASYNC)
        if not bulk_copies(problem, details):
            found.difference_update(RINGS)
        return found

    def lanes(self, problem: Problem) -> Sequence[int]:
        """How many lanes of a warp can share a row."""
        return (1, 2, 4, 8, 16, 32) if self.scope == "WARP" else (32,)

    def clusters(self, problem: Problem) -> range:
        """How many blocks can share a row."""
        if self.scope == "CLUSTER":
            return range(2, most_blocks(problem) + 1)
        if self.scope == "GRID":  # all of them have to run at once
            return range(1, problem.device.multiprocessors + 1)
        return range(1, 2)

    @property
    def blocks_per_sm(self) -> range:
        return range(3)

    def declines(self, problem: Problem) -> str | None:
        vectors = problem.layout.layout.vectors
        cluster = self.sibling("cuda_cluster").supports(problem) is None
        if self.scope == "GRID" and cluster:
            return "clusters do the same without a detour through global memory"
        if self.scope == "BLOCK" and vectors > self.long:
            several = cluster or self.sibling("cuda_cooperative").supports(problem) is None
            if several and vectors > self.block_keeps:
                return "a block would read such long rows twice; several blocks can keep them"
            if several and few_rows(problem):
                return "few long rows leave most SMs idle; several blocks can share each"
        return None

    def varies_with_batch(self, problem: Problem) -> str | None:
        """Nothing: a row's arithmetic is that of its launch, and a launch that of N and the dtypes.

        Which team takes a row, and which rows it took before, is in none of its sums: reductions
        start anew for every row and add in a fixed order (reductions.cuh). Which thread takes which
        column is given by the launch and the vectors; `layout_of` makes those the same wherever
        rows lie. What is summed over rows (a weight's gradient, a mean) knows its batch, of course.
        """
        return None

    def sibling(self, name: str) -> RowVariant:
        """The same op's variant of another scope."""
        return type(self)(name)

    @abstractmethod
    def longest(self, problem: Problem) -> int:
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

    def shared_bytes(self, details: RowDetails, config: RowConfig) -> int:
        """What the kernel's Team and Feed use, as team.cuh and feed.cuh lay it out."""
        team = team_bytes(self.scope, self.floats)
        row = self.share(details, config) * column_bytes(details)
        if config.feed == ASYNC:
            return team + row
        return team + 128 + config.feed * row if config.feed > 0 else team

    def share(self, details: RowDetails, config: RowConfig) -> int:
        """Columns of a row per block."""
        layout = details.layout
        return -(-layout.vectors // config.cluster) * layout.vector

    def template(self, details: RowDetails, config: RowConfig) -> str:
        """The template arguments that all row kernels end with."""
        bound = next(size for size in BOUNDS if config.threads <= size)
        nested, hold = str(details.layout.nested).lower(), str(config.hold).lower()
        vector, items = details.layout.vector, config.items
        if config.feed == TWICE:
            return f"{nested},{self.scope},{vector},{items},{bound}"
        feed = config.feed
        return f"{nested},{self.scope},{config.lanes},{vector},{items},{feed},{hold},{bound}"

    def prepare(
        self, problem: Problem, config: RowConfig, program: Program, params: Struct
    ) -> tuple[Launch, int]:
        """The launch of the program's first kernel, and how many teams (in scope WARP blocks).

        One per row, or as many as the device runs at once where a team does several rows.
        """
        details: RowDetails = problem.layout
        teams = details.layout.rows
        if self.scope == "WARP":
            teams = -(-teams // (config.threads // config.lanes))
        shared = self.shared_bytes(details, config)
        resident = self.resident_teams(problem, config, program, shared)
        if config.feed not in ONE_ROW:
            teams = min(teams, resident)
        start = launch.prepare(
            launch.KernelCall(
                program,
                program.names[0],
                grid=teams * config.cluster,
                block=config.threads,
                shared=shared,
                params=params,
                cluster=config.cluster if self.scope == "CLUSTER" else 1,
                cooperative=self.scope == "GRID",
                dependent=problem.device.capability >= (9, 0),
            ),
            problem.device.index,
        )
        return start, teams

    def members(self, config: RowConfig) -> int:
        """Blocks that meet in global memory; 0 where none do."""
        return config.cluster if self.scope == "GRID" else 0

    def meeting(self, teams: int, members: int, device: torch.device) -> torch.Tensor:
        """The zeroed words of a `Meeting` (team.cuh): arrivals[teams], then the partial results."""
        return launch.zeros(teams + 2 * teams * members * self.floats, device)
