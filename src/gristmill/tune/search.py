"""Which row counts are measured, and which row counts the results hold for.

Measured are the row counts that are asked for and both sides of each place at which the heuristics
change their choice. Then, as long as two neighbouring measurements have different winners and there
are row counts between them, the one in the middle is measured. What remains between two neighbours
with the same winner is taken to have that winner as well.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gristmill.select.problem import Sizes, Span


@dataclass(frozen=True)
class Run:
    """Measured row counts with the same winner, and all that they hold for."""

    covers: Span
    measured: tuple[int, ...]


@dataclass(frozen=True)
class Search:
    """The search along the rows of one kind of problem.

    `rows`: all row counts that can be measured, ascending. `sizes` says which others each of them
    holds for.
    """

    rows: tuple[int, ...]
    sizes: Sizes

    def first(self, asked: Iterable[int], heuristics: Callable[[int], Hashable]) -> list[int]:
        """What is measured in any case: `asked`, and where `heuristics` change their choice."""
        wanted = set(asked)
        between = [rows for rows in self.rows if min(wanted) <= rows <= max(wanted)]
        choices = {rows: heuristics(rows) for rows in between}
        for low, high in pairwise(between):
            if choices[low] != choices[high]:
                wanted |= {low, high}
        return sorted(wanted)

    def next(self, winners: Mapping[int, Hashable], failed: Collection[int] = ()) -> int | None:
        """The row count to measure next, between two with different winners; None at the end.

        `failed` could not be measured.
        """
        for low, high in pairwise(sorted(winners)):
            if winners[low] != winners[high]:
                inside = [rows for rows in self._between(low, high) if rows not in failed]
                if inside:
                    return inside[len(inside) // 2]
        return None

    def most_steps(self, measured: Iterable[int]) -> int:
        """How many row counts `next` may ask for at most, with one switch in each gap."""
        gaps = (self._between(low, high) for low, high in pairwise(sorted(measured)))
        return sum(len(gap).bit_length() for gap in gaps)

    def runs(self, winners: Mapping[int, Hashable]) -> Iterator[Run]:
        """Which row counts share a winner, as far as is known by now.

        Where a switch is not bracketed yet, what lies between its sides is left out.
        """
        together: list[int] = []
        for rows in sorted(winners):
            if together and winners[rows] != winners[together[0]]:
                yield self._run(together)
                together = []
            together.append(rows)
        if together:
            yield self._run(together)

    def _run(self, measured: Sequence[int]) -> Run:
        least, most = self.sizes.span(measured[0]).least, self.sizes.span(measured[-1]).most
        return Run(Span(least, most), tuple(measured))

    def _between(self, low: int, high: int) -> tuple[int, ...]:
        return self.rows[bisect_right(self.rows, low) : bisect_left(self.rows, high)]
