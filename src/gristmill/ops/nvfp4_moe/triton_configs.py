"""How the Triton kernel cuts the products of experts into tiles: every threshold stands here.

As for the linear product, a few configs are enumerated, those that do not fit the device are left
out, and the rest is ordered by `estimate`. A row of a table may use any that is enumerated for some
number of slots and fits (`why_rejected`). What a token's expert costs depends on how many others
have the same one; nothing here knows that, so slots are taken as spread evenly.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from gristmill.ops.nvfp4_linear.triton_configs import (
    GRIDS,
    SHAPE,
    STAGES,
    RowsConfig,
    product_us,
    shared_bytes,
)
from gristmill.select.choices import why_no_room, why_unlisted
from gristmill.select.device import Device

CANDIDATES = 10
# Up to so many slots every program of the products looks at all of them, and nothing is sorted.
FEW = 64
_GROUPS = (1, 8)


@dataclass(frozen=True)
class ExpertsConfig:
    """Tiles of block_m slots by block_n rows of a matrix, fed by `stages` buffers along K.

    The same for both products; of the first's rows a half are the gate's and a half up's. `group`
    tiles of slots are walked together, block of rows by block of rows, so that those that share an
    expert find its weights in L2.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int
    group: int = 1

    def product(self) -> RowsConfig:
        """One of the products as a linear one."""
        return RowsConfig(self.block_m, self.block_n, self.block_k, self.stages, self.warps)


@dataclass(frozen=True)
class Sizes:
    """What a config depends on: slots, experts here, and the sizes of their matrices."""

    slots: int
    experts: int
    hidden: int
    inner: int

    @property
    def used(self) -> float:
        """How many experts have a slot, if slots fall anywhere."""
        return self.experts * -math.expm1(self.slots * math.log1p(-1 / (self.experts + 1e-9)))

    @property
    def each(self) -> float:
        """How many slots an expert has, of those that have one."""
        return self.slots / max(1.0, self.used)


def candidates(
    slots: int, experts: int, hidden: int, inner: int, device: Device
) -> tuple[ExpertsConfig, ...]:
    """The most promising configs, the best first.

    Of nearby numbers of slots one answers for all: a growing batch must not pay for this at every
    step, nor compile another kernel.
    """
    return _ordered(Sizes(1 << (slots - 1).bit_length(), experts, hidden, inner), device)


def why_rejected(config: ExpertsConfig, hidden: int, inner: int, device: Device) -> str | None:
    """Why `candidates` cannot give `config` for any number of slots."""
    choices = {SHAPE: GRIDS, "stages": STAGES, "group": _GROUPS}
    return why_unlisted(config, choices) or _why_unsuited(config, hidden, inner, device)


@functools.lru_cache(maxsize=1024)
def _ordered(sizes: Sizes, device: Device) -> tuple[ExpertsConfig, ...]:
    fitting = [
        config
        for config in _all(sizes)
        if _why_unsuited(config, sizes.hidden, sizes.inner, device) is None
    ]
    fitting.sort(key=lambda one: (estimate(one, sizes, device), -one.stages, repr(one)))
    return tuple(fitting[:CANDIDATES])


def _all(sizes: Sizes) -> Iterator[ExpertsConfig]:
    """Every config whose tiles are neither too tall nor too many for the slots."""
    for (block_m, block_n, block_k, warps), stages in itertools.product(GRIDS, STAGES):
        if block_m > max(16, 2 * sizes.each) or block_m > max(8, sizes.slots):
            continue
        if block_m < 64 and sizes.each > 4 * block_m:
            continue
        # Most experts have one tile, or not.
        group = _GROUPS[2 * sizes.each > block_m]
        yield ExpertsConfig(block_m, block_n, block_k, stages, warps, group)


def _why_unsuited(config: ExpertsConfig, hidden: int, inner: int, device: Device) -> str | None:
    """Why a config that is enumerated is not valid for matrices of these sizes."""
    if config.block_k >= 256 and 2 * config.block_k > max(hidden, inner):
        return f"block_k={config.block_k} is too much for {max(hidden, inner)} columns"
    return why_no_room(shared_bytes(config.product()), device)


def estimate(config: ExpertsConfig, sizes: Sizes, device: Device) -> float:
    """About how many us both products take; what comes before and after is the same for all.

    Memory must deliver the weights of every expert that has a slot.
    """
    total = 0.0
    for rows, depth in ((2 * sizes.inner, sizes.hidden), (sizes.hidden, sizes.inner)):
        programs = tiles_expected(config, sizes) * math.ceil(rows / config.block_n)
        moved = sizes.used * rows * depth * 9 / 16 + 2.0 * sizes.slots * (depth + rows)
        total += product_us(config.product(), programs, depth, moved, device)
    return total


def tiles_expected(config: ExpertsConfig, sizes: Sizes) -> float:
    """Tiles of slots: the last one of an expert is half empty."""
    return sizes.used * max(1.0, sizes.each / config.block_m + 0.5)
