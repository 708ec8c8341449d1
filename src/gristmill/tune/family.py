"""One family in a run of tuning: what is known, what is measured next, and the rows that result.

Nothing here touches a device or a file.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from gristmill.select.chooser import by_heuristics
from gristmill.select.problem import Span
from gristmill.select.table import Row, Table, revive
from gristmill.select.tuning import Candidate, Outcome
from gristmill.tune.jobs import Family
from gristmill.tune.report import winner
from gristmill.tune.search import Run


@dataclass
class FamilySearch:
    """The search of one family, and what is known of it.

    `todo`: the row counts that are left to measure in any case. `launches`: the winners by row
    count, measured now (`outcomes`) or covered by rows of the table (`known`). `gaps`: row counts
    that no run may reach across: still to measure, failed, or next to a change of the heuristics
    that cannot be measured. `held`: how many row counts would be in `todo` if no row covered them.
    `candidates`: the most that a row count has. `rows`: those made of `outcomes`, by key.
    """

    family: Family
    todo: list[int] = field(default_factory=list)
    gaps: set[int] = field(default_factory=set)
    launches: dict[int, Candidate] = field(default_factory=dict)
    known: dict[int, Row] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    held: int = 0
    candidates: int = 0
    rows: dict[str, Row] = field(default_factory=dict)

    def neighbours(self, rows: int) -> list[Candidate]:
        """The winners at the next smaller and the next larger row count that are known."""
        below = [one for one in self.launches if one < rows]
        above = [one for one in self.launches if one > rows]
        found = [max(below)] if below else []
        found += [min(above)] if above else []
        return [self.launches[one] for one in found]

    def most_steps(self) -> int:
        """How many row counts may be measured beside `todo`."""
        if not self.family.split:
            return 0
        return self.family.search.most_steps({*self.todo, *self.launches})

    def order(self) -> Iterator[int]:
        """Row counts in the order in which they are measured; later ones follow from winners."""
        yield from self.todo
        while (rows := self.next()) is not None:
            yield rows

    def next(self) -> int | None:
        """The row count between two winners that is measured next, if there is one."""
        if not self.family.split:
            return None
        return self.family.search.next(self._winners(), self.gaps)

    def won(self, rows: int, outcome: Outcome) -> list[Row]:
        """Take a measurement down; gives the rows that are new or cover more than before."""
        self.gaps.discard(rows)
        self.outcomes[rows] = outcome
        self.launches[rows] = outcome.launches[winner(outcome)]
        before, self.rows = self.rows, {row.key: row for row in self._all_rows()}
        return [row for key, row in self.rows.items() if before.get(key) != row]

    def _winners(self) -> dict[int, str]:
        return {rows: str(launch) for rows, launch in self.launches.items()}

    def _all_rows(self) -> Iterator[Row]:
        """A row for each run in which something was measured now; others are in the table."""
        for run in self.family.search.runs(self._winners(), self.gaps):
            if any(rows in self.outcomes for rows in run.members):
                yield self._row(run)

    def _row(self, run: Run) -> Row:
        """One row for all of a run: measured at the largest of its row counts."""
        measured = [rows for rows in run.members if rows in self.outcomes]
        rows, launch = measured[-1], str(self.launches[measured[-1]])
        covers = self._covers(run)
        stop = self.family.search.sizes.stop(rows)
        key = self.family.at(rows).problem.key(stop if stop in covers else rows)
        times: dict[int, float] = {}
        for row in [self.known[one] for one in run.members if one in self.known]:
            times |= {row.rows: row.us} | {int(one): us for one, us in row.also.items()}
        times |= {one: round(self.outcomes[one].timings[launch].us, 3) for one in measured}
        also = {str(one): times[one] for one in sorted(times) if one in covers and one != rows}
        return dataclasses.replace(self.outcomes[rows].row, key=key, covers=covers, also=also)

    def _covers(self, run: Run) -> Span:
        """What a run holds for, with what known rows at its ends cover beyond it."""
        least, most = run.covers
        first, last = run.members[0], run.members[-1]
        others, span = {*self.launches, *self.gaps}, self.family.search.sizes.span
        if first in self.known:
            ends = [span(rows).end + 1 for rows in others if rows < first]
            least = int(min(least, max([self.known[first].covers.least, *ends])))
        if last in self.known and most is not None:
            starts = [span(rows).least - 1 for rows in others if rows > last]
            end = min([self.known[last].covers.end, *starts])
            most = None if end == math.inf else max(most, int(end))
        return Span(least, most)


def search_of(family: Family, table: Table, *, again: bool) -> FamilySearch:
    """The search of a family before it starts.

    Row counts that a row of `table` covers are known, unless they are asked for `again`.
    """
    found, search = FamilySearch(family), family.search
    span = Span(family.asked[0], family.asked[-1])
    covered = _covered(family, table, span)
    for rows, (row, launch) in covered.items():
        if not again or rows not in search.rows:
            found.known[rows], found.launches[rows] = row, launch
    replaced = {rows: row.key for rows, (row, _) in covered.items() if rows not in found.known}
    changes = search.changes(span, _choice(family, replaced))
    wanted = {*family.asked, *chain.from_iterable(changes)}
    measured = wanted if family.split else set(family.asked)
    found.todo = sorted(measured - found.known.keys())
    found.held = len(measured) - len(found.todo)
    found.gaps = wanted - found.known.keys()
    for low, high in changes:
        end, known = search.sizes.span(low).end, found.known.get(low)
        apart = end + 1 < search.sizes.span(high).least
        if apart and (known is None or known is not found.known.get(high)):
            # The heuristics change at a size between these that cannot be measured.
            found.gaps.add(int(end) + 1)
    return found


def _covered(family: Family, table: Table, span: Span) -> dict[int, tuple[Row, Candidate]]:
    """The row counts in `span` that a row of `table` covers, with that row and its launch.

    If a row covers no size that can be measured, use the count in its key, so that a run does not
    overwrite it.
    """
    found: dict[int, tuple[Row, Candidate]] = {}
    sample = family.at(family.asked[0]).problem
    for row in table.family(sample):
        members = [(rows, family.at(rows).problem) for rows in family.search.within(row.covers)]
        members = members or [(row.stop, dataclasses.replace(sample, rows=row.stop))]
        for rows, problem in members:
            launch = revive(row, problem, family.op.variants) if rows in span else ""
            if isinstance(launch, tuple):
                found[rows] = row, Candidate(*launch)
    return found


def _choice(family: Family, replaced: dict[int, str]) -> Callable[[int], Hashable]:
    """What runs at a row count by heuristics, and the row that is to be replaced there.

    Where one of them changes, a row of this run must not reach across without a measurement.
    """

    def choice(rows: int) -> Hashable:
        rule = by_heuristics(family.op.name, family.op.variants, family.at(rows).problem)
        return rule and str(Candidate(rule.variant, rule.config)), replaced.get(rows)

    return choice
