"""How the Triton kernel cuts an NVFP4 product into tiles: every threshold of it stands here.

A few configs are enumerated by the number of rows, those that do not fit the device are left out,
and the rest is ordered by `estimate`, a model of the time in a few lines. The first is what runs
when no table knows better; all of them are what tuning times. A row of a table may use any
that is enumerated for some number of rows and fits (`why_rejected`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gristmill.ops.linear.configs import why_large_sums
from gristmill.select.choices import Choices, why_no_room, why_unlisted
from gristmill.select.device import Device

CANDIDATES = 12

# The model's numbers; time is in us. They are counted in compiled loops and taken from data sheets,
# not fitted to timings; only ratios matter, and these are alike on all devices.
_INSTRUCTIONS = 9.0  # of a thread for each byte of codes: most of them decode it
_LANES = 128 * 1.6e3  # of an SM, per us
_TENSOR_RATE = 3.5e6  # operations of an SM's tensor cores in such loops, per us, by mma.sync
_WARPGROUP_RATE = 5.0e6  # and by the instructions of sm_90 and sm_100
_BANDWIDTH = 2.0e6  # bytes per us, of a device of which it is not known
_LATENCY_US = 0.9  # of a load; `stages - 1` of them are under way at a time
_WAVE_US = 1.0
_LAUNCH_US = 1.5
_SECOND_KERNEL_US = 1.6
_PARTIALS_RATE = 6.0e6

_REGISTERS = 65536
_ACCUMULATORS = 64  # fp32 sums per thread, beside the operands, which are registers
_SHARED_RESERVED = 2048
_LEAST_STEPS = 4  # of a share of K

# What is enumerated, for experts too: block_m, block_n, block_k and warps; stages.
GRIDS = (
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
)
STAGES = (3, 4)
SHAPE = "block_m block_n block_k warps"
_SPLITS = (1, 2, 4, 8)


@dataclass(frozen=True)
class RowsConfig:
    """Tiles of block_m rows of x by block_n of the weight, fed by `stages` buffers along K.

    `split_k` programs share a tile. `early`: this kernel asks for its first tiles of the weight
    before the one before it has ended, and lets the next one begin as early.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int
    split_k: int = 1
    early: bool = False


@functools.lru_cache(maxsize=1024)
def candidates(rows: int, columns: int, depth: int, device: Device) -> tuple[RowsConfig, ...]:
    """The most promising configs, the best first.

    Of nearby numbers of rows one answers for all: a growing batch must not pay for this at every
    step, nor compile another kernel.
    """
    rounded = 1 << (rows - 1).bit_length() if rows < 128 else -(-rows // 128) * 128
    return _ordered(rounded, columns, depth, device)


def why_rejected(
    config: RowsConfig, rows: int, columns: int, depth: int, device: Device
) -> str | None:
    """Why `config` is not one of `candidates` for any number of rows, or does not fit these."""
    early = (False, True) if device.capability >= (9, 0) else (False,)
    choices: Choices = {SHAPE: GRIDS, "stages": STAGES, "split_k": _SPLITS, "early": early}
    return why_unlisted(config, choices) or _why_unsuited(config, rows, columns, depth, device)


@functools.lru_cache(maxsize=1024)
def _ordered(rows: int, columns: int, depth: int, device: Device) -> tuple[RowsConfig, ...]:
    fitting = [
        replace(config, early=_is_early(config, rows, columns, device))
        for config in _all(rows)
        if _why_unsuited(config, rows, columns, depth, device) is None
    ]
    fitting.sort(
        key=lambda one: (estimate(one, rows, columns, depth, device), -one.stages, repr(one))
    )
    found: list[RowsConfig] = []
    for config in fitting:
        alike = [one for one in found if replace(one, split_k=1) == replace(config, split_k=1)]
        if len(alike) < 2:  # the others differ in the number of shares alone
            found.append(config)
    return tuple(found[:CANDIDATES])


def _all(rows: int) -> Iterator[RowsConfig]:
    """Every config whose tiles are neither too tall nor too many for the rows."""
    for (block_m, block_n, block_k, warps), stages, split in itertools.product(
        GRIDS, STAGES, _SPLITS
    ):
        if block_m <= max(8, rows) and (block_m >= 64 or rows <= 4 * block_m):
            yield RowsConfig(block_m, block_n, block_k, stages, warps, split)


def _why_unsuited(
    config: RowsConfig, rows: int, columns: int, depth: int, device: Device
) -> str | None:
    """Why a config that is enumerated is not valid for this GEMM.

    The number of rows matters for the partial sums of a split only.
    """
    split, block_k = config.split_k, config.block_k
    if split > 1 and depth < block_k * split * _LEAST_STEPS:
        return f"split_k={split} with block_k={block_k} is too much for K={depth}"
    if split > 1 and (reason := why_large_sums(split * rows * columns)):
        return reason
    return why_no_room(shared_bytes(config), device)


def estimate(config: RowsConfig, rows: int, columns: int, depth: int, device: Device) -> float:
    """About how many us the kernel takes."""
    programs = tile_count(config, rows, columns) * config.split_k
    moved = columns * depth * 9 / 16 + 2.0 * rows * (depth + columns)
    us = _LAUNCH_US + product_us(config, programs, depth, moved, device)
    if config.split_k > 1:
        us += _SECOND_KERNEL_US + 8.0 * rows * columns * config.split_k / _PARTIALS_RATE
    return us


def product_us(
    config: RowsConfig, programs: float, depth: int, moved: float, device: Device
) -> float:
    """About how many us so many programs take, without the launch, if they move so many bytes.

    An SM gets `each` of them, some at a time. A step along K takes as long as decoding and
    products, which hardly overlap, or as the latency of its loads; meanwhile memory must deliver
    every byte once.
    """
    each = math.ceil(programs / max(1, device.multiprocessors))
    resident = min(each, _resident(config, device))
    steps = math.ceil(depth / (config.block_k * config.split_k))
    decoding = (
        config.block_n * config.block_k / 2 * _INSTRUCTIONS * _decoded(config, device) / _LANES
    )
    rate = _WARPGROUP_RATE if by_warpgroup(config, device) else _TENSOR_RATE
    products = 2.0 * config.block_m * config.block_n * config.block_k / rate
    step = max(resident * (decoding + products), _LATENCY_US / (config.stages - 1))
    work = math.ceil(each / resident) * (steps * step + _WAVE_US)
    return max(work, moved / (device.bandwidth / 1e6 or _BANDWIDTH))


def by_warpgroup(config: RowsConfig, device: Device) -> bool:
    """Whether the compiler takes the instructions of whole warpgroups: sm_90 and sm_100 have them.

    The weight is then decoded byte by byte on sm_90: that is how its registers want it.
    """
    tall = config.block_n >= 64 and config.block_m >= 16 and config.warps % 4 == 0
    return tall and device.capability[0] in (9, 10)


def bytes_at_a_time(config: RowsConfig, device: Device) -> int:
    """Four bytes of codes are in a register, save for the operands of sm_90's warpgroups: one."""
    return 1 if device.capability[0] == 9 and by_warpgroup(config, device) else 4


def _decoded(config: RowsConfig, device: Device) -> int:
    """How many warps decode the same values: those that share rows of the weight."""
    if by_warpgroup(config, device):
        return 1
    return max(1, 16 * config.warps // config.block_n, min(config.warps, config.block_m // 32))


def tile_count(config: RowsConfig, rows: int, columns: int) -> int:
    return math.ceil(rows / config.block_m) * math.ceil(columns / config.block_n)


def shared_bytes(config: RowsConfig) -> int:
    """The shared memory of a program: no less than what the compiler will say."""
    x, codes = 2 * config.block_m * config.block_k, config.block_n * config.block_k // 2
    stored = 4 * config.block_m * config.block_n
    stage = x + codes + codes // 8
    return max(config.stages * stage, stored) + _SHARED_RESERVED


def _resident(config: RowsConfig, device: Device) -> int:
    by_shared = (device.shared_per_block + _SHARED_RESERVED) // shared_bytes(config)
    sums = config.block_m * config.block_n // (32 * config.warps)
    by_registers = _REGISTERS // (min(255, 100 + sums) * 32 * config.warps)
    return max(1, min(by_shared, by_registers))


def _is_early(config: RowsConfig, rows: int, columns: int, device: Device) -> bool:
    """Whether kernels should overlap: each SM has one program, and room for one of the next."""
    alone = tile_count(config, rows, columns) * config.split_k <= device.multiprocessors
    return device.capability >= (9, 0) and alone and _resident(config, device) > 1
