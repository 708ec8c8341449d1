"""How the Triton kernels cut a product into tiles: every threshold of theirs stands here.

Candidates are enumerated, those that do not fit are left out, and the rest is ordered by
`estimate`, a model of the time in a few lines. The first is what runs when no table knows better;
the first few, different enough from each other, are what tuning times.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from gristmill.ops.linear.problem import Product
from gristmill.select.device import Device

# Of an H200, measured: what memory gives, what L2 gives, what the tensor cores do in large 16-bit
# products of random numbers. For other devices only their ratios matter here, which are alike.
_MEMORY_RATE = 4.0e12
_L2_RATE = 9.0e12
_TENSOR_RATE = 740e12
_FP32_RATE = 45e12
# Tiles of 128 x 256 reach the tensor cores' full rate; of smaller ones a share that falls with
# their ratio of work to bytes. Without wgmma (fewer than 64 rows of the wide side) it is half.
_FULL_TILE = 128 * 256 / (128 + 256)
_WITHOUT_WGMMA = 0.5
# Bytes that an SM must have asked for at any time, to keep memory busy for the latency of a read.
_BYTES_UNDER_WAY = 64 * 1024
# An SM alone can draw no more than so many times its share of the memory's rate.
_GREED = 2.0
_LAUNCH_US = 2.0
_WAVE_US = 0.6  # from the first load of a tile to its first product, and its last to its store
_SECOND_KERNEL_US = 1.8

_SHARED_RESERVED = 2048  # of the system's, and barriers
_REGISTERS = 65536
# fp32 sums per thread: the rest of 255 registers goes to addresses and, where the tensor cores do
# not read their operands from shared memory, to these.
_ACCUMULATORS = 128
_ACCUMULATORS_BESIDE_OPERANDS = 64
# Where matrices must be read element by element, the elements of a step per thread: they wait in
# registers.
_ELEMENTS = 32
CANDIDATES = 20


@dataclass(frozen=True)
class MatmulConfig:
    """Tiles of (block_m, block_n) sums, fed by `stages` buffers of block_k along K.

    `group` rows of tiles are walked together, for L2. `split_k` programs share a tile. `swap`: the
    product is computed transposed, for few rows. `parts`: pieces in which a persistent program
    stores a tile. `specialize`: it has warps that only load, beside `warps` and as many more that
    multiply.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int
    group: int = 8
    split_k: int = 1
    swap: bool = False
    parts: int = 1
    specialize: bool = False


@functools.lru_cache(maxsize=4096)
def candidates(
    kind: str, product: Product, rows: int, device: Device, count: int = CANDIDATES
) -> tuple[MatmulConfig, ...]:
    """The `count` most promising configs of a kind ("tiles", "split_k" or "persistent").

    `rows` stands for those of `product`, which may be another number (batch invariance).
    """
    itemsize = product.dtype.itemsize
    fitting = [
        config
        for config in dict.fromkeys(_all(kind, product, rows, device))
        if shared_bytes(kind, config, itemsize) <= device.shared_per_block
        and _accumulators(config) <= _most_accumulators(config, product, device)
        and (_vectors(product) or _elements(config) <= _ELEMENTS)
    ]
    fitting.sort(key=lambda config: (estimate(kind, product, rows, config, device), repr(config)))
    return tuple(itertools.islice(_different(fitting), count))


def estimate(kind: str, product: Product, rows: int, config: MatmulConfig, device: Device) -> float:
    """About how many us the kernel takes: the longer of products, L2 and memory, and overheads."""
    itemsize = product.dtype.itemsize
    multiprocessors = max(1, device.multiprocessors)
    tiles = (
        product.batch
        * math.ceil(rows / config.block_m)
        * math.ceil(product.columns / config.block_n)
    )
    programs = tiles * config.split_k
    each = math.ceil(programs / multiprocessors)
    resident = min(each, _resident(kind, config, itemsize, device))
    steps = math.ceil(product.depth / (config.block_k * config.split_k))

    operations = 2.0 * config.block_m * config.block_n * config.block_k * steps
    rate = _tensor_rate(config, itemsize) / multiprocessors
    read = (min(rows, config.block_m) + config.block_n) * config.block_k * itemsize
    l2_rate = _L2_RATE / multiprocessors
    work = each * max(operations / rate, read * steps / l2_rate)

    moved = (
        product.batch
        * itemsize
        * (rows * product.depth + product.depth * product.columns + rows * product.columns)
    )
    busy = min(programs, multiprocessors) / multiprocessors
    under_way = resident * (config.stages - 1) * read
    memory = moved / (_MEMORY_RATE * min(1.0, _GREED * busy))
    memory *= max(1.0, _BYTES_UNDER_WAY / under_way)

    waves = 1 if kind == "persistent" else math.ceil(each / max(1, resident))
    us = _LAUNCH_US + 1e6 * max(work, memory) + _WAVE_US * waves
    if config.split_k > 1:
        partials = 4.0 * product.batch * rows * product.columns * config.split_k
        us += _SECOND_KERNEL_US + 1e6 * 2 * partials / _L2_RATE
    return us


def shared_bytes(kind: str, config: MatmulConfig, itemsize: int) -> int:
    """The shared memory of a program: no less than what the compiler will say."""
    tile = (config.block_m + config.block_n) * config.block_k * itemsize
    buffers = config.stages if _wgmma(config) or kind == "persistent" else config.stages - 1
    stored = config.block_m * config.block_n * (itemsize if config.split_k == 1 else 4)
    if kind == "persistent":
        # The tile is stored while the next one is loaded already.
        return buffers * tile + stored // config.parts + _SHARED_RESERVED
    return max(buffers * tile, stored) + _SHARED_RESERVED


def _resident(kind: str, config: MatmulConfig, itemsize: int, device: Device) -> int:
    by_shared = (device.shared_per_block + _SHARED_RESERVED) // shared_bytes(kind, config, itemsize)
    registers = min(255, 48 + 2 * _accumulators(config))
    by_registers = _REGISTERS // (registers * 32 * config.warps)
    return max(1, min(by_shared, by_registers))


def _tensor_rate(config: MatmulConfig, itemsize: int) -> float:
    if itemsize == 4:
        return _FP32_RATE
    share = config.block_m * config.block_n / (config.block_m + config.block_n) / _FULL_TILE
    rate = _TENSOR_RATE * min(1.0, math.sqrt(share))
    return rate if _wgmma(config) else rate * _WITHOUT_WGMMA


def _most_accumulators(config: MatmulConfig, product: Product, device: Device) -> int:
    from_shared = device.capability[0] in (9, 10) and _wgmma(config)
    # erf needs registers of its own for each of its values.
    if from_shared and product.activation != "gelu":
        return _ACCUMULATORS
    return _ACCUMULATORS_BESIDE_OPERANDS


def _elements(config: MatmulConfig) -> int:
    return (config.block_m + config.block_n) * config.block_k // (32 * config.warps)


def _vectors(product: Product) -> bool:
    """Whether both matrices can be copied to shared memory in pieces of 4 bytes or more."""
    if not (product.a_aligned and product.b_aligned):
        return False
    contiguous = [product.depth if product.a_strides[2] == 1 else product.rows]
    contiguous.append(product.depth if product.b_strides[1] == 1 else product.columns)
    return all(count * product.dtype.itemsize % 4 == 0 for count in contiguous)


def _wgmma(config: MatmulConfig) -> bool:
    return (config.block_n if config.swap else config.block_m) >= 64


def _accumulators(config: MatmulConfig) -> int:
    groups = 2 if config.specialize else 1  # of `warps` warps, which share the tile
    return config.block_m * config.block_n // (32 * config.warps * groups)


def _all(kind: str, product: Product, rows: int, device: Device) -> Iterator[MatmulConfig]:
    """Every config of a kind whose tiles are not mostly empty."""
    if product.dtype.itemsize == 4:
        yield from _all_fp32(kind, product, rows)
        return
    if kind == "persistent":
        yield from _all_persistent(product, rows, device.capability[0])
        return
    splits = (1,) if kind == "tiles" else (2, 4, 8, 16)
    tall = max(16, _power_above(rows))
    deep = (64, 128, 256, 512) if _vectors(product) else (16, 32, 64)
    for block_m, block_n, block_k, stages, split in itertools.product(
        (16, 32, 64, 128, 256), (16, 32, 64, 128, 256), deep, (3, 4, 5, 6), splits
    ):
        if block_m > tall or block_n > max(16, _power_above(product.columns)):
            continue
        if block_k * split > max(64, _power_above(product.depth)):
            continue
        if block_m * block_n > 128 * 256 or (block_m >= 128 and block_k > 64 and block_n >= 128):
            continue
        warps = 8 if block_m * block_n > 128 * 128 else 4
        base = MatmulConfig(block_m, block_n, block_k, stages, warps, split_k=split)
        yield base
        if block_m * block_n == 128 * 128:
            yield MatmulConfig(block_m, block_n, block_k, stages, 8, split_k=split)
        if block_m <= 64 <= block_n <= 128:
            yield MatmulConfig(block_m, block_n, block_k, stages, 4, split_k=split, swap=True)


def _all_persistent(product: Product, rows: int, capability: int) -> Iterator[MatmulConfig]:
    for (block_m, block_n, warps), block_k, stages, parts in itertools.product(
        (
            (64, 128, 4),
            (64, 256, 4),
            (128, 64, 4),
            (128, 128, 4),
            (128, 128, 8),
            (128, 256, 8),
            (256, 128, 8),
        ),
        (64, 128),
        (3, 4, 5),
        (1, 2, 4),
    ):
        if block_m > max(64, _power_above(rows)) or block_n > max(
            64, _power_above(product.columns)
        ):
            continue
        if block_n // parts < 64:
            continue
        yield MatmulConfig(block_m, block_n, block_k, stages, warps, parts=parts)
        # Triton 3.6 cannot give the warps their shares of a tile that is stored in parts.
        if block_m >= 128 and parts == 1 and capability == 9:
            yield MatmulConfig(block_m, block_n, block_k, stages, 4, parts=parts, specialize=True)


def _all_fp32(kind: str, product: Product, rows: int) -> Iterator[MatmulConfig]:
    """Without tensor cores: small tiles, whose operands are registers."""
    splits = (1,) if kind == "tiles" else (2, 4, 8)
    for block_m, block_n, block_k, stages, split in itertools.product(
        (16, 32, 64), (16, 32, 64, 128), (16, 32, 64), (2, 3), splits
    ):
        if block_m > max(16, _power_above(rows)) or block_n > max(
            16, _power_above(product.columns)
        ):
            continue
        if block_m * block_n > 64 * 64:
            continue
        yield MatmulConfig(block_m, block_n, block_k, stages, 4, split_k=split)


def _different(ordered: list[MatmulConfig]) -> Iterator[MatmulConfig]:
    """Leave out what differs from two earlier ones by stages, parts or warps alone."""
    seen: dict[tuple[int, ...], int] = {}
    for config in ordered:
        key = (
            config.block_m,
            config.block_n,
            config.block_k,
            config.split_k,
            config.swap,
            config.specialize,
        )
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= 2:
            yield config


def _power_above(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()
