"""Who wins a measurement, by timings that are faked, and what a row says of it."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from select_fakes import H200, Config, Fake, problem, row_of

from gristmill.errors import CompileError, VariantUnavailable
from gristmill.select import Device, Timing, remember, timing, tuning, use
from gristmill.select.problem import Span
from gristmill.select.timing import time_interleaved
from gristmill.select.tuning import Candidate, can_run, candidates, measure, tune, unbeaten

CPU = Device("cpu", "cpu")
COVERS = Span(513, 2048)


class Stopwatch:
    """Stands in for `time_interleaved`: times by name, given for all rounds or for each."""

    def __init__(self, times: Mapping[str, Any], spread: float = 0.0) -> None:
        self.times = dict(times)
        self.spread = spread
        self.rounds: list[tuple[list[str], int]] = []
        self.options: list[dict[str, Any]] = []
        self.sets: list[Sequence[Any]] = []

    def __call__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        argsets: Sequence[Any],
        *,
        samples: int,
        **options: Any,
    ) -> dict[str, Timing | Exception]:
        self.rounds.append((list(functions), samples))
        self.options.append(options)
        self.sets.append(list(argsets))
        return {name: self._result(name, samples) for name in functions}

    def _result(self, name: str, samples: int) -> Timing | Exception:
        found = self.times[name]
        if isinstance(found, list):
            found = found.pop(0)
        if isinstance(found, Exception):
            return found
        return Timing(float(found), self.spread, samples, "graph")


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Stopwatch]:
    def install(times: Mapping[str, Any], spread: float = 0.0) -> Stopwatch:
        made = Stopwatch(times, spread)
        monkeypatch.setattr(tuning, "time_interleaved", made)
        return made

    return install


def contest(
    watch: Any, incumbent: str, times: Mapping[str, Any], spread: float = 0.0, **options: Any
) -> Any:
    watch(times, spread)
    return measure({name: lambda *args: None for name in times}, (), incumbent=incumbent, **options)


def test_the_fastest_wins_and_the_next_is_second(watch: Any) -> None:
    found = contest(watch, "a", {"a": 10.0, "b": 5.0, "c": 7.0})
    assert (found.winner, found.second) == ("b", "c")
    assert {name: one.us for name, one in found.timings.items()} == {"a": 10, "b": 5, "c": 7}
    assert found.failures == {}


@pytest.mark.parametrize(
    ("challenger", "spread", "winner"),
    [
        (9.91, 0.0, "incumbent"),  # less than one percent
        (9.89, 0.0, "challenger"),
        (9.50, 0.6, "incumbent"),  # less than the spread
        (9.30, 0.6, "challenger"),
        (10.0, 0.0, "incumbent"),
        (11.0, 0.0, "incumbent"),
    ],
)
def test_the_incumbent_stays_unless_beaten_by_more_than_noise(
    watch: Any, challenger: float, spread: float, winner: str
) -> None:
    times = {"challenger": challenger, "incumbent": 10.0}
    found = contest(watch, "incumbent", times, spread)
    assert found.winner == winner
    assert found.second == ({*times} - {winner}).pop()


def test_the_incumbent_kept_within_noise_leaves_the_fastest_as_second(watch: Any) -> None:
    found = contest(watch, "a", {"a": 10.0, "b": 9.95, "c": 9.92})
    assert (found.winner, found.second) == ("a", "c")


@pytest.mark.parametrize(
    ("times", "winner"),
    [
        ({"below": 10.0, "above": 9.97, "now": 9.96, "best": 9.95}, "below"),
        ({"below": 10.5, "above": 10.0, "now": 9.96, "best": 9.95}, "above"),
        ({"below": 10.5, "above": 10.6, "now": 10.0, "best": 9.95}, "now"),
        ({"below": 10.5, "above": 10.6, "now": 10.7, "best": 9.95}, "best"),
        ({"below": 9.0, "above": 8.99, "now": 9.96, "best": 9.95}, "below"),
        ({"below": RuntimeError("no"), "above": 10.0, "now": 9.96, "best": 9.95}, "above"),
    ],
)
def test_what_runs_at_neighbouring_sizes_stays_unless_beaten_by_more_than_noise(
    watch: Any, times: dict[str, Any], winner: str
) -> None:
    """In their order, then the incumbent."""
    found = contest(watch, "now", times, preferred=["below", "above", "not there"])
    assert found.winner == winner
    others = {name: us for name, us in times.items() if name != winner and isinstance(us, float)}
    assert found.second == min(others, key=lambda name: others[name])


def test_what_is_kept_wins_only_by_its_time(watch: Any) -> None:
    times = {"now": 9.0, "rule": 8.95, "best": 8.0}
    assert contest(watch, "now", times, kept=["rule"]).winner == "best"
    assert contest(watch, "now", {**times, "best": 8.99}, kept=["rule"]).winner == "now"


@pytest.mark.parametrize("option", ["preferred", "kept"])
def test_neighbours_and_heuristics_are_in_the_last_round_though_slow_in_the_first(
    watch: Any, option: str
) -> None:
    times: dict[str, Any] = {name: 10.0 + number for number, name in enumerate("abcdefgh")}
    times["g"] = [40.0, 5.0]
    times["e"] = [50.0, RuntimeError("later")]
    made = watch(times)
    named = {"incumbent": "h", option: ["g", "e"]}
    found = measure(dict.fromkeys(times, lambda: None), (), **named)
    assert made.rounds == [(list("abcdefgh"), 3), (["a", "b", "c", "d", "e", "g", "h"], 9)]
    assert (found.winner, found.second) == ("g", "a")
    assert set(found.last) == {"a", "b", "c", "d", "g", "h"}
    assert found.last["g"].us == found.timings["g"].us == 5.0
    assert found.timings["e"].us == 50.0
    assert found.failures == {"e": "RuntimeError: later"}


def test_one_of_them_that_fails_in_the_first_round_is_not_in_the_last(watch: Any) -> None:
    times: dict[str, Any] = {name: 10.0 + number for number, name in enumerate("abcdefgh")}
    times["g"] = RuntimeError("no")
    made = watch(times)
    measure(dict.fromkeys(times, lambda: None), (), incumbent="h", preferred=["g"], kept=["g"])
    assert made.rounds[1] == (["a", "b", "c", "d", "h"], 9)


def test_unbeaten_takes_the_first_that_is_within_noise_of_the_fastest() -> None:
    def timings(**us: float) -> dict[str, Timing]:
        return {name: Timing(one, 0.0, 9, "graph") for name, one in us.items()}

    some = timings(a=10.0, b=9.95, c=9.85)
    assert unbeaten(some, []) == "c"
    assert unbeaten(some, ["a"]) == "c"
    assert unbeaten(some, ["a", "b"]) == "c"  # by 1.005 percent
    assert unbeaten(timings(a=10.0, b=9.9, c=9.85), ["a", "b"]) == "b"
    assert unbeaten(timings(a=10.0, b=9.95), ["b", "a"]) == "b"
    assert unbeaten(timings(a=10.0, b=9.95), ["a", "b"]) == "a"
    assert unbeaten(timings(a=10.0), ["gone"]) == "a"
    noisy = {"a": Timing(10.0, 1.0, 9, "graph"), "b": Timing(9.4, 0.4, 9, "graph")}
    assert unbeaten(noisy, ["a"]) == "a"


def test_up_to_four_meet_in_one_round(watch: Any) -> None:
    made = watch({"a": 4.0, "b": 3.0, "c": 2.0, "d": 1.0})
    measure(dict.fromkeys("abcd", lambda: None), (), incumbent="a")
    assert made.rounds == [(["a", "b", "c", "d"], 9)]
    assert made.options[0]["hopeless"] == tuning.HOPELESS


def test_calls_that_read_other_parts_take_turns(watch: Any) -> None:
    made, x, ids = watch({"a": 1.0}), torch.randn(3), torch.arange(3)
    measure(
        {"a": lambda *args: None},
        (x, ids),
        incumbent="a",
        written=(),
        elsewhere=lambda x, ids: [(x, ids), (x, ids + 3)],
    )
    (sets,) = made.sets
    assert [found.tolist() for _, found in sets] == [[0, 1, 2], [3, 4, 5]]
    assert all(found is x for found, _ in sets)


def test_more_go_through_heats_and_the_incumbent_is_always_in_the_last_round(watch: Any) -> None:
    times = {name: 10.0 + number for number, name in enumerate("abcdefgh")}
    times["h"] = 50.0
    made = watch(times)
    found = measure(dict.fromkeys(times, lambda: None), (), incumbent="h")
    assert made.rounds == [(list("abcdefgh"), 3), (["a", "b", "c", "d", "h"], 9)]
    assert (found.winner, found.second) == ("a", "b")
    assert set(found.timings) == set(times)


def test_the_last_round_decides_and_not_a_lucky_heat(watch: Any) -> None:
    times = {"a": [1.0, 9.0], "b": [2.0, 8.0], "c": [3.0, 9.5], "d": [4.0, 9.6], "e": 20.0}
    found = contest(watch, "e", times)
    assert (found.winner, found.timings["a"].us, found.timings["b"].us) == ("b", 9.0, 8.0)


def test_a_candidate_left_behind_in_the_heats_cannot_win(watch: Any) -> None:
    """Even if the others were slower in the last round than it was in its heat."""
    times = {"a": [1.0, 9.0], "b": [1.0, 9.1], "c": [1.0, 9.2], "d": [1.0, 9.3], "e": 2.0}
    times["f"] = [1.5, 10.0]
    assert contest(watch, "f", times).winner == "a"


def test_many_are_held_in_groups(watch: Any) -> None:
    names = [f"n{number}" for number in range(40)]
    made = watch({name: 100.0 - number for number, name in enumerate(names)})
    found = measure(dict.fromkeys(names, lambda: None), (), incumbent="n0")
    assert [len(group) for group, _ in made.rounds] == [16, 16, 8, 5]
    assert (found.winner, found.second) == ("n39", "n38")


def test_one_that_raises_is_a_failure_and_no_more(watch: Any) -> None:
    times = {"a": 3.0, "b": RuntimeError("illegal address"), "c": 2.0}
    found = contest(watch, "a", times)
    assert found.winner == "c"
    assert found.failures == {"b": "RuntimeError: illegal address"}
    assert set(found.timings) == {"a", "c"}


def test_the_incumbent_may_fail_and_another_wins(watch: Any) -> None:
    times = {"a": ValueError("no"), "b": 3.0, "c": 9.0, "d": 9.0, "e": 9.0, "f": 9.0}
    found = contest(watch, "a", times)
    assert (found.winner, found.failures) == ("b", {"a": "ValueError: no"})


def test_one_that_fails_after_its_heat_is_out(watch: Any) -> None:
    times = {"a": [1.0, RuntimeError("later")], "b": 2.0, "c": 3.0, "d": 4.0, "e": 5.0}
    found = contest(watch, "b", times)
    assert (found.winner, found.second) == ("b", "c")
    assert found.failures == {"a": "RuntimeError: later"}


@pytest.mark.parametrize("count", [2, 6])
def test_if_all_raise_the_error_is_the_incumbents(watch: Any, count: int) -> None:
    names = "abcdef"[:count]
    errors = {name: ValueError(name) for name in names}
    watch(errors)
    with pytest.raises(ValueError, match=r"^b$"):
        measure(dict.fromkeys(names, lambda: None), (), incumbent="b")
    with pytest.raises(ValueError, match=r"^a$"):
        measure(dict.fromkeys(names, lambda: None), (), incumbent="not there")


def test_arguments_are_copied_gradients_off_and_random_numbers_put_back() -> None:
    x = torch.ones(16, requires_grad=True)
    seen: list[tuple[bool, bool]] = []

    def draws(value: torch.Tensor) -> None:
        seen.append((value is x, torch.is_grad_enabled()))
        value.add_(torch.rand(16))

    torch.manual_seed(7)
    expected = torch.rand(4)
    torch.manual_seed(7)
    measure({"draws": draws, "again": draws}, (x,), incumbent="draws")
    assert torch.equal(torch.rand(4), expected)
    assert set(seen) == {(False, False)}
    assert torch.equal(x, torch.ones(16))
    assert torch.is_grad_enabled()


def test_hopeless_ones_get_two_samples_and_no_more() -> None:
    """By a clock that only the candidates move."""
    taken: dict[str, int] = {}

    class Sampler:
        method = "wall"

        def __init__(self, function: Callable[[], float], argsets: Any, least_us: float) -> None:
            self.function = function

        def sample(self) -> float:
            return self.function()

    def candidate(name: str, us: float) -> Callable[[], float]:
        def sample() -> float:
            taken[name] = taken.get(name, 0) + 1
            return us

        return sample

    @contextmanager
    def sampling(device: Any) -> Iterator[Any]:
        yield Sampler

    times = {"best": 10.0, "close": 12.9, "hopeless": 13.1, "worse": 99.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "_sampling", sampling)
        functions = {name: candidate(name, us) for name, us in times.items()}
        found = time_interleaved(functions, [()], samples=9, hopeless=1.3)
        assert taken == {"best": 9, "close": 9, "hopeless": 2, "worse": 2}
        assert {name: one.us for name, one in found.items()} == times  # type: ignore[union-attr]
        taken.clear()
        time_interleaved(functions, [()], samples=9)
    assert set(taken.values()) == {9}


# rows


def variants() -> list[Fake]:
    return [
        Fake("first", configured=True, source="v1", more=[Config(64), Config(256, cap=2.0)]),
        Fake("second"),
        Fake("third", refusal="too wide"),
        Fake("reference"),
    ]


CONFIG = "vector=16 order=() scope=warp cap=None"
TIMES = {
    f"first threads=128 {CONFIG}": 12.0,
    f"first threads=64 {CONFIG}": 9.12345,
    "first threads=256 vector=16 order=() scope=warp cap=2.0": 10.0,
    "second": 11.0,
    "reference": 100.0,
}


def test_a_row_says_what_was_measured(watch: Any) -> None:
    watch(TIMES, spread=0.5)
    outcome = tune(
        "toy", variants(), problem(), (), key="toy rows=1024", covers=COVERS, thorough=True
    )
    row = outcome.row
    assert (row.key, row.variant, row.us, row.spread_us) == ("toy rows=1024", "first", 9.123, 0.5)
    assert (row.covers, row.also) == (COVERS, {})
    assert row.config == {"threads": 64, "vector": 16, "order": (), "scope": "warp", "cap": None}
    assert row.second is not None
    assert (row.second.variant, row.second.us) == ("first", 10.0)
    assert row.second.config is not None
    assert (row.second.config["threads"], row.second.config["cap"]) == (256, 2.0)
    # The reference does not take part on a GPU; of each variant the best time is kept.
    assert dict(row.times) == {"first": 9.123, "second": 11.0}
    assert row.candidates == 4
    assert row.rows == 1000
    assert row.source_hash == variants()[0].source_hash(problem(), None)
    assert (row.date, row.torch) == (datetime.date.today().isoformat(), torch.__version__)
    assert outcome.before == f"first threads=128 {CONFIG}"
    assert outcome.before_us == 12.0
    assert outcome.won == pytest.approx(1 - 9.123 / 12.0)


def launch(threads: int, name: str = "first", **values: Any) -> Candidate:
    return Candidate(Fake(name, configured=True, source="v1"), Config(threads, **values))


def test_launches_of_neighbouring_sizes_take_part_and_are_preferred(watch: Any) -> None:
    more = [launch(512), launch(64)]
    # Of 0.9 percent.
    made = watch({**TIMES, f"first threads=512 {CONFIG}": 9.2})
    some = variants()
    outcome = tune(
        "toy",
        some,
        problem(),
        (),
        key=problem().key(1024),
        covers=COVERS,
        neighbours=[Candidate(some[0], one.config) for one in more],
    )
    assert made.rounds == [
        (
            [
                f"first threads=128 {CONFIG}",
                f"first threads=512 {CONFIG}",
                f"first threads=64 {CONFIG}",
                "second",
            ],
            9,
        )
    ]
    assert outcome.row.config is not None
    assert (outcome.row.config["threads"], outcome.row.us) == (512, 9.2)
    assert outcome.row.second is not None
    assert outcome.row.second.us == 9.123
    assert outcome.row.candidates == 4
    assert {name: one.us for name, one in outcome.timings.items()} == {
        f"first threads=128 {CONFIG}": 12.0,
        f"first threads=512 {CONFIG}": 9.2,
        f"first threads=64 {CONFIG}": 9.12345,
        "second": 11.0,
    }
    assert {name: str(one) for name, one in outcome.launches.items()} == {
        name: name for name in outcome.timings
    }


def test_what_the_heuristics_take_is_in_the_last_round(watch: Any) -> None:
    """Where a table decides what runs now: what it says must not be slower than no table."""
    configs = [Config(threads) for threads in range(32, 320, 32)]
    some = [Fake("first", configured=True, source="v1", more=configs), Fake("second")]
    remember(H200, [row_of(problem(), some[1])], keep=False)
    times: dict[str, Any] = {f"first threads={one.threads} {CONFIG}": 12.0 for one in configs}
    times |= {f"first threads=128 {CONFIG}": [50.0, 9.0], "second": 13.0}
    made = watch(times)
    outcome = tune(
        "toy", some, problem(), (), key=problem().key(1024), covers=COVERS, thorough=True
    )
    assert outcome.before == "second"
    assert f"first threads=128 {CONFIG}" in made.rounds[-1][0]
    assert "second" in made.rounds[-1][0]
    assert outcome.row.config is not None
    assert outcome.row.config["threads"] == 128


def test_only_launches_that_can_run_here_are_taken_from_other_sizes() -> None:
    few = Fake("few", configured=True, refusal=lambda one: "many" if one.rows > 1000 else None)
    assert can_run(launch(64), problem())
    assert not can_run(launch(33), problem())
    assert can_run(Candidate(Fake("second"), None), problem())
    assert can_run(Candidate(few, Config(64)), problem(1000))
    assert not can_run(Candidate(few, Config(64)), problem(1001))
    random = Candidate(Fake("second", random="atomics"), None)
    assert can_run(random, problem())
    assert not can_run(random, problem(deterministic=True))


def test_without_thoroughness_each_variant_has_one_launch(watch: Any) -> None:
    made = watch(TIMES)
    outcome = tune("toy", variants(), problem(), (), key="toy rows=1024", covers=COVERS)
    assert made.rounds == [([f"first threads=128 {CONFIG}", "second"], 9)]
    assert (outcome.row.variant, outcome.row.config, outcome.row.candidates) == ("second", None, 2)


def test_only_one_candidate_makes_a_row_without_a_second(watch: Any) -> None:
    watch(TIMES)
    row = tune("toy", [Fake("second")], problem(), (), key="toy rows=1024", covers=COVERS).row
    assert (row.variant, row.second, dict(row.times)) == ("second", None, {"second": 11.0})


@pytest.mark.parametrize(
    ("device", "others", "expected"),
    [
        (H200, [Fake("second")], ["second"]),
        (H200, [], ["reference"]),
        (CPU, [Fake("second")], ["second", "reference"]),
    ],
)
def test_the_reference_takes_part_on_a_cpu_or_alone(
    device: Device, others: list[Fake], expected: list[str]
) -> None:
    reference = Fake("reference")
    both = [*others, reference]
    found = candidates(both, problem(device=device), Candidate(both[0], None), thorough=False)
    assert [str(one) for one in found] == expected


def test_what_runs_now_takes_part_first_with_its_tuned_config(watch: Any) -> None:
    some = variants()
    tuned = Config(threads=1024)
    remember(H200, [row_of(problem(), some[0], tuned)], keep=False)
    made = watch({**TIMES, f"first threads=1024 {CONFIG}": 12.0, "second": 11.95})
    outcome = tune("toy", some, problem(), (), key=problem().key(1024), covers=COVERS)
    assert made.rounds[0][0][0] == outcome.before == f"first threads=1024 {CONFIG}"
    # 0.4% is noise.
    assert outcome.row.config is not None
    assert outcome.row.config["threads"] == 1024


def test_the_reference_stays_in_where_it_is_what_runs_now(watch: Any) -> None:
    watch(TIMES)
    with use("toy", "reference"):
        outcome = tune("toy", variants(), problem(), (), key="toy rows=1024", covers=COVERS)
    assert (outcome.before, outcome.before_us) == ("reference", 100.0)
    assert outcome.row.variant == "second"


def test_variants_that_cannot_be_built_are_failures(watch: Any) -> None:
    watch(TIMES)
    broken = Fake("first", failure=CompileError("expected a ';'"))
    outcome = tune(
        "toy", [broken, Fake("second")], problem(), (), key="toy rows=1024", covers=COVERS
    )
    assert outcome.row.variant == "second"
    assert outcome.failures == {"first": "CompileError: expected a ';'"}
    assert (outcome.before_us, outcome.won) == (None, 0.0)


def test_nothing_that_can_be_built_is_an_error_with_the_reasons() -> None:
    broken = Fake("first", failure=CompileError("expected a ';'"))
    with pytest.raises(VariantUnavailable, match=r"no variant could be built: first: CompileError"):
        tune("toy", [broken], problem(), (), key="toy rows=1024", covers=COVERS)


def test_modes_decide_who_takes_part(watch: Any) -> None:
    watch({"second": 5.0, "reference": 1.0, "first": 2.0})
    some = [Fake("first", random="atomics"), Fake("second"), Fake("reference", varies="adds")]
    row = tune(
        "toy", some, problem(deterministic=True, device=CPU), (), key="k rows=1", covers=COVERS
    ).row
    assert dict(row.times) == {"second": 5.0, "reference": 1.0}
    row = tune(
        "toy", some, problem(batch_invariant=True, device=CPU), (), key="k rows=1", covers=COVERS
    ).row
    assert dict(row.times) == {"first": 2.0, "second": 5.0}


def test_written_arguments_are_timed_on_copies_and_what_is_read_only_is_not_copied() -> None:
    seen: list[tuple[int, int]] = []

    def add_(x: torch.Tensor, y: torch.Tensor) -> None:
        seen.append((x.data_ptr(), y.data_ptr()))
        x.add_(y)

    x, y = torch.zeros(8), torch.ones(8)
    some = [Fake("first", work=add_), Fake("second", work=add_)]
    tune("toy", some, problem(device=CPU), (x, y), key="toy rows=1024", covers=COVERS, written=(0,))
    assert x.sum() == 0
    assert {pointers[0] for pointers in seen}.isdisjoint({x.data_ptr()})
    assert {pointers[1] for pointers in seen} == {y.data_ptr()}
