"""Files that are not tables, or tables with wrong entries: one message names the file and entry.

Through every reader: `Table.load`, a choice and `explain` with the user's own table, the listing of
`gristmill tables`, and tuning that adds rows to the file.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from select_fakes import H200, Config, Fake, problem, row_of, table_of

from gristmill.errors import TableError
from gristmill.ops.registry import OPS
from gristmill.select import Table, tables_for
from gristmill.select.chooser import ranked
from gristmill.select.configs import config_to_json
from gristmill.select.explain import explain_problem, launch_words
from gristmill.select.table import MOST_BYTES, row_from_json, row_to_json
from gristmill.select.tables import remember, user_table_path
from gristmill.tune.listing import listed, why_stale

FIRST = Fake("first", configured=True, source="v1")
VARIANTS = [Fake("second"), FIRST]
ROW: dict[str, Any] = json.loads(row_to_json(row_of(problem(), FIRST, Config(threads=512))))
KEY = ROW["key"]
HEAD: dict[str, Any] = {
    "schema": 3,
    "gpu": "NVIDIA H200",
    "arch": "sm_90a",
    "multiprocessors": 132,
}


def table(*rows: Any, **head: Any) -> str:
    return json.dumps({**HEAD, **head, "rows": list(rows)})


def row(**changes: Any) -> str:
    """A table whose second row has something wrong."""
    other = {**ROW, "key": KEY.replace("rows=1024", "rows=16"), "covers": [5, 32]}
    return table(other, {**ROW, **changes})


def config(**changes: Any) -> str:
    return row(config={**ROW["config"], **changes})


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


HUGE = 10**4000
LAUNCH = launch_words("first", ROW["config"])
BROKEN: list[tuple[str, str]] = [
    ("", "is not JSON"),
    ("{", "is not JSON"),
    ("[" * 100_000, "is not JSON"),
    ("[" * 1_000_000, "has too many values for its size"),
    (table().replace('"rows": [', '"rows": [' + "{}, " * 200_000), "has too many values"),
    (table().replace("132", "9" * (1 << 20)), "is not JSON: Exceeds the limit"),
    ("\ufeff" + table(), "is not JSON: Unexpected UTF-8 BOM"),
    ("[]", r"must be a JSON object, got \[\]"),
    ("null", "must be a JSON object, got None"),
    (table(schema=2), "has schema 2, this version reads 3"),
    (table(schema=[1] * 1000), r"has schema \[1, .*\.\.\.\], this version reads 3"),
    (table(gpu=None), "'gpu' must be a string, got None"),
    (table(gpu="NVIDIA\nH200"), "'gpu' must be at most 4096 printable characters"),
    (table(multiprocessors=-1), r"'multiprocessors' must be from 0 to 10\*\*18, got -1"),
    (table(multiprocessors=True), "'multiprocessors' must be an integer, got True"),
    (json.dumps({**HEAD, "rows": {}}), "'rows' must be a list, got {}"),
    (table(3), "row 1: must be an object, got 3"),
    (table("x" * 10**6), "row 1: must be an object, got 'xxx"),
    (table(ROW, {"key": "k"}), "row 2: 'key' must have rows= and a number, got 'k'"),
    (table(ROW, ROW), "row 2: another row has the key 'toy rows=1024"),
    (row(key=KEY.replace("1024", "9" * 30)), "row 2: 'key' must have rows="),
    (row(key=KEY.replace("1024", "٦٤")), "row 2: 'key' must have rows="),
    (row(key=KEY.replace("4096", "9" * 5000)), "row 2: 'key' must be at most 4096"),
    (row(key=KEY + "\x1b[31m"), "row 2: 'key' must be at most 4096 printable"),
    (row(key=KEY + "\ud800"), "row 2: 'key' must be at most 4096 printable"),
    (row(variant=None), "row 2: 'variant' must be a string"),
    (row(variant="a\nb"), "row 2: 'variant' must be at most 4096 printable"),
    (row(config=5), "row 2: 'config' must be an object or null, got 5"),
    (config(order=nested(2)), r"row 2: 'config' has \[\[1\]\] in 'order', not a plain value"),
    (config(order=nested(900)), "row 2: 'config' has .* in 'order', not a plain value"),
    (config(cap={}), "row 2: 'config' has {} in 'cap', not a plain value"),
    (config(cap=float("nan")), "is not JSON: NaN is not a finite number"),
    (row(second=5), "row 2: 'second' must be an object"),
    (row(second={"variant": "x", "us": -1}), "row 2: 'us' must be a time in microseconds"),
    *(
        (row(us=value), "row 2: 'us' must be a time in microseconds, got")
        for value in ("1", True, -1.0, HUGE)
    ),
    (row(us=77.5).replace("77.5", "1e999"), "is not JSON: 1e999 is not a finite number"),
    (row(spread_us=float("-inf")), "is not JSON: -Infinity is not a finite number"),
    (row(times=None), "row 2: 'times' must be an object, got None"),
    (row(times={"first": "1"}), "row 2: 'first' must be a time in microseconds, got '1'"),
    (row(rows=1.5), "row 2: 'rows' must be an integer, got 1.5"),
    (row(rows=HUGE), r"row 2: 'rows' must be from 0 to 10\*\*18"),
    (row(candidates=-1), r"row 2: 'candidates' must be from 0 to 10\*\*18"),
    (row(date=20260101), "row 2: 'date' must be a string"),
    (row(source_hash="0" * 10**6), "row 2: 'source_hash' must be at most 4096 printable"),
    (row(torch=None), "row 2: 'torch' must be a string"),
    *(
        (row(covers=value), "row 2: 'covers' must be a list, got")
        for value in (None, "513", {}, 1024, True)
    ),
    *(
        (row(covers=value), rf"row 2: 'covers' must be the least and the most rows, .*{shown}")
        for value, shown in (
            ([], r"got \[\]"),
            ([513], r"got \[513\]"),
            ([513, 1024, 2048], r"got \[513, 1024, 2048\]"),
            ([-1, 2048], r"got \[-1, 2048\]"),
            ([None, 2048], r"got \[None, 2048\]"),
            (["513", 2048], r"got \['513', 2048\]"),
            ([513, 2048.0], r"got \[513, 2048.0\]"),
            ([True, 2048], r"got \[True, 2048\]"),
            ([2048, 513], r"got \[2048, 513\]"),  # the wrong way around
            ([513, 1023], r"got \[513, 1023\]"),  # without the row count in the key
            ([1025, None], r"got \[1025, None\]"),
            ([[513], 2048], r"got \[\[513\], 2048\]"),
        )
    ),
    *(
        (row(also=value), "row 2: 'also' must be an object, got")
        for value in (None, [], [[600, 1.0]], 7)
    ),
    *(
        (row(also={name: 1.0}), "row 2: 'also' must have numbers of rows as names, got")
        for name in ("", "many", "-1", "6 0", "1e3", "٦٤", "600\n", "9" * 30)
    ),
    *(
        (row(also={"600": value}), "row 2: '600' must be a time in microseconds, got")
        for value in (None, "1", -1.0, True, HUGE, [])
    ),
]
IDS = [f"{at} {message[:50]}" for at, (_, message) in enumerate(BROKEN)]


def put(content: str | bytes) -> Path:
    """Into the user's own table of the H200."""
    path = user_table_path(H200)
    assert path is not None
    path.parent.mkdir(parents=True, mode=0o700)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def check_ignored(caplog: pytest.LogCaptureFixture, path: Path, message: str) -> None:
    """Calls run by heuristics, and one warning names the file and what `message` matches, such as
    the row. Tuning leaves the file as it is.
    """
    before = path.read_bytes() if path.is_file() else None
    for _ in range(2):
        assert [one.source for one in ranked("toy", VARIANTS, problem())] == ["preference"] * 2
        assert len(str(explain_problem("toy", VARIANTS, problem()))) < 2000
    assert all(one.source != "user table" for one in listed(tables_for(H200), H200))
    (said,) = caplog.messages
    assert said.startswith(f"table {path}: ")
    assert re.search(message, said)
    assert said.endswith("; it is ignored")
    assert len(said) < 400 + len(str(path))
    caplog.clear()
    remember(H200, [row_of(problem(64), FIRST, Config(threads=64))])
    (said,) = caplog.messages
    assert str(path) in said
    assert said.endswith("what was tuned is kept in memory only")
    assert (path.read_bytes() if path.is_file() else None) == before


@pytest.mark.parametrize(("text", "message"), BROKEN, ids=IDS)
def test_a_broken_table_is_one_message_that_names_file_and_entry(
    text: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = put(text)
    begin = time.perf_counter()
    with pytest.raises(TableError, match=rf"^table {path}: .*{message}") as error:
        Table.load(path)
    assert len(str(error.value)) < 400 + len(str(path))
    with caplog.at_level(logging.WARNING, "gristmill"):
        check_ignored(caplog, path, message)
    assert time.perf_counter() - begin < 5.0


def _bytes(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")


def _large(path: Path) -> None:
    """With a hole, so that it takes no space."""
    with path.open("wb") as file:
        file.truncate(MOST_BYTES + 1)


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "folder": (Path.mkdir, "is not a regular file"),
    "pipe": (os.mkfifo, "is not a regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is not a regular file"),
    "bytes": (_bytes, "'utf-8' codec can't decode"),
    "large": (_large, f"has {MOST_BYTES + 1} bytes"),
}


@pytest.mark.parametrize("kind", FILES)
def test_what_is_not_a_file_of_text_is_one_message_that_names_it(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = put("")
    path.unlink()
    make, message = FILES[kind]
    make(path)
    begin = time.perf_counter()
    with pytest.raises(TableError, match=rf"^table {path}: cannot be read: .*{message}"):
        Table.load(path)
    with caplog.at_level(logging.WARNING, "gristmill"):
        check_ignored(caplog, path, message)
    assert time.perf_counter() - begin < 5.0


def test_a_missing_file_is_an_error_that_names_it_and_a_choice_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = put("")
    path.unlink()
    with pytest.raises(TableError, match=rf"^table {path}: cannot be read"):
        Table.load(path)
    with caplog.at_level(logging.WARNING, "gristmill"):
        assert ranked("toy", VARIANTS, problem())[0].source == "preference"
    assert caplog.messages == []


ODD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "no such variant": ({"variant": "gone"}, "names variant 'gone', which does not exist"),
    "wrong hash": ({"source_hash": "0"}, "stale: first has changed since 2026-11-15"),
    "no config": ({"config": None}, "config of first is malformed: needs a Config, got none"),
    "threads=512.0": (
        {"config": {**ROW["config"], "threads": 512.0}},
        "config of first is malformed: threads=512.0 is not of type int",
    ),
    "threads=-1": (
        {"config": {**ROW["config"], "threads": -1}},
        "config of first is rejected: threads=-1 is not a multiple of 32 from 32 to 1024",
    ),
    "threads=1e4000": (
        {"config": {**ROW["config"], "threads": HUGE}},
        "config of first is rejected: threads=100000000000000000...0000000000000000000 is not",
    ),
    "a field too few": (
        {"config": {"threads": 512}},
        "malformed: its fields are ['threads']; they must be",
    ),
    "a field too many": (
        {"config": {**ROW["config"], "x" * 10**5: 1}},
        "malformed: its fields are ['cap',",
    ),
    "another type": ({"config": {**ROW["config"], "cap": HUGE}}, "malformed: cap=1000"),
    "another word": ({"config": {**ROW["config"], "scope": "nope"}}, "malformed: scope='nope'"),
}


@pytest.mark.parametrize("kind", ODD_ROWS)
def test_a_row_that_does_not_hold_is_passed_over_with_its_reason(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The other rows of the file hold."""
    changes, reason = ODD_ROWS[kind]
    put(row(**changes))
    with caplog.at_level(logging.WARNING, "gristmill"):
        assert [one.source for one in ranked("toy", VARIANTS, problem())] == ["preference"] * 2
        few = explain_problem("toy", VARIANTS, problem(rows=16))
        many = explain_problem("toy", VARIANTS, problem())
    assert caplog.messages == []
    assert (few.source, many.source) == ("user table", "preference")
    (note,) = many.notes
    assert note.startswith("user table: its row for 513 to 2048 rows is ignored: ")
    first, *others = note.splitlines()
    assert reason in first
    assert len(first) < 400
    assert others == [f"  below, for 5 to 32 rows: {LAUNCH}, 10.50 us at rows=1000"]


def test_the_row_without_a_change_holds() -> None:
    put(row())
    assert ranked("toy", VARIANTS, problem())[0].source == "user table"


def test_unknown_ops_and_families_are_kept_and_matter_to_no_one() -> None:
    path = put(row(key="nope rows=64 N=5", covers=[33, 128]))
    assert ranked("toy", VARIANTS, problem(rows=16))[0].source == "user table"
    assert [one.stale for one in listed(tables_for(H200)[1:2], H200)] == ["", ""]
    remember(H200, [row_of(problem(64), FIRST, Config(threads=64))])
    assert set(Table.load(path).rows) == {
        "nope rows=64 N=5",
        KEY.replace("1024", "16"),
        KEY.replace("1024", "64"),
    }


@pytest.mark.parametrize(
    ("key", "before"),
    [("²", "9"), ("0007", "12"), ("9" * 4000, "9" * 4000 + "0")],
    ids=["superscript", "zeros", "digits"],
)
def test_any_key_is_sorted_and_written(tmp_path: Path, key: str, before: str) -> None:
    rows = [{**ROW, "key": f"toy rows=1 N={one}", "covers": [0, 4]} for one in (key, before)]
    path = tmp_path / "h200.json"
    path.write_text(table(*rows))
    table_of(row_of(problem(), FIRST, Config(threads=64))).save(path)
    assert {one["key"] for one in rows} < set(Table.load(path).rows)


@pytest.mark.parametrize("changes", [{"us": float("nan")}, {"variant": "a\nb"}], ids=str)
def test_a_row_that_could_not_be_read_is_not_written(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    path = tmp_path / "h200.json"
    table_of(row_of(problem(1), FIRST, Config(threads=64))).save(path)
    before = path.read_bytes()
    odd = replace(row_of(problem(), FIRST, Config(threads=64)), **changes)
    with pytest.raises(TableError, match=rf"^table {path}: "):
        table_of(odd).save(path)
    assert path.read_bytes() == before


def test_a_table_too_large_to_be_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "h200.json"
    table_of(row_of(problem(1), FIRST, Config(threads=64))).save(path)
    before = path.read_bytes()
    monkeypatch.setattr("gristmill.select.table.MOST_BYTES", len(before) + 100)
    said = rf"^table {path}: 2 rows take \d+ bytes, and {len(before) + 100} are the most$"
    with pytest.raises(TableError, match=said):
        table_of(row_of(problem(), FIRST, Config(threads=64))).save(path)
    assert path.read_bytes() == before
    assert len(Table.load(path).rows) == 1


@pytest.mark.parametrize("text", ["", "5", "{}", "[" * 100_000, '{"us": NaN}', '{"us": 1e999}'])
def test_a_row_of_another_rank_that_is_none_is_a_typed_error(text: str) -> None:
    with pytest.raises(TableError, match=r"^row of a table: "):
        row_from_json(text)


def test_many_sizes_of_one_family_are_read_in_linear_time(tmp_path: Path) -> None:
    """A call waits for this."""
    rows = [
        {**ROW, "key": KEY.replace("rows=1024", f"rows={size}"), "covers": [size, size]}
        for size in range(1, 20_000)
    ]
    path = tmp_path / "h200.json"
    path.write_text(table(*rows))
    begin = time.process_time()
    read = Table.load(path)
    assert len(read.rows) == len(rows)
    assert time.process_time() - begin < 5.0
    begin = time.process_time()
    for size in range(20_000, 22_000):
        assert read.row(problem(size)) is None
        assert read.row(problem(size - 10_000)) is not None
    assert time.process_time() - begin < 0.5


@pytest.mark.parametrize("word", ["x=complex64", "x=bool", "x=int64"])
def test_a_listing_goes_on_at_dtypes_that_no_kernel_has(word: str) -> None:
    op = OPS["rms_norm"]
    args = op.example_for(H200, (64, 64), torch.bfloat16)
    found = op.problem(*args, device=H200)
    variant = next(one for one in op.variants if one.name == "cuda_block")
    planted = row_of(found, variant, variant.config(found))
    assert why_stale(op, planted, H200) == ""
    assert why_stale(op, replace(planted, key=f"rms_norm rows=64 N=64 {word}"), H200) == ""


@pytest.mark.parametrize(
    "change", [{"threads": 32}, {"feed": -7}, {"threads": 2048}, {"cluster": 0}], ids=str
)
def test_a_planted_config_is_listed_as_one_that_is_passed_over(change: dict[str, int]) -> None:
    op = OPS["rms_norm"]
    found = op.problem(*op.example_for(H200, (4096, 2048), torch.bfloat16), device=H200)
    variant = next(one for one in op.variants if one.name == "cuda_block")
    good = row_of(found, variant, variant.config(found))
    assert why_stale(op, good, H200) == ""
    planted = replace(good, config={**(good.config or {}), **change})
    assert "config of cuda_block is rejected: " in why_stale(op, planted, H200)


def test_a_config_that_is_not_a_launch_is_not_compiled_for_a_listing() -> None:
    """Hashing it would count its stages down one by one."""
    op = OPS["nvfp4_linear"]
    variant = next(one for one in op.variants if one.name == "cuda_wgmma")
    args = op.example_for(H200, (64, 4096, 4096), torch.bfloat16)
    found = op.problem(*args, device=H200)
    own = variant.config(found)
    values = {**(config_to_json(own) or {}), "stages": 10**12}
    planted = replace(row_of(found, variant, own), config=values)
    begin = time.perf_counter()
    assert "rejected: stages=" in why_stale(op, planted, H200)
    assert time.perf_counter() - begin < 1.0
    assert why_stale(op, row_of(found, variant, own, source_hash="0"), H200) != ""
