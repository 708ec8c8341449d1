"""Which row counts are measured, and which row counts the results hold for.

Measured are the row counts that are asked for and both sides of each place at which the heuristics
change their choice. Then, as long as two neighbouring measurements have different winners and there
are row counts between them, the one in the middle is measured. The sizes between two neighbours
with the same winner are assumed to have that winner.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gristmill.select.problem import Sizes, Span


@dataclass(frozen=True)
class Run:
    """Neighbouring row counts with the same winner, and all that they hold for."""

    covers: Span
    members: tuple[int, ...]


@dataclass(frozen=True)
class Search:
    """The search along the rows of one kind of problem.

    `rows`: all row counts that can be measured, ascending. `sizes` says which others each of them
    holds for. `unknown`, below: row counts that are not measured next and that no run reaches
    across, as they are measured later in any case, or cannot be.
    """

    rows: tuple[int, ...]
    sizes: Sizes

    def changes(self, span: Span, choice: Callable[[int], Hashable]) -> list[tuple[int, int]]:
        """Both sides of each change of `choice` in `span`, as neighbouring row counts."""
        choices = [(rows, choice(rows)) for rows in self.within(span)]
        return [(low, high) for (low, one), (high, other) in pairwise(choices) if one != other]

    def next(self, winners: Mapping[int, Hashable], unknown: Collection[int] = ()) -> int | None:
        """The row count to measure next, between two with different winners; None at the end."""
        for low, high in pairwise(sorted(winners)):
            if winners[low] != winners[high]:
                inside = [rows for rows in self._between(low, high) if rows not in unknown]
                if inside:
                    return inside[len(inside) // 2]
        return None

    def most_steps(self, measured: Iterable[int]) -> int:
        """How many row counts `next` may ask for at most, with one switch in each gap."""
        gaps = (self._between(low, high) for low, high in pairwise(sorted(measured)))
        return sum(len(gap).bit_length() for gap in gaps)

    def runs(self, winners: Mapping[int, Hashable], unknown: Collection[int] = ()) -> Iterator[Run]:
        """Which row counts share a winner, as far as is known by now.

        Where a switch is not bracketed yet, what lies between its sides is left out.
        """
        together: list[int] = []
        for rows in sorted({*winners, *unknown}):
            if together and (rows in unknown or winners[rows] != winners[together[0]]):
                yield self._run(together)
                together = []
            if rows not in unknown:
                together.append(rows)
        if together:
            yield self._run(together)

    def within(self, span: Span) -> tuple[int, ...]:
        """The row counts in `span` that can be measured."""
        end = len(self.rows) if span.most is None else bisect_right(self.rows, span.most)
        return self.rows[bisect_left(self.rows, span.least) : end]

    def _run(self, members: Sequence[int]) -> Run:
        least, most = self.sizes.span(members[0]).least, self.sizes.span(members[-1]).most
        return Run(Span(least, most), tuple(members))

    def _between(self, low: int, high: int) -> tuple[int, ...]:
        return self.within(Span(low + 1, high - 1))
