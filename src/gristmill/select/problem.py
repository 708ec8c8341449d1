"""A problem: everything the choice of a kernel may depend on, and nothing else."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gristmill.select.device import Device

# The row counts at which kernels are tuned. Each is about four times the last: fine enough that
# the best kernel seldom changes within a bucket, few enough that a table stays readable.
HINTS = (1, 16, 64, 256, 1024, 4096, 16384, 65536)

# The row count that stands for all where a choice may not depend on it: a batch of decoding
# sequences or a short prompt.
CANONICAL_ROWS = 256


def bucket(rows: int, hints: Sequence[int] = HINTS) -> int:
    """The hint nearest to `rows` in log space; a tie goes to the smaller, no rows to the first.

    `hints` must be positive and ascending. Integers only: hints `a < b` meet at `sqrt(a * b)`, so
    `rows` belongs to `a` exactly when `rows**2 <= a * b`.
    """
    # By bisection: a table may have split one family thousands of times.
    pairs = range(len(hints) - 1)
    return hints[bisect_left(pairs, rows * rows, key=lambda at: hints[at] * hints[at + 1])]


def bucket_edges(hint: int, hints: Sequence[int]) -> tuple[int, int | None]:
    """The least and the greatest row count whose `bucket` is `hint`; None where there is no end."""
    at = list(hints).index(hint)
    low = math.isqrt(hints[at - 1] * hint) + 1 if at else 0
    high = math.isqrt(hint * hints[at + 1]) if at + 1 < len(hints) else None
    return low, high


@dataclass(frozen=True)
class Problem:
    """One call as the chooser sees it.

    `dims` are the dimensions a kernel specialises on (N of a row op), `dtypes` name the tensors
    that are there (an absent weight has no entry), `flags` are the words for layout and options.
    `layout` is what a plan needs beyond what a choice depends on (exact strides, say): it takes no
    part in comparisons and in table keys. `deterministic` and `batch_invariant` say which variants
    may take part; they are in no table key either.
    """

    op: str
    rows: int
    dims: tuple[tuple[str, int], ...]
    dtypes: tuple[tuple[str, str], ...]
    flags: tuple[str, ...]
    device: Device
    layout: Any = field(default=None, compare=False, repr=False)
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
