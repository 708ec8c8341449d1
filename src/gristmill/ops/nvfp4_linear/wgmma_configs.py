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
# Worth timing for one problem: of 180 problems the best of these is 0.15% slower in the mean than
# the best launch of all, 5% at worst (H200); of twelve 0.10% and 5%.
CANDIDATES = 8


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
    rows: int
    tokens: int
    depth: int
    stages: int
    slabs: int
    chunks: int
    share: int  # chunks for each block of a split
    token_tiles: int
    row_units: int
    blocks: int  # that are to fit on an SM
    resident: int  # that do fit: never fewer than `blocks`, often more
    reason: str | None  # why there is no such launch, if so

    @property
    def groups(self) -> int:
        return self.config.row_groups * self.config.k_groups

    @property
    def units(self) -> int:
        return self.row_units * self.token_tiles

    @property
    def threads(self) -> int:
        """As `producers` of the kernel has it: a warp, or a warpgroup that releases registers."""
        return 128 * self.groups + (128 if self.tokens > 128 else 32)

    @property
    def shared(self) -> int:
        return _shared(self.config, self.tokens, self.depth, self.stages)

    @property
    def slot_bytes(self) -> int:
        return self.depth * _chunk_bytes(self.config, self.tokens)


def _has_registers(tokens: int, groups: int, blocks: int) -> bool:
    """Whether so many blocks have the registers that the kernel takes, for it must never spill.

    A thread needs half a register for each token's sums and about 62 more, or a few. With more
    than 128 tokens the producer releases most of its registers to the consumers.
    """
    if tokens > 128:
        return blocks == 1 and groups <= (2 if tokens > 192 else 3)
    warps = math.ceil(blocks * (4 * groups + 1) / 4)  # of a quarter of the SM
    return 512 // warps // 8 * 8 >= 62 + tokens * 17 // 32


@functools.lru_cache(maxsize=4096)
def cut(config: WgmmaConfig, rows: int, n: int, k: int, device: Device) -> Cut:
    groups = config.row_groups * config.k_groups
    sizes = [size for size in TOKENS if min(rows, config.tokens) <= size <= config.tokens]
    # Three warpgroups have the registers for 192 tokens, but not for 128: at 128 tokens the
    # producer keeps its registers.
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
    resident, most = blocks, (room + 1024) // (shared + 1024)
    while resident < most and _has_registers(tokens, groups, resident + 1):
        resident += 1
    reason = why_no_room(shared, device)
    if reason is None and (config.split - 1) * share >= chunks:
        reason = f"{chunks} chunks of columns cannot be split in {config.split}"
    if reason is None and not _has_registers(tokens, groups, 1):
        reason = f"{groups} warpgroups with tiles of {tokens} tokens need too many registers"
    return Cut(
        config=config,
        rows=rows,
        tokens=tokens,
        depth=depth,
        stages=stages,
        slabs=slabs,
        chunks=chunks,
        share=share,
        token_tiles=math.ceil(rows / tokens),
        row_units=math.ceil(slabs / config.row_groups),
        blocks=blocks,
        resident=resident,
        reason=reason,
    )


def _shared(config: WgmmaConfig, tokens: int, depth: int, stages: int) -> int:
    """Bytes: the ring, sums on their way out, factors and shifts of the rows, barriers."""
    rows = SLAB * config.row_groups
    ring = stages * depth * _chunk_bytes(config, tokens)
    piece = tokens if tokens < 64 else 48 if tokens % 64 else 64
    whole = config.k_groups == config.split == 1
    sums = config.row_groups * piece * 144 if whole else config.k_groups * piece * (rows + 4) * 4
    return ring + sums + 2 * rows * 4 + 16 * stages


def _chunk_bytes(config: WgmmaConfig, tokens: int) -> int:
    """Of a chunk of columns in the ring: the activations of a tile, and the weight's pieces."""
    return tokens * CHUNK * 2 + config.row_groups * PIECE_BYTES


# Row groups, column groups, depth, stages, blocks, by the tokens of a tile: the shapes that won
# somewhere when all sensible ones were timed (H200, bf16). All are considered for any number of
# rows, and `estimate` decides; but not those that would have as many tokens as a smaller size,
# which has shapes of its own. With ten weights at 18 numbers of rows, the best of these is 0.1%
# slower in the mean than the best of all shapes with all tiles, and 5% at worst. Where the model
# holds two equal the first is taken: those come first that took less than it says, in the mean.
Shape = tuple[int, int, int, int, int]
_SHAPES: dict[int, tuple[Shape, ...]] = {
    64: (
        *((1, 1, 4, 3, 5), (2, 2, 4, 3, 1), (4, 1, 2, 4, 1), (1, 1, 2, 4, 4), (2, 1, 2, 4, 2)),
        *((2, 1, 2, 4, 3), (2, 1, 4, 4, 2), (1, 2, 4, 6, 2), (1, 2, 8, 4, 1), (1, 1, 4, 4, 4)),
        *((1, 2, 8, 3, 2), (1, 4, 8, 4, 1), (1, 2, 4, 3, 2), (1, 2, 4, 4, 3), (1, 1, 4, 4, 3)),
    ),
    96: ((2, 1, 2, 4, 1), (3, 1, 1, 6, 1), (1, 2, 4, 3, 1)),
    128: ((2, 1, 2, 4, 1), (1, 1, 2, 4, 2)),
    192: ((2, 1, 1, 5, 1), (3, 1, 1, 4, 1)),
    256: ((2, 1, 1, 5, 1), (1, 1, 1, 5, 1)),
}
_SPLITS = (1, 2, 4, 8)  # of 8 blocks is the largest cluster that any device has
_KNOWN = frozenset((tokens, *shape) for tokens, some in _SHAPES.items() for shape in some)


def candidates(rows: int, n: int, k: int, device: Device) -> tuple[WgmmaConfig, ...]:
    """The configs worth timing, the fastest by the model first; empty if none fits."""
    return _ranked(rows, n, k, device)[:CANDIDATES]


def candidates_of(problem: Problem) -> tuple[WgmmaConfig, ...]:
    return candidates(problem.rows, problem.dim("N"), problem.dim("K"), problem.device)


def all_of(problem: Problem) -> tuple[WgmmaConfig, ...]:
    """All configs that fit, the fastest by the model first."""
    return _ranked(problem.rows, problem.dim("N"), problem.dim("K"), problem.device)


def fastest_us(problem: Problem) -> float:
    """Microseconds of the config that the model puts first; infinite if none fits."""
    found = all_of(problem)
    return estimate(cut_of(problem, found[0]), problem.device) if found else math.inf


@functools.lru_cache(maxsize=1024)
def _ranked(rows: int, n: int, k: int, device: Device) -> tuple[WgmmaConfig, ...]:
    found: dict[WgmmaConfig, float] = {}
    for whole in _cuts(rows, n, k, device):
        for one in _ways(whole, device):
            found[one] = estimate(replace(whole, config=one), device)
    return tuple(sorted(found, key=found.__getitem__))


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


def _cuts(rows: int, n: int, k: int, device: Device) -> Iterator[Cut]:
    """All shapes that have a launch; of the sizes, those that the rows fill."""
    least, seen = min(_SHAPES), set()
    for tokens, shapes in _SHAPES.items():
        for row_groups, k_groups, depth, stages, blocks in shapes:
            for split in _SPLITS:
                config = WgmmaConfig(
                    tokens, row_groups, k_groups, depth, stages, split, blocks=blocks
                )
                whole = cut(config, rows, n, k, device)
                kind = (row_groups, k_groups, whole.depth, whole.stages, split, whole.blocks)
                fills = tokens == least or whole.tokens == tokens
                if whole.reason is None and fills and (tokens, kind) not in seen:
                    seen.add((tokens, kind))
                    yield whole


def _ways(whole: Cut, device: Device) -> Iterator[WgmmaConfig]:
    """The launches of a cut: a block for each tile, or as many as fit, with tile after tile."""
    config, room = whole.config, device.multiprocessors * whole.resident
    if config.split > 1 and whole.units * config.split > 4 * room:
        return  # there is enough to do for everybody
    yield config
    if config.split == 1 and whole.units > room and whole.tokens >= 64:
        yield replace(config, persistent=True)


@dataclass(frozen=True)
class Costs:
    """What the parts of a launch cost, in cycles of an SM's clock unless something else is said.

    tools/fit_nvfp4_linear.py fitted all of them at once to the times of 9,564 launches on an H200
    (benchmarks/results/h200-2026-11-16/nvfp4_linear-launches), each within bounds that the hardware
    sets. With those of weights that took no part in the fit, the chosen launch is 1.7% slower than
    the best in the mean, and 14.6% at worst.
    """

    issue: float = 102.0  # instructions that decode a piece of the weight, in an SM's issue slots
    issue_token: float = 1.65  # and its matrix instructions, for each token of the tile
    tensor_token: float = 2.29  # the tensor cores, for each token: 2 at 4096 operations a cycle
    wait: float = 145.0  # of a warpgroup for its own piece, which no other work shortens
    wait_token: float = 1.7  # the same, for each token
    copy: float = 98.9  # the producer's thread, to start one bulk or tensor copy
    refill: float = 1290.0  # from giving a slot back until its first bytes are there
    fill: float = 91.0  # bytes per cycle that come into one slot meanwhile
    add: float = 12.1  # sums that are added through shared memory, for each token and row group
    start: float = 3.0  # us: blocks begin, and the first slots arrive
    split: float = 1.07  # us: the blocks of a cluster wait for each other
    early: float = 0.39  # us of the start that are saved where the previous grid leaves room
    weight: float = 4.8  # MB of the weight that memory gives per us: of the data sheet, not fitted
    latency: float = 1240.0  # of memory, felt once for each time that the ring goes round
    missing: float = 14.7  # thousands of rows beyond the end of the tokens per us, of all SMs


COSTS = Costs()
_CLOCK = 1750.0  # cycles per microsecond, near what an H200 has under such load
# Memory and SMs overlap, but not entirely when they take about as long: (a^4 + b^4)^(1/4) is about
# the larger of two that differ, and 1.19 times either of two that are the same.
_OVERLAP = 4
# The part of a GPU's multiprocessors that clusters of so many blocks fill. The blocks of a cluster
# lie in one GPC, and multiprocessors that are left over in a GPC stay empty. On an H200, with one
# block on each of its 132, 27 clusters of 4 ran at once and 32 did not; 11 of 8 did and 16 did not.
# These give 30 and 14. The driver knows the number, but GPCs of chips of one model differ, and what
# is chosen must not depend on the chip: ranks choose alike.
_FILLED = {1: 1.0, 2: 1.0, 4: 0.91, 8: 0.85}


def _room(device: Device, split: int) -> int:
    """Clusters that run at once, with one block on each multiprocessor."""
    return max(1, int(device.multiprocessors * _FILLED[split] / split))


def estimate(whole: Cut, device: Device, costs: Costs = COSTS) -> float:
    """Microseconds."""
    config, tokens, resident = whole.config, whole.tokens, whole.resident
    slots = math.ceil(whole.share / whole.depth)  # of the ring, that a block fills in turn
    # The last slot is multiplied whole, where it ends beyond the columns by zeros.
    pieces = slots * whole.depth * config.row_groups

    # Work of a block that others on its SM wait for, and the time that it needs on its own.
    work = pieces * max(costs.issue + costs.issue_token * tokens, costs.tensor_token * tokens)
    adds = config.split > 1 or config.k_groups > 1
    ends = costs.add * tokens * config.row_groups if adds else 0.0
    alone = max(
        pieces / whole.groups * (costs.wait + costs.wait_token * tokens),
        slots * (2 * config.row_groups + whole.depth) * costs.copy,
        # A slot is given back once the next one is begun, so one of them is never being filled.
        slots / (whole.stages - 1) * (costs.refill + whole.slot_bytes / costs.fill),
    )

    def together(blocks: int) -> float:
        return max(blocks * work, alone) + blocks * ends

    room = _room(device, config.split)
    passes, rest = divmod(whole.units, room * resident)
    turns = passes + (rest > 0)
    last = math.ceil(rest / room) if rest else resident  # blocks of an SM in the last turn
    if config.persistent:
        cycles, starts = turns * together(resident), 1
        last = resident if passes else last
    else:
        cycles, starts = passes * together(resident) + (together(last) if rest else 0.0), turns
    arithmetic = cycles / _CLOCK + starts * costs.start

    # The weight at the memory's full rate, and waits for it: fewer with more slots in the ring.
    memory = whole.slabs * whole.chunks * PIECE_BYTES / (costs.weight * 1e6)
    memory += turns * slots / whole.stages * costs.latency / _CLOCK
    # Rows that a copy finds beyond the last token are zeros. All SMs together get only so many.
    beyond = whole.token_tiles * tokens - whole.rows
    missing = whole.row_units * whole.chunks * beyond / (costs.missing * 1e3)
    parts = (arithmetic, memory, missing)
    us = float(sum(part**_OVERLAP for part in parts) ** (1 / _OVERLAP))
    # While this grid's last blocks run, as many of the next one load what they can of the weight.
    us -= costs.early if resident >= 2 * last else 0.0
    return us + (costs.split if config.split > 1 else 0.0)
