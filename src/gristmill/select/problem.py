"""A problem: everything the choice of a kernel may depend on, and nothing else."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from gristmill.names import counted
from gristmill.select.device import Device

# The row counts at which row kernels are tuned. Each is about four times the last: fine enough that
# the best kernel seldom changes in between, few enough that a table stays readable.
HINTS = (1, 16, 64, 256, 1024, 4096, 16384, 65536)

# The row count that stands for all where a choice may not depend on it: a batch of decoding
# sequences or a short prompt.
CANONICAL_ROWS = 256


@dataclass(frozen=True)
class Sizes:
    """Which row counts are taken to be alike, so that one measurement holds for all of them.

    `stops` are positive and ascending. A row count belongs to the nearest stop by ratio (a tie goes
    to the smaller), or with `up` to the next larger one: kernels that tile the rows do the same
    work for all counts that need the same tiles.
    """

    stops: tuple[int, ...]
    up: bool = False

    def stop(self, rows: int) -> int:
        """The stop that `rows` belongs to; beyond the last one it is the last."""
        return self.stops[self._index(rows)]

    def span(self, rows: int) -> Span:
        """All row counts that belong to the same stop as `rows`.

        With `up` what lies beyond the last stop is a span of its own.
        """
        at, stops = self._index(rows), self.stops
        if self.up:
            if rows > stops[-1]:
                return Span(stops[-1] + 1, None)
            return Span(stops[at - 1] + 1 if at else 0, stops[at])
        low = math.isqrt(stops[at - 1] * stops[at]) + 1 if at else 0
        high = math.isqrt(stops[at] * stops[at + 1]) if at + 1 < len(stops) else None
        return Span(low, high)

    def _index(self, rows: int) -> int:
        stops = self.stops
        if self.up:
            return min(bisect_left(stops, rows), len(stops) - 1)
        # Integers only: stops `a < b` meet at `sqrt(a * b)`, so `rows` belongs to `a` exactly when
        # `rows**2 <= a * b`.
        pairs = range(len(stops) - 1)
        return bisect_left(pairs, rows * rows, key=lambda at: stops[at] * stops[at + 1])


class Span(NamedTuple):
    """Row counts from `least` to `most`; None: no end."""

    least: int
    most: int | None

    def __contains__(self, rows: object) -> bool:
        return isinstance(rows, int) and self.least <= rows <= self.end

    @property
    def end(self) -> float:
        return math.inf if self.most is None else self.most

    def __str__(self) -> str:
        if self.most is None:
            return f"{self.least} rows and more" if self.least > 1 else "any number of rows"
        if self.least == 0:
            return f"up to {counted(self.most, 'row')}"
        if self.most == self.least:
            return counted(self.least, "row")
        return f"{self.least} to {self.most} rows"


BUCKETS = Sizes(HINTS)


def tiled(step: int = 8, per_octave: int = 16, last: int = 65536) -> Sizes:
    """For kernels that tile the rows in multiples of `step`, which is a power of two.

    Powers of two below `step`, then its multiples, in wider steps where rows are many: there are at
    most `per_octave` stops from one power of two to the next. So a step adds at most an eighth to
    the work of any launch from 64 rows on, and a sixteenth from 128 on.
    """
    stops = [2**power for power in range(step.bit_length() - 1)] + [step]
    while stops[-1] < last:
        octave = 2 ** (stops[-1].bit_length() - 1)
        stops.append(stops[-1] + max(step, octave // per_octave))
    return Sizes(tuple(stops), up=True)


@dataclass(frozen=True)
class Problem:
    """One call as the chooser sees it.

    `dims` are the dimensions a kernel specialises on (N of a row op), `dtypes` name the tensors
    that are there (an absent weight has no entry), `flags` are the words for layout and options.
    `layout` is what a plan needs beyond what a choice depends on (exact strides, say), and `sizes`
    says which row counts may share a choice: neither takes part in comparisons and in table keys.
    `deterministic` and `batch_invariant` say which variants may take part; they are in no table key
    either.
    """

    op: str
    rows: int
    dims: tuple[tuple[str, int], ...]
    dtypes: tuple[tuple[str, str], ...]
    flags: tuple[str, ...]
    device: Device
    layout: Any = field(default=None, compare=False, repr=False)
    sizes: Sizes = field(default=BUCKETS, compare=False, repr=False)
    deterministic: bool = False
    batch_invariant: bool = False

    def dim(self, name: str) -> int:
        for key, value in self.dims:
            if key == name:
                return value
        raise KeyError(f"{self.op}: a problem has no dimension {name!r}, only {self._names()}")

    def dtype(self, name: str) -> str | None:
        for key, value in self.dtypes:
            if key == name:
                return value
        return None

    def asked(self) -> Problem:
        """The problem as tables and configs are asked about it.

        Where rows must not depend on the batch, the choice must not depend on their number.
        """
        return replace(self, rows=CANONICAL_ROWS) if self.batch_invariant else self

    def family(self) -> str:
        """`key` without the rows: what all sizes of one kind of problem have in common."""
        return self.key("*")

    def key(self, hint: int | str) -> str:
        """The line that names this problem in a table, with `hint` for its rows.

        The device is not in it: a table belongs to one GPU.
        """
        words = [self.op, f"rows={hint}"]
        words += [f"{name}={value}" for name, value in self.dims]
        words += [f"{name}={value}" for name, value in self.dtypes]
        words += sorted(self.flags)
        return " ".join(words)

    def _names(self) -> str:
        return ", ".join(name for name, _ in self.dims) or "none"
