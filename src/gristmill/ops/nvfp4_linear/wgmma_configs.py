"""How the warpgroup kernel tiles a GEMM, and a model of the time that takes.

A row of a table may use any config that is enumerated for some number of rows and fits
(`why_rejected`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gristmill.select.choices import Choices, why_no_room, why_unlisted
from gristmill.select.device import Device
from gristmill.select.problem import Problem

TOKENS = (8, 16, 32, 64, 96, 128, 192, 256)  # that a tile can have
SLAB = CHUNK = 64  # rows and columns of a piece
PIECE_BYTES = 2048 + 256  # codes and scales
CANDIDATES = 12  # worth timing for one problem


@dataclass(frozen=True)
class WgmmaConfig:
    """A launch of kernels/cuda/nvfp4_wgmma.cu, which explains the words.

    `tokens` is the most that a tile may have: with fewer rows it has as few as hold them all, if
    registers allow it.
    `blocks` is how many shall fit on an SM, if shared memory allows it. `persistent`: as many
    blocks as run at once, each with tile after tile. `group` token tiles go side by side.
    """

    tokens: int
    row_groups: int
    k_groups: int
    depth: int
    stages: int
    split: int = 1
    blocks: int = 1
    persistent: bool = False
    group: int = 4


@dataclass(frozen=True)
class Cut:
    """What follows from a config for a product of some tokens by an (N, K) weight on a device.

    `depth` and `stages` are the config's, or less where a tile has more tokens than the config
    was made for and shared memory has no room: that changes nothing in the order of sums.
    """

    config: WgmmaConfig
    tokens: int
    depth: int
    stages: int
    slabs: int
    chunks: int
    share: int  # chunks for each block of a split
    token_tiles: int
    row_units: int
    blocks: int  # that are to fit on an SM
    reason: str | None  # why there is no such launch, if so

    @property
    def groups(self) -> int:
        return self.config.row_groups * self.config.k_groups

    @property
    def units(self) -> int:
        return self.row_units * self.token_tiles

    @property
    def threads(self) -> int:
        """As `producers` of the kernel has it: a warp, or a warpgroup that gives registers away."""
        return 128 * self.groups + (128 if self.tokens > 128 else 32)

    @property
    def shared(self) -> int:
        return _shared(self.config, self.tokens, self.depth, self.stages)


def _has_registers(tokens: int, groups: int, blocks: int) -> bool:
    """Whether so many blocks have the registers that the kernel takes, for it must never spill.

    A thread needs half a register for each token's sums and about 62 more, or a few. With more
    than 128 tokens the producer gives most of its own to the others.
    """
    if tokens > 128:
        return blocks == 1 and groups <= (2 if tokens > 192 else 3)
    warps = math.ceil(blocks * (4 * groups + 1) / 4)  # of a quarter of the SM
    return 512 // warps // 8 * 8 >= 62 + tokens * 17 // 32


@functools.lru_cache(maxsize=4096)
def cut(config: WgmmaConfig, rows: int, n: int, k: int, device: Device) -> Cut:
    groups = config.row_groups * config.k_groups
    sizes = [size for size in TOKENS if min(rows, config.tokens) <= size <= config.tokens]
    # Three warpgroups have the registers for 192 tokens, but not for 128: there nobody gives any.
    # Where the config was chosen for another number of rows it must still have a launch.
    tokens = next((size for size in sizes if _has_registers(size, groups, 1)), sizes[0])
    slabs, chunks = math.ceil(n / SLAB), math.ceil(k / CHUNK)
    share = math.ceil(chunks / config.split)
    depth, stages = config.depth, config.stages
    room = device.shared_per_block
    while _shared(config, tokens, depth, stages) > room and (depth, stages) != (config.k_groups, 2):
        if stages > 2:
            stages -= 1
        else:
            depth = max(config.k_groups, depth // 2 // config.k_groups * config.k_groups)
    shared = _shared(config, tokens, depth, stages)
    # An SM has 1 KB more than a block may have, and each block takes 1 KB of its own.
    blocks = max(1, min(config.blocks, (room + 1024) // (shared + 1024)))
    while blocks > 1 and not _has_registers(tokens, groups, blocks):
        blocks -= 1
    reason = why_no_room(shared, device)
    if reason is None and (config.split - 1) * share >= chunks:
        reason = f"{chunks} chunks of columns cannot be split in {config.split}"
    if reason is None and not _has_registers(tokens, groups, 1):
        reason = f"{groups} warpgroups with tiles of {tokens} tokens need too many registers"
    return Cut(
        config=config,
        tokens=tokens,
        depth=depth,
        stages=stages,
        slabs=slabs,
        chunks=chunks,
        share=share,
        token_tiles=math.ceil(rows / tokens),
        row_units=math.ceil(slabs / config.row_groups),
        blocks=blocks,
        reason=reason,
    )


def _shared(config: WgmmaConfig, tokens: int, depth: int, stages: int) -> int:
    """Bytes: the ring, sums on their way out, factors and shifts of the rows, barriers."""
    rows = SLAB * config.row_groups
    ring = stages * depth * (tokens * 128 + config.row_groups * PIECE_BYTES)
    piece = tokens if tokens < 64 else 48 if tokens % 64 else 64
    whole = config.k_groups == config.split == 1
    sums = config.row_groups * piece * 144 if whole else config.k_groups * piece * (rows + 4) * 4
    return ring + sums + 2 * rows * 4 + 16 * stages


# Row groups, column groups, depth, stages, blocks: the shapes that won somewhere when all sensible
# ones were timed (H200, bf16, seven weights from 2112x7168 to 57344x8192).
Shape = tuple[int, int, int, int, int]
_FEW: tuple[Shape, ...] = (
    *((1, 1, 4, 4, 3), (1, 1, 4, 3, 5), (1, 1, 4, 4, 4), (1, 2, 8, 3, 2), (1, 2, 4, 4, 3)),
    *((1, 2, 4, 6, 2), (1, 2, 8, 4, 1), (2, 1, 4, 4, 2), (2, 1, 2, 4, 3), (1, 4, 8, 4, 1)),
)
_SOME: tuple[Shape, ...] = (
    (1, 1, 2, 4, 4),
    (4, 1, 2, 4, 1),
    (2, 2, 4, 3, 1),
    (1, 2, 4, 3, 2),
    (2, 1, 2, 4, 2),
)
_MANY: dict[int, tuple[Shape, ...]] = {
    96: ((2, 1, 2, 4, 1), (3, 1, 1, 6, 1), (1, 2, 4, 3, 1)),
    128: ((2, 1, 2, 4, 1), (1, 1, 2, 4, 2)),
    192: ((2, 1, 1, 5, 1), (3, 1, 1, 4, 1)),
    256: ((2, 1, 1, 5, 1), (1, 1, 1, 5, 1)),
}
_SPLITS = (1, 2, 4, 8)  # of 8 blocks is the largest cluster that any device has
_KNOWN = frozenset(
    (tokens, *shape) for tokens, some in {64: _FEW + _SOME, **_MANY}.items() for shape in some
)


@functools.lru_cache(maxsize=1024)
def candidates(rows: int, n: int, k: int, device: Device) -> tuple[WgmmaConfig, ...]:
    """The configs worth timing, the fastest by the model first; empty if none fits."""
    found: dict[WgmmaConfig, float] = {}
    for config in _all(rows):
        whole = cut(config, rows, n, k, device)
        if whole.reason is None:
            for one in _ways(whole, device):
                found[one] = estimate(cut(one, rows, n, k, device), device)
    return tuple(sorted(found, key=found.__getitem__)[:CANDIDATES])


def candidates_of(problem: Problem) -> tuple[WgmmaConfig, ...]:
    return candidates(problem.rows, problem.dim("N"), problem.dim("K"), problem.device)


def why_rejected(problem: Problem, config: WgmmaConfig) -> str | None:
    """Why `config` is not one of `candidates` for any number of rows, or does not fit these."""
    choices: Choices = {
        "tokens row_groups k_groups depth stages blocks": _KNOWN,
        "split": _SPLITS,
        "persistent": (False, True) if config.split == 1 else (False,),
        "group": (WgmmaConfig.group,),
    }
    return why_unlisted(config, choices) or cut_of(problem, config).reason


def cut_of(problem: Problem, config: WgmmaConfig) -> Cut:
    return cut(config, problem.rows, problem.dim("N"), problem.dim("K"), problem.device)


def _all(rows: int) -> Iterator[WgmmaConfig]:
    shapes: dict[int, tuple[Shape, ...]]
    if rows <= 64:
        shapes = {64: _FEW if rows <= 32 else _SOME}
    elif rows <= 128:
        shapes = {size: _MANY[size] for size in (96, 128) if size >= rows} | {64: _SOME}
    else:
        shapes = {size: shape for size, shape in _MANY.items() if size > 96}
    for tokens, some in shapes.items():
        for row_groups, k_groups, depth, stages, blocks in some:
            for split in _SPLITS:
                yield WgmmaConfig(tokens, row_groups, k_groups, depth, stages, split, blocks=blocks)


def _ways(whole: Cut, device: Device) -> Iterator[WgmmaConfig]:
    """The launches of a cut: a block for each tile, or as many as fit, with tile after tile."""
    config, room = whole.config, device.multiprocessors * whole.blocks
    if config.split > 1 and whole.units * config.split > 4 * room:
        return  # there is enough to do for everybody
    yield config
    if config.split == 1 and whole.units > room and whole.tokens >= 64:
        yield replace(config, persistent=True)


# Cycles of an SM for a piece of the weight by what limits them, and microseconds. Fitted to the
# times of launches of 84 products on an H200, M = 1 to 4096: the one that it puts first is 2.8%
# slower than the best in the mean, 27% at worst (128 tokens by 24576x1536). The parts explain
# nothing.
_CLOCK = 1750.0  # per microsecond
_ISSUE, _ISSUE_TOKEN = 122.7, 1.305
_TENSOR_TOKEN = 2.236
_WAIT, _WAIT_TOKEN = 199.7, 0.971  # of a warpgroup that is alone
_PASS, _EPILOGUE = 1.822, 7.695
_SPLIT, _SPLIT_TOKEN, _SPLIT_FURTHER = 0.43, 0.00708, 3.303
_BANDWIDTH = 12.0e6  # bytes per microsecond, if nothing else took time
_TOKENS_FROM_L2 = 0.324  # of what an SM fetches again, the part that is felt
_OVERLAP = 0.4246  # of the shorter of memory and arithmetic, the part that is not hidden


def estimate(whole: Cut, device: Device) -> float:
    """Microseconds."""
    config, tokens = whole.config, whole.tokens
    blocks, processors = whole.blocks, device.multiprocessors
    pieces = whole.share * config.row_groups
    epilogue = _EPILOGUE * tokens * config.row_groups

    def piece(resident: int) -> float:
        busy = max(_ISSUE + _ISSUE_TOKEN * tokens, _TENSOR_TOKEN * tokens)
        return max(busy, (_WAIT + _WAIT_TOKEN * tokens) / (resident * whole.groups))

    units = whole.units * config.split
    if config.persistent:
        turns = math.ceil(units / (processors * blocks))
        cycles = turns * (blocks * pieces * piece(blocks) + epilogue) + _PASS * _CLOCK
    else:
        cycles = 0.0
        passes, rest = divmod(units, processors * blocks)
        for count, times in ((blocks, passes), (math.ceil(rest / processors), 1)):
            if count:
                one = count * (pieces * piece(count) + epilogue) + _PASS * _CLOCK
                cycles += times * one
    weight = whole.slabs * whole.chunks * PIECE_BYTES
    again = (
        whole.token_tiles * tokens * whole.chunks * CHUNK * 2 * whole.row_units * _TOKENS_FROM_L2
    )
    memory = (weight + again) / _BANDWIDTH
    arithmetic = cycles / _CLOCK
    us = max(memory, arithmetic) + _OVERLAP * min(memory, arithmetic)
    if config.split > 1:
        us += _SPLIT + _SPLIT_TOKEN * tokens * config.row_groups
        us += _SPLIT_FURTHER if config.split > 2 else 0.0
    return us
