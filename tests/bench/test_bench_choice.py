"""What choosing costs: real lookups on a CPU, and tuning in processes of its own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.bench.choice import first_tuning
from gristmill.bench.choice import suite as choice
from gristmill.bench.regret.families import Family
from gristmill.bench.results import Results
from gristmill.errors import ArgumentError, GristmillError
from gristmill.ops.registry import OPS
from gristmill.select import device_of, reset_tables, tables_for
from gristmill.settings import reload_settings

CPU = torch.device("cpu")
FAMILY = Family("rms_norm", (64,), "float32")


@pytest.fixture(autouse=True)
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_CALLS", 50)
    monkeypatch.setattr(choice, "_BLOCKS", 2)


def test_a_lookup_is_that_of_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that takes a millisecond is seen in it; what runs after the lookup is not."""
    assert 0.05 < choice.lookup_us(FAMILY, CPU) < 900
    op = OPS["rms_norm"]
    key = op._key

    def slow(*args: Any) -> Any:
        time.sleep(0.001)
        return key(*args)

    monkeypatch.setattr(op, "_key", slow)
    assert choice.lookup_us(FAMILY, CPU) > 1000


def test_a_lookup_of_nothing_is_no_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    op = OPS["rms_norm"]
    monkeypatch.setattr(op, "_key", lambda *args: object())
    with pytest.raises(GristmillError, match="rms_norm has not remembered its plan"):
        choice.lookup_us(FAMILY, CPU)


def test_a_multikernel_is_measured_beyond_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        def __init__(self, name: str, kernels: dict[str, Any]) -> None:
            self.first = next(iter(kernels.values()))

        def __call__(self, *args: Any) -> Any:
            time.sleep(0.001)
            return self.first(*args)

    monkeypatch.setattr(choice, "MultiKernel", Slow)
    assert 1000 < choice.multikernel_us(CPU) < 20_000


def test_a_first_choice_is_made_by_a_table_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = []
    resolve = choice.resolve

    def seen(*args: Any) -> Any:
        found = resolve(*args)
        sources.append(found[0].source)
        return found

    monkeypatch.setattr(choice, "resolve", seen)
    assert 1 < choice.first_choice_us(FAMILY, CPU) < 1e5
    assert set(sources) == {"tuning of this process"}
    assert not tables_for(device_of(CPU))[0].table.rows


def test_rows_of_tuning_by_what_was_there_before(monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[tuple[str, bool]] = []

    def child(module: str, words: Any, environment: dict[str, str], what: str) -> Any:
        assert module == "gristmill.bench.choice.first_tuning"
        assert words[:3] == ["rms_norm", "64", "float32"]
        assert environment["GRISTMILL_TUNE"] == "first-call"
        cache = Path(environment["GRISTMILL_CACHE_DIR"])
        folders.append((str(cache), (cache / "tables").exists()))
        (cache / "tables").mkdir()
        number = len(folders)
        return {
            "tuned": [
                {"seconds": seconds, "candidates": 4, "compiles": 3 if number == 1 else 0}
                for seconds in (2.0 / number, 0.1)
            ]
        }

    monkeypatch.setattr(choice, "in_fresh_process", child)
    rows = list(choice.tuning_rows(FAMILY, CPU, repeats=3))
    # One folder for all, in which nothing that was tuned is left for the next.
    assert len({folder for folder, _ in folders}) == 1
    assert not any(tables for _, tables in folders)
    assert [row["choice_s"] for row in rows] == [2.0, pytest.approx(2 / 3, abs=1e-4), 0.1]
    assert [row["limit"] for row in rows] == [None, 0.5, 0.5]
    assert [row["compiles"] for row in rows] == [3, 0, 0]
    assert [row["M"] for row in rows] == [256, 256, 1024]
    assert {row["candidates"] for row in rows} == {4}


def test_a_child_that_fails_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def child(*_: Any) -> Any:
        raise GristmillError("tuning of it failed in a fresh process: no driver")

    monkeypatch.setattr(choice, "in_fresh_process", child)
    (row,) = choice.tuning_rows(FAMILY, CPU, repeats=1)
    assert row["error"] == "tuning of it failed in a fresh process: no driver"
    assert Results({}, [row]).failures() == [row]


def test_the_child_tunes_with_no_more_candidates_than_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import json

    monkeypatch.setenv("GRISTMILL_TUNE", "first-call")
    monkeypatch.setenv("GRISTMILL_CACHE_DIR", str(tmp_path))
    op = OPS["rms_norm"]
    variants = op.variants
    op.forget_plans()
    reset_tables()
    reload_settings()
    try:
        for most, sizes in (("4", ["16", "256"]), ("1", ["4096"])):
            first_tuning.main(["rms_norm", "64", "float32", "cpu", most, *sizes], 0.0)
    finally:
        monkeypatch.undo()
        reload_settings()
        reset_tables()
        op.forget_plans()
    both, one = (json.loads(line)["tuned"] for line in capsys.readouterr().out.splitlines())
    assert [run["candidates"] for run in both] == [2, 2]  # library and reference
    assert [run["candidates"] for run in one] == [1]
    assert all(run["seconds"] > 0 and run["compiles"] == 0 for run in both)
    assert op.variants is variants


def test_a_call_that_did_not_tune_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    OPS["rms_norm"].forget_plans()
    reset_tables()
    with pytest.raises(GristmillError, match="rms_norm 64 float32 at 16 rows was not tuned"):
        first_tuning.main(["rms_norm", "64", "float32", "cpu", "4", "16"], 0.0)


def test_the_suite_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_TUNED", ("rms_norm",))
    monkeypatch.setattr(choice, "_BUCKET", range(40, 104, 16))
    results, steps = Results({}), []
    planned = choice.planned(CPU, dtype="float32", repeats=1)
    choice.run(planned, "float32", results, steps.append)
    assert len(steps) == len(planned) == 8
    assert not results.failures()
    assert not results.timed()
    costs = {(row["op"], row["what"]): row for row in results.rows}
    for op in ("rms_norm", "softmax", "linear_silu"):
        assert costs[op, "lookup on every call"]["choice_us"] > 0.05
        assert costs[op, "first choice, by a table"]["choice_us"] > 1
    tuned = [row for row in results.rows if "choice_s" in row]
    assert len(tuned) == 3
    assert all(row["choice_s"] > 0 and row["candidates"] == 2 for row in tuned)
    # A run that goes on has nothing left to do.
    before = list(results.rows)
    monkeypatch.setattr(choice, "lookup_us", None)
    monkeypatch.setattr(choice, "in_fresh_process", None)
    choice.run(planned, "float32", results, steps.append)
    assert results.rows == before


def test_one_op_of_the_suite_alone() -> None:
    steps = choice.planned(CPU, names=["softmax"])
    assert [(step.op, step.what) for step in steps] == [
        ("softmax", "lookup on every call"),
        ("softmax", "first choice, by a table"),
    ]
    with pytest.raises(ArgumentError, match=r"unknown op 'sofmax' \(did you mean softmax\?\)"):
        choice.planned(CPU, names=["sofmax"])
