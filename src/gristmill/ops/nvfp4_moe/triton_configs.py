"""How the Triton kernel cuts the products of experts into tiles: every threshold stands here.

As for the linear product, a few configs are enumerated, those that do not fit the device are left
out, and the rest is ordered by `estimate`. What a token's expert costs depends on how many others
have the same one; nothing here knows that, so slots are taken as spread evenly.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from gristmill.ops.nvfp4_linear.triton_configs import RowsConfig, by_warpgroup, shared_bytes
from gristmill.select.device import Device

CANDIDATES = 10
# Up to so many slots every program of the products looks at all of them, and nothing is sorted.
FEW = 64

# The model's numbers; time is in us. As in nvfp4_linear/triton_configs.py they are counted and from
# data sheets, not fitted.
_INSTRUCTIONS = 9.0
_LANES = 128 * 1.6e3
_TENSOR_RATE = 3.5e6
_WARPGROUP_RATE = 5.0e6
_BANDWIDTH = 2.0e6
_LATENCY_US = 0.9
_WAVE_US = 1.0
_REGISTERS = 65536
_SHARED_RESERVED = 2048


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


@functools.lru_cache(maxsize=1024)
def _ordered(sizes: Sizes, device: Device) -> tuple[ExpertsConfig, ...]:
    fitting = [
        config
        for config in _all(sizes)
        if shared_bytes(config.product()) <= device.shared_per_block
    ]
    fitting.sort(key=lambda one: (estimate(one, sizes, device), -one.stages, repr(one)))
    return tuple(fitting[:CANDIDATES])


def _all(sizes: Sizes) -> Iterator[ExpertsConfig]:
    for (block_m, block_n, block_k, warps), stages in itertools.product(
        (
            (8, 64, 256, 4),
            (8, 64, 128, 2),
            (8, 32, 512, 4),
            (16, 64, 128, 2),
            (16, 64, 256, 4),
            (16, 128, 128, 4),
            (32, 64, 128, 4),
            (32, 128, 128, 4),
            (64, 64, 128, 4),
            (64, 128, 64, 4),
            (64, 128, 128, 8),
            (128, 128, 64, 8),
        ),
        (3, 4),
    ):
        if block_m > max(16, 2 * sizes.each) or block_m > max(8, sizes.slots):
            continue
        if block_m < 64 and sizes.each > 4 * block_m:
            continue
        if block_k >= 256 and 2 * block_k > max(sizes.hidden, sizes.inner):
            continue
        # Most experts have one tile, or not.
        group = 1 if 2 * sizes.each <= block_m else 8
        yield ExpertsConfig(block_m, block_n, block_k, stages, warps, group)


def estimate(config: ExpertsConfig, sizes: Sizes, device: Device) -> float:
    """About how many us both products take; what comes before and after is the same for all.

    An SM gets some of the programs at a time. A step along K takes as long as decoding and
    products, which hardly overlap, or as the latency of its loads; meanwhile memory must deliver
    the weights of every expert that has a slot.
    """
    bandwidth = device.bandwidth / 1e6 or _BANDWIDTH
    total = 0.0
    for rows, depth in ((2 * sizes.inner, sizes.hidden), (sizes.hidden, sizes.inner)):
        programs = tiles_expected(config, sizes) * math.ceil(rows / config.block_n)
        each = math.ceil(programs / max(1, device.multiprocessors))
        resident = min(each, _resident(config, device))
        decoding = (
            config.block_n * config.block_k / 2 * _INSTRUCTIONS * _decoded(config, device) / _LANES
        )
        by_group = by_warpgroup(config.product(), device)
        rate = _WARPGROUP_RATE if by_group else _TENSOR_RATE
        products = 2.0 * config.block_m * config.block_n * config.block_k / rate
        step = max(resident * (decoding + products), _LATENCY_US / (config.stages - 1))
        steps = math.ceil(depth / config.block_k)
        work = math.ceil(each / resident) * (steps * step + _WAVE_US)
        moved = sizes.used * rows * depth * 9 / 16 + 2.0 * sizes.slots * (depth + rows)
        total += max(work, moved / bandwidth)
    return total


def tiles_expected(config: ExpertsConfig, sizes: Sizes) -> float:
    """Tiles of slots: the last one of an expert is half empty."""
    return sizes.used * max(1.0, sizes.each / config.block_m + 0.5)


def _decoded(config: ExpertsConfig, device: Device) -> int:
    """How many warps decode the same values: those that share rows of the weight."""
    if by_warpgroup(config.product(), device):
        return 1
    return max(1, 16 * config.warps // config.block_n, min(config.warps, config.block_m // 32))


def _resident(config: ExpertsConfig, device: Device) -> int:
    by_shared = (device.shared_per_block + _SHARED_RESERVED) // shared_bytes(config.product())
    sums = config.block_m * config.block_n // (32 * config.warps)
    by_registers = _REGISTERS // (min(255, 100 + sums) * 32 * config.warps)
    return max(1, min(by_shared, by_registers))
