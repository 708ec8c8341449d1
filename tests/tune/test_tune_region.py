"""`gristmill.tune`: a function or a block of code, with what it meets tuned on the way."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
import torch
from tune_helpers import N, chosen, fake_times, table_rows, user_table

import gristmill as gm
from gristmill.errors import ArgumentError, DtypeError
from gristmill.ops.registry import OPS
from gristmill.select import reset_counters
from gristmill.select.device import device_of
from gristmill.select.problem import Span
from gristmill.select.sight import _REGIONS
from gristmill.select.tables import remember
from gristmill.tune import TuneReport


def reference_wins(name: str, rows: int) -> float:
    del rows
    return 5.0 if name == "reference" else 10.0


def rows_of(report: TuneReport) -> list[str]:
    return [" ".join(outcome.row.key.split(" ")[:2]) for outcome in report.outcomes]


def test_a_function_is_run_once_and_its_problems_are_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_times(monkeypatch, reference_wins)
    calls = []

    def step(x: torch.Tensor, *, scale: float) -> torch.Tensor:
        calls.append(x)
        return gm.rms_norm(x * scale)

    x = torch.randn(60, N)
    report = gm.tune(step, x, scale=2.0)
    assert calls == [x]
    torch.testing.assert_close(report.result, gm.rms_norm(x * 2))
    assert rows_of(report) == ["rms_norm rows=64"]
    (outcome,) = report.outcomes
    assert (outcome.before, outcome.before_us, outcome.row.variant) == (
        "library",
        10.0,
        "reference",
    )
    assert outcome.row.rows == 60
    assert outcome.won == 0.5
    assert report.changed == [outcome]
    assert report.speedup == pytest.approx(2.0)
    assert table_rows() == {"rms_norm rows=64": "reference"}


def test_what_is_tuned_is_used_at_once_and_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_times(monkeypatch, reference_wins)
    x = torch.randn(64, N)
    gm.rms_norm(x)  # a plan is remembered
    with gm.tune():
        gm.rms_norm(x)
    reset_counters()
    gm.rms_norm(x)
    assert gm.counters()["choices"] == {"rms_norm:reference": 1}


@pytest.mark.parametrize("stale", [False, True])
def test_in_a_row_that_was_joined_from_many_one_call_speaks_for_its_own_sizes(
    stale: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One winner from 1 to 4096 rows, says the table: a call of one row measures only that."""
    fake_times(monkeypatch, lambda name, rows: 5.0 if name == "library" else 10.0)
    with gm.tune() as report:
        gm.rms_norm(torch.randn(4096, N))
    row = report.outcomes[0].row
    joined = dataclasses.replace(
        row, covers=Span(0, 8192), source_hash="0" * 16 if stale else row.source_hash
    )
    remember(device_of("cpu"), [joined])
    fake_times(monkeypatch, reference_wins)
    with gm.tune(again=not stale):
        gm.rms_norm(torch.randn(1, N))
    rows = user_table().rows.values()
    assert {row.covers: (row.variant, row.rows) for row in rows} == {
        (0, 4): ("reference", 1),
        (5, 8192): ("library", 4096),
    }


def test_a_row_speaks_for_its_bucket_until_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fake_times(monkeypatch, reference_wins)
    names: list[str] = []
    with gm.tune(progress=names.append) as report:
        for rows in (60, 64, 70, 60):
            gm.rms_norm(torch.randn(rows, N))
    assert rows_of(report) == ["rms_norm rows=64"]
    assert [name.split(" ")[:2] for name in names] == [["rms_norm", "rows=64"]]
    with gm.tune() as report:
        gm.rms_norm(torch.randn(61, N))
    assert report.outcomes == []
    assert "nothing was tuned" in str(report)
    with gm.tune(again=True) as report:
        for rows in (60, 64, 70):
            gm.rms_norm(torch.randn(rows, N))
    assert rows_of(report) == ["rms_norm rows=64"]
    assert report.outcomes[0].before == "reference"
    assert [rows for rows, _ in asked] == [60, 60]


def test_thorough_asks_for_all_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    library = next(one for one in OPS["rms_norm"].variants if one.name == "library")
    seen = []

    def configs(self: Any, problem: Any) -> tuple[None]:
        seen.append(problem.rows)
        return (None,)

    monkeypatch.setattr(type(library), "configs", configs)
    fake_times(monkeypatch, reference_wins)
    gm.tune(gm.rms_norm, torch.randn(4, N))
    assert seen == []
    gm.tune(gm.rms_norm, torch.randn(64, N), thorough=True)
    assert seen == [64]


def test_backward_passes_are_tuned_too(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_times(monkeypatch, reference_wins)
    x = torch.randn(64, N, requires_grad=True)
    weight = torch.ones(N, requires_grad=True)

    def step() -> None:
        gm.rms_norm(x, weight).square().sum().backward()

    report = gm.tune(step)
    assert rows_of(report) == ["rms_norm rows=64", "rms_norm_backward rows=64"]
    assert x.grad is not None
    assert set(table_rows()) == {"rms_norm rows=64", "rms_norm_backward rows=64"}


def test_a_backward_pass_after_the_region_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_times(monkeypatch, reference_wins)
    x = torch.randn(64, N, requires_grad=True)
    with gm.tune() as report:
        y = gm.rms_norm(x)
    y.sum().backward()
    assert rows_of(report) == ["rms_norm rows=64"]


def test_compiled_functions_are_tuned_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also their backward pass in a thread that knows nothing of the region, as on CUDA."""
    fake_times(monkeypatch, reference_wins)
    x = torch.randn(64, N, requires_grad=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return gm.rms_norm(x).square().sum()

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    compiled(x).backward()  # compiled, with plans of its own, before the region
    with gm.tune() as report:
        loss = compiled(x)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert rows_of(report) == ["rms_norm rows=64", "rms_norm_backward rows=64"]


def test_other_threads_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_times(monkeypatch, reference_wins)
    with gm.tune() as report:
        thread = threading.Thread(target=gm.rms_norm, args=(torch.randn(64, N),))
        thread.start()
        thread.join()
    assert report.outcomes == []


def test_threads_in_regions_of_their_own_tune_a_problem_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = fake_times(monkeypatch, reference_wins)
    reports: list[TuneReport] = []
    gate = threading.Barrier(8)

    def step(number: int) -> None:
        gate.wait()
        for rows in (64, 256, 1024):
            gm.rms_norm(torch.randn(rows, N))

    def work(number: int) -> None:
        reports.append(gm.tune(step, number))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(rows for rows, _ in asked) == [64, 256, 1024]
    told = sorted(name for report in reports for name in rows_of(report))
    assert told == sorted(f"rms_norm rows={rows}" for rows in (64, 256, 1024))
    assert set(table_rows().values()) == {"reference"}


def test_regions_nest_and_the_inner_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_times(monkeypatch, reference_wins)
    with gm.tune() as outer:
        gm.rms_norm(torch.randn(1, N))
        with gm.tune() as inner:
            gm.rms_norm(torch.randn(64, N))
        gm.rms_norm(torch.randn(1024, N))
    assert rows_of(inner) == ["rms_norm rows=64"]
    assert rows_of(outer) == ["rms_norm rows=1", "rms_norm rows=1024"]


def test_an_error_in_the_function_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_times(monkeypatch, reference_wins)

    def step() -> None:
        OPS["rms_norm"].run(*OPS["rms_norm"].example((64, N), torch.bfloat16, "cpu"))
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        gm.tune(step)
    assert not _REGIONS
    assert table_rows() == {"rms_norm rows=64": "reference"}
    assert chosen("rms_norm", 64) == "reference"


def test_a_forced_variant_is_not_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_times(monkeypatch, reference_wins)
    with gm.use("rms_norm", "library"), gm.tune() as report:
        gm.rms_norm(torch.randn(64, N))
        gm.softmax(torch.randn(64, N))
    assert rows_of(report) == ["softmax rows=64"]


def test_batch_invariant_calls_are_not_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their choice asks no measured row, and a row of theirs would speak for ordinary calls."""
    fake_times(monkeypatch, reference_wins)
    with gm.batch_invariant(), gm.tune() as report:
        gm.rms_norm(torch.randn(64, N))
    assert report.outcomes == []


def test_arguments_that_make_no_sense() -> None:
    with pytest.raises(ArgumentError, match="no function to call"):
        gm.tune(None, 1)
    with pytest.raises(DtypeError, match="fn must be a callable, got int"):
        gm.tune(3)  # type: ignore[call-overload]


def test_a_report_is_a_table_that_ends_in_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_times(
        monkeypatch, lambda name, rows: 5.0 if (name == "reference") == (rows < 50) else 10.0
    )
    with gm.tune() as report:
        gm.rms_norm(torch.randn(16, N))
        gm.rms_norm(torch.randn(64, N))
    first, second, last = str(report).splitlines()
    assert first.startswith("rms_norm rows=16")
    assert first.endswith("library -> reference  10.00 -> 5.00 us  -50.0%")
    assert second.endswith("library stays         5.00 us")
    assert last == (
        "2 problems tuned, 1 with another choice than before; 1.414 times as fast (geometric mean)"
    )
    data = report.as_dict()
    assert data["changed"] == 1
    assert [one["winner"] for one in data["problems"]] == ["reference", "library"]
    assert data["problems"][0]["second"]["variant"] == "library"


def test_real_timing_keeps_something_true() -> None:
    report = gm.tune(gm.softmax, torch.randn(16, 64))
    (outcome,) = report.outcomes
    row = user_table().rows[outcome.row.key]
    assert set(row.times) == {"library", "reference"}
    assert row.us == row.times[row.variant] > 0
    # What is slower stays only if it ran before.
    assert row.us == min(row.times.values()) or row.variant == outcome.before
