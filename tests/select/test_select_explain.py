from __future__ import annotations

import json

import pytest
from select_fakes import H200, Config, Fake, problem

from gristmill.errors import CompileError
from gristmill.select import (
    Explanation,
    RunnerUp,
    Table,
    explain_problem,
    reset_tables,
    resolve,
    row_for,
    use,
)
from gristmill.select.table import user_table_path

FIRST = Fake("first", configured=True, source="v1")
SECOND = Fake("second", refusal="needs an even N")
THIRD = Fake("third", declined="leaves SMs idle")
REFERENCE = Fake("reference")
VARIANTS = [FIRST, SECOND, THIRD, REFERENCE]


def tune(source_hash: str | None = None) -> None:
    row = row_for(
        problem(),
        FIRST,
        Config(threads=256, cap=2.0),
        us=20.0,
        spread_us=0.1,
        second=RunnerUp("reference", 80.0),
        date="2026-11-15",
    )
    table = Table.for_device(H200)
    table.put(row)
    table.save(user_table_path(H200))
    if source_hash is not None:
        path = user_table_path(H200)
        path.write_text(path.read_text().replace(row.source_hash, source_hash))
    reset_tables()


def statuses(explanation: Explanation) -> dict[str, str]:
    return {row.variant: row.status for row in explanation.rows}


def test_every_variant_is_there_with_its_reason_or_config() -> None:
    explanation = explain_problem("toy", VARIANTS, problem())
    assert statuses(explanation) == {
        "first": "chosen",
        "second": "unsupported",
        "third": "declined",
        "reference": "available",
    }
    assert explanation.chosen == "first"
    assert explanation.source == "preference"
    assert explanation.rows[0].config == Config(threads=128)
    assert explanation.rows[1].reason == "needs an even N"
    assert explanation.rows[2].reason == "leaves SMs idle"
    assert [row.measured_us for row in explanation.rows] == [None] * 4


def test_one_that_declined_and_is_alone_is_chosen() -> None:
    explanation = explain_problem("toy", [SECOND, THIRD], problem())
    assert statuses(explanation) == {"second": "unsupported", "third": "chosen"}
    assert explanation.chosen == "third"


def test_measured_times_and_config_come_from_the_table() -> None:
    tune()
    explanation = explain_problem("toy", VARIANTS, problem())
    assert explanation.source == "user table"
    assert explanation.rows[0].config == Config(threads=256, cap=2.0)
    assert [row.measured_us for row in explanation.rows] == [20.0, None, None, 80.0]


def test_stale_row_is_said_and_its_times_are_not_shown() -> None:
    tune(source_hash="f" * 16)
    explanation = explain_problem("toy", VARIANTS, problem())
    assert explanation.source == "preference"
    assert [row.measured_us for row in explanation.rows] == [None] * 4
    assert any("stale: first has changed" in note for note in explanation.notes)


def test_explain_builds_nothing() -> None:
    variant = Fake("first")
    explain_problem("toy", [variant], problem())
    assert variant.bound == []


def test_forced_variant_is_the_chosen_one() -> None:
    with use("toy", "third"):
        explanation = explain_problem("toy", VARIANTS, problem())
    assert (explanation.chosen, explanation.source) == ("third", "forced")
    assert statuses(explanation)["first"] == "available"


def test_forced_variant_that_cannot_run_is_explained_not_raised() -> None:
    with use("toy", "second"):
        explanation = explain_problem("toy", VARIANTS, problem())
    assert explanation.chosen is None
    assert "needs an even N" in str(explanation).split("nothing runs:")[1]


def test_what_failed_to_build_is_not_called_chosen() -> None:
    broken = Fake("first", failure=CompileError("expected a ';'"))
    assert statuses(explain_problem("toy", [broken, REFERENCE], problem()))["first"] == "chosen"
    resolve("toy", [broken, REFERENCE], problem())
    explanation = explain_problem("toy", [broken, REFERENCE], problem())
    assert statuses(explanation) == {"first": "failed", "reference": "chosen"}
    assert "expected a ';'" in explanation.rows[0].reason
    broken.failure = None
    resolve("toy", [broken, REFERENCE], problem())
    assert explain_problem("toy", [broken, REFERENCE], problem()).chosen == "first"


def test_text_is_an_aligned_table() -> None:
    tune()
    text = str(explain_problem("toy", VARIANTS, problem()))
    assert text.splitlines() == [
        "toy rows=1000 N=4096 x=bfloat16 weight=float32 llama strided",
        "on NVIDIA H200 (sm_90a, 132 SMs); choices are tuned at rows=1024",
        "",
        "    variant    status       us",
        "->  first      chosen       20.00  threads=256 vector=16 order=() scope=warp cap=2.0",
        "    second     unsupported         needs an even N",
        "    third      declined            leaves SMs idle",
        "    reference  available    80.00",
        "",
        "runs first, by user table: measured on this machine's NVIDIA H200",
        "times from the user table, measured on this machine's NVIDIA H200, 2026-11-15",
    ]


def test_empty_columns_are_left_out_of_the_text() -> None:
    text = str(explain_problem("toy", [REFERENCE], problem()))
    assert " us" not in text
    assert "->  reference  chosen" in text.splitlines()


@pytest.mark.parametrize("tuned", [False, True])
def test_as_dict_is_json(tuned: bool) -> None:
    if tuned:
        tune()
    found = json.loads(json.dumps(explain_problem("toy", VARIANTS, problem()).as_dict()))
    assert (found["chosen"], found["hint"], found["arch"]) == ("first", 1024, "sm_90a")
    assert found["dtypes"] == {"x": "bfloat16", "weight": "float32"}
    assert found["variants"][0]["config"]["threads"] == (256 if tuned else 128)
    assert found["variants"][0]["measured_us"] == (20.0 if tuned else None)
    assert found["variants"][1]["reason"] == "needs an even N"
