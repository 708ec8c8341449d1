"""How kernels/cuda/nvfp4_mma.cu is launched: its shapes, its launches, and a guess of the best.

A launch has few choices: how many tokens and slabs a tile has, how many groups of four warps share
its columns and how far ahead they read (a shape, which is compiled), and how many blocks share
the columns (`shares`). Registers and shared memory leave 16 warps on an SM, or fewer with larger
tiles. A row of a table may use any that is enumerated for some number of rows and fits
(`why_rejected`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from gristmill.formats.nvfp4 import fragments
from gristmill.ops.linear.configs import why_large_sums
from gristmill.select.choices import Choices, why_no_room, why_unlisted
from gristmill.select.device import Device
from gristmill.select.problem import Problem

WARPGROUP = 128  # threads that do a slab
TOKENS = (8, 16, 32, 64)
CANDIDATES = 12
_PIECE = fragments.CODES + fragments.SCALES
_RESERVED = 1024  # bytes of shared memory that the system takes of every block

# Tokens, slabs, groups and depth. Each reads 36 to 74 KB ahead on an SM, of which some 32 KB are
# under way at 4.3 TB/s (those of 64 tokens that read less are for GPUs with less shared memory).
# A second slab halves what is read of the tokens, from L2 and from shared
# memory, which with 32 tokens would be busy all the time. Other shapes spill registers.
_SHAPES = (
    *((8, 1, 4, 8), (8, 1, 2, 8), (8, 2, 4, 4), (8, 2, 2, 4), (8, 1, 4, 4)),
    *((16, 1, 4, 8), (16, 1, 2, 8), (16, 2, 3, 4), (16, 2, 2, 4), (16, 1, 4, 4)),
    *((32, 2, 3, 4), (32, 2, 2, 4), (32, 1, 3, 4)),
    *((64, 2, 2, 4), (64, 2, 2, 2), (64, 1, 2, 4), (64, 1, 2, 2)),
)
_SHARES = (1, 2, 4, 8)

# The model, in us and bytes per us: of an H200 by its data sheet, the rest by counting. Only ratios
# matter.
_CLOCK = 1755.0  # per us
_ISSUES = (72.0, 6.0)  # slots of a warp for a chunk: for its weights, and for eight tokens
_PRODUCT = 26.0  # clocks of a tensor core for the same eight tokens
_FROM_L2 = 43e3  # an SM's part of what L2 delivers
_MEMORY = 25e3  # an SM's part of what memory delivers, where no data sheet tells
_REACHED = 0.88  # of what the data sheet tells
_LATENCY = 1.3  # of memory under load, in us, with registers that wait for their turn
_TILE_US = 0.3  # from the last product of a tile to its results
_CLUSTER_US = 0.5  # for blocks of a cluster to start, and to wait for each other
_SECOND_KERNEL_US = 2.0


@dataclass(frozen=True)
class MmaConfig:
    """Tiles of 64 * `slabs` rows by `tokens`; `groups` of four warps read `depth` chunks ahead.

    `shares` blocks share the columns of a tile: in clusters, or `partial`: by a second kernel.
    """

    tokens: int
    slabs: int
    groups: int
    depth: int
    shares: int = 1
    partial: bool = False

    @property
    def threads(self) -> int:
        return WARPGROUP * self.groups

    @property
    def stripe(self) -> int:
        """Chunks that a block takes in one round."""
        return self.groups * self.depth

    @property
    def blocks_per_sm(self) -> int:
        """What the kernel is compiled for (least_blocks)."""
        return max(1, 4 // self.groups) if self.tokens * self.slabs <= 32 else 1


@dataclass(frozen=True)
class Shares:
    """What the blocks of a launch do along the columns; sums depend on nothing else."""

    slabs: int
    chunks: int
    tiles: int  # of rows
    share: int  # chunks of a block
    rounds: int

    @classmethod
    def of(cls, rows: int, columns: int, config: MmaConfig) -> Shares:
        slabs, chunks = fragments.padded(rows, columns)
        share = math.ceil(chunks / config.shares)
        rounds = math.ceil(share / config.stripe)
        return cls(slabs, chunks, math.ceil(slabs / config.slabs), share, rounds)


@dataclass(frozen=True)
class Slots:
    """Where tokens lie in shared memory: two slots that are filled in turn, or one that stays."""

    rounds: int  # of a slot
    count: int

    @classmethod
    def of(cls, shares: Shares, config: MmaConfig, passes: int, device: Device) -> Slots:
        """One that stays where a block does several tiles, or one round only, and it fits."""
        kept = cls(shares.rounds, 1)
        fits = kept.bytes(config) <= room(config, device)
        if shares.rounds == 1 or (passes > 1 and fits):
            return kept
        return cls(1, 2)

    def bytes(self, config: MmaConfig) -> int:
        """Of a block, with the sums of its groups behind the slots."""
        tokens = self.count * self.rounds * config.stripe * config.tokens * 128
        return tokens + config.groups * config.tokens * (64 * config.slabs + 4) * 4


def room(config: MmaConfig, device: Device) -> int:
    """Shared memory of a block when an SM has as many as registers allow."""
    return (device.shared_per_block + _RESERVED) // config.blocks_per_sm - _RESERVED


def candidates(problem: Problem) -> tuple[MmaConfig, ...]:
    """The most promising configs, the best first by `estimate`."""
    tokens = next((size for size in TOKENS if problem.rows <= size), TOKENS[-1])
    found = sorted(
        _fitting(tokens, problem),
        key=lambda config: (round(estimate(problem, config), 2), config.shares, repr(config)),
    )
    return tuple(found[:CANDIDATES])


def why_rejected(problem: Problem, config: MmaConfig) -> str | None:
    """Why `config` is not one of `candidates` for any number of rows, or does not fit these."""
    choices: Choices = {
        "tokens slabs groups depth": _SHAPES,
        "shares": _SHARES,
        "partial": (_is_partial(config.shares, problem.device),),
    }
    return why_unlisted(config, choices) or _why_unsuited(problem, config)


def _is_partial(shares: int, device: Device) -> bool:
    return shares > 1 and device.capability < (9, 0)  # which has no clusters


def _fitting(tokens: int, problem: Problem) -> Iterator[MmaConfig]:
    for shape, shares in itertools.product(_SHAPES, _SHARES):
        config = MmaConfig(*shape, shares, _is_partial(shares, problem.device))
        if config.tokens == tokens and _why_unsuited(problem, config) is None:
            yield config


def _why_unsuited(problem: Problem, config: MmaConfig) -> str | None:
    """Why a config that is enumerated is not valid for this GEMM.

    The number of rows matters for partial sums only.
    """
    device, shares = problem.device, config.shares
    _, chunks = fragments.padded(problem.dim("N"), problem.dim("K"))
    # Each group of each share must have at least one chunk.
    if shares > 1 and (
        chunks < shares * config.groups or (shares - 1) * -(-chunks // shares) >= chunks
    ):
        return f"shares={shares} with groups={config.groups} is too much for {chunks} chunks"
    reason = why_no_room(Slots(1, 2).bytes(config), device)
    if reason is None and config.partial:
        reason = why_large_sums(partial_floats(problem, config))
    return reason


def partial_floats(problem: Problem, config: MmaConfig) -> int:
    """How many partial sums all shares leave; rows of the weight are rounded up to four."""
    return config.shares * problem.rows * math.ceil(problem.dim("N") / 4) * 4


def estimate(problem: Problem, config: MmaConfig) -> float:
    """About how many us the kernel takes.

    Memory delivers every byte once. Meanwhile the busiest SM has to take in its blocks' weights and
    tokens, and to issue what they need: it does `passes` tiles one after another in each of its
    blocks, and has no more under way than its registers hold. Chunks that a round has no use for
    cost as if they were there.
    """
    device, columns = problem.device, problem.dim("K")
    shares = Shares.of(problem.dim("N"), columns, config)
    processors = max(1, device.multiprocessors)
    token_tiles = math.ceil(problem.rows / config.tokens)
    resident = processors * config.blocks_per_sm
    workers = max(1, resident // (config.shares * token_tiles))
    passes = math.ceil(shares.tiles / workers)
    blocks = min(shares.tiles, workers) * config.shares * token_tiles
    beside = min(config.blocks_per_sm, math.ceil(blocks / processors))

    eights = config.tokens // 8
    clocks = max((_ISSUES[0] + _ISSUES[1] * eights) / 4, _PRODUCT * eights / 4)
    pieces = shares.rounds * config.stripe * config.slabs
    kept = Slots.of(shares, config, passes, device).count == 1
    tokens = min(problem.rows, config.tokens) * shares.share * 128 * (1 if kept else passes)
    computing = passes * pieces * 4 * clocks / _CLOCK
    taking = (passes * pieces * _PIECE + tokens) / _FROM_L2
    waiting = passes * pieces / (config.stripe * config.slabs) * _LATENCY
    memory = _REACHED * device.bandwidth / 1e6 or processors * _MEMORY
    delivered = shares.slabs * shares.chunks * _PIECE / memory
    us = max(delivered, beside * computing, beside * taking, waiting)
    # Only one pass has nothing to overlap with; blocks beside each other overlap.
    us += _TILE_US * (1 if config.blocks_per_sm > 1 else min(passes, 4) ** 0.5)
    if config.partial:
        return us + _SECOND_KERNEL_US
    return us + (_CLUSTER_US if config.shares > 1 else 0.0)
