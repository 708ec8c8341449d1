"""How the Triton kernels cut a product into tiles: every threshold of theirs stands here.

Candidates are enumerated, those that do not fit are left out, and the rest is ordered by
`estimate`, a model of the time in a few lines. The first is what runs when no table knows better;
the first few, different enough from each other, are what tuning times. A row of a table may use
any that is enumerated for some number of rows and fits (`why_rejected`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gristmill.ops.linear.problem import Product
from gristmill.select.choices import Choices, why_no_room, why_unlisted
from gristmill.select.device import Device

# The model's numbers, fitted to timings of 91 products of bf16 on an H200 (1 to 4,096 rows, a cold
# L2), 31 configs for each, such that what is picked loses little against the best of these and
# torch's own product: 3% on average. Time is in us. For other devices only the ratios matter here,
# which are alike.
_MEMORY_RATE = 4.0e6  # bytes
_L2_RATE = 8.8e6
_TENSOR_RATE = 740e6  # operations
_FP32_RATE = 45e6
# Tiles of 128 x 256 reach the tensor cores' full rate; smaller ones a share that falls with their
# ratio of work to bytes, those without wgmma (narrower than 64) another.
_FULL_TILE = 128 * 256 / (128 + 256)
_TILE_POWER = 0.7
_WITHOUT_WGMMA = 0.37
# How long a load takes, by each thread or by TMA; `stages - 1` of them are under way at a time.
_LATENCY_US = 0.9
_TMA_LATENCY_US = 0.75
_LAUNCH_US = 1.3
_CROWDED_US = 0.6  # where an SM has no room for a program of the next kernel beside its own
_WAVE_US = 0.9  # from the start of a program to its first product, and from its last to its end
_SECOND_KERNEL_US = 1.6
# What happens at the same time does so not wholly: times add up as in norms of these powers.
_STEP_POWER = 3.4
_OVERLAP_POWER = 6.5
# The same of torch's product, fitted to 91 timings (8% mean error).
_LIBRARY_US = 5.3
_LIBRARY_RATE = 712e6
_LIBRARY_FP32_RATE = 50e6
_LIBRARY_MEMORY_RATE = 4.4e6
_LIBRARY_OVERLAP_POWER = 3.6
_ACTIVATION_US = 1.8

_SHARED_RESERVED = 2048  # of the system's, and barriers
_REGISTERS = 65536
# fp32 sums per thread: the rest of 255 registers goes to addresses and, where the tensor cores do
# not read their operands from shared memory, to these.
_ACCUMULATORS = 128
_ACCUMULATORS_BESIDE_OPERANDS = 64
# Where matrices must be read element by element, the elements of a step per thread: they wait in
# registers.
_ELEMENTS = 32
MOST_PARTIALS = 1 << 30  # bytes of the partial sums of a split
CANDIDATES = 20

# What is enumerated: block_m, block_n, warps and swap (which is for few rows).
Shape = tuple[int, int, int, bool]
_SHAPES: tuple[Shape, ...] = (
    *(
        (block_m, block_n, 8 if block_m * block_n >= 128 * 128 else 4, False)
        for block_m, block_n in itertools.product((16, 32, 64, 128), (16, 32, 64, 128, 256))
    ),
    *((block_m, block_n, 4, True) for block_m in (16, 32, 64) for block_n in (64, 128)),
)
# Without tensor cores: small tiles, whose operands are registers.
_FP32_SHAPES: tuple[Shape, ...] = tuple(
    (block_m, block_n, 4, False)
    for block_m, block_n in itertools.product((16, 32, 64), (16, 32, 64, 128))
    if block_m * block_n <= 64 * 64
)
_PERSISTENT_SHAPES: tuple[Shape, ...] = (
    (64, 128, 4, False),
    (64, 256, 4, False),
    (128, 64, 4, False),
    (128, 128, 4, False),
    (128, 128, 8, False),
    (128, 256, 8, False),
    (256, 128, 8, False),
)


@dataclass(frozen=True)
class MatmulConfig:
    """Tiles of (block_m, block_n) sums, fed by `stages` buffers of block_k along K.

    `group` rows of tiles are walked together, for L2. `split_k` programs share a tile. `swap`: the
    product is computed transposed, for few rows. `parts`: pieces in which a persistent program
    stores a tile. `early`: kernels overlap at their ends: this one asks for its first tiles of B
    before the one before it has ended, and lets the next one do the same.
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
    early: bool = False


# By kind: fits every device and every product, and is in a bundle for all of them (space.py).
STURDY = {
    "tiles": MatmulConfig(64, 64, 64, stages=3, warps=4),
    "split_k": MatmulConfig(64, 64, 64, stages=3, warps=4, split_k=2),
    "persistent": MatmulConfig(64, 128, 64, stages=3, warps=4),
}


@dataclass(frozen=True)
class Candidate:
    """A config, and about how many us it takes."""

    config: MatmulConfig
    us: float


def candidates(
    kind: str, product: Product, rows: int, device: Device, count: int | None = CANDIDATES
) -> tuple[Candidate, ...]:
    """The `count` most promising configs of a kind ("tiles", "split_k" or "persistent").

    `rows` stands for those of `product`, which may be another number (batch invariance). Of nearby
    numbers of rows one answers for all: to look at every config takes some milliseconds, which a
    growing batch must not pay at every step.
    """
    size = 1 << max(3, (rows - 1).bit_length() - 3)  # to 8, and then to an eighth of its power of 2
    rounded = -(-rows // size) * size if rows > 1 else 1
    return _ordered(kind, _relevant(product, rounded), device)[:count]


def why_rejected(
    kind: str, config: MatmulConfig, product: Product, rows: int, device: Device
) -> str | None:
    """Why `config` is not one of `candidates` for any number of rows, or does not fit these."""
    if config == STURDY[kind]:
        return None
    relevant = _relevant(product, rows)
    early = (False, True) if kind != "persistent" and device.capability >= (9, 0) else (False,)
    choices = {**_choices(kind, relevant), "early": early}
    return why_unlisted(config, choices) or _why_unsuited(kind, config, relevant, device)


def _relevant(product: Product, rows: int) -> Product:
    """What a choice depends on."""
    vectors = _vectors(product)
    return replace(
        product,
        rows=rows,
        a_strides=(0, 0, 1),
        b_strides=(0, 1, 0),
        a_aligned=vectors,
        b_aligned=vectors,
        bias=False,
        copied=False,
        b_copied=False,
    )


@functools.lru_cache(maxsize=1024)
def _ordered(kind: str, product: Product, device: Device) -> tuple[Candidate, ...]:
    """All configs that fit, but for those that are much alike, the most promising first."""
    fitting = [
        Candidate(
            replace(config, early=True) if _is_early(kind, product, config, device) else config,
            estimate(kind, product, product.rows, config, device),
        )
        for config in _all(kind, product)
        if _why_unsuited(kind, config, product, device) is None
    ]
    fitting.sort(key=lambda candidate: (candidate.us, repr(candidate.config)))
    return tuple(_different(fitting))


def _is_early(kind: str, product: Product, config: MatmulConfig, device: Device) -> bool:
    """Whether kernels should overlap: each SM has one program, and room for one of the next."""
    if kind == "persistent" or device.capability < (9, 0):
        return False
    across = math.ceil(product.rows / config.block_m) * math.ceil(product.columns / config.block_n)
    alone = product.batch * across * config.split_k <= device.multiprocessors
    return alone and _resident(kind, config, product.dtype.itemsize, device) > 1


def estimate(kind: str, product: Product, rows: int, config: MatmulConfig, device: Device) -> float:
    """About how many us the kernel takes.

    An SM gets `each` programs, `resident` at a time. A step along K of all that are resident takes
    about as long as the slowest of their products, their reads from L2, and the latency of a load
    divided by the loads under way. Meanwhile memory must deliver every byte once.
    """
    itemsize = product.dtype.itemsize
    multiprocessors = max(1, device.multiprocessors)
    across = math.ceil(rows / config.block_m) * math.ceil(product.columns / config.block_n)
    each = math.ceil(product.batch * across * config.split_k / multiprocessors)
    room = _resident(kind, config, itemsize, device)
    resident = min(each, room)
    steps = math.ceil(product.depth / (config.block_k * config.split_k))

    operations = 2.0 * config.block_m * config.block_n * config.block_k
    products = operations * multiprocessors / _tensor_rate(config, itemsize)
    read = (min(rows, config.block_m) + config.block_n) * config.block_k * itemsize
    reads = read * multiprocessors / _L2_RATE
    latency = _TMA_LATENCY_US if kind == "persistent" else _LATENCY_US
    latency /= config.stages - 1

    def wave(programs: int) -> float:
        return steps * _norm(_STEP_POWER, programs * products, programs * reads, latency)

    full, rest = divmod(each, resident)
    work = full * wave(resident) + (wave(rest) if rest else 0.0)
    if kind != "persistent":
        work += _WAVE_US * math.ceil(each / resident)
    us = _LAUNCH_US + _norm(_OVERLAP_POWER, work, moved_bytes(product, rows) / _MEMORY_RATE)
    us += _CROWDED_US if each == room else 0.0
    if config.split_k > 1:
        partials = 4.0 * product.batch * rows * product.columns * config.split_k
        us += _SECOND_KERNEL_US + 2 * partials / _L2_RATE
    return us


def library_estimate(product: Product, rows: int) -> float:
    """About how many us torch's product takes, with its activation in a second kernel.

    cuBLASLt can do some activations on the way.
    """
    operations = 2.0 * product.batch * rows * product.columns * product.depth
    rate = _LIBRARY_FP32_RATE if product.dtype.itemsize == 4 else _LIBRARY_RATE
    memory = moved_bytes(product, rows) / _LIBRARY_MEMORY_RATE
    us = _LIBRARY_US + _norm(_LIBRARY_OVERLAP_POWER, operations / rate, memory)
    if product.pre or product.activation not in ("none", "relu", "gelu_tanh"):
        result = product.batch * rows * product.columns * product.dtype.itemsize
        us += _ACTIVATION_US + 2 * result / _L2_RATE
    return us


def moved_bytes(product: Product, rows: int) -> int:
    """What must be read and written, once."""
    elements = rows * product.depth + product.depth * product.columns + rows * product.columns
    return product.batch * elements * product.dtype.itemsize


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
    registers = min(255, 44 + _accumulators(config))
    by_registers = _REGISTERS // (registers * 32 * config.warps)
    return max(1, min(by_shared, by_registers))


def _tensor_rate(config: MatmulConfig, itemsize: int) -> float:
    if itemsize == 4:
        return _FP32_RATE
    share = config.block_m * config.block_n / (config.block_m + config.block_n) / _FULL_TILE
    rate: float = _TENSOR_RATE * min(1.0, share**_TILE_POWER)
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
    return config.block_m * config.block_n // (32 * config.warps)


def _choices(kind: str, product: Product) -> Choices:
    """The values of a kind's configs, all but `early`."""
    deep: tuple[int, ...]
    stages: tuple[int, ...]
    splits: tuple[int, ...] = ()
    if kind == "persistent":
        shapes, deep, stages = _PERSISTENT_SHAPES, (64, 128), (3, 4, 5)
    elif product.dtype.itemsize == 4:
        shapes, deep, stages, splits = _FP32_SHAPES, (16, 32, 64), (2, 3), (2, 4, 8)
    else:
        deep = (64, 128, 256, 512) if product.a_aligned else (16, 32, 64)
        shapes, stages, splits = _SHAPES, (3, 4, 5, 6), (2, 4, 8, 16)
    return {
        "block_m block_n warps swap": shapes,
        "block_k": deep,
        "stages": stages,
        "split_k": splits if kind == "split_k" else (1,),
        "parts": (1, 2, 4) if kind == "persistent" else (1,),
        "group": (MatmulConfig.group,),
    }


def _all(kind: str, product: Product) -> Iterator[MatmulConfig]:
    """Every config of a kind whose tiles are not too tall for the rows."""
    tall = max(64 if kind == "persistent" else 16, _power_above(product.rows))
    for (block_m, block_n, warps, swap), block_k, stages, split, parts, group in itertools.product(
        *_choices(kind, product).values()
    ):
        if block_m <= tall:
            yield MatmulConfig(
                block_m, block_n, block_k, stages, warps, group, split, swap=swap, parts=parts
            )


def _why_unsuited(kind: str, config: MatmulConfig, product: Product, device: Device) -> str | None:
    """Why a config that is enumerated is not valid for this GEMM.

    The number of rows matters for the partial sums of a split only.
    """
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    split = config.split_k
    if block_n > max(64 if kind == "persistent" else 16, _power_above(product.columns)):
        return f"block_n={block_n} is too wide for {product.columns} columns"
    if block_n // config.parts < 64 and config.parts > 1:
        return f"parts={config.parts} leaves parts of {block_n // config.parts} columns, below 64"
    if split > 1 and block_k * split > max(64, _power_above(product.depth)):
        return f"split_k={split} with block_k={block_k} is too much for K={product.depth}"
    if split > 1 and (
        reason := why_large_sums(split * product.batch * product.rows * product.columns)
    ):
        return reason
    if kind != "persistent" and block_m >= 128 and block_n >= 128 and block_k > 64:
        return f"block_k={block_k} is not at most 64, as tiles of {block_m} by {block_n} require"
    if reason := why_no_room(shared_bytes(kind, config, product.dtype.itemsize), device):
        return reason
    sums, most = _accumulators(config), _most_accumulators(config, product, device)
    if sums > most:
        return f"a thread would hold {sums} sums, and {most} are the most"
    if not product.a_aligned and _elements(config) > _ELEMENTS:
        return (
            f"a thread would load {_elements(config)} single elements, and {_ELEMENTS} are the most"
        )
    return None


def why_large_sums(count: int) -> str | None:
    """Why the partial sums of a split take too much memory; None if they do not."""
    if 4 * count <= MOST_PARTIALS:
        return None
    return f"partial sums take {4 * count} bytes, and {MOST_PARTIALS} are the most"


def _different(ordered: list[Candidate]) -> Iterator[Candidate]:
    """Leave out what differs from two earlier ones by stages, parts or warps alone."""
    seen: dict[tuple[int, ...], int] = {}
    for candidate in ordered:
        one = candidate.config
        tile = (one.block_m, one.block_n, one.block_k)
        key = (*tile, one.group, one.split_k, one.swap, one.early)
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= 2:
            yield candidate


def _norm(power: float, *times: float) -> float:
    total: float = sum(time**power for time in times) ** (1 / power)
    return total


def _power_above(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()
