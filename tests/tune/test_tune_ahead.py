"""Tuning ahead of time: what is measured and kept, what is passed over, how a run goes on."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tune_helpers import N, chosen, fake_times, table_rows, user_table

from gristmill.errors import ArgumentError, DriverError, TableError
from gristmill.jit import cache, counters
from gristmill.ops.registry import OPS
from gristmill.select import reset_tables
from gristmill.select.chooser import ranked
from gristmill.select.configs import config_to_json
from gristmill.select.device import KNOWN, device_of
from gristmill.select.table import Row, Table
from gristmill.select.tables import remember, user_table_path
from gristmill.select.tuning import Candidate, Outcome
from gristmill.settings import reload_settings
from gristmill.tune.ahead import AheadReport, Watch, free_bytes, open_table, tune_ahead
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
    hints: list[int] | None = None,
    split: bool = False,
    path: Path | None = None,
    shape: tuple[int, ...] = (1, N),
    **options: Any,
) -> AheadReport:
    """A run in a process that has read the tables just now."""
    reset_tables()
    table = open_table(device_of("cpu"), path)
    sizes = HINTS if hints is None else hints
    plan = plan_by_shapes(
        ops or ["rms_norm"], device_of("cpu"), shapes=[shape], hints=sizes, probes=int(split)
    )
    return tune_ahead(plan, CPU, table, **options)


def sizes(report: AheadReport) -> list[int]:
    return [outcome.row.hint for outcome in report.tuned]


def test_every_hint_gets_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fake_times(monkeypatch, library_wins)
    report = ahead("rms_norm", "softmax")
    assert sizes(report) == HINTS * 2
    assert [rows for rows, _ in asked] == HINTS * 2
    assert all(set(names) == {"library", "reference"} for _, names in asked)
    assert table_rows() == {
        f"{op} rows={rows}": "library" for op in ("rms_norm", "softmax") for rows in HINTS
    }
    assert report.table == user_table_path(device_of("cpu"))
    assert (report.held, report.alone, report.probed, report.notes) == (0, 0, 0, [])
    assert {row.rows for row in user_table().rows.values()} == set(HINTS)


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
    assert set(table_rows()) == {"rms_norm rows=16", "rms_norm rows=64"}
    report = ahead()
    assert sizes(report) == [256]
    assert report.held == 2
    assert len(table_rows()) == 3
    report = ahead()
    assert (sizes(report), report.held) == ([], 3)
    assert sizes(ahead(again=True)) == HINTS


def test_a_run_interrupted_at_a_probe_tries_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint's row is kept only with its probes, so none of them is forgotten."""
    fake_times(monkeypatch, library_wins)
    watch = Interrupted(2)  # 16, 64, then 32, which lies between them
    with pytest.raises(KeyboardInterrupt):
        ahead(hints=[16, 64], split=True, watch=watch)
    assert [key.split(" ")[1] for key in watch.keys] == ["rows=16", "rows=64", "rows=32"]
    assert set(table_rows()) == {"rms_norm rows=16"}
    report = ahead(hints=[16, 64], split=True)
    assert (sizes(report), report.probed, report.held) == ([64], 1, 1)


def test_a_row_that_is_stale_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_times(monkeypatch, library_wins)
    ahead()
    path = user_table_path(device_of("cpu"))
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


# split buckets


def small_by_reference(limit: int) -> Any:
    """The reference is the fastest below `limit` rows, the library from there on."""
    return lambda name, rows: 5.0 if (name == "reference") == (rows < limit) else 10.0


def test_a_bucket_is_split_where_its_choice_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The winner changes at 100 rows, and 128 is in the bucket of 64."""
    asked = fake_times(monkeypatch, small_by_reference(100))
    report = ahead(hints=[16, 64, 256], split=True)
    assert [rows for rows, _ in asked] == [16, 64, 32, 256, 128]
    assert sizes(report) == [16, 64, 256]
    assert [outcome.row.hint for outcome in report.splits] == [128]
    assert report.probed == 2
    assert table_rows() == {
        "rms_norm rows=16": "reference",
        "rms_norm rows=64": "reference",
        "rms_norm rows=128": "library",
        "rms_norm rows=256": "library",
    }
    # In this process and in the next: 90 is the last that is nearer to 64 than to 128.
    for _ in range(2):
        assert [chosen("rms_norm", rows) for rows in (64, 90, 91, 128, 181, 256)] == [
            "reference",
            "reference",
            "library",
            "library",
            "library",
            "library",
        ]
        reset_tables()
    again = ahead(hints=[16, 64, 256], split=True)
    assert (sizes(again), again.probed, again.held) == ([], 0, 3)


def test_without_split_the_bucket_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_times(monkeypatch, small_by_reference(100))
    ahead(hints=[64, 256])
    assert [chosen("rms_norm", rows) for rows in (128, 129)] == ["reference", "library"]


@pytest.mark.parametrize(("gain", "kept"), [(0.02, False), (0.029, False), (0.04, True)])
def test_a_split_must_win_more_than_three_percent(
    monkeypatch: pytest.MonkeyPatch, gain: float, kept: bool
) -> None:
    def times(name: str, rows: int) -> float:
        if rows == 128:
            return 100 * (1 - gain) if name == "library" else 100.0
        return small_by_reference(100)(name, rows)

    fake_times(monkeypatch, times)
    ended: list[tuple[int, bool]] = []

    class Seen(Watch):
        def ended(self, outcome: Outcome, kept: bool) -> None:
            ended.append((outcome.row.hint, kept))

    report = ahead(hints=[64, 256], split=True, watch=Seen())
    assert ("rms_norm rows=128" in table_rows()) is kept
    assert len(report.splits) == kept
    assert ended == [(64, True), (256, True), (128, kept)]


def test_a_shape_of_its_own_is_tried_even_where_the_hint_has_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_times(monkeypatch, small_by_reference(100))
    ahead(hints=[64])
    report = ahead(shape=(120, N), hints=[])
    assert (sizes(report), report.held, report.probed) == ([], 1, 1)
    assert table_rows() == {"rms_norm rows=64": "reference", "rms_norm rows=120": "library"}
    # Now it is a hint: it has a row that holds.
    report = ahead(shape=(120, N), hints=[])
    assert (report.held, report.probed) == (1, 0)


# tables


def test_a_table_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_times(monkeypatch, small_by_reference(100))
    path = tmp_path / "folder" / "table.json"
    report = ahead(path=path, hints=[64, 256], split=True)
    assert report.table == path
    assert not user_table_path(device_of("cpu")).exists()
    assert set(table_rows(path)) == {f"rms_norm rows={rows}" for rows in (64, 128, 256)}
    ahead(hints=[16])  # the user's own has nothing to do with it
    assert ahead(path=path, hints=[64, 256]).held == 2
    assert ahead(path=path, hints=[16]).held == 0


def test_the_shipped_kind_of_table_is_what_the_package_would_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_times(monkeypatch, library_wins)
    path = tmp_path / "cpu.json"
    ahead(path=path)
    table = Table.load(path)
    assert (table.gpu, len(table.rows)) == ("cpu", 3)
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
    report = ahead("rms_norm", "softmax", hints=[64])
    assert [outcome.row.key.split(" ")[0] for outcome in report.tuned] == ["softmax"]
    assert "forced by GRISTMILL_USE" in report.notes[0]


def test_batch_invariance_is_not_what_rows_are_measured_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = fake_times(monkeypatch, library_wins)
    monkeypatch.setenv("GRISTMILL_BATCH_INVARIANT", "1")
    reload_settings()
    assert sizes(ahead(hints=[64])) == [64]
    assert asked == [(64, ["library", "reference"])]


def test_a_problem_with_one_candidate_needs_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_times(monkeypatch, library_wins)
    only = [one for one in OPS["rms_norm"].variants if one.name == "reference"]
    monkeypatch.setattr(OPS["rms_norm"], "variants", tuple(only))
    report = ahead(hints=[64])
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
    report = ahead(shape=(200, N), hints=[])
    assert (sizes(report), len(report.notes)) == ([], 1)
    assert table_rows() == {"rms_norm rows=200": "reference"}


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
    assert sizes(ahead("fused_add_rms_norm_", hints=[64])) == [64]
    ((args, before),) = made
    assert torch.equal(args[0], before[0])
    assert torch.equal(args[1], before[1])
    assert args[0].abs().sum() > 0


# on a GPU, as far as that goes without one

H200 = KNOWN["sm_90a"]


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A run for an H200 in which the measuring is left to `tuned(op, size, hint)`."""
    monkeypatch.setattr(AHEAD, "device_of", lambda device: H200)

    def run(tuned: Any, watch: Watch | None = None) -> AheadReport:
        monkeypatch.setattr(AHEAD._Run, "_tuned", lambda self, *args: tuned(*args))
        table = open_table(H200, tmp_path / "h200.json")
        plan = plan_by_shapes(["rms_norm"], H200, shapes=[(1, 4096)], hints=[16, 64], probes=0)
        return tune_ahead(plan, CPU, table, thorough=False, workers=2, watch=watch)

    return run


def outcome_of(op: Any, size: Any, hint: int) -> Outcome:
    choice = ranked(op.name, op.variants, size.problem)[0]
    row = Row(
        key=size.problem.key(hint),
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
    return Outcome(row, str(Candidate(choice.variant, choice.config)), 1.0, {})


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

    def tuned(op: Any, size: Any, hint: int) -> Outcome:
        if hint == 64:
            monkeypatch.setattr(torch.cuda, "synchronize", dead)
            monkeypatch.setattr(torch.cuda, "empty_cache", dead)
            dead()
        return outcome_of(op, size, hint)

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
