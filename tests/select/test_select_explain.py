from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from select_fakes import H200, Config, Fake, problem, row_of, table_of

import gristmill
from gristmill.errors import CompileError
from gristmill.explain import explain_call, tune_command
from gristmill.ops.registry import OPS
from gristmill.select import (
    KNOWN,
    Explanation,
    Row,
    RunnerUp,
    explain_problem,
    reset_tables,
    resolve,
    tables,
    use,
)
from gristmill.select.overrides import batch_invariant
from gristmill.select.problem import Span
from gristmill.select.tables import user_table_path
from gristmill.settings import reload_settings

FIRST = Fake("first", configured=True, source="v1")
SECOND = Fake("second", refusal="needs an even N")
THIRD = Fake("third", declined="leaves SMs idle")
REFERENCE = Fake("reference")
VARIANTS = [FIRST, SECOND, THIRD, REFERENCE]


@dataclass(frozen=True)
class Work:
    bytes: int
    operations: int = 0


def won(rows: int = 1000, **changes: Any) -> Row:
    """The row of a win by `first`, as a table holds it."""
    row = row_of(
        problem(rows),
        FIRST,
        Config(threads=256, cap=2.0),
        us=20.0,
        spread_us=0.1,
        second=RunnerUp("reference", 80.0),
        times={"first": 19.9, "third": 90.0, "reference": 80.0},
        candidates=5,
    )
    return replace(row, **changes)


def tune(*rows: Row) -> None:
    table_of(*(rows or (won(),))).save(user_table_path(H200))
    reset_tables()


def statuses(explanation: Explanation) -> dict[str, str]:
    return {row.variant: row.status for row in explanation.rows}


def times(explanation: Explanation) -> list[float | None]:
    return [row.measured_us for row in explanation.rows]


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
    assert times(explanation) == [None] * 4


def test_one_that_declined_and_is_alone_is_chosen() -> None:
    explanation = explain_problem("toy", [SECOND, THIRD], problem())
    assert statuses(explanation) == {"second": "unsupported", "third": "chosen"}
    assert explanation.chosen == "third"


def test_measured_times_and_config_come_from_the_table() -> None:
    """Of the winner the time of the launch that won, of the others their best."""
    tune()
    explanation = explain_problem("toy", VARIANTS, problem())
    assert explanation.source == "user table"
    assert explanation.rows[0].config == Config(threads=256, cap=2.0)
    assert times(explanation) == [20.0, None, 90.0, 80.0]


def test_stale_row_is_said_and_its_times_are_not_shown() -> None:
    tune(won(source_hash="f" * 16))
    explanation = explain_problem("toy", VARIANTS, problem())
    assert explanation.source == "preference"
    assert times(explanation) == [None] * 4
    (note,) = explanation.notes
    assert note.startswith(
        "user table: its row for 513 to 2048 rows is ignored: stale: first has changed"
    )


def test_times_of_one_table_only_are_shown_together(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured on other days, or on another GPU, does not compare."""
    monkeypatch.setattr(tables.resources, "files", lambda package: tmp_path)
    table_of(won(us=1.0, times={"first": 1.0, "third": 0.5})).save(tmp_path / "tables" / "a.json")
    tune(won(times={"first": 20.0}, second=None))
    explanation = explain_problem("toy", VARIANTS, problem())
    assert times(explanation) == [20.0, None, None, None]
    assert [one.source for one in explanation.evidence] == ["user table", "shipped table"]


def test_explain_builds_nothing() -> None:
    variant = Fake("first")
    explain_problem("toy", [variant], problem())
    assert variant.bound == []


def test_forced_variant_is_the_chosen_one() -> None:
    with use("toy", "third"):
        explanation = explain_problem("toy", VARIANTS, problem())
    assert (explanation.chosen, explanation.source) == ("third", "forced")
    assert statuses(explanation)["first"] == "available"
    assert explanation.modes["use"] == "third"
    assert explanation.changes[0] == 'leave the block of gm.use("toy", "third")'
    assert not any("tune" in line for line in explanation.changes)


def test_forced_by_the_environment_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRISTMILL_USE", "toy:third")
    reload_settings()
    explanation = explain_problem("toy", VARIANTS, problem())
    assert explanation.chosen == "third"
    assert explanation.changes[0] == "take toy:third out of GRISTMILL_USE"


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
    explanation = explain_problem(
        "toy",
        VARIANTS,
        problem(),
        cost=Work(bytes=67_200_000),
        tune_command="gristmill tune toy --shape 1000x4096 --dtype bfloat16",
    )
    assert str(explanation).splitlines() == [
        "toy rows=1000 N=4096 x=bfloat16 weight=float32 llama strided",
        "on NVIDIA H200 (sm_90a, 132 SMs); 513 to 2048 rows share the choice measured at rows=1000",
        "roof: 67.2 MB at 4.8 TB/s = 14.0 us (data sheet)",
        "",
        "    variant    status       us     of roof",
        "->  first      chosen       20.00  70%      "
        "threads=256 vector=16 order=() scope=warp cap=2.0",
        "    second     unsupported                  needs an even N",
        "    third      declined     90.00  16%      leaves SMs idle",
        "    reference  available    80.00  18%",
        "",
        "runs first, by user table: measured on this machine's NVIDIA H200",
        "user table: measured on this machine's NVIDIA H200 at rows=1000 on 2026-11-15, torch "
        "2.11.0: first 20.00 us (spread 0.10), then reference 80.00 us; 5 launches were timed",
        "in force: GRISTMILL_TUNE=off, GRISTMILL_TABLE=on",
        "to change it:",
        '  with gm.use("toy", "reference"): ...',
        "  GRISTMILL_USE=toy:reference",
        "  gristmill tune toy --shape 1000x4096 --dtype bfloat16",
    ]


def test_empty_columns_are_left_out_of_the_text() -> None:
    text = str(explain_problem("toy", [REFERENCE], problem()))
    assert " us" not in text
    assert "roof" not in text
    assert "to change it" not in text
    assert "->  reference  chosen" in text.splitlines()


def test_a_share_of_the_roof_is_told_only_of_this_very_number_of_rows() -> None:
    tune()
    cost = Work(bytes=67_200_000)
    assert explain_problem("toy", VARIANTS, problem(), cost=cost).rows[0].of_roof == pytest.approx(
        0.7
    )
    other = explain_problem("toy", VARIANTS, problem(1024), cost=cost)
    assert (other.rows[0].measured_us, other.rows[0].of_roof) == (20.0, None)


def test_the_larger_of_memory_and_arithmetic_is_the_roof() -> None:
    explanation = explain_problem(
        "toy", VARIANTS, problem(), cost=Work(bytes=101_000_000, operations=137_438_953_472)
    )
    assert explanation.roof is not None
    assert explanation.roof.us == pytest.approx(138.97, abs=0.01)
    assert (
        "roof: 137 GFLOP at 989 TFLOP/s = 139.0 us (data sheet, bf16 on tensor cores); "
        "101 MB at 4.8 TB/s alone are 21.0 us"
    ) in str(explanation)


@pytest.mark.parametrize(
    ("cost", "device"),
    [(None, H200), (Work(0), H200), (Work(100), replace(H200, bandwidth=0.0))],
)
def test_no_roof_is_drawn_where_it_is_not_known(cost: Work | None, device: Any) -> None:
    explanation = explain_problem("toy", VARIANTS, problem(device=device), cost=cost)
    assert explanation.roof is None
    assert "roof" not in str(explanation)


def test_a_card_without_a_data_sheet_has_the_roof_of_its_memory_clock() -> None:
    card = replace(H200, name="NVIDIA Something", bandwidth=1e12, flops=0.0)
    roof = explain_problem("toy", VARIANTS, problem(device=card), cost=Work(10**6, 10**12)).roof
    assert str(roof) == "1 MB at 1 TB/s = 1.00 us (by its memory clock)"


def beside(*spans: tuple[int, int | None], **changes: Any) -> list[Row]:
    """Rows that cover these row counts, each measured at the first of them, but at one at least."""
    return [
        won(
            key=problem().key(max(1, least)),
            covers=Span(least, most),
            rows=max(1, least),
            us=20.0 + number,
            **changes,
        )
        for number, (least, most) in enumerate(spans)
    ]


@pytest.mark.parametrize(
    ("rows", "measured", "words"),
    [
        (0, 1, "up to 4 rows share the choice measured at rows=1"),
        (1, 1, "up to 4 rows share the choice measured at rows=1"),
        (5, 5, "5 rows share the choice measured at rows=5"),
        (513, 513, "513 to 2048 rows share the choice measured at rows=513"),
        (2048, 513, "513 to 2048 rows share the choice measured at rows=513"),
        (10**6, 32769, "32769 rows and more share the choice measured at rows=32769"),
    ],
)
def test_what_the_choice_covers_is_shown(rows: int, measured: int, words: str) -> None:
    tune(*beside((0, 4), (5, 5), (513, 2048), (32769, None)))
    explanation = explain_problem("toy", VARIANTS, problem(rows))
    assert explanation.measured_at == measured
    assert explanation.covers is not None
    assert rows in explanation.covers
    assert f"; {words}\n" in str(explanation)


@pytest.mark.parametrize("rows", [0, 5, 512, 2049, 10**6])
def test_where_no_row_covers_a_size_that_is_said(rows: int) -> None:
    if rows:
        tune(*beside((1, 4), (513, 2048)))
    explanation = explain_problem("toy", VARIANTS, problem(rows))
    assert (explanation.measured_at, explanation.covers) == (None, None)
    assert (explanation.chosen, explanation.source) == ("first", "preference")
    assert times(explanation) == [None] * 4
    assert "; no row of a table decides\n" in str(explanation)
    assert len(explanation.evidence) == bool(rows)


@pytest.mark.parametrize(
    ("rows", "below", "above"),
    [
        (0, None, 1),
        (3, None, 200),
        (100, 1, 200),
        (300, 1, 513),
        (513, 200, None),
        (9999, 513, None),
    ],
)
def test_the_rows_of_the_next_sizes_are_shown(
    rows: int, below: int | None, above: int | None
) -> None:
    tune(*beside((1, 4), (200, 400), (513, 2048)))
    explanation = explain_problem("toy", VARIANTS, problem(rows))
    (found,) = explanation.evidence
    assert (found.below and found.below.stop, found.above and found.above.stop) == (below, above)
    covered = rows in (3, 300, 513)
    assert (found.row is not None) == covered
    (note,) = explanation.notes
    first, *lines = note.splitlines()
    assert first == (
        f"user table: {found._measured(found.row)}"
        if found.row is not None
        else "user table: no row covers this number of rows"
    )
    launch = "first threads=256 vector=16 order=[] scope=warp cap=2.0"
    spans = {
        1: "1 to 4 rows: {}, 20.00 us at rows=1",
        200: "200 to 400 rows: {}, 21.00 us at rows=200",
        513: "513 to 2048 rows: {}, 22.00 us at rows=513",
    }
    expected = [] if below is None else [f"  below, for {spans[below].format(launch)}"]
    expected += [] if above is None else [f"  above, for {spans[above].format(launch)}"]
    assert lines == expected
    as_dict = explanation.as_dict()["evidence"][0]
    assert (as_dict["below"] or {}).get("key") == (below and problem().key(below))
    assert (as_dict["above"] or {}).get("key") == (above and problem().key(above))
    assert (as_dict["row"] is not None) == covered
    assert note in str(explanation)


def test_a_stale_row_is_shown_with_its_neighbours() -> None:
    old = [replace(row, source_hash="f" * 16) for row in beside((5, 8))]
    tune(*beside((1, 4)), *old, *beside((9, 16)))
    explanation = explain_problem("toy", VARIANTS, problem(6))
    assert (explanation.covers, explanation.source) == (None, "preference")
    first, below, above = explanation.notes[0].splitlines()
    assert first.startswith("user table: its row for 5 to 8 rows is ignored: stale: first")
    assert below.startswith("  below, for 1 to 4 rows: ")
    assert above.startswith("  above, for 9 to 16 rows: ")


def test_a_table_that_knows_nothing_of_the_kind_of_problem_is_not_shown() -> None:
    tune(row_of(problem(dims=(("N", 512),)), REFERENCE))
    assert explain_problem("toy", VARIANTS, problem()).evidence == ()


def test_what_the_row_also_took_at_other_sizes_is_shown() -> None:
    tune(won(also={"600": 12.5, "2000": 40.126}))
    explanation = explain_problem("toy", VARIANTS, problem())
    expected = (
        "5 launches were timed; this one also took 12.50 us at rows=600, 40.13 us at rows=2000"
    )
    assert explanation.notes[0].endswith(expected)
    assert explanation.as_dict()["evidence"][0]["row"]["also"] == {"600": 12.5, "2000": 40.126}


def test_the_covered_sizes_are_those_of_the_table_that_decides(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables.resources, "files", lambda package: tmp_path)
    table_of(won(), won(key=problem().key(64), covers=Span(33, 128))).save(
        tmp_path / "tables" / "a.json"
    )
    tune(won(key=problem().key(2048), rows=2048, covers=Span(1449, 2896)))
    explanation = explain_problem("toy", VARIANTS, problem(1500))
    assert (explanation.measured_at, explanation.covers) == (2048, (1449, 2896))
    assert explanation.evidence[0].row is not None
    assert explanation.evidence[0].row.rows == 2048
    below = explain_problem("toy", VARIANTS, problem(1448))
    assert (below.source, below.measured_at, below.covers) == ("shipped table", 1000, (513, 2048))
    users, shipped = below.evidence
    assert (users.row, users.below) == (None, None)
    assert users.above is not None
    assert users.above.covers == (1449, 2896)
    assert shipped.row is not None
    assert shipped.below is not None
    assert (shipped.row.covers, shipped.below.covers) == ((513, 2048), (33, 128))


def test_variants_that_a_mode_excludes_are_told_apart_from_those_that_cannot() -> None:
    variants = [Fake("first", random="adds in any order"), SECOND, REFERENCE]
    explanation = explain_problem("toy", variants, problem(deterministic=True))
    assert statuses(explanation) == {
        "first": "excluded",
        "second": "unsupported",
        "reference": "chosen",
    }
    assert explanation.rows[0].reason == "not deterministic: adds in any order"
    assert explanation.modes["deterministic"] is True
    assert "in force: deterministic, GRISTMILL_TUNE=off" in str(explanation)
    assert "torch.use_deterministic_algorithms(False)" in explanation.changes


def test_batch_invariance_asks_the_shipped_table_alone_at_its_own_size(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables.resources, "files", lambda package: tmp_path)
    here = problem(batch_invariant=True)
    variants = [Fake("first", varies="splits rows"), THIRD, REFERENCE]
    shipped = row_of(problem(256), REFERENCE, us=7.0)
    table_of(shipped).save(tmp_path / "tables" / "h200.json")
    tune(row_of(problem(256), THIRD, us=3.0))
    explanation = explain_problem("toy", variants, here)
    assert (explanation.chosen, explanation.source) == ("reference", "shipped table")
    assert statuses(explanation)["first"] == "excluded"
    assert [one.source for one in explanation.evidence] == ["shipped table"]
    assert "whatever the number of rows, the choice is that for 256" in str(explanation)
    assert "with gm.batch_invariant(False): ..." in explanation.changes
    assert not any("tune" in line.lower() for line in explanation.changes)


def test_nothing_that_a_mode_allows_is_explained_not_raised() -> None:
    variants = [Fake("first", varies="splits rows")]
    explanation = explain_problem("toy", variants, problem(batch_invariant=True))
    assert explanation.chosen is None
    assert "first: not batch-invariant: splits rows" in explanation.reason


@pytest.mark.parametrize("tuned", [False, True])
def test_as_dict_is_json_and_complete(tuned: bool) -> None:
    if tuned:
        tune()
    explanation = explain_problem("toy", VARIANTS, problem(), cost=Work(48_000_000))
    found = json.loads(json.dumps(explanation.as_dict()))
    assert (found["chosen"], found["rows"], found["arch"]) == ("first", 1000, "sm_90a")
    assert found["measured_at"] == (1000 if tuned else None)
    assert found["covers"] == ([513, 2048] if tuned else None)
    assert found["dtypes"] == {"x": "bfloat16", "weight": "float32"}
    assert found["variants"][0]["config"]["threads"] == (256 if tuned else 128)
    assert found["variants"][0]["measured_us"] == (20.0 if tuned else None)
    assert found["variants"][0]["of_roof"] == (pytest.approx(0.5) if tuned else None)
    assert found["variants"][1]["reason"] == "needs an even N"
    assert found["roof"]["us"] == pytest.approx(10.0)
    assert found["modes"] == {
        "deterministic": False,
        "batch_invariant": False,
        "use": None,
        "tune": "off",
        "table": "on",
    }
    assert f"with gm.tune({'again=True' if tuned else ''}): ..." in found["changes"]
    assert len(found["evidence"]) == int(tuned)
    if tuned:
        assert found["evidence"][0]["row"]["second"]["variant"] == "reference"
        assert found["evidence"][0]["ignored"] == ""


# of real ops


@pytest.mark.parametrize("name", list(OPS))
def test_the_command_that_tunes_is_of_this_very_problem(name: str) -> None:
    op = OPS[name]
    shape = (8, 8, 2, 256, 256) if "moe" in name else (64, 512, 256)
    args = op.example_for(KNOWN["sm_90a"], shape, torch.float16)
    asked = op.problem(*args, device=KNOWN["sm_90a"])
    explanation = explain_call(op, args, asked)
    assert explanation.roof is not None
    assert explanation.roof.bytes == op.cost(*args).bytes
    command = tune_command(op, asked)
    assert command is not None
    words = command.split()
    assert words[:3] == ["gristmill", "tune", name]
    sizes = tuple(int(size) for size in words[words.index("--shape") + 1].split("x"))
    dtype = getattr(torch, words[words.index("--dtype") + 1])
    again = op.example_for(asked.device, sizes, dtype)
    assert op.problem(*again, device=asked.device) == asked


def test_where_a_shape_does_not_say_all_another_way_to_tune_is_told() -> None:
    x = torch.zeros(4, 8, 32)
    plain = gristmill.explain(gristmill.rms_norm, x, torch.ones(32))
    unweighted = gristmill.explain(gristmill.rms_norm, x)
    assert "gristmill tune rms_norm --shape 32x32 --dtype float32" in plain.changes
    assert "with gm.tune(): ..." in unweighted.changes
    with gristmill.tune():
        gristmill.rms_norm(x, torch.ones(32))
        gristmill.rms_norm(x)
    plain = gristmill.explain(gristmill.rms_norm, x, torch.ones(32))
    unweighted = gristmill.explain(gristmill.rms_norm, x)
    assert "gristmill tune rms_norm --shape 32x32 --dtype float32 --again" in plain.changes
    assert "with gm.tune(again=True): ..." in unweighted.changes


def test_explain_of_a_call_knows_the_modes_in_force() -> None:
    x = torch.zeros(4, 8)
    torch.use_deterministic_algorithms(True)
    try:
        assert gristmill.explain("rms_norm", x, None).modes["deterministic"] is True
    finally:
        torch.use_deterministic_algorithms(False)
    with batch_invariant():
        assert gristmill.explain("rms_norm", x, None).modes["batch_invariant"] is True
    assert gristmill.explain("rms_norm", x, None).modes["batch_invariant"] is False


def test_a_row_of_a_variant_that_a_mode_excludes_does_not_decide() -> None:
    tune(*beside((513, 2048)))
    variants = [Fake("first", configured=True, source="v1", random="adds in any order"), REFERENCE]
    explanation = explain_problem("toy", variants, problem(1000, deterministic=True))
    assert (explanation.chosen, explanation.measured_at, explanation.covers) == (
        *("reference", None, None),
    )
    text = "its row for 513 to 2048 rows is ignored: first cannot run this problem: not determ"
    assert text in str(explanation)


def test_a_row_of_another_variant_than_the_forced_one_does_not_decide() -> None:
    tune(*beside((513, 2048)))
    with use("toy", "third"):
        explanation = explain_problem("toy", VARIANTS, problem(1000))
    assert (explanation.measured_at, explanation.covers) == (None, None)
    assert "no row of a table decides" in str(explanation)
    with use("toy", "first"):
        explanation = explain_problem("toy", VARIANTS, problem(1000))
    assert explanation.covers == Span(513, 2048)
