"""Which row of which table speaks for a size: split buckets, and tables on top of each other."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from select_fakes import H200, Fake, problem, row_of, table_of

from gristmill.errors import TableError
from gristmill.select import (
    HINTS,
    Row,
    Table,
    bucket,
    ranked,
    remember,
    reset_tables,
    tables,
    tables_for,
)
from gristmill.select.problem import CANONICAL_ROWS, bucket_edges
from gristmill.select.sight import spoken_for, table_key
from gristmill.select.tables import user_table_path
from gristmill.settings import reload_settings

FIRST, SECOND, THIRD = Fake("first"), Fake("second"), Fake("third")
VARIANTS = [FIRST, SECOND, THIRD]


def at(hint: int, variant: Fake = FIRST, **changes: Any) -> Row:
    return row_of(problem(hint), variant, hint=hint, **changes)


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the table shipped for the H200, in a package folder of our own."""
    monkeypatch.setattr(tables.resources, "files", lambda package: tmp_path)
    return tmp_path / "tables" / "nvidia-h200.json"


def users(*rows: Row) -> None:
    table_of(*rows).save(user_table_path(H200))
    reset_tables()


def choice(rows: int, **changes: Any) -> tuple[str, str]:
    found = ranked("toy", VARIANTS, problem(rows, **changes))[0]
    return found.variant.name, found.source


@pytest.mark.parametrize("hints", [HINTS, (1, 16, 64, 100, 256), (7,)])
def test_edges_are_where_the_bucket_changes(hints: tuple[int, ...]) -> None:
    for hint in hints:
        low, high = bucket_edges(hint, hints)
        assert bucket(low, hints) == hint
        assert low == 0 or bucket(low - 1, hints) != hint
        assert bucket(10**9 if high is None else high, hints) == hint
        assert high is None or bucket(high + 1, hints) != hint


def test_a_row_at_another_size_splits_its_bucket_exactly_in_the_middle() -> None:
    split = table_of(at(1024, FIRST), at(2048, SECOND), at(4096, THIRD))
    found = {
        rows: split.lookup(problem(rows), VARIANTS)[0].name  # type: ignore[index]
        # 1448 * 1448 < 1024 * 2048 < 1449 * 1449, and 2896 likewise between 2048 and 4096.
        for rows in (513, 1448, 1449, 2896, 2897, 8192)
    }
    assert found == {
        513: "first",
        1448: "first",
        1449: "second",
        2896: "second",
        2897: "third",
        8192: "third",
    }


def test_a_family_is_split_by_its_own_rows_only() -> None:
    other = problem(2048, dims=(("N", 512),))
    split = table_of(at(1024), row_of(other, SECOND, hint=2048))
    assert split.hints(problem()) == HINTS
    assert 2048 in split.hints(other)
    assert split.hint(problem(1500)) == 1024
    assert split.hint(problem(1500, dims=(("N", 512),))) == 2048


def test_a_split_comes_back_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    table_of(at(1024), at(2048, SECOND)).save(path)
    loaded = Table.load(path)
    assert loaded.lookup(problem(1500), VARIANTS) == (SECOND, None)
    assert loaded.hints(problem()) == (*HINTS[:5], 2048, *HINTS[5:])


def test_this_process_goes_before_the_user_and_the_user_before_what_is_shipped(
    shipped: Path,
) -> None:
    table_of(at(64, THIRD), at(256, THIRD), at(1024, THIRD)).save(shipped)
    users(at(256, SECOND), at(1024, SECOND))
    remember(H200, [at(1024, FIRST)], keep=False)
    assert choice(64) == ("third", "shipped table")
    assert choice(256) == ("second", "user table")
    assert choice(1024) == ("first", "tuning of this process")
    assert [source.label for source in tables_for(H200)] == [
        "tuning of this process",
        "user table",
        "shipped table",
    ]


def test_all_tables_that_know_something_stand_in_order() -> None:
    users(at(1024, SECOND))
    remember(H200, [at(1024, THIRD)], keep=False)
    order = [(one.variant.name, one.source) for one in ranked("toy", VARIANTS, problem())]
    assert order == [
        ("third", "tuning of this process"),
        ("second", "user table"),
        ("first", "preference"),
    ]


@pytest.mark.parametrize("mine", ["process", "user"])
def test_a_row_speaks_for_no_part_that_a_table_after_it_has_split_off(
    shipped: Path, mine: str
) -> None:
    """Measured at 1024, it says nothing of 2048, where another table has found another winner."""
    table_of(at(1024, SECOND), at(2048, THIRD)).save(shipped)
    if mine == "user":
        users(at(1024, FIRST))
    else:
        reset_tables()
        remember(H200, [at(1024, FIRST)], keep=False)
    assert choice(1000)[0] == "first"
    assert choice(1448)[0] == "first"
    assert choice(1449) == ("third", "shipped table")
    assert not spoken_for(problem(1449), VARIANTS)
    assert table_key(problem(1449)) == problem().key(2048)


def test_what_this_process_splits_leaves_the_rest_of_the_bucket_as_it_was() -> None:
    users(at(1024, SECOND))
    remember(H200, [at(2048, FIRST)], keep=False)
    assert choice(1448) == ("second", "user table")
    assert choice(1449) == ("first", "tuning of this process")
    assert choice(2897)[1] == "preference"


def test_rows_are_tuned_under_the_usual_hints_where_nothing_is_split() -> None:
    assert table_key(problem(1500)) == problem().key(1024)
    assert table_key(problem(1500, batch_invariant=True)) == problem().key(CANONICAL_ROWS)


def test_a_stale_row_lets_the_next_table_speak(shipped: Path) -> None:
    table_of(at(1024, THIRD)).save(shipped)
    users(at(1024, SECOND, source_hash="0" * 16))
    assert choice(1000) == ("third", "shipped table")
    (user,) = [source for source in tables_for(H200) if source.label == "user table"]
    assert user.table.ignored == {problem().key(1024): "stale: second has changed since 2026-11-15"}
    assert not spoken_for(problem(), VARIANTS)


def test_a_row_that_holds_again_is_not_called_ignored() -> None:
    picky = Fake("first", refusal=lambda problem: "too many" if problem.rows > 1000 else None)
    table = table_of(at(1024, picky))
    assert table.lookup(problem(1001), [picky]) is None
    assert table.ignored
    assert table.lookup(problem(1000), [picky]) == (picky, None)
    assert table.ignored == {}


def test_batch_invariance_asks_what_is_shipped_at_one_size_for_all(shipped: Path) -> None:
    table_of(at(CANONICAL_ROWS, THIRD), at(1, FIRST), at(65536, FIRST)).save(shipped)
    users(at(CANONICAL_ROWS, SECOND), at(1, SECOND))
    remember(H200, [at(CANONICAL_ROWS, SECOND)], keep=False)
    for rows in (0, 1, 256, 10**6):
        assert choice(rows, batch_invariant=True) == ("third", "shipped table")
    assert choice(1)[0] == "second"


def test_a_split_by_this_process_does_not_move_what_is_batch_invariant(shipped: Path) -> None:
    table_of(at(CANONICAL_ROWS, THIRD)).save(shipped)
    reset_tables()
    remember(H200, [at(CANONICAL_ROWS + 1, FIRST)], keep=False)
    assert choice(5, batch_invariant=True) == ("third", "shipped table")


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("on", "user table"), ("off", "shipped table"), ("none", "preference")],
)
def test_tables_can_be_switched_off(
    shipped: Path, monkeypatch: pytest.MonkeyPatch, setting: str, expected: str
) -> None:
    table_of(at(1024, THIRD)).save(shipped)
    users(at(1024, SECOND))
    monkeypatch.setenv("GRISTMILL_TABLE", setting)
    reload_settings()
    reset_tables()
    assert choice(1000)[1] == expected


def test_modes_keep_a_row_of_a_variant_that_may_not_run_from_being_taken() -> None:
    loose = Fake("first", random="atomics")
    users(at(1024, loose))
    found = ranked("toy", [loose, SECOND], problem(deterministic=True))
    assert [one.variant.name for one in found] == ["second"]


# what is remembered


def test_remembered_rows_are_chosen_at_once_and_kept_in_the_file() -> None:
    assert choice(1000) == ("first", "preference")
    remember(H200, [at(1024, THIRD)])
    assert choice(1000) == ("third", "tuning of this process")
    assert Table.load(user_table_path(H200)).rows == {problem().key(1024): at(1024, THIRD)}
    reset_tables()
    assert choice(1000) == ("third", "user table")


def test_a_path_of_ones_own_is_written_whatever_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRISTMILL_TABLE", "off")
    reload_settings()
    remember(H200, [at(1024)], path=tmp_path / "mine.json")
    assert list(Table.load(tmp_path / "mine.json").rows) == [problem().key(1024)]
    assert not user_table_path(H200).exists()
    remember(H200, [at(64)])
    assert not user_table_path(H200).exists()


def test_a_path_of_ones_own_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TableError, match="cannot be written"):
        remember(H200, [at(1024)], path=tmp_path / "file" / "mine.json")


def test_a_table_of_the_last_schema_is_ignored_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = user_table_path(H200)
    users(at(1024, SECOND))
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "schema": 1}))
    reset_tables()
    with caplog.at_level(logging.WARNING, logger="gristmill"):
        assert choice(1000) == ("first", "preference")
        assert choice(64) == ("first", "preference")
    (record,) = caplog.records
    assert "schema 1, this version reads 2; it is ignored" in record.getMessage()


def test_processes_that_save_at_once_keep_each_others_rows() -> None:
    """Each merges its rows one by one into the same file."""
    path = user_table_path(H200)
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from select_fakes import Fake, problem, row_of, table_of\n"
        "path, start = Path(sys.argv[1]), int(sys.argv[2])\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "for number in range(start, start + 25):\n"
        "    one = problem(dims=(('N', number),))\n"
        "    table_of(row_of(one, Fake('first'))).save(path)\n"
    )
    folders = [str(Path(__file__).parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(path), str(start)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for start in (0, 100, 200)
    ]
    # All are there before the first begins.
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in running:
        process.communicate(timeout=120)
        assert process.returncode == 0
    rows = Table.load(path).rows.values()
    assert len(rows) == 75
    assert [one.name for one in path.parent.iterdir()] == [path.name]
