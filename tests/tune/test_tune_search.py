"""The search along the rows: what is measured, and what rows of a table then cover.

Winners are planted, so what a row says can be compared with the truth at every row count.
"""

from __future__ import annotations

import json
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from tune_helpers import planted_op

from gristmill.ops.nvfp4_linear.problem import SIZES
from gristmill.ops.registry import OPS
from gristmill.select.chooser import by_heuristics
from gristmill.select.device import KNOWN, device_of
from gristmill.select.problem import Problem, Sizes, Span, tiled
from gristmill.select.table import Row, Table
from gristmill.select.timing import Timing
from gristmill.select.tuning import Candidate, Outcome, unbeaten
from gristmill.tune.ahead import Watch, tune_ahead
from gristmill.tune.jobs import Family, Plan, Size
from gristmill.tune.search import Run, Search

hypothesis = pytest.importorskip("hypothesis")
given, st = hypothesis.given, hypothesis.strategies

CPU = torch.device("cpu")
# By its name in sys.modules: gristmill.tune is the function.
AHEAD: Any = sys.modules["gristmill.tune.ahead"]
Function = Callable[[int], int]


# Search alone


def search(rows: Iterable[int], *, up: bool = True) -> Search:
    rows = tuple(rows)
    return Search(rows, Sizes(rows, up=up))


def test_changes_of_the_heuristics_have_two_sides() -> None:
    one = search(range(8, 129, 8))
    assert one.changes(Span(16, 100), lambda rows: rows > 40) == [(40, 48)]
    assert one.changes(Span(16, 40), lambda rows: rows > 40) == []
    assert one.changes(Span(16, 32), lambda rows: rows) == [(16, 24), (24, 32)]


def test_between_two_winners_the_middle_is_next() -> None:
    one = search(range(8, 129, 8))
    winners = {8: "a", 128: "b"}
    order = []
    while (rows := one.next(winners)) is not None:
        order.append(rows)
        winners[rows] = "a" if rows <= 24 else "b"
    assert order == [72, 40, 24, 32]
    assert len(order) <= one.most_steps([8, 128])
    assert list(one.runs(winners)) == [
        Run(Span(0, 24), (8, 24)),
        Run(Span(25, 128), (32, 40, 72, 128)),
    ]


def test_nothing_is_next_between_equal_winners() -> None:
    one = search(range(8, 129, 8))
    assert one.next({8: "a", 128: "a"}) is None
    assert one.next({8: "a", 16: "b"}) is None
    assert one.next({8: "a"}) is None


def test_what_is_unknown_is_neither_next_nor_inside_a_run() -> None:
    one = search((8, 16, 24))
    assert one.next({8: "a", 24: "b"}, {16}) is None
    assert list(one.runs({8: "a", 24: "a"}, {16})) == [
        Run(Span(0, 8), (8,)),
        Run(Span(17, 24), (24,)),
    ]
    assert list(one.runs({8: "a", 16: "a"}, {24})) == [Run(Span(0, 16), (8, 16))]


def test_what_is_not_bracketed_is_left_out() -> None:
    one = search((8, 16, 24, 32))
    assert list(one.runs({8: "a", 32: "b"})) == [
        Run(Span(0, 8), (8,)),
        Run(Span(25, 32), (32,)),
    ]


def test_a_switch_between_two_nearest_stops_lies_in_the_middle_by_ratio() -> None:
    one = search((16, 25, 64), up=False)
    low, high = one.runs({16: "a", 25: "b", 64: "b"})
    assert (low.covers, high.covers) == (Span(0, 20), Span(21, None))


# whole runs


@dataclass
class Done:
    """What a run has done: the sizes in the order in which they were measured, and its rows.

    `memory`: what counted in the process; `disk`: what was written. `steps`: `memory` after each
    measurement.
    """

    measured: list[int] = field(default_factory=list)
    memory: Table = field(default_factory=lambda: Table.for_device(device_of("cpu")))
    disk: Table = field(default_factory=lambda: Table.for_device(device_of("cpu")))
    steps: list[list[Row]] = field(default_factory=list)
    most: int = 0
    held: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    """Sizes to search, and what is true at each: the launch that wins, that of the heuristics."""

    sizes: Sizes
    rows: tuple[int, ...]
    asked: tuple[int, ...]
    wins: Function
    rule: Function
    failing: frozenset[int] = frozenset()
    split: bool = True
    again: bool = False

    def problem(self, rows: int) -> Problem:
        return Problem("toy", rows, (("N", 32),), (), (), device_of("cpu"), sizes=self.sizes)

    def run(self, known: Table | None = None, stop_after: int | None = None) -> Done:
        """Tune; with `stop_after`, Ctrl-C comes after so many measurements."""
        done = Done()
        for row in () if known is None else known.rows.values():
            done.memory.put(row)
            done.disk.put(row)
        op = planted_op(self.rule)
        (variant,) = op.variants

        class Stop(Watch):
            def starts(self, amount: Any) -> None:
                done.most = amount.most

            def begins(self, key: str, total: int) -> None:
                if stop_after is not None and len(done.measured) >= stop_after:
                    raise KeyboardInterrupt

            def ended(self, outcome: Outcome) -> None:
                done.steps.append(list(done.memory.rows.values()))

        def tuned(run: Any, op: Any, size: Size, neighbours: Any) -> Outcome:
            done.measured.append(size.rows)
            if size.rows in self.failing:
                raise RuntimeError("no such luck")
            candidate = Candidate(variant, variant.launch(self.wins(size.rows)))
            row = Row(
                key=size.problem.key(size.rows),
                covers=Span(size.rows, size.rows),
                variant=variant.name,
                config={"number": candidate.config.number},
                us=float(size.rows),
                spread_us=0.0,
                second=None,
                date="2026-01-01",
                source_hash="",
                rows=size.rows,
                times={},
                candidates=2,
                torch="2.13",
            )
            timing = Timing(float(size.rows), 0.0, 9, "wall")
            name = str(candidate)
            return Outcome(row, "", None, {}, {name: candidate}, {name: timing})

        def remember(device: Any, rows: list[Row], *, path: Any = None, keep: bool = True) -> None:
            for row in rows:
                done.memory.put(row)
                if keep:
                    done.disk.put(row)

        def at(rows: int) -> Size:
            assert rows in self.rows
            return Size(self.problem(rows), lambda device: ())

        family = Family(op, Search(self.rows, self.sizes), self.asked, at, self.split)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(AHEAD._Run, "_tuned", tuned)
            patch.setattr(AHEAD, "remember", remember)
            table = (Path("unused"), known or Table.for_device(device_of("cpu")))
            try:
                report = tune_ahead(Plan([family]), CPU, table, again=self.again, watch=Stop())
            except KeyboardInterrupt:
                return done
        done.held, done.notes = report.held, report.notes
        return done

    def covered(self, rows: Iterable[Row]) -> dict[int, int]:
        """The launch that rows say to run, at each row count that they cover."""
        found: dict[int, int] = {}
        for row in rows:
            assert row.stop in row.covers
            assert row.config is not None
            span = self._within_end(row.covers)
            assert not found.keys() & set(span), "two rows cover the same"
            found |= dict.fromkeys(span, row.config["number"])
        return found

    def _within_end(self, span: Span) -> range:
        end = self.sizes.stops[-1] + 3
        return range(span.least, int(min(span.end + 1, end)))

    def may_cover(self, measured: Iterable[int]) -> dict[int, int]:
        """What the measurements at these sizes may say of others, by the rules of docs/tuning.md:
        what a measurement holds for, and what lies between two with the same winner where the
        heuristics do not change.
        """
        failed = self.failing & set(measured)
        known = sorted(set(measured) - failed)
        found: dict[int, int] = {}
        for rows in known:
            found |= dict.fromkeys(self._within_end(self.sizes.span(rows)), self.wins(rows))
        for low, high in pairwise(known):
            inside = [rows for rows in self.rows if low <= rows <= high]
            if (
                self.wins(low) == self.wins(high)
                and len({self.rule(rows) for rows in inside}) == 1
                and not failed & set(inside)
            ):
                found |= dict.fromkeys(range(low, high), self.wins(low))
        return found


def piecewise(switches: list[int], values: list[int]) -> Function:
    """`values[0]` up to the first switch, then the next ones."""
    return lambda rows: values[bisect_right(switches, rows) % len(values)]


FUNCTIONS = st.builds(
    piecewise,
    st.lists(st.integers(1, 200), max_size=4).map(sorted),
    st.lists(st.integers(0, 3), min_size=1, max_size=5),
)


@st.composite
def cases(draw: Any, *, failing: bool = True) -> Case:
    stops = draw(
        st.one_of(
            st.just(tiled(8, last=160).stops),
            st.just((1, 4, 16, 32, 64, 128)),
            st.sets(st.integers(1, 160), min_size=1, max_size=30).map(sorted).map(tuple),
        )
    )
    sizes = Sizes(stops, up=draw(st.booleans()))
    rows = tuple(sorted(draw(st.sets(st.sampled_from(stops), min_size=1)) | {stops[0]}))
    rows = draw(st.sampled_from([stops, rows]))
    asked = draw(st.sets(st.sampled_from(rows), min_size=1, max_size=5))
    fails = draw(st.sets(st.sampled_from(rows), max_size=3)) if failing else ()
    wins, rule = draw(FUNCTIONS), draw(FUNCTIONS)
    return Case(sizes, rows, tuple(sorted(asked)), wins, rule, frozenset(fails))


SETTINGS = hypothesis.settings(
    max_examples=30, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)


def first(case: Case) -> list[int]:
    """What is measured in any case."""
    inside = [rows for rows in case.rows if case.asked[0] <= rows <= case.asked[-1]]
    changes = [pair for pair in pairwise(inside) if len(set(map(case.rule, pair))) == 2]
    return sorted({*case.asked, *(rows for pair in changes for rows in pair)})


@SETTINGS
@given(cases())
def test_rows_cover_what_the_measurements_say_and_no_more(case: Case) -> None:
    done = case.run()
    assert case.covered(done.memory.rows.values()) == case.may_cover(done.measured)
    assert done.disk.rows == done.memory.rows
    assert len(set(done.measured)) == len(done.measured)
    assert len(done.notes) == len(case.failing & set(done.measured))


@SETTINGS
@given(cases())
def test_every_switch_is_bracketed(case: Case) -> None:
    done = case.run()
    assert set(first(case)) <= set(done.measured)
    known = sorted(set(done.measured) - case.failing)
    for low, high in pairwise(known):
        if case.wins(low) != case.wins(high):
            assert {rows for rows in case.rows if low < rows < high} <= case.failing


@SETTINGS
@given(cases(failing=False))
def test_measurements_are_bounded(case: Case) -> None:
    """By a logarithm for each switch; with one in each gap that is what was announced."""
    done = case.run()
    one = Search(case.rows, case.sizes)
    most = len(first(case))
    switches = []
    for low, high in pairwise(first(case)):
        gap = [rows for rows in case.rows if low <= rows <= high]
        switches.append(sum(case.wins(one) != case.wins(other) for one, other in pairwise(gap)))
        most += switches[-1] * (len(gap) - 2).bit_length()
    assert len(done.measured) <= most
    assert done.most == len(first(case)) + one.most_steps(first(case))
    if max(switches, default=0) <= 1:
        assert len(done.measured) <= done.most


@SETTINGS
@given(cases())
def test_after_each_step_nothing_unknown_is_covered(case: Case) -> None:
    done = case.run()
    final = case.covered(done.memory.rows.values())
    ends = [at for at, rows in enumerate(done.measured, 1) if rows not in case.failing]
    for end, rows in zip(ends, done.steps, strict=True):
        covered = case.covered(rows)
        assert covered.items() <= final.items()
        assert covered.items() <= case.may_cover(done.measured[:end]).items()


@SETTINGS
@given(cases(), st.integers(0, 12))
def test_an_interrupted_run_ends_like_one_that_was_not(case: Case, steps: int) -> None:
    whole = case.run()
    part = case.run(stop_after=steps)
    assert part.measured == whole.measured[:steps]
    assert part.disk.rows == part.memory.rows  # Ctrl-C or not
    rest = case.run(part.disk)
    assert set(rest.measured) & set(part.measured) <= case.failing
    assert case.covered(rest.disk.rows.values()) == case.covered(whole.disk.rows.values())
    for rows in rest.steps:
        assert case.covered(rows).items() <= case.covered(whole.disk.rows.values()).items()
    assert set(rest.measured) | set(part.measured) == set(whole.measured)


@SETTINGS
@given(cases())
def test_what_is_known_is_not_measured_again(case: Case) -> None:
    done = case.run()
    again = case.run(done.disk)
    assert set(again.measured) <= case.failing
    assert again.held == len(set(first(case)) - case.failing)
    assert again.disk.rows == done.disk.rows


@SETTINGS
@given(cases())
def test_without_split_nothing_else_is_measured(case: Case) -> None:
    case = replace(case, split=False)
    done = case.run()
    assert done.measured == list(case.asked)
    assert done.most == len(case.asked)
    assert case.covered(done.memory.rows.values()) == case.may_cover(done.measured)


@SETTINGS
@given(cases(), st.data())
def test_rows_of_earlier_runs_stay_and_take_part(case: Case, data: Any) -> None:
    """The second run asks for other sizes. What the first has measured is neither lost nor
    measured again.
    """
    rows = data.draw(st.sets(st.sampled_from(case.sizes.stops), min_size=1).map(sorted))
    asked = data.draw(st.sets(st.sampled_from(rows), min_size=1, max_size=4).map(sorted))
    other = replace(case, rows=tuple(rows), asked=tuple(asked))
    before = case.run()
    after = other.run(before.disk)
    was, now = case.covered(before.disk.rows.values()), other.covered(after.disk.rows.values())
    assert was.keys() <= now.keys()
    for size in before.measured:
        if size not in case.failing:
            assert now[size] == case.wins(size)
    for size in after.measured:
        if size not in case.failing:
            assert now[size] == case.wins(size)
    assert not set(after.measured) & set(was)


@SETTINGS
@given(cases(failing=False), FUNCTIONS)
def test_again_measures_what_rows_cover_and_both_sides_of_their_switches(
    case: Case, wins: Function
) -> None:
    """Another truth than that of the table, as with another driver: no old row is believed."""
    before = case.run()
    renewed = replace(case, wins=wins, again=True)
    done = renewed.run(before.disk)
    assert set(case.asked) <= set(done.measured)
    assert done.held == 0
    old, new = case.covered(before.disk.rows.values()), renewed.covered(done.disk.rows.values())
    for size in done.measured:
        assert new[size] == wins(size)
    inside = [rows for rows in case.rows if case.asked[0] <= rows <= case.asked[-1]]
    for low, high in pairwise(inside):
        if old.get(low) != old.get(high):
            assert {low, high} <= set(done.measured)


def test_the_row_of_a_run_names_all_its_measurements() -> None:
    case = Case(
        SIZES, SIZES.stops[:20], (1, 64, 128), piecewise([60], [0, 1]), piecewise([30], [0, 1])
    )
    done = case.run()
    assert done.measured[:5] == [1, 24, 32, 64, 128]
    low, high = sorted(done.disk.rows.values(), key=lambda row: row.covers)
    assert low.covers == Span(0, 56)
    assert high.covers == Span(57, 128)
    assert (low.key.split(" ")[1], low.rows) == ("rows=56", 56)
    assert low.also == {"1": 1.0, "24": 24.0, "32": 32.0, "48": 48.0}
    assert (high.rows, high.also) == (128, {"64": 64.0})


def test_a_row_that_goes_on_keeps_the_times_of_the_old_one() -> None:
    sizes = SIZES.stops[:20]
    case = Case(SIZES, sizes, (1, 64), lambda rows: 0, lambda rows: 0)
    before = case.run()
    done = replace(case, asked=(64, 128)).run(before.disk)
    assert done.measured == [128]
    (row,) = done.disk.rows.values()
    assert (row.covers, row.rows, row.also) == (Span(0, 128), 128, {"1": 1.0, "64": 64.0})


def test_a_row_between_the_sizes_that_can_be_measured_is_not_run_over() -> None:
    """As when a server's sizes are tuned after others of the same weight."""
    wins = piecewise([33, 41], [0, 1, 0])
    between = Case(SIZES, (40,), (40,), wins, lambda rows: 0)
    before = between.run()
    case = Case(SIZES, (8, 64), (8, 64), wins, lambda rows: 0)
    done = case.run(before.disk)
    covered = case.covered(done.disk.rows.values())
    assert {rows for rows, launch in covered.items() if launch == 1} == set(range(33, 41))
    # The search could not look between 8 and 40, and 40 and 64: that stays with the heuristics.
    assert set(covered) == {*range(5, 9), *range(33, 41), *range(57, 65)}


def test_sizes_beyond_the_last_stop_have_a_row_of_their_own() -> None:
    last = SIZES.stops[-1]
    rows = (last, 2 * last)
    done = Case(SIZES, rows, rows, piecewise([last + 1], [0, 1]), lambda rows: 0).run()
    low, high = sorted(done.disk.rows.values(), key=lambda row: row.covers)
    assert (high.covers, high.stop) == (Span(last + 1, None), 2 * last)
    assert low.stop == last


# measured times

H200 = KNOWN["sm_90a"]
RESULTS = Path(__file__).parents[2] / "benchmarks/results"
LAUNCHES = RESULTS / "h200-2026-11-16/nvfp4_linear-launches/launches.json"
Times = dict[str, float]


@pytest.fixture(scope="module")
def weights() -> dict[tuple[int, int], dict[int, Times]]:
    """Of each weight, by N and K, the times of all launches at each number of rows, on an H200."""
    if not LAUNCHES.exists():
        pytest.skip("a source distribution has no results")
    data = json.loads(LAUNCHES.read_text())
    at = data["columns"].index("us")
    found: dict[tuple[int, int], dict[int, Times]] = {}
    for one in data["problems"]:
        times = {str(launch[:at]): launch[at] for launch in one["launches"]}
        found.setdefault((one["N"], one["K"]), {})[one["M"]] = times
    return found


def tuned(times: dict[int, Times], rule: Callable[[int], Any]) -> tuple[Search, dict[int, str]]:
    """The winners by row count of a search over one weight."""
    one = Search(tuple(sorted(times)), SIZES)
    won: dict[int, str] = {}

    def measure(rows: int) -> None:
        below, above = (sorted(size for size in won if (size > rows) is on) for on in (False, True))
        preferred = [won[size] for size in (*below[-1:], *above[:1])]
        timings = {name: Timing(us, 0.0, 9, "wall") for name, us in times[rows].items()}
        won[rows] = unbeaten(timings, preferred)

    changes = one.changes(Span(one.rows[0], one.rows[-1]), rule)
    for rows in sorted({one.rows[0], one.rows[-1], *chain.from_iterable(changes)}):
        measure(rows)
    while (rows := one.next(won)) is not None:
        measure(rows)
    return one, won


def test_measured_weights_lose_next_to_nothing(
    weights: dict[tuple[int, int], dict[int, Times]],
) -> None:
    op, losses, shared, alone = OPS["nvfp4_linear"], [], 0, 0
    assert len(weights) == 10
    for weight, times in weights.items():

        def rule(rows: int, weight: tuple[int, int] = weight) -> str:
            args = op.example_for(H200, (rows, *weight), torch.bfloat16)
            choice = by_heuristics(op.name, op.variants, op.problem(*args, device=H200))
            assert choice is not None
            return str(Candidate(choice.variant, choice.config))

        one, won = tuned(times, rule)
        covered = set()
        for run in one.runs(won):
            for rows in (rows for rows in times if rows in run.covers):
                covered.add(rows)
                losses.append(times[rows][won[run.members[0]]] / min(times[rows].values()) - 1)
        assert covered == set(times)
        shared += len(set(won.values()))
        alone += len({min(found, key=found.__getitem__) for found in times.values()})
    assert len(losses) == sum(map(len, weights.values()))
    assert fmean(losses) < 0.015
    assert max(losses) < 0.08
    # And a server compiles fewer kernels than with the fastest launch at each size.
    assert shared < alone


ONE_WINNER = Case(
    sizes=tiled(),
    rows=(8, 16, 24, 32, 40, 48, 56, 64),
    asked=(8, 64),
    wins=lambda rows: 1,
    rule=lambda rows: 1 if rows < 32 else 2,
)


def test_without_split_no_row_reaches_across_a_change_of_the_heuristics() -> None:
    done = replace(ONE_WINNER, split=False).run()
    assert done.measured == [8, 64]
    spans = {row.covers for row in done.memory.rows.values()}
    assert spans == {Span(5, 8), Span(57, 64)}


def test_no_row_reaches_across_a_size_that_is_measured_later() -> None:
    known = replace(ONE_WINNER, rows=(64,), asked=(64,)).run()
    done = ONE_WINNER.run(known.disk)
    assert done.measured == [8, 24, 32]
    assert {row.covers for row in done.steps[0]} == {Span(5, 8), Span(57, 64)}
    assert {row.covers for row in done.steps[1]} == {Span(5, 24), Span(57, 64)}
    assert {row.covers for row in done.steps[2]} == {Span(5, 64)}
