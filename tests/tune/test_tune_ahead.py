"""Tuning ahead of time: what is measured and kept, what is passed over, how a run goes on."""

from __future__ import annotations

import copy
import gc
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tune_helpers import (
    N,
    chosen,
    chosen_source,
    fake_times,
    planted_on_rms_norm,
    table_rows,
    user_table,
)

from gristmill.errors import ArgumentError, DriverError, TableError
from gristmill.jit import cache, counters
from gristmill.ops.registry import OPS
from gristmill.select import reset_tables
from gristmill.select.chooser import ranked
from gristmill.select.configs import config_to_json
from gristmill.select.device import KNOWN, device_of
from gristmill.select.problem import BUCKETS, Span
from gristmill.select.table import Row, Table
from gristmill.select.tables import remember, user_table_path
from gristmill.select.timing import Timing
from gristmill.select.tuning import Candidate, Outcome
from gristmill.settings import reload_settings
from gristmill.tune.ahead import AheadReport, Amount, Watch, free_bytes, open_table, tune_ahead
from gristmill.tune.jobs import plan_by_shapes

CPU = torch.device("cpu")
# By its name in sys.modules: gristmill.tune is the function.
AHEAD = sys.modules["gristmill.tune.ahead"]
HINTS = [16, 64, 256]


def library_wins(name: str, rows: int) -> float:
    del rows
    return 5.0 if name == "library" else 10.0


def ahead(
    *ops: str,
    rows: list[int] | None = None,
    split: bool = False,
    path: Path | None = None,
    shape: tuple[int, ...] = (1, N),
    **options: Any,
) -> AheadReport:
    """A run in a process that has read the tables just now."""
    reset_tables()
    table = open_table(device_of("cpu"), path)
    plan = plan_by_shapes(
        ops or ["rms_norm"],
        device_of("cpu"),
        shapes=[shape],
        rows=HINTS if rows is None else rows,
        probes=int(split),
        split=split,
    )
    return tune_ahead(plan, CPU, table, **options)


def sizes(report: AheadReport) -> list[int]:
    return [outcome.row.rows for outcome in report.outcomes]


def covers(path: Path | None = None) -> list[tuple[str, Span]]:
    """The variant of each row of a table, and what it covers."""
    table = user_table() if path is None else Table.load(path)
    return [
        (row.variant, row.covers) for row in sorted(table.rows.values(), key=lambda row: row.covers)
    ]


def test_every_size_is_measured_and_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fake_times(monkeypatch, library_wins)
    report = ahead("rms_norm", "softmax")
    assert sizes(report) == HINTS * 2
    assert [rows for rows, _ in asked] == HINTS * 2
    assert all(set(names) == {"library", "reference"} for _, names in asked)
    # One row for all, named after the largest, with the times at the others.
    assert table_rows() == {"rms_norm rows=256": "library", "softmax rows=256": "library"}
    assert covers() == [("library", Span(5, 512))] * 2
    assert {row.rows for row in user_table().rows.values()} == {256}
    assert all(row.also == {"16": 5.0, "64": 5.0} for row in user_table().rows.values())
    assert report.table == user_table_path(device_of("cpu"))
    assert (report.held, report.alone, report.notes) == (0, 0, [])
    assert report.rows == list(user_table().rows.values())


class Interrupted(Watch):
    """Stops before the measurement of this number, as Ctrl-C would."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.keys: list[str] = []

    def begins(self, key: str, total: int) -> None:
        self.keys.append(key)
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1


def test_an_interrupted_run_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_times(monkeypatch, library_wins)
    with pytest.raises(KeyboardInterrupt):
        ahead(watch=Interrupted(2))
    assert covers() == [("library", Span(5, 128))]
    report = ahead()
    assert sizes(report) == [256]
    assert report.held == 2
    # As if it had not been interrupted, with the times of both runs.
    assert covers() == [("library", Span(5, 512))]
    (row,) = user_table().rows.values()
    assert (row.rows, row.also) == (256, {"16": 5.0, "64": 5.0})
    report = ahead()
    assert (sizes(report), report.held) == ([], 3)
    assert sizes(ahead(again=True)) == HINTS


@pytest.mark.parametrize("frozen", [0, 7])
def test_objects_that_the_program_has_frozen_stay_frozen(
    frozen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_times(monkeypatch, library_wins)
    calls: list[str] = []
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, partial(calls.append, name))
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen)
    ahead()
    assert calls == ([] if frozen else ["freeze", "unfreeze"])


def test_a_run_interrupted_at_a_switch_goes_on_there(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_times(monkeypatch, small_by_reference(40))
    watch = Interrupted(2)  # 16, 64, then 32, which lies between them
    with pytest.raises(KeyboardInterrupt):
        ahead(rows=[16, 64], split=True, watch=watch)
    assert [key.split(" ")[1] for key in watch.keys] == ["rows=16", "rows=64", "rows=32"]
    # Nothing is said of what lies between.
    assert covers() == [("reference", Span(5, 22)), ("library", Span(46, 128))]
    report = ahead(rows=[16, 64], split=True)
    assert (sizes(report), report.held) == ([32], 2)
    assert covers() == [("reference", Span(5, 45)), ("library", Span(46, 128))]


def test_rows_count_at_once_and_are_written_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large table takes long to write, so that is not done after each step."""
    fake_times(monkeypatch, library_wins)
    seconds = iter([0.0, 1.0, 6.0, 7.0, 8.0, 9.0])
    monkeypatch.setattr(AHEAD, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    path = user_table_path(device_of("cpu"))
    assert path is not None
    written: list[float] = []

    class Seen(Watch):
        def ended(self, outcome: Outcome) -> None:
            assert chosen_source("rms_norm", outcome.row.rows) == "tuning of this process"
            written.append(covers()[0][1].end if path.exists() else 0)

    ahead(watch=Seen())
    assert written == [0, 0, 128]
    assert covers() == [("library", Span(5, 512))]


def test_a_row_that_is_stale_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_times(monkeypatch, library_wins)
    for rows in HINTS:
        ahead(rows=[rows])
    path = user_table_path(device_of("cpu"))
    assert path is not None
    text = path.read_text().splitlines()
    changed = [
        line.replace('"variant": "library"', '"variant": "gone"', 1)
        if " rows=64 " in line
        else line
        for line in text
    ]
    path.write_text("\n".join(changed))
    report = ahead()
    assert (sizes(report), report.held) == ([64], 2)
    assert table_rows()["rms_norm rows=64"] == "library"
    # Now that 64 is measured, all of them have the same winner.
    assert [variant for variant, _ in covers()] == ["library"]


# along the rows


def small_by_reference(limit: int) -> Any:
    """The reference is the fastest below `limit` rows, the library from there on."""
    return lambda name, rows: 5.0 if (name == "reference") == (rows < limit) else 10.0


def test_a_switch_is_bracketed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The winner changes at 100 rows: between 64 and 128, and so from 91 rows on."""
    asked = fake_times(monkeypatch, small_by_reference(100))
    report = ahead(rows=[16, 64, 256], split=True)
    assert [rows for rows, _ in asked] == [16, 64, 256, 128] == sizes(report)
    assert covers() == [("reference", Span(5, 90)), ("library", Span(91, 512))]
    assert table_rows() == {"rms_norm rows=64": "reference", "rms_norm rows=256": "library"}
    assert [row.also for row in report.rows] == [{"16": 5.0}, {"128": 5.0}]
    # In this process and in the next.
    for _ in range(2):
        assert [chosen("rms_norm", rows) for rows in (16, 64, 90, 91, 128, 181, 256)] == [
            *["reference"] * 3,
            *["library"] * 4,
        ]
        reset_tables()
    again = ahead(rows=[16, 64, 256], split=True)
    assert (sizes(again), again.held) == ([], 3)


def test_without_split_nothing_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_times(monkeypatch, small_by_reference(100))
    assert sizes(ahead(rows=[64, 256])) == [64, 256]
    assert [chosen("rms_norm", rows) for rows in (128, 129)] == ["reference", "library"]


@pytest.mark.parametrize(("gain", "kept"), [(0.005, False), (0.009, False), (0.02, True)])
def test_the_launch_of_a_neighbour_stays_unless_it_is_beaten_by_more_than_noise(
    monkeypatch: pytest.MonkeyPatch, gain: float, kept: bool
) -> None:
    def times(name: str, rows: int) -> float:
        if rows == 128:
            return 100 * (1 - gain) if name == "library" else 100.0
        return 5.0 if name == "reference" else 10.0

    fake_times(monkeypatch, times)
    ended: list[int] = []

    class Seen(Watch):
        def ended(self, outcome: Outcome) -> None:
            ended.append(outcome.row.rows)

    report = ahead(rows=[64, 128, 256], watch=Seen())
    assert ended == [64, 128, 256]
    assert [row.variant for row in report.rows] == (
        ["reference", "library", "reference"] if kept else ["reference"]
    )


def test_times_alike_keep_one_launch_over_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of launches that differ by noise, another one looks best at each size."""
    variant = planted_on_rms_norm(monkeypatch, rule=lambda rows: 0)

    def times(name: str, rows: int) -> float:
        return 100.0 - 0.5 * (name == f"planted number={rows.bit_length() % 4}")

    asked = fake_times(monkeypatch, times)
    report = ahead(rows=[1, 16, 64, 256, 1024, 4096], split=True)
    (row,) = report.rows
    assert (row.covers, row.config) == (Span(0, 8192), {"number": 0})
    assert set(row.also) == {"1", "16", "64", "256", "1024"}
    assert len(asked) == 6
    assert variant.launches == 4


def test_kernels_are_shared_as_far_as_times_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch 1 is for few rows, launch 3 for many; between 40 and 600 rows they are alike, and a
    third looks a little better.
    """
    planted_on_rms_norm(monkeypatch, rule=lambda rows: 0)

    def times(name: str, rows: int) -> float:
        number = int(name[-1])
        if number == 1:
            return 10.0 if rows < 600 else 20.0
        if number == 3:
            return 10.0 if rows > 40 else 20.0
        return 9.95 if number == 2 and 40 < rows < 600 else 20.0

    fake_times(monkeypatch, times)
    report = ahead(rows=[1, 16, 64, 256, 1024, 4096], split=True)
    assert [(row.config, row.covers) for row in report.rows] == [
        ({"number": 1}, Span(0, 724)),
        ({"number": 3}, Span(725, 8192)),
    ]


@pytest.mark.parametrize("first_round", [1.0, 50.0])
def test_no_row_is_slower_than_the_heuristics(
    monkeypatch: pytest.MonkeyPatch, first_round: float
) -> None:
    """What the heuristics choose is in the last round even if it looks hopeless in the first."""
    planted_on_rms_norm(monkeypatch, rule=lambda rows: 7, launches=12)

    def times(name: str, rows: int) -> float:
        return 9.0 if name.endswith("=7") else 10.0

    rounds: list[set[str]] = []

    def time_interleaved(
        functions: dict[str, Any], sets: list[Any], *, samples: int, **options: Any
    ) -> dict[str, Timing]:
        rounds.append(set(functions))
        slower = first_round if samples < 9 else 1.0
        found = {name: times(name, 0) for name in functions}
        found = {name: us * (slower if us == 9.0 else 1.0) for name, us in found.items()}
        return {name: Timing(us, 0.0, samples, "wall") for name, us in found.items()}

    monkeypatch.setattr("gristmill.select.tuning.time_interleaved", time_interleaved)
    # A table that is asked first has another launch there, which is not beaten by others.
    (known,) = ahead(rows=[64]).rows
    assert known.config == {"number": 7}
    remember_launch(known, number=2)
    report = ahead(rows=[64], again=True)
    assert [row.config for row in report.rows] == [{"number": 7}]
    assert report.outcomes[0].before == "planted number=2"
    assert all(any(name.endswith("=7") for name in names) for names in rounds)
    # Nor where the sizes on both sides have another.
    remember_launch(known, number=2, rows=16)
    remember_launch(known, number=2, rows=256)
    report = ahead(rows=[16, 64, 256])
    assert report.held == 3
    user_table_path(device_of("cpu")).unlink()
    remember_launch(known, number=2, rows=16)
    remember_launch(known, number=2, rows=256)
    report = ahead(rows=[16, 64, 256])
    assert (report.held, [row.config for row in report.rows]) == (2, [{"number": 7}])


def remember_launch(row: Row, *, number: int, rows: int = 64) -> None:
    """Put a row like this one into the user's file."""
    device = device_of("cpu")
    path = user_table_path(device)
    assert path is not None
    key = re.sub(r"rows=\d+", f"rows={rows}", row.key)
    covers = BUCKETS.span(rows)
    other = replace(row, key=key, rows=rows, covers=covers, config={"number": number}, also={})
    remember(device, [other], path=path)


def test_changes_of_the_heuristics_are_measured_on_both_sides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Launch 1 wins in the middle, where a search between equal ends would not look."""
    planted_on_rms_norm(monkeypatch, rule=lambda rows: int(30 < rows < 300))

    def times(name: str, rows: int) -> float:
        return 5.0 if name.endswith(f"={int(30 < rows < 300)}") else 10.0

    fake_times(monkeypatch, times)
    amounts: list[Amount] = []

    class Seen(Watch):
        def starts(self, amount: Amount) -> None:
            amounts.append(amount)

    report = ahead(rows=[1, 1024], split=True, watch=Seen())
    assert sizes(report) == [1, 16, 32, 256, 512, 1024]
    assert [(row.config, row.covers) for row in report.rows] == [
        ({"number": 0}, Span(0, 22)),
        ({"number": 1}, Span(23, 362)),
        ({"number": 0}, Span(363, 2048)),
    ]
    (amount,) = amounts
    # 4 lies between 1 and 16; 64 and 128 between 32 and 256: two steps at most.
    assert (amount.families, amount.problems, amount.most, amount.programs) == (1, 6, 9, 0)
    assert 0 < amount.seconds < 60


def test_a_size_that_fails_is_not_covered_by_those_around_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_times(monkeypatch, library_wins)
    failing = [64]

    def free(device: Any) -> int:
        return 1 << 40

    make = AHEAD.argument_bytes

    def need(size: Any) -> int:
        return 1 << 60 if size.rows in failing else make(size)

    monkeypatch.setattr(AHEAD, "free_bytes", free)
    monkeypatch.setattr(AHEAD, "argument_bytes", need)
    report = ahead(rows=[16, 64, 256], split=True)
    assert sizes(report) == [16, 256]
    assert covers() == [("library", Span(5, 22)), ("library", Span(182, 512))]
    assert "rms_norm rows=64" in report.notes[0]
    assert "more than a third" in report.notes[0]
    failing.clear()
    report = ahead(rows=[16, 64, 256], split=True)
    assert (sizes(report), report.held) == ([64], 2)
    assert covers() == [("library", Span(5, 512))]


def test_a_shape_of_its_own_is_measured_only_if_no_row_covers_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_times(monkeypatch, small_by_reference(100))
    ahead(rows=[64])
    assert covers() == [("reference", Span(33, 128))]
    report = ahead(shape=(120, N), rows=[])
    assert (sizes(report), report.held) == ([], 2)
    report = ahead(shape=(120, N), rows=[], again=True)
    assert sizes(report) == [64, 120]
    assert covers() == [("reference", Span(33, 87)), ("library", Span(88, 175))]
    report = ahead(shape=(120, N), rows=[])
    assert (sizes(report), report.held) == ([], 2)


# tables


def test_a_table_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_times(monkeypatch, small_by_reference(100))
    path = tmp_path / "folder" / "table.json"
    report = ahead(path=path, rows=[64, 256], split=True)
    assert report.table == path
    assert not user_table_path(device_of("cpu")).exists()
    assert covers(path) == [("reference", Span(33, 90)), ("library", Span(91, 512))]
    ahead(rows=[16])  # the user's own has nothing to do with it
    assert ahead(path=path, rows=[64, 256]).held == 2
    assert ahead(path=path, rows=[16]).held == 0


def test_the_shipped_kind_of_table_is_what_the_package_would_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_times(monkeypatch, library_wins)
    path = tmp_path / "cpu.json"
    ahead(path=path)
    table = Table.load(path)
    assert (table.gpu, len(table.rows)) == ("cpu", 1)
    problem = OPS["rms_norm"].problem(*OPS["rms_norm"].example((64, N), torch.bfloat16, "cpu"))
    found = table.lookup(problem, OPS["rms_norm"].variants)
    assert found is not None
    assert found[0].name == "library"


def test_no_table_no_tuning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GRISTMILL_TABLE", "off")
    reload_settings()
    with pytest.raises(ArgumentError, match="GRISTMILL_TABLE=off keeps no table; give one by"):
        open_table(device_of("cpu"), None)
    path, known = open_table(device_of("cpu"), tmp_path / "a.json")
    assert (path, known.rows) == (tmp_path / "a.json", {})


def test_a_file_that_is_no_table_of_this_device_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("{")
    with pytest.raises(TableError, match=r"a\.json: is not JSON.*move it away"):
        open_table(device_of("cpu"), path)
    assert path.read_text() == "{"
    other = tmp_path / "b.json"
    Table.for_device(KNOWN["sm_90a"]).save(other)
    with pytest.raises(TableError, match="is for 'NVIDIA H200', not for 'cpu'"):
        open_table(device_of("cpu"), other)


# what cannot be tuned


def test_what_is_forced_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_times(monkeypatch, library_wins)
    monkeypatch.setenv("GRISTMILL_USE", "rms_norm:library")
    reload_settings()
    report = ahead("rms_norm", "softmax", rows=[64])
    assert [outcome.row.key.split(" ")[0] for outcome in report.outcomes] == ["softmax"]
    assert "forced by GRISTMILL_USE" in report.notes[0]


def test_batch_invariance_is_not_what_rows_are_measured_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = fake_times(monkeypatch, library_wins)
    monkeypatch.setenv("GRISTMILL_BATCH_INVARIANT", "1")
    reload_settings()
    assert sizes(ahead(rows=[64])) == [64]
    assert asked == [(64, ["library", "reference"])]


def test_a_problem_with_one_candidate_needs_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_times(monkeypatch, library_wins)
    only = [one for one in OPS["rms_norm"].variants if one.name == "reference"]
    monkeypatch.setattr(OPS["rms_norm"], "variants", tuple(only))
    report = ahead(rows=[64])
    assert (sizes(report), report.alone) == ([], 1)


def test_what_does_not_fit_into_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_times(monkeypatch, library_wins)
    need = 2 * (256 * N + N)
    monkeypatch.setattr(AHEAD, "free_bytes", lambda device: 3 * need - 1)
    report = ahead()
    assert sizes(report) == [16, 64]
    assert len(report.notes) == 1
    assert "rows=256" in report.notes[0]
    assert "more than a third" in report.notes[0]
    monkeypatch.setattr(AHEAD, "free_bytes", lambda device: 3 * need)
    assert sizes(ahead()) == [256]


def test_a_shape_is_tried_even_where_its_hint_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_times(monkeypatch, lambda name, rows: 5.0 if name == "reference" else 10.0)
    monkeypatch.setattr(AHEAD, "free_bytes", lambda device: 3 * 2 * (201 * N))
    report = ahead(shape=(200, N), rows=[])
    assert (sizes(report), len(report.notes)) == ([200], 1)
    assert table_rows() == {"rms_norm rows=200": "reference"}
    # And not for the sizes nearer to 256, which it could not say anything of.
    assert covers() == [("reference", Span(114, 226))]


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (torch.OutOfMemoryError("too much"), "does not fit into the memory"),
        (RuntimeError("no such luck"), "RuntimeError: no such luck"),
        (AssertionError("nor that"), "AssertionError: nor that"),
    ],
)
def test_one_problem_that_fails_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, error: Exception, note: str
) -> None:
    fake_times(monkeypatch, library_wins)
    example = OPS["rms_norm"].example

    def make(shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Any:
        if device != "meta" and shape[0] == 64:
            raise error
        return example(shape, dtype, device)

    monkeypatch.setattr(OPS["rms_norm"], "example", make)
    report = ahead()
    assert sizes(report) == [16, 256]
    assert len(report.notes) == 1
    assert "rows=64" in report.notes[0]
    assert note in report.notes[0]


def test_memory_that_is_free_is_known_here() -> None:
    assert 1 << 20 < free_bytes(CPU) < 1 << 50


def test_arguments_are_never_written_to_and_differ_from_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In-place ops are timed on copies; the arguments are what the op's example gives."""
    fake_times(monkeypatch, library_wins)
    made: list[tuple[Any, list[torch.Tensor]]] = []
    op = OPS["fused_add_rms_norm_"]
    example = op.example

    def make(shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Any:
        args = example(shape, dtype, device)
        if device != "meta":
            made.append((args, [args[0].clone(), args[1].clone()]))
        return args

    monkeypatch.setattr(op, "example", make)
    other = copy.copy(op.variants[-1])  # there is but one on a CPU
    monkeypatch.setattr(other, "name", "other", raising=False)
    monkeypatch.setattr(op, "variants", (*op.variants, other))
    assert sizes(ahead("fused_add_rms_norm_", rows=[64])) == [64]
    ((args, before),) = made
    assert torch.equal(args[0], before[0])
    assert torch.equal(args[1], before[1])
    assert args[0].abs().sum() > 0


# on a GPU, as far as that goes without one

H200 = KNOWN["sm_90a"]


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A run for an H200 in which the measuring is left to `tuned(op, size, neighbours)`."""
    monkeypatch.setattr(AHEAD, "device_of", lambda device: H200)

    def run(tuned: Any, watch: Watch | None = None) -> AheadReport:
        monkeypatch.setattr(AHEAD._Run, "_tuned", lambda self, *args: tuned(*args))
        table = open_table(H200, tmp_path / "h200.json")
        plan = plan_by_shapes(
            ["rms_norm"], H200, shapes=[(1, 4096)], rows=[16, 64], probes=0, split=False
        )
        return tune_ahead(plan, CPU, table, thorough=False, workers=2, watch=watch)

    return run


def outcome_of(op: Any, size: Any, neighbours: Any) -> Outcome:
    choice = ranked(op.name, op.variants, size.problem)[0]
    row = Row(
        key=size.problem.key(size.rows),
        covers=Span(size.rows, size.rows),
        variant=choice.variant.name,
        config=config_to_json(choice.config),
        us=1.0,
        spread_us=0.0,
        second=None,
        date="2026-01-01",
        source_hash=choice.variant.source_hash(size.problem, choice.config),
        rows=size.rows,
        times={},
        candidates=1,
        torch="2.13",
    )
    launch = Candidate(choice.variant, choice.config)
    timings = {str(launch): Timing(1.0, 0.0, 9, "graph")}
    return Outcome(row, str(launch), 1.0, {}, {str(launch): launch}, timings)


def test_every_kernel_of_every_candidate_is_compiled_first(on_h200: Any) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")
    cache.forget()
    order: list[str] = []

    class Seen(Watch):
        def compiled(self, result: Any, number: int, total: int) -> None:
            order.append(f"compiled {number} of {total}")

        def begins(self, key: str, total: int) -> None:
            order.append(f"measured, of {total}")

    report = on_h200(outcome_of, Seen())
    assert sizes(report) == [16, 64]
    assert len(report.compiled) >= 3
    assert {one.how for one in report.compiled} == {"compiled"}
    count = len(report.compiled)
    compiled = [f"compiled {number} of {count}" for number in range(1, count + 1)]
    assert order == [*compiled, "measured, of 2", "measured, of 2"]
    # What a call would look for is there: nothing is compiled any more.
    op = OPS["rms_norm"]
    before = counters.snapshot()["compiles"]
    for hint in (16, 64):
        args = op.example((hint, 4096), torch.bfloat16, "meta")
        problem = op.problem(*args, device=H200)
        for variant in op.variants:
            if variant.supports(problem) is None:
                for program in variant.programs(problem, variant.config(problem)):
                    cache.load_or_compile(program, "sm_90a")
    assert counters.snapshot()["compiles"] == before
    again = on_h200(outcome_of)
    assert (again.held, again.compiled) == (2, [])


def test_a_gpu_that_has_failed_ends_the_run(
    on_h200: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After an illegal access nothing works: to go on would only collect errors."""
    monkeypatch.setattr(AHEAD, "compile_all", lambda programs, arch, **options: [])

    def dead(device: Any = None) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    def tuned(op: Any, size: Any, neighbours: Any) -> Outcome:
        if size.rows == 64:
            monkeypatch.setattr(torch.cuda, "synchronize", dead)
            monkeypatch.setattr(torch.cuda, "empty_cache", dead)
            dead()
        return outcome_of(op, size, neighbours)

    with pytest.raises(DriverError, match=r"failed at rms_norm rows=64 .* illegal memory"):
        on_h200(tuned)
    assert set(table_rows(tmp_path / "h200.json")) == {"rms_norm rows=16"}


def test_a_table_that_others_can_write_is_neither_read_nor_merged() -> None:
    device = device_of("cpu")
    path = user_table_path(device)
    assert path is not None
    Table.for_device(device).save(path)
    table = open_table(device, None)
    path.chmod(0o666)
    before = path.read_text()
    with pytest.raises(TableError, match="can be written to by others"):
        open_table(device, None)
    with pytest.raises(TableError, match="can be written to by others"):
        remember(device, list(table[1].rows.values()), path=path)
    assert path.read_text() == before
