"""Comparing two runs: distributions that are made up, so that what is true is known."""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import pytest
from rich.console import Console

from gristmill.bench.compare.comparison import (
    FALSE_ALARMS,
    Change,
    Comparison,
    compare,
    parse_threshold,
)
from gristmill.bench.compare.report import changed, tables
from gristmill.bench.compare.rows import readings
from gristmill.bench.results import OURS, Results, load
from gristmill.errors import ArgumentError

META = {
    "gpu": "NVIDIA H200",
    "device": "cuda",
    "driver": "580.1",
    "cuda": "13.0",
    "torch": "2.13.0",
    "peers": {"eager": "2.13.0", "quack": "0.6", "liger": "0.8"},
}
PEERS = {"eager": 2.1, "quack_one_pass": 1.1, "liger": 1.6}
OPS = ("rms_norm", "softmax", "cross_entropy")
SIZES = [(op, 2**power) for op in OPS for power in range(4, 20)]
Factor = Callable[[str, int, str], float]

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def unchanged(op: str, rows: int, impl: str) -> float:
    return 1.0


class Machine:
    """Runs of the same code: samples scatter, medians scatter between runs, the machine drifts."""

    def __init__(self, seed: int, *, noise: float = 0.004, scatter: float = 0.008) -> None:
        self._random = random.Random(seed)
        self._noise, self._scatter = noise, scatter

    def run(self, factor: Factor = unchanged, *, drift: float = 1.0, samples: int = 11) -> Results:
        """Times as they should be by `factor(op, rows, impl)`, where "copy" is the roof."""
        rows = []
        for op, size in SIZES:
            roof = 2.0 + size / 200
            local = drift * math.exp(self._random.gauss(0, 0.01))
            copy = roof * local * factor(op, size, "copy") * self._scattered()
            for impl, times in {OURS: 1.05, **PEERS}.items():
                us = roof * times * local * factor(op, size, impl) * self._scattered()
                rows.append(self._row(op, size, impl, us, copy, samples))
        return Results(dict(META), rows)

    def _scattered(self) -> float:
        return math.exp(self._random.gauss(0, self._scatter))

    def _row(
        self, op: str, size: int, impl: str, us: float, roof: float, samples: int
    ) -> dict[str, Any]:
        taken = [us * math.exp(self._random.gauss(0, self._noise)) for _ in range(samples)]
        low, _, high = quantiles(taken, n=4, method="inclusive")
        row = {"op": op, "dtype": "bfloat16", "M": size, "N": 4096, "impl": impl, "error": None}
        row |= {"us": round(median(taken), 3), "spread_us": round(high - low, 3)}
        row |= {"samples": samples, "roof_us": round(roof, 3)}
        return row | ({"variant": "cuda_block", "config": {"threads": 128}} if impl == OURS else {})


def of(comparison: Comparison, op: str, rows: int) -> Change:
    return next(
        one
        for one in comparison.changes
        if one.key.op == op and one.key.problem == f"bfloat16 {rows}x4096"
    )


def slowed(op: str, rows: int, by: float, *impls: str) -> Factor:
    def factor(this_op: str, this_rows: int, impl: str) -> float:
        return by if (this_op, this_rows) == (op, rows) and impl in impls else 1.0

    return factor


@pytest.mark.parametrize("samples", [5, 11])
def test_noise_alone_raises_an_alarm_no_more_often_than_stated(samples: int) -> None:
    """With a threshold of nearly nothing, so that only the noise stands between."""
    alarms, draws = 0, 100
    for seed in range(draws):
        machine = Machine(seed)
        old, new = machine.run(samples=samples), machine.run(drift=1.04, samples=samples)
        alarms += bool(compare(old, new, threshold=1e-6).regressions)
    assert alarms <= FALSE_ALARMS * draws


def test_a_tenth_more_is_found_and_nothing_else_is_blamed() -> None:
    for seed in range(40):
        machine = Machine(seed)
        slow = slowed("softmax", 4096, 1.10, OURS)
        found = compare(machine.run(), machine.run(slow, drift=0.97))
        (only,) = found.regressions
        assert (only.key.op, only.key.problem) == ("softmax", "bfloat16 4096x4096")
        assert only.ratio == pytest.approx(1.10, abs=0.06)
        assert found.exit_code == 1


def test_a_machine_that_drifts_is_not_blamed_on_us() -> None:
    machine = Machine(1)
    found = compare(machine.run(), machine.run(drift=1.15))
    assert found.regressions == []
    assert found.exit_code == 0
    assert all(one.factor == pytest.approx(1.15, abs=0.01) for one in found.drifts)
    assert of(found, "rms_norm", 4096).raw == pytest.approx(1.15, abs=0.05)
    assert of(found, "rms_norm", 4096).ratio == pytest.approx(1.0, abs=0.03)


def test_a_drift_of_one_problem_alone_is_the_machines_too() -> None:
    """As of a clock that fell while this problem was measured, all implementations in turns."""
    machine = Machine(2)
    local = slowed("rms_norm", 1024, 1.2, OURS, "copy", *PEERS)
    assert compare(machine.run(), machine.run(local)).regressions == []


def test_a_regression_does_not_hide_behind_a_faster_machine() -> None:
    machine = Machine(3)
    found = compare(machine.run(), machine.run(slowed("rms_norm", 8192, 1.12, OURS), drift=0.88))
    (only,) = found.regressions
    assert only.raw is not None
    assert only.raw < 1.03
    assert only.ratio == pytest.approx(1.12, abs=0.05)


def test_a_peer_that_changed_by_itself_excuses_nothing_and_accuses_nobody() -> None:
    machine = Machine(4)

    def factor(op: str, rows: int, impl: str) -> float:
        if impl == "quack_one_pass" and rows == 4096:
            return 0.6
        return 1.15 if (op, rows, impl) == ("softmax", 4096, OURS) else 1.0

    found = compare(machine.run(), machine.run(factor))
    assert [one.key.op for one in found.regressions] == ["softmax"]


def test_a_peer_of_another_version_is_no_witness() -> None:
    """Everything but the copy is then free to change; the copy alone says that nothing drifted."""
    machine = Machine(5)

    def newer(op: str, rows: int, impl: str) -> float:
        return 1.1 if impl in (OURS, *PEERS) else 1.0

    old, new = machine.run(), machine.run(newer)
    assert compare(old, new).regressions == []
    new.meta = {**META, "peers": {"eager": "2.13.1", "quack": "0.7", "liger": "0.9"}}
    found = compare(old, new)
    # One witness leaves more noise than four.
    assert len(found.regressions) > len(SIZES) / 2
    assert {one.verdict for one in found.changes} <= {"slower", "unclear"}
    versions = {(one.peer, one.old_version, one.new_version) for one in found.peers}
    assert ("quack_one_pass", "0.6", "0.7") in versions


def test_without_a_witness_times_are_taken_as_they_are() -> None:
    machine = Machine(6, scatter=0.001)
    old, new = machine.run(), machine.run(drift=1.08)
    for results in (old, new):
        results.rows = [row for row in results.rows if row["impl"] == OURS]
        for row in results.rows:
            del row["roof_us"]
    found = compare(old, new)
    assert found.drifts == []
    assert all(one.ratio == one.raw and one.witnesses == 0 for one in found.changes)
    assert len(found.regressions) > len(SIZES) / 2


def test_noise_that_is_too_large_to_judge_is_called_unclear_not_same() -> None:
    machine = Machine(7, scatter=0.08)
    found = compare(machine.run(), machine.run(slowed("softmax", 4096, 1.10, OURS)))
    assert found.regressions == []
    assert {one.verdict for one in found.changes} == {"unclear"}
    assert {one.verdict for one in compare(*still()).changes} == {"same"}


def still(*, ours: float = 1.0, us: float = 20.0) -> tuple[Results, Results]:
    """Two runs without a trace of noise."""
    pair = []
    for factor in (1.0, ours):
        rows: list[dict[str, Any]] = []
        for size in range(1, 21):
            for impl in (OURS, "eager"):
                row = {"op": "rms_norm", "dtype": "bfloat16", "M": size, "N": 4096, "impl": impl}
                time = us * (factor if impl == OURS else 1.0)
                row |= {"us": time, "spread_us": 0.001, "samples": 11, "roof_us": us}
                rows.append({**row, "error": None})
        pair.append(Results(dict(META), rows))
    return pair[0], pair[1]


@pytest.mark.parametrize(
    ("us", "ours", "verdict"),
    [
        (20.0, 1.02, "same"),
        (20.0, 1.04, "slower"),
        (20.0, 0.95, "faster"),
        (4.0, 1.04, "same"),  # below 5 µs a twentieth is the least that counts
        (4.0, 1.06, "slower"),
        (1.0, 1.09, "same"),  # and a tenth of a µs
        (1.0, 1.12, "slower"),
    ],
)
def test_the_least_change_that_counts(us: float, ours: float, verdict: str) -> None:
    assert {one.verdict for one in compare(*still(us=us, ours=ours)).changes} == {verdict}


def test_the_threshold_is_the_callers() -> None:
    assert compare(*still(ours=1.04)).exit_code == 1
    assert compare(*still(ours=1.04), threshold=0.05).exit_code == 0
    assert (parse_threshold("3%"), parse_threshold("0.03")) == (0.03, 0.03)
    for text in ("3", "-1%", "0", "a lot", "nan"):
        with pytest.raises(ArgumentError, match=r"write 3% or 0\.03"):
            parse_threshold(text)
    with pytest.raises(ArgumentError, match="between 0 and 1"):
        compare(*still(), threshold=3)


@pytest.mark.parametrize("name", ["gpu", "driver", "cuda", "torch", "device"])
def test_other_machines_and_versions_are_refused_unless_asked_for(name: str) -> None:
    old, new = still()
    new.meta[name] = "other"
    with pytest.raises(ArgumentError, match=f"differ in {name}: .* -> other.*--across"):
        compare(old, new)
    found = compare(old, new, across=True)
    assert found.notes == [f"differs: {name}: {META[name]} -> other"]


def test_what_only_might_matter_is_told() -> None:
    old, new = still()
    old.meta["revision"], new.meta["revision"] = "abc", "def"
    assert compare(old, new).notes == ["differs: revision: abc -> def"]


def test_files_without_anything_in_common_cannot_be_compared() -> None:
    old, new = still()
    new.rows = [{**row, "op": "softmax"} for row in new.rows]
    with pytest.raises(ArgumentError, match="no problem in common"):
        compare(old, new)


def test_what_vanished_failed_or_came_is_told_and_only_a_failure_counts() -> None:
    old, new = still()
    ours = [row for row in new.rows if row["impl"] == OURS]
    new.rows.remove(ours[0])
    ours[1].update(error="RuntimeError: no such kernel [abc]")
    del ours[1]["us"]
    new.rows.append({**ours[2], "M": 99})
    for row in old.rows:
        if row["impl"] == OURS and row["M"] == 4:
            row["error"] = "OutOfMemoryError: much"
            del row["us"]
    found = compare(old, new)
    verdicts = {one.key.problem.split()[1]: one.verdict for one in found.changes}
    assert (verdicts["1x4096"], verdicts["2x4096"]) == ("gone", "fails")
    assert (verdicts["99x4096"], verdicts["4x4096"]) == ("new", "works again")
    assert [one.reason for one in found.regressions] == ["RuntimeError: no such kernel [abc]"]
    assert found.exit_code == 1
    assert "no such kernel [abc]" in printed(found)


def test_peers_that_become_slower_or_fail_are_no_regressions_of_ours() -> None:
    old, new = still()
    for row in new.rows:
        if row["impl"] == "eager" and row["M"] < 5:
            row["us"] *= 2
        if row["impl"] == "eager" and row["M"] == 7:
            row["error"] = "it broke"
            del row["us"]
    found = compare(old, new)
    assert found.exit_code == 0
    assert {one.key.impl for one in found.changes} == {OURS}
    (eager,) = (one for one in found.peers if one.peer == "eager")
    assert eager.ratio == pytest.approx(2 ** (4 / 19), rel=1e-4)


def other_suites(factor: float) -> Results:
    """A row of each suite that measures something else, ours by `factor` longer."""
    host = {"op": "rms_norm", "dtype": "bfloat16", "M": 1, "N": 4096, "mode": "forward"}
    model = {"suite": "transformers", "op": "training", "dtype": "bfloat16", "shape": "4x2048"}
    model |= {"error": None, "spread_ms": 0.5, "repeats": 5}
    start = {"suite": "cold_start", "op": "rms_norm", "shape": "256x4096", "impl": OURS}
    start |= {"cache": "warm", "error": None, "least_s": 0.199 * factor, "most_s": 0.201 * factor}
    regret = {"suite": "regret", "op": "rms_norm", "dtype": "bfloat16", "M": 1, "N": 4096}
    regret |= {"impl": OURS, "error": None, "picked": "cuda_block threads=128", "best": "library"}
    regret |= {"picked_us": 10 * factor, "best_us": 10.0, "regret": factor - 1}
    choice = {"suite": "choice", "op": "rms_norm", "dtype": "bfloat16", "M": 1, "N": 4096}
    choice |= {"impl": OURS, "error": None, "what": "lookup", "choice_us": 5.0 * factor}
    rows: list[dict[str, Any]] = [
        {**host, "impl": OURS, "host_us": 10.0 * factor},
        {**host, "impl": "eager", "host_us": 8.0},
        {**model, "impl": "patched", "ours": True, "ms": 100.0 * factor},
        {**model, "impl": "eager", "ours": False, "ms": 150.0},
        {**start, "beyond_s": 0.2 * factor, "torch_s": 1.2, "repeats": 3},
        {**regret, "picked_spread_us": 0.01, "best_spread_us": 0.01},
        choice,
        {**choice, "what": "tuning", "choice_us": None, "choice_s": 0.7 * factor},
        # Nothing is compared by these two: a launch that was not chosen, a start of old files.
        {**regret, "suite": "matrix", "hint": 1, "us": 3.0 * factor, "spread_us": 0.1},
        {**host, "mode": None, "impl": OURS, "cache": "warm", "first_call_s": 0.3 * factor},
    ]
    del rows[-1]["mode"]
    return Results(dict(META), rows)


def test_a_spread_is_read_as_the_suite_means_it() -> None:
    """Of a block it is the interquartile range of samples, of whole models the range of runs."""
    timed = {"op": "training", "shape": "2x8", "impl": OURS, "ms": 100.0, "spread_ms": 1.0}
    rows = [{**timed, "suite": suite, "repeats": 9} for suite in ("end_to_end", "transformers")]
    block, model = (one.error for one in readings(Results({}, rows)).values.values())
    # A normal distribution: IQR = 1.349 sigma; the range of nine is 2.97 sigma.
    assert block == pytest.approx(1.2533 / 1.349 / 3 / 100)
    assert model == pytest.approx(1.2533 / 2.970 / 3 / 100)


def test_a_negative_time_is_no_number() -> None:
    """Tokens of a generation are timed as a difference, which noise can turn round."""
    row = {"suite": "transformers", "op": "generation", "impl": OURS, "ms": -1.0}
    assert readings(Results({}, [row])).values == {}


def test_every_suite_is_compared_by_its_own_number() -> None:
    found = compare(other_suites(1.0), other_suites(1.6))
    worse = {(one.key.measure, one.key.op): one.ratio for one in found.regressions}
    assert set(worse) == {
        ("host", "rms_norm"),
        ("model", "transformers: training"),
        ("start", "cold_start: rms_norm"),
        ("regret", "regret: rms_norm"),
        ("host", "choice: rms_norm"),
        ("start", "choice: rms_norm"),
    }
    assert all(ratio == pytest.approx(1.6) for ratio in worse.values())
    assert compare(other_suites(1.0), other_suites(1.02)).exit_code == 0


def test_seconds_of_a_slow_machines_start_are_not_ours() -> None:
    """Torch's own part of the start took as much longer."""
    old, new = other_suites(1.0), other_suites(1.6)
    for row in new.rows:
        if "torch_s" in row:
            row["torch_s"] *= 1.6
    assert "start" in {one.key.measure for one in compare(old, other_suites(1.6)).regressions}
    starts = [one for one in compare(old, new).changes if one.key.op.startswith("cold_start")]
    assert [one.verdict for one in starts] != ["slower"]


def printed(comparison: Comparison, **options: Any) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=220)
    for table in tables(comparison, **options):
        console.print(table)
    return stream.getvalue()


def test_tables_show_what_changed_and_all_rows_on_request() -> None:
    old, new = still(ours=1.2)
    for row in new.rows:
        if row["M"] > 3:
            row["us"] = 20.0
        if row["impl"] == OURS:
            row |= {"variant": "cuda_warp", "config": {"up": [1, 2]}}
    for row in old.rows:
        row |= {"variant": "cuda_block", "config": {"up": [1, 1]}}
    found = compare(old, new)
    text = printed(found)
    assert "rms_norm bfloat16 3x4096" in text
    assert "rms_norm bfloat16 4x4096" not in text
    assert "rms_norm bfloat16 4x4096" in printed(found, all_rows=True)
    assert "+20.0%" in text
    assert "cuda_block -> cuda_warp" in text
    (summary,) = found.summaries
    assert summary.counts == {"slower": 3, "same": 17}
    assert summary.ratio == pytest.approx(1.2 ** (3 / 20), rel=1e-3)


def test_what_else_runs_is_said_in_few_words() -> None:
    assert changed("cuda_block threads=64 up=[1, 2]", "cuda_block threads=64 up=[1, 3]") == (
        "cuda_block: up [1, 2] -> [1, 3]"
    )
    assert changed("library", "cuda_block threads=64") == "library -> cuda_block"
    assert changed("a:x b:y", "a:x b:z") == "-b:y b:z"
    assert changed("library", "library") == ""


def test_json_holds_everything() -> None:
    found = compare(*still(ours=1.5))
    data = json.loads(json.dumps(found.as_json()))
    assert data["exit_code"] == 1
    assert len(data["changes"]) == 20
    assert data["changes"][0]["measure"] == "kernel"
    assert data["changes"][0]["verdict"] == "slower"
    assert data["changes"][0]["ratio"] == pytest.approx(1.5)
    assert data["summary"][0]["counts"] == {"slower": 20}


def test_stored_runs_of_the_h200_agree_but_for_what_was_tuned_between_them() -> None:
    """Two runs of 2026-11-15; a table in between gave add_rms_norm another config at one size."""
    folder = RESULTS / "h200-2026-11-15"
    old, new = (load(folder / name / "results.json") for name in ("first-run", "forward"))
    (only,) = compare(old, new).regressions
    assert (only.key.op, only.key.problem) == ("add_rms_norm", "bfloat16 2048x4096")
    assert changed(only.old_choice, only.new_choice).startswith("cuda_block: threads 192 -> 64")
    again = [
        load(folder / "host-and-start" / name) for name in ("results.json", "results-again.json")
    ]
    assert compare(*again).regressions == []  # the host took up to twice as long, eager as well
