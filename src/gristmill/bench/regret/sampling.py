"""Problems drawn at random: row counts and weights that no table was made with on purpose.

All of it follows from a seed. What is drawn for one weight does not depend on the others, so that
a part of a run has the problems that the whole run has.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from gristmill.bench.layers import MODELS, Layer

# Most sizes are drawn up to the first limit, the others from there up to the second.
NEAR, FAR = 512, 4096
# Tables are measured at powers of two and multiples of 8, so drawn sizes are none of these.
_LEAST = 3
# Every row count of decoding up to 512 in steps of 8, and some of prefill.
GRID = (1, 2, 4, *range(8, NEAR + 1, 8), 768, 1024, 2048, FAR)

# Drawn weights: N and K are multiples of STEP, log-uniform between these, N * K bounded.
STEP = 64
N_RANGE, K_RANGE = (512, 65536), (512, 32768)
LEAST_ELEMENTS, MOST_ELEMENTS = 1 << 20, 1 << 29

# Query, key and value in one; output; gate and up in one; down.
NAMED: Mapping[str, tuple[Layer, ...]] = {
    "llama3_8b": MODELS["llama3_8b"],
    "llama3_70b": MODELS["llama3_70b"],
    "qwen3_14b": ((7168, 5120), (5120, 5120), (34816, 5120), (5120, 17408)),
    "qwen3_32b": MODELS["qwen3_32b"],
    "mistral_small": ((6144, 5120), (5120, 4096), (65536, 5120), (5120, 32768)),
}
NAMED_WEIGHTS = tuple(dict.fromkeys(layer for layers in NAMED.values() for layer in layers))
# Two that the shipped table has, and one that it lacks.
QUICK_WEIGHTS: tuple[Layer, ...] = ((6144, 4096), (8192, 28672), (5120, 17408))


@dataclass(frozen=True)
class Sampling:
    """How many problems are drawn. `sizes`: for each weight; `weights`: beside the named ones.

    `grid`: the fixed row counts are measured as well.
    """

    seed: int = 0
    sizes: int = 8
    weights: int = 8
    grid: bool = False

    def rows(self, dims: Sequence[int]) -> tuple[int, ...]:
        """The row counts at which a weight is measured, ascending."""
        drawn = drawn_rows(self._random("rows", *dims), self.sizes)
        return tuple(sorted({*drawn, *(GRID if self.grid else ())}))

    def drawn(self, taken: Collection[Layer] = NAMED_WEIGHTS) -> tuple[Layer, ...]:
        """The drawn weights, none of them one of `taken`."""
        random = self._random("weights")
        found: dict[Layer, None] = {}
        while len(found) < self.weights:
            layer = drawn_weight(random)
            if layer not in taken:
                found[layer] = None
        return tuple(found)

    def _random(self, *about: object) -> Random:
        # Seeds of text give the same numbers in every process and version of Python.
        return Random(" ".join(map(str, (self.seed, *about))))


QUICK = Sampling(sizes=3, weights=2)


def drawn_rows(random: Random, count: int) -> tuple[int, ...]:
    """`count` different row counts, ascending: a quarter of them above NEAR, at least one of two.

    Each part is log-uniform, with one size from each of as many equal shares of the log range. None
    is a row count that tables are measured at.
    """
    far = max(1, count // 4) if count > 1 else 0
    found: set[int] = set()
    for low, high, some in ((_LEAST, NEAR, count - far), (NEAR + 1, FAR, far)):
        share = math.log((high + 1) / low) / max(1, some)
        edges = [math.log(low) + at * share for at in range(some + 1)]
        for first, last in pairwise(edges):
            found.add(_drawn_size(random, first, last, found, low, high))
    return tuple(sorted(found))


def is_tuned(rows: int) -> bool:
    """Whether tables may be measured at this row count."""
    return rows % 8 == 0 or rows in (1, 2, 4)


def _drawn_size(
    random: Random, first: float, last: float, taken: Collection[int], low: int, high: int
) -> int:
    """A size from a share of the log range; where that has none left, from all of the range."""
    for attempt in range(1000):
        if attempt == 100:
            first, last = math.log(low), math.log(high + 1)
        size = min(high, max(low, int(math.exp(random.uniform(first, last)))))
        if size not in taken and not is_tuned(size):
            return size
    left = (size for size in range(low, high + 1) if size not in taken and not is_tuned(size))
    return next(left)


def drawn_weight(random: Random) -> Layer:
    """N and K, log-uniform within their ranges, rounded to STEP, of a bounded product."""
    while True:
        n, k = (
            STEP * round(math.exp(random.uniform(math.log(low), math.log(high))) / STEP)
            for low, high in (N_RANGE, K_RANGE)
        )
        if LEAST_ELEMENTS <= n * k <= MOST_ELEMENTS:
            return n, k
