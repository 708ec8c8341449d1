"""How the expert kernel of Hopper is launched: which kernel sorts tokens, how the GEMMs are tiled.

A row of a table may combine any listed tiling of each GEMM with any tile size, if both can be
launched (`why_rejected`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gristmill.select.choices import Choices, why_no_room, why_unlisted
from gristmill.select.device import Device
from gristmill.select.problem import Problem

SLAB = CHUNK = 64  # rows and columns of a piece
PIECE_BYTES = 2048 + 256  # codes and scales

# By the largest tile, in tokens: the sizes that a tile may have. Those of `KNOWN` have loops of
# their own; of the others one loop does all, which takes fewer registers and a little longer.
SIZES: dict[int, tuple[int, ...]] = {
    8: (8,),
    16: (8, 16),
    32: (8, 16, 32),
    48: (32, 48),
    64: (8, 16, 24, 32, 40, 48, 64),
    96: (64, 96),
    128: (16, 32, 48, 64, 80, 96, 112, 128),
    192: (32, 64, 96, 112, 128, 144, 160, 192),
}
KNOWN = (8, 16, 32, 48, 96)
ONE_TILE = (8, 16, 32, 64)  # of all tokens, where slots are scanned
TILES = tuple(SIZES)

# Who puts slots in order: nobody, as blocks only look which experts there are; or a kernel before.
# The numbers are the kernel's.
SCAN, LAUNCH = 0, 1
MOST_SCANNED = 64  # slots
# Products: up; down; and down with the sum over a token's experts, for so many tokens.
UP, DOWN, ADD = 1, 2, 3
MOST_ADDED = 64

# Row groups, column groups, depth, stages, split, blocks: as kernels/cuda/nvfp4_moe.cu has them.
Cut = tuple[int, int, int, int, int, int]


@dataclass(frozen=True)
class MoeConfig:
    """The launches of kernels/cuda/nvfp4_moe.cu for both products.

    `up` and `down` are how each product is cut, `tile` is the most tokens of a tile. `routing`:
    where "scan" is allowed few slots are not put in order. `added`: where they are, the second
    product of up to 64 tokens adds up as well, by clusters of as many blocks as its split; else
    that has a launch of its own, before which what experts give is kept in fp32 (`wide`) or in x's
    dtype. `persistent`: as many blocks as run at once, each with unit after unit; else a block for
    each unit that there may be.
    """

    up: Cut
    down: Cut
    tile: int
    routing: Literal["scan", "launch"] = "scan"
    added: bool = True
    wide: bool = True
    persistent: bool = True


@dataclass(frozen=True)
class Product:
    """What follows from a cut for one product on a device.

    `depth` and `stages` are the config's, or less where tiles are larger than it was made for and
    shared memory has no room: that changes nothing in the order of sums.
    """

    step: int
    routing: int
    row_groups: int
    k_groups: int
    depth: int
    stages: int
    split: int
    blocks: int  # that are to fit on an SM
    tile: int
    wide: bool
    slabs: int
    chunks: int
    share: int  # chunks for each block of a split
    tokens: int  # of the call
    reason: str | None = None  # why there is no such launch, if so

    @property
    def row_units(self) -> int:
        return math.ceil(self.slabs / self.row_groups)

    @property
    def groups(self) -> int:
        return self.row_groups * self.k_groups

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.tile,) if self.routing == SCAN else SIZES[self.tile]

    @property
    def known(self) -> bool:
        return self.routing == SCAN or self.tile in KNOWN

    @property
    def raised(self) -> bool:
        return _is_raised(self.groups, self.tile, self.known)

    @property
    def threads(self) -> int:
        return 128 * self.groups + (128 if self.raised else 32)

    @property
    def shared(self) -> int:
        """Bytes: ring, results on their way out, factors, barriers, what was scanned, totals."""
        rows, piece = SLAB * self.row_groups, min(self.tile, 64)
        chunk = self.tile * 128 + self.row_groups * PIECE_BYTES
        ring = self.stages * math.ceil(self.depth * chunk / 1024) * 1024
        whole = self.k_groups == self.split == 1
        if self.step == ADD:
            results = 0
        elif whole and (self.step == UP or self.routing == LAUNCH):
            results = self.row_groups * piece * (80 if self.step == UP else 144)
        else:
            results = self.k_groups * piece * (rows + 4) * 4
        totals = self.tokens * (rows + 4) * 4 if self.step == ADD else 0
        return ring + results + 8 * rows + 16 * self.stages + 1024 + totals

    def template(self, x: str) -> str:
        """The kernel's name for tokens of type `x`."""
        numbers = (
            *(self.step, self.routing, self.row_groups, self.k_groups, self.depth, self.stages),
            *(self.split, self.blocks, self.tile, *(self.sizes if self.known else ())),
        )
        return f"nvfp4_moe<{x},{'float' if self.wide else x},{','.join(map(str, numbers))}>"

    def has_registers(self, blocks: int) -> bool:
        """Whether so many blocks have the registers that the kernel takes: it must never spill.

        A thread needs half a register for each token's sums and about 80 more, or a few.
        """
        if self.raised:
            most = {32: 3, 96: 3, 128: 3, 192: 2} if self.routing != SCAN else {}
            return blocks == 1 and self.groups <= most.get(self.tile, 4)
        warps = math.ceil(blocks * self.threads / 32 / 4)  # of a quarter of the SM
        needed = {8: 80, 16: 96, 32: 120, 48: 128, 64: 112, 96: 168, 128: 160}
        if self.routing == SCAN:  # tiles of one size alone
            needed = {8: 80, 16: 88, 32: 96, 64: 112}
        return 512 // warps // 8 * 8 >= needed[self.tile]


def _is_raised(groups: int, tile: int, known: bool) -> bool:
    """As the kernel has it: whether the producer is a warpgroup that gives registers away."""
    if tile > 128:
        return True
    return (groups > 2 and tile > (48 if known else 64)) or (
        groups > 3 and tile > (8 if known else 32)
    )


@functools.lru_cache(maxsize=4096)
def products(
    config: MoeConfig, tokens: int, topk: int, hidden: int, inner: int, device: Device
) -> tuple[Product, Product]:
    """Both products of a call."""
    routing, tile = LAUNCH, config.tile
    if config.routing == "scan" and tokens * topk <= MOST_SCANNED:
        routing, tile = SCAN, next(size for size in ONE_TILE if size >= tokens)
    # Of scanned slots sums have a launch of their own: there are three at most then, too.
    added = config.added and routing == LAUNCH
    added = added and max(tokens, tile) <= MOST_ADDED and config.down[1] == 1

    def product(step: int, cut: Cut, rows: int, columns: int) -> Product:
        row_groups, k_groups, depth, stages, split, blocks = cut
        chunks = math.ceil(columns / CHUNK)
        share = chunks if step == ADD else math.ceil(chunks / split)

        def of(reason: str | None = None) -> Product:
            return Product(
                *(step, routing, row_groups, k_groups, depth, stages, split, blocks, tile),
                *(config.wide or step != DOWN, math.ceil(rows / SLAB), chunks, share, tokens),
                reason,
            )

        room = device.shared_per_block
        while of().shared > room and (depth, stages) != (2 * k_groups, 2):
            if stages > 2:
                stages -= 1
            else:
                depth = max(2 * k_groups, depth // 2 // (2 * k_groups) * 2 * k_groups)
        shared = of().shared
        # An SM has 1 KB more than a block may have, and each block takes 1 KB of its own.
        blocks = max(1, min(blocks, (room + 1024) // (shared + 1024)))
        while blocks > 1 and not of().has_registers(blocks):
            blocks -= 1
        if reason := why_no_room(shared, device):
            return of(reason)
        if step != ADD and (split - 1) * share >= chunks:
            return of(f"{chunks} chunks of columns cannot be split in {split}")
        if not of().has_registers(1):
            return of(f"tiles of {tile} need more registers than {of().groups} warpgroups have")
        return of()

    down = config.down
    if config.added and not added:  # its split was to add by
        down = (*down[:4], 1, down[5])
    up = product(UP, config.up, 2 * inner, hidden)
    return up, product(ADD if added else DOWN, down, hidden, inner)


# Cuts that won somewhere when sensible ones were timed (H200, bf16; Qwen3-30B and DeepSeek-V3), by
# how many tokens an expert has: up to so many, the largest tile, cuts for up and for down.
_A, _B, _C = (1, 1, 4, 3, 1, 4), (1, 1, 4, 4, 1, 3), (1, 1, 8, 2, 1, 3)
_D, _E = (2, 1, 4, 3, 1, 2), (2, 1, 4, 4, 1, 2)
_G, _H, _I = (3, 1, 4, 3, 1, 1), (4, 1, 4, 3, 1, 1), (3, 1, 2, 4, 1, 1)
_J, _K, _L = (3, 1, 2, 3, 1, 1), (3, 1, 4, 2, 1, 1), (2, 1, 2, 3, 1, 1)
_M, _N = (2, 1, 6, 3, 1, 2), (4, 1, 6, 3, 1, 1)
_CUTS: tuple[tuple[float, int, tuple[Cut, ...], tuple[Cut, ...]], ...] = (
    (1.5, 8, (_B, _A, _C, _E), (_D, _E, _A, _M)),
    (5.0, 8, (_D, _B, _C), (_D, _E, _M, _N)),
    (12.0, 16, (_A, _E, _D), (_D, _E, _A)),
    (40.0, 48, (_H, _G), (_H, _G)),
    (math.inf, 128, (_I,), (_I, _J)),
)
# Beside those, of the neighbours: the first cuts of each.
_OTHERS = {8: (16,), 16: (8, 32), 48: (16, 32, 64), 128: (96, 192, 64)}
_FIRST: dict[int, tuple[Cut, Cut]] = {
    8: (_B, _D),
    16: (_A, _D),
    32: (_B, _E),
    48: (_H, _H),
    64: (_G, _G),
    96: (_I, _K),
    128: (_I, _I),
    192: (_L, _L),
}
_EVERY = frozenset(
    cut for cuts in (*(ups + downs for _, _, ups, downs in _CUTS), *_FIRST.values()) for cut in cuts
)
_SPLITS = (4, 8)  # blocks that add up; of 8 is the largest cluster that any device has
_ADDING = frozenset((*cut[:4], split, cut[5]) for cut in _EVERY for split in _SPLITS)
# More than this of fp32 results would not stay in the L2 cache until they are added.
_WIDE_BYTES = 32 << 20


@functools.lru_cache(maxsize=1024)
def candidates(
    tokens: int, topk: int, experts: int, hidden: int, inner: int, device: Device
) -> tuple[MoeConfig, ...]:
    """The configs worth timing, the likely best one first."""
    sizes = (tokens, topk, hidden, inner, device)
    return tuple(
        config
        for config in dict.fromkeys(_all(tokens, topk, experts, hidden))
        if all(one.reason is None for one in products(config, *sizes))
    )


def candidates_of(problem: Problem) -> tuple[MoeConfig, ...]:
    dims = (problem.dim(name) for name in ("k", "E", "H", "I"))
    return candidates(problem.rows, *dims, problem.device)


def why_rejected(config: MoeConfig) -> str | None:
    """Why `config` is not one of `candidates` for any call. `products` says if it fits this one."""
    choices: Choices = {
        "up": _EVERY,
        "down": _ADDING if config.added else _EVERY,
        "tile": TILES,
        "routing": ("scan",),
        "persistent": (True,),
    }
    return why_unlisted(config, choices)


def _all(tokens: int, topk: int, experts: int, hidden: int) -> Iterator[MoeConfig]:
    slots = tokens * topk
    each = slots / max(1, experts)
    wide = slots * hidden * 4 <= _WIDE_BYTES
    _, tile, ups, downs = next(cuts for cuts in _CUTS if each <= cuts[0])
    for up in ups:
        for down in downs:
            yield MoeConfig(up, down, tile, "scan", False, wide)
    for other in _OTHERS[tile]:
        yield MoeConfig(*_FIRST[other], other, "scan", False, wide)
    # A launch less, and slower where both were timed: by 19% at 16 tokens of Qwen3-30B, by 24% at
    # 64 (H200, 2026-11-16).
    if slots > MOST_SCANNED and tokens <= MOST_ADDED:
        small = min(tile, 64)
        for down, split in ((_B, 8), (_E, 8), (_B, 4)):
            yield MoeConfig(ups[0], (*down[:4], split, down[5]), small, "scan", True)
