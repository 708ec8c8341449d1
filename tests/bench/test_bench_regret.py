"""Regret and the hint by runtime matrix, with a clock that is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from gristmill.bench.regret import matrix
from gristmill.bench.regret import suite as regret
from gristmill.bench.regret.families import (
    KINDS,
    PRODUCT_ROWS,
    ROWS,
    Family,
    Point,
    points,
)
from gristmill.bench.regret.matrix import CHOSEN, Matrix
from gristmill.bench.regret.report import gains, matrices, measured, unjudged
from gristmill.bench.regret.sampling import NAMED_WEIGHTS, Sampling
from gristmill.bench.results import Results
from gristmill.errors import ArgumentError, CompileError
from gristmill.jit import Program
from gristmill.jit.cutedsl import CuteProgram
from gristmill.ops.registry import OPS
from gristmill.select import Problem, Variant, device_of, remember, reset_tables
from gristmill.select.chooser import Choice, by_heuristics, ranked
from gristmill.select.device import KNOWN
from gristmill.select.sight import placed
from gristmill.select.table import Row
from gristmill.select.timing import Timing
from gristmill.select.tuning import tune

CPU = torch.device("cpu")
FAMILY = Family("rms_norm", (64,), "float32")
Clock = Callable[[str, int], float]


@dataclass(frozen=True)
class Launch:
    width: int


class Way(Variant):
    """The op's reference under another name, with `widths` to choose from, the first the usual."""

    summary = "a way for tests"

    def __init__(
        self,
        name: str,
        widths: Sequence[int] = (),
        *,
        most_rows: int = 10**9,
        scale: float = 1.0,
        broken: bool = False,
    ) -> None:
        self.name, self.widths = name, widths
        self.most_rows, self.scale, self.broken = most_rows, scale, broken
        self.config_type = Launch if widths else None  # type: ignore[misc]

    def supports(self, problem: Problem) -> str | None:
        return None if problem.rows <= self.most_rows else f"takes {self.most_rows} rows"

    def config(self, problem: Problem) -> Any:
        return Launch(self.widths[0]) if self.widths else None

    def configs(self, problem: Problem) -> Sequence[Any]:
        return [Launch(width) for width in self.widths] or [None]

    def bind(self, problem: Problem, config: Any) -> Callable[..., Any]:
        if self.broken:
            raise CompileError("no such instruction")
        return lambda *args: OPS["rms_norm"].reference(*args) * self.scale


@pytest.fixture(autouse=True)
def own_tables() -> Iterator[None]:
    """No test leaves a row behind for the next."""
    reset_tables()
    yield
    reset_tables()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """Give rms_norm these variants and this clock; returns the names timed in each round.

    A clock may tell the rounds apart by the samples, which are noted in `install.kinds`.
    """

    kinds: list[tuple[int, float | None]] = []

    def install(variants: Sequence[Variant], clock: Clock) -> list[list[str]]:
        rounds: list[list[str]] = []

        def timed(
            functions: Mapping[str, Any],
            sets: Sequence[Any],
            *,
            samples: int,
            hopeless: float | None = None,
        ) -> dict[str, Any]:
            rounds.append(list(functions))
            kinds.append((samples, hopeless))
            rows = sets[0][0].shape[0]
            return {
                name: Timing(clock(name, rows), 0.01 * samples, samples, "fake")
                for name in functions
            }

        monkeypatch.setattr(OPS["rms_norm"], "variants", tuple(variants))
        monkeypatch.setattr("gristmill.select.tuning.time_interleaved", timed)
        monkeypatch.setattr("gristmill.bench.regret.matrix.time_interleaved", timed)
        return rounds

    install.kinds = kinds  # type: ignore[attr-defined]
    return install


def tuned_at(rows: int, ways: Sequence[Variant]) -> Row:
    """A table of this process gets an entry for these rows of the family."""
    args = FAMILY.arguments(rows, CPU)
    problem = FAMILY.op.problem(*args)
    key, covers = placed(problem)
    tuned = tune("rms_norm", ways, problem, args, key=key, covers=covers, thorough=True)
    remember(device_of(CPU), [tuned.row], keep=False)
    return tuned.row


def regrets(*rows: int) -> Results:
    results = Results({})
    regret.run([Point(FAMILY, m) for m in rows], CPU, results, lambda text: None)
    return results


def test_a_pick_that_is_slower_shows_by_how_much(fake: Any) -> None:
    times = {"first": 10.7, "second": 10.0, "third": 30.0}
    fake([Way(name) for name in times], lambda name, rows: times[name])
    (row,) = regrets(8).rows
    assert row["regret"] == pytest.approx(0.07)
    assert (row["picked"], row["picked_us"]) == ("first", 10.7)
    assert (row["best"], row["best_us"]) == ("second", 10.0)
    assert (row["op"], row["M"], row["N"], row["K"]) == ("rms_norm", 8, 64, None)
    assert (row["candidates"], row["source"], row["error"]) == (3, "preference", None)
    assert row["variants"] == {"second": 10.0, "first": 10.7, "third": 30.0}
    assert row["picked_spread_us"] == row["best_spread_us"] == 0.2


def test_a_difference_within_noise_is_reported_as_it_is(fake: Any) -> None:
    """Tuning would keep the pick; its regret is 0.5% all the same."""
    times = {"first": 10.05, "second": 10.0}
    fake([Way(name) for name in times], lambda name, rows: times[name])
    (row,) = regrets(8).rows
    assert row["regret"] == pytest.approx(0.005)
    assert row["best"] == "second"


def test_the_best_there_is_has_no_regret(fake: Any) -> None:
    fake([Way("first"), Way("second")], lambda name, rows: 10.0 if name == "first" else 11.0)
    (row,) = regrets(8).rows
    assert row["regret"] == 0.0
    assert row["picked"] == row["best"] == "first"


def test_pick_rule_and_the_best_eight_meet_in_one_last_round(fake: Any) -> None:
    """The pick is the slowest of thirty: it is in the last round all the same."""
    widths = [1, *range(100, 129)]

    def clock(name: str, rows: int) -> float:
        return 50.0 if name.endswith("width=1") else float(name.rpartition("=")[2]) / 10

    rounds = fake([Way("wide", widths)], clock)
    (row,) = regrets(8).rows
    assert (row["candidates"], row["finalists"], row["samples"]) == (30, 9, 20)
    assert [len(names) for names in rounds] == [16, 14, 9]
    # Only the first round, of few samples, may drop a candidate.
    assert fake.kinds == [(3, 1.3), (3, 1.3), (20, None)]
    assert rounds[-1] == ["wide width=1", *(f"wide width={width}" for width in range(100, 108))]
    assert (row["picked"], row["best"]) == ("wide width=1", "wide width=100")
    assert row["regret"] == pytest.approx(4.0)


def test_a_lucky_first_round_is_not_the_best(fake: Any) -> None:
    """Times are those of the last round: a candidate that looked fastest in the first is not."""
    widths = list(range(20))

    def clock(name: str, rows: int) -> float:
        width = int(name.rpartition("=")[2])
        lucky = width == 19 and fake.kinds[-1][0] == 3
        return 1.0 if lucky else 10.0 + width

    fake([Way("wide", widths)], clock)
    (row,) = regrets(8).rows
    assert (row["best"], row["best_us"], row["regret"]) == ("wide width=0", 10.0, 0.0)


def test_few_candidates_need_no_first_round(fake: Any) -> None:
    rounds = fake([Way("first"), Way("second")], lambda name, rows: 10.0)
    regrets(8)
    assert rounds == [["first", "second"]]
    assert fake.kinds == [(20, None)]


def test_samples_are_those_asked_for(fake: Any) -> None:
    fake([Way("first")], lambda name, rows: 10.0)
    results = Results({})
    method = regret.Method(samples=5)
    regret.run([Point(FAMILY, 8)], CPU, results, lambda text: None, method)
    assert fake.kinds == [(5, None)]
    assert results.rows[0]["samples"] == 5


def test_pick_rule_and_best_side_by_side(fake: Any) -> None:
    """The table's entry was the best when it was measured, and is now slower than the rule."""
    ways = [Way("usual"), Way("wide", [16, 64])]
    times = {"usual": 10.0, "wide width=16": 8.0, "wide width=64": 7.0}
    fake(ways, lambda name, rows: times[name])
    tuned_at(16, ways)
    times["wide width=64"] = 12.0
    (row,) = regrets(16).rows
    assert (row["picked"], row["rule"], row["best"]) == ("wide width=64", "usual", "wide width=16")
    assert (row["picked_us"], row["rule_us"], row["best_us"]) == (12.0, 10.0, 8.0)
    assert row["regret"] == pytest.approx(0.5)
    assert row["rule_regret"] == pytest.approx(0.25)
    assert row["over_rule"] == pytest.approx(0.2)
    assert (row["tabled"], row["source"]) == (True, "tuning of this process")


def test_a_family_is_in_the_table_at_any_row_count(fake: Any) -> None:
    ways = [Way("usual"), Way("wide", [16, 64])]
    fake(ways, lambda name, rows: 10.0)
    (before,) = regrets(16).rows
    assert (before["tabled"], before["over_rule"]) == (False, 0.0)
    tuned_at(16, ways)
    assert [row["tabled"] for row in regrets(16, 4096).rows] == [True, True]
    results = Results({})
    other = Family(FAMILY.name, (128,), FAMILY.dtype)
    regret.run([Point(other, 16)], CPU, results, lambda text: None)
    assert results.rows[0]["tabled"] is False


def test_a_rule_that_cannot_be_built_has_no_time(fake: Any) -> None:
    ways = [Way("usual", broken=True), Way("second")]
    fake(ways, lambda name, rows: 10.0)
    (row,) = regrets(8).rows
    assert row["picked"] == "second"
    assert not {"rule", "rule_us", "over_rule"} & row.keys()
    assert row["failures"]["usual"] == "CompileError: no such instruction"


class Enumerated(Way):
    """Beside the usual configs it knows all that there are."""

    def all_configs(self, problem: Problem) -> list[Launch]:
        return [Launch(width) for width in (16, 64, 8)]

    def programs(self, problem: Problem, config: Any) -> tuple[Any, ...]:
        return (f"program {config.width}",)


def test_all_launches_take_part_where_a_variant_enumerates_them(fake: Any) -> None:
    ways = [Enumerated("wide", [16, 64])]
    rounds = fake(ways, lambda name, rows: float(name.rpartition("=")[2]))
    results = Results({})
    points = [Point(FAMILY, 8)]
    every = regret.Method(all_launches=True)
    regret.run(points, CPU, results, lambda text: None)
    assert rounds[-1] == ["wide width=16", "wide width=64"]
    assert regret.todo(points, results) == []
    assert regret.todo(points, results, every) == points
    regret.run(points, CPU, results, lambda text: None, every)
    (row,) = results.rows  # it has taken the place of the other
    assert rounds[-1] == ["wide width=16", "wide width=64", "wide width=8"]
    assert (row["best"], row["launches"], row["regret"]) == ("wide width=8", "all", 1.0)
    assert regret.todo(points, results, every) == regret.todo(points, results) == []
    assert "notes" not in results.meta


def test_programs_are_those_of_pick_rule_candidates_and_all_launches(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unlisted(Enumerated):
        """Its usual config is none of those that it thinks worth timing."""

        def config(self, problem: Problem) -> Launch:
            return Launch(512)

    ways = [Unlisted("wide", [16, 64])]
    fake(ways, lambda name, rows: 1.0)
    usual = regret.programs([Point(FAMILY, 8)], CPU)
    assert usual == ["program 512", "program 16", "program 64"]
    every = regret.programs([Point(FAMILY, 8)], CPU, all_launches=True)
    assert every == [*usual, "program 8"]
    # By a table another launch is picked: the rule's is compiled as well.
    monkeypatch.setattr(
        "gristmill.bench.regret.suite.ranked",
        lambda *_: [Choice(ways[0], Launch(32), "shipped table", "")],
    )
    assert regret.programs([Point(FAMILY, 8)], CPU) == ["program 32", *usual]


def test_results_that_may_be_rounded_are_compared_row_by_row(fake: Any) -> None:
    """Elements near zero are off by far more than the row: `loose` lets these through."""
    ways = [Way("first"), Way("rounded", scale=1.05)]
    fake(ways, lambda name, rows: 10.0)
    args = FAMILY.arguments(8, CPU)
    problem = FAMILY.op.problem(*args)
    field = regret.field_of(FAMILY.op, problem, args, loose=0.08)
    assert list(field.plans) == ["first", "rounded"]
    assert regret.field_of(FAMILY.op, problem, args, loose=0.04).differing == ["rounded"]
    assert regret.field_of(FAMILY.op, problem, args).differing == ["rounded"]
    loose = {name: kind.loose for name, kind in KINDS.items() if kind.loose}
    assert loose == {"nvfp4_linear_fp8": 0.08}


def test_the_meta_says_how_problems_were_drawn_and_timed() -> None:
    meta: dict[str, Any] = {}
    regret.describe(meta, None, regret.Method())
    assert meta["regret"] == {
        "first_samples": 3,
        "samples": 20,
        "finalists": 8,
        "all_launches": False,
    }
    regret.describe(meta, Sampling(seed=3), regret.Method())
    regret.describe(meta, Sampling(seed=5, grid=True), regret.Method())
    regret.describe(meta, None, regret.Method())  # problems by hand, into the same file
    assert (meta["regret"]["seeds"], meta["regret"]["grid"]) == ([3, 5], True)


def test_a_row_of_a_table_is_what_is_picked(fake: Any) -> None:
    ways = [Way("narrow"), Way("wide", [16, 64])]
    fake(ways, lambda name, rows: {"narrow": 9.0, "wide width=16": 8.0}.get(name, 7.0))
    assert tuned_at(16, ways).config == {"width": 64}
    table, preference = regrets(16, 4096).rows
    assert (table["picked"], table["regret"]) == ("wide width=64", 0.0)
    assert table["source"] == "tuning of this process"
    assert preference["picked"] == "narrow"
    assert preference["regret"] == pytest.approx(9 / 7 - 1, abs=1e-5)


def test_what_gives_another_result_or_none_is_not_the_best(fake: Any) -> None:
    times = {"first": 10.0, "wrong": 1.0, "broken": 1.0}
    ways = [Way("first"), Way("wrong", scale=1.01), Way("broken", broken=True)]
    rounds = fake(ways, lambda name, rows: times[name])
    results = regrets(8)
    (row,) = results.rows
    assert (row["best"], row["candidates"]) == ("first", 1)
    assert "off by" in row["failures"]["wrong"]
    assert row["failures"]["broken"] == "CompileError: no such instruction"
    assert rounds == [["first"]]


def test_where_a_rival_gives_another_result_the_pick_is_not_judged(fake: Any) -> None:
    """Either may be the wrong one: it is not known to be the best, nor how far it is from that."""
    times = {"first": 12.0, "good": 10.0, "wrong": 1.0, "broken": 1.0}
    scales = {"wrong": 1.01}
    ways = [
        Way(name, scale=scales.get(name, 1.0), broken=name == "broken", most_rows=most)
        for name, most in zip(times, (99, 99, 8, 99), strict=True)
    ]
    fake(ways, lambda name, rows: times[name])
    results = regrets(8, 16)
    differs, judged = results.rows
    assert "regret" not in differs
    assert (differs["regret_at_least"], differs["differing"]) == (pytest.approx(0.2), ["wrong"])
    # One that cannot be built could not have been picked.
    assert judged["regret"] == pytest.approx(0.2)
    assert "differing" not in judged
    assert (measured(results), unjudged(results)) == ([judged], [differs])


def test_a_problem_that_fails_is_told_and_the_others_go_on(fake: Any) -> None:
    def clock(name: str, rows: int) -> float:
        if rows == 8:
            raise RuntimeError("unspecified launch failure\nand a second line")
        return 1.0

    fake([Way("first")], clock)
    failed, good = regrets(8, 16).rows
    assert failed["error"] == "RuntimeError: unspecified launch failure"
    assert "regret" not in failed
    assert good["regret"] == 0.0


def test_what_does_not_fit_is_left_out_and_noted(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no more\nsecond line")

    fake([Way("first")], lambda name, rows: 1.0)
    monkeypatch.setattr(Family, "arguments", full)
    results = regrets(8)
    assert results.rows == []
    assert results.meta["notes"] == ["left out: rms_norm 8x64 float32: not enough memory: no more"]


def test_what_a_run_has_is_not_measured_again(fake: Any) -> None:
    fake([Way("first")], lambda name, rows: 1.0)
    results = regrets(8)
    points = [Point(FAMILY, rows) for rows in (8, 16)]
    assert regret.todo(points, results) == points[1:]
    other = Point(Family(FAMILY.name, FAMILY.dims, "bfloat16"), 8)
    assert regret.todo([other], results) == [other]
    # Rows of kernel time about the same problem are something else.
    kernels = [{key: value for key, value in row.items() if key != "suite"} for row in results.rows]
    assert regret.todo(points, Results({}, kernels)) == points


def test_a_matrix_goes_on_with_the_sizes_that_it_lacks() -> None:
    there = [{"suite": "matrix", **FAMILY.problem(size), "hint": "chosen"} for size in (4, 64)]
    whole, part = Matrix(FAMILY, (4,), (4, 64)), Matrix(FAMILY, (4,), (4, 16, 64))
    assert matrix.todo([whole, part], Results({}, there)) == [Matrix(FAMILY, (4,), (16,))]
    assert matrix.todo([whole], Results({})) == [whole]


def test_memory_is_counted_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses over 128256 classes: the gradients of all candidates do not fit beside each other."""
    monkeypatch.setattr("gristmill.bench.regret.suite.device_of", lambda device: KNOWN["sm_90a"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (139 << 30, 139 << 30))
    cuda = torch.device("cuda")
    large = Family("cross_entropy_bwd", (128256,), "bfloat16")
    reason = regret.too_large(Point(large, 65536), cuda)
    assert reason is not None
    assert reason.endswith("149 GB are free")
    assert regret.too_large(Point(large, 4096), cuda) is None
    assert regret.too_large(Point(Family("rms_norm", (8192,), "bfloat16"), 65536), cuda) is None


def test_everything_that_candidates_need_is_known_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gristmill.bench.regret.suite.device_of", lambda device: KNOWN["sm_90a"])
    found = regret.programs([Point(FAMILY, 1), Point(FAMILY, 4096)], torch.device("cuda"))
    assert found
    assert len(found) == len(set(found))
    # Where the CuTe DSL is installed, RMSNorm has a candidate in it.
    own = [program for program in found if not isinstance(program, CuteProgram)]
    assert all(isinstance(program, Program) for program in own)
    assert {program.source for program in own} == {"norm.cu"}


def test_programs_of_drawn_problems_are_known_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over meta tensors: what runs, what would run without tables, and the candidates of both."""
    here = KNOWN["sm_90a"]
    monkeypatch.setattr("gristmill.bench.regret.suite.device_of", lambda device: here)
    for point in points("cuda", names=["nvfp4_linear", "nvfp4_linear_fp8"], quick=True)[::7]:
        found = regret.programs([point], torch.device("cuda"))
        op = point.family.op
        problem = op.problem(*point.family.arguments(point.rows, "meta", here), device=here)
        rule = by_heuristics(op.name, op.variants, problem)
        assert rule is not None
        (picked, *_) = ranked(op.name, op.variants, problem)
        for choice in (rule, picked):
            assert set(choice.variant.programs(problem, choice.config)) <= set(found)
        assert len(found) > 5


# The matrix


def log_distance(name: str, rows: int) -> float:
    """Each width is best at as many rows, and twice as slow four times away from there."""
    width = int(name.rpartition("=")[2])
    return 10.0 * 2 ** (abs(math.log2(width / rows)) / 2)


def measured_matrix(hints: tuple[int, ...], sizes: tuple[int, ...]) -> Results:
    results = Results({})
    grid = Matrix(FAMILY, hints, sizes)
    steps: list[str] = []
    matrix.run([grid], CPU, results, steps.append, samples=3)
    assert len(steps) == matrix.steps([grid])
    return results


def test_a_matrix_has_what_each_hint_takes_and_what_is_chosen(fake: Any) -> None:
    ways = [Way("wide", [256, 16, 64])]
    fake(ways, log_distance)
    for hint in (16, 64, 256):
        tuned_at(hint, ways)
    results = measured_matrix((16, 256), (16, 48, 64, 256))
    (cells,) = matrices(results)
    assert (cells.hints, cells.sizes) == ((16, 256), (16, 48, 64, 256))
    for hint in (16, 256):
        for size in cells.sizes:
            expected = log_distance(f"wide width={hint}", size)
            assert cells.us[hint][size] == pytest.approx(expected, abs=1e-3)
    # 48 belongs to 64, which neither row of the matrix was tuned at.
    chosen = cells.us[CHOSEN]
    assert chosen[16] == chosen[64] == chosen[256] == 10.0
    assert chosen[48] == pytest.approx(log_distance("wide width=64", 48), abs=1e-3)
    assert cells.over_best(256, 16) == pytest.approx(4.0)
    assert cells.over_best(CHOSEN, 64) == 1.0
    assert {row["launch"] for row in results.rows if row["hint"] == CHOSEN and row["M"] == 48} == {
        "wide width=64"
    }


def test_without_a_table_hints_are_tuned_and_chosen_is_the_preference(fake: Any) -> None:
    """Tuned at 16, run at 256: four times; the preference is 64, twice as slow at both ends."""
    rounds = fake([Way("wide", [64, 16, 256])], log_distance)
    results = measured_matrix((16, 256), (16, 64, 256))
    (cells,) = matrices(results)
    assert [cells.us[16][size] for size in cells.sizes] == [10.0, 20.0, 40.0]
    assert [cells.us[256][size] for size in cells.sizes] == [40.0, 20.0, 10.0]
    assert [cells.us[CHOSEN][size] for size in cells.sizes] == [20.0, 10.0, 20.0]
    assert [len(names) for names in rounds] == [3] * 5
    lines = gains(cells)
    # (0.5 * 2 * 2) ** (1/3) for either hint
    assert lines[0].startswith("tuned at 16 only: 26.0% more time than choosing")
    assert "2.00 times as much, at 64 rows" in lines[0]
    assert lines[-1].endswith("costs up to 2.00 times, the mean gain over all of them is 26.0%")
    assert measured(results) == []
    reset_tables()
    (row,) = regrets(16).rows
    assert row["source"] == "preference"  # nothing of this was remembered


def test_a_launch_that_cannot_run_at_a_size_leaves_its_cell_empty(fake: Any) -> None:
    fake(
        [Way("small", most_rows=100), Way("large")],
        lambda name, rows: 1.0 if name == "small" else 3.0,
    )
    results = measured_matrix((4, 256), (4, 256))
    (cells,) = matrices(results)
    assert cells.us == {4: {4: 1.0}, 256: {4: 3.0, 256: 3.0}, CHOSEN: {4: 1.0, 256: 3.0}}
    (empty,) = [row for row in results.rows if "us" not in row]
    assert empty["impossible"] == "takes 100 rows"
    assert gains(cells)[0].endswith("does not run at 1 of 2 sizes")
    assert not results.failures()


def test_equal_launches_are_timed_once(fake: Any) -> None:
    rounds = fake([Way("only")], lambda name, rows: 5.0)
    results = measured_matrix((4, 64), (4, 64))
    assert rounds[-2:] == [["only"], ["only"]]
    assert {row["us"] for row in results.rows} == {5.0}


# What is measured


def test_the_sizes_on_a_gpu() -> None:
    found = points("cuda")
    assert len(found) == len(set(found))
    families: dict[Family, list[int]] = {}
    for point in found:
        families.setdefault(point.family, []).append(point.rows)
    usual = {"linear_silu": PRODUCT_ROWS}
    for family, rows in families.items():
        if not family.kind.sampled:
            assert rows == list(usual.get(family.name, ROWS))
    assert {2**power for power in range(17)} < set(ROWS)
    assert PRODUCT_ROWS[:3] == (64, 128, 192)
    assert PRODUCT_ROWS[-2:] == (3840, 4096)
    assert set(range(64, 1025, 64)) < set(PRODUCT_ROWS)
    dims = {name: [f.dims for f in families if f.name == name] for name in KINDS}
    assert dims["rms_norm"] == [(1024,), (4096,), (8192,)]
    assert dims["cross_entropy_bwd"] == [(32768,), (128256,)]
    assert dims["linear_silu"] == [(4096, 4096), (14336, 4096)]
    assert dims["nvfp4_linear"] == dims["nvfp4_linear_fp8"] == [*NAMED_WEIGHTS, *Sampling().drawn()]


def test_quick_and_a_cpu_have_fewer() -> None:
    assert 0 < len(points("cuda", quick=True)) < len(points("cuda")) / 5
    assert 0 < len(points("cpu")) <= 2 * len(KINDS)
    assert set(KINDS) == {point.family.name for point in points("cpu")}


def test_shapes_by_hand() -> None:
    found = points("cuda", names=["softmax", "linear_silu"], shapes=[(3, 5), (2, 7, 9)])
    assert [(str(point), point.rows, point.family.dims) for point in found] == [
        ("softmax 3x5 bfloat16", 3, (5,)),
        ("softmax 14x9 bfloat16", 14, (9,)),
        ("linear_silu 3x5x5 bfloat16", 3, (5, 5)),
        ("linear_silu 2x7x9 bfloat16", 2, (7, 9)),
    ]


def test_unknown_names_are_told() -> None:
    with pytest.raises(ArgumentError, match=r"unknown op 'softmx' \(did you mean softmax\?\)"):
        points("cuda", names=["softmx"])
    with pytest.raises(ArgumentError, match="unknown dtype 'int8'"):
        points("cuda", dtypes=["int8"])


@pytest.mark.parametrize("name", KINDS)
def test_arguments_are_the_ops_own_at_that_size(name: str) -> None:
    family = Family(name, KINDS[name].cpu[0], "float32")
    args = family.arguments(12, CPU)
    family.op.check(*args)
    problem = family.op.problem(*args)
    assert problem.rows == 12
    dims = dict(problem.dims)
    assert tuple(dims[key] for key in ("N", "K") if key in dims) == family.dims
    if name == "linear_silu":
        assert args[-1] == "silu"
    there = zip(args, family.arguments(12, CPU), strict=True)
    assert all(torch.equal(a, b) for a, b in there if isinstance(a, torch.Tensor))
    shapes = zip(args, family.arguments(12, "meta"), strict=True)
    assert all(a.shape == b.shape for a, b in shapes if isinstance(a, torch.Tensor))


def test_matrices_of_a_gpu() -> None:
    product, first, second = matrix.matrices("cuda")
    assert (product.family.dims, product.hints) == ((4096, 4096), (64, 256, 4096))
    assert product.sizes == PRODUCT_ROWS
    for grid in (first, second):
        assert (grid.sizes[0], grid.sizes[-1]) == (1, 65536)
        assert set(grid.hints) < set(grid.sizes)
    assert [str(one.family) for one in matrix.matrices("cuda", names=["rms_norm"])] == [
        "rms_norm 4096 bfloat16"
    ]
