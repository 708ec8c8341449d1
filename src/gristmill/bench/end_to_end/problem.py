"""A problem of the suite `end_to_end`, and what measuring training and decoding have in common."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from gristmill.bench.end_to_end.model import Sizes
from gristmill.bench.end_to_end.pieces import Implementation
from gristmill.bench.results import Row, described

SUITE = "end_to_end"
SEED = 20
_T = TypeVar("_T")


@dataclass(frozen=True)
class Problem:
    """A step of one block, by some implementations.

    `length`: tokens of each of the `batch` sequences in training; in decoding how many their caches
    hold, that of the step included.
    """

    op: str
    sizes: Sizes
    batch: int
    length: int
    implementations: tuple[Implementation, ...]

    @property
    def is_training(self) -> bool:
        return self.op.startswith("training")

    @property
    def tokens(self) -> int:
        return self.batch * self.length if self.is_training else self.batch

    @property
    def shape(self) -> str:
        if self.is_training:
            return f"{self.batch}x{self.length}"
        return f"batch {self.batch}, {self.length} cached"

    @property
    def row(self) -> Row:
        """What all rows of it say."""
        return {
            "suite": SUITE,
            "op": self.op,
            "model": self.sizes.name,
            "dtype": "bfloat16",
            "M": self.tokens,
            "batch": self.batch,
            "length": self.length,
            "shape": self.shape,
        }

    def row_of(self, implementation: Implementation) -> Row:
        return {
            **self.row,
            "impl": implementation.name,
            "peer": implementation.peer,
            "ours": implementation.is_ours,
            "error": None,
        }

    def failed(self, error: BaseException) -> list[Row]:
        """Rows for all, where nobody came to be measured."""
        return [{**self.row_of(one), "error": described(error)} for one in self.implementations]

    def is_in(self, rows: list[Row]) -> bool:
        """Whether all implementations have a row there."""
        about = self.row
        there = {row["impl"] for row in rows if all(row.get(key) == about[key] for key in about)}
        return {one.name for one in self.implementations} <= there


def compiled(function: Callable[..., _T]) -> Callable[..., _T]:
    """As a model of one shape is compiled. Dynamo is reset before each problem, and no more: this
    would throw away what the other implementations of the problem have compiled."""
    return torch.compile(function, fullgraph=True, dynamic=False)


def first_call(function: Callable[..., _T], *args: Any, device: torch.device) -> tuple[float, _T]:
    """Its seconds, those of compilers included, and what it gave."""
    synchronize(device)
    start = time.perf_counter()
    outputs = function(*args)
    synchronize(device)
    return round(time.perf_counter() - start, 4), outputs


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def times(ms: float, spread_ms: float, repeats: int, method: str) -> Row:
    """The part of a row that says how long it took; five digits, a step can take microseconds."""
    return {
        "ms": float(f"{ms:.5g}"),
        "spread_ms": float(f"{spread_ms:.3g}"),
        "repeats": repeats,
        "method": method,
    }
