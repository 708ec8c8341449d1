"""Which row of which table covers a size, what a new row covers, and which table goes first."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
from select_fakes import H200, Fake, problem, row_of, table_of

from gristmill.errors import TableError
from gristmill.select import (
    Problem,
    Row,
    Table,
    ranked,
    remember,
    reset_tables,
    tables,
    tables_for,
)
from gristmill.select.chooser import by_heuristics
from gristmill.select.problem import BUCKETS, CANONICAL_ROWS, Sizes, Span, tiled
from gristmill.select.sight import placed, spoken_for
from gristmill.select.table import parse, row_to_json
from gristmill.select.tables import user_table_path
from gristmill.settings import reload_settings

hypothesis = pytest.importorskip("hypothesis")
given, st = hypothesis.given, hypothesis.strategies

FIRST, SECOND, THIRD = Fake("first"), Fake("second"), Fake("third")
VARIANTS = [FIRST, SECOND, THIRD]
TILED = tiled(8)


def at(
    stop: int, variant: Fake = FIRST, covers: tuple[int, int | None] | None = None, **changes: Any
) -> Row:
    return row_of(problem(stop), variant, stop=stop, covers=covers, **changes)


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


def spans(table: Table) -> dict[int, Span]:
    """What the rows of a table cover, by the row counts in their keys."""
    return {row.stop: row.covers for row in table.family(problem())}


# rows of one table


def test_each_row_covers_what_it_says_and_the_heuristics_decide_between_them() -> None:
    """And beyond the last one."""
    table = table_of(
        at(1024, FIRST, (513, 1100)), at(2048, SECOND, (1449, 2048)), at(4096, THIRD, (2049, 4096))
    )
    found = {
        rows: None if (one := table.lookup(problem(rows), VARIANTS)) is None else one[0].name
        for rows in (0, 512, 513, 1024, 1100, 1101, 1448, 1449, 2048, 2049, 4096, 4097, 10**9)
    }
    assert found == {
        0: None,
        512: None,
        513: "first",
        1024: "first",
        1100: "first",
        1101: None,
        1448: None,
        1449: "second",
        2048: "second",
        2049: "third",
        4096: "third",
        4097: None,
        10**9: None,
    }


def test_a_row_without_an_end_covers_all_that_is_larger() -> None:
    table = table_of(at(65536, FIRST, (32769, None)))
    assert table.lookup(problem(10**15), VARIANTS) == (FIRST, None)
    assert table.lookup(problem(32768), VARIANTS) is None


def test_a_new_row_takes_what_it_covers_from_its_own_family_only() -> None:
    other = problem(2048, dims=(("N", 512),))
    table = table_of(at(1024), row_of(other, FIRST, stop=1024))
    table.put(row_of(other, SECOND, stop=2048, covers=(1449, 2896)))
    assert table.row(problem(1500)) == at(1024)
    assert [row.covers for row in table.family(other)] == [(513, 1448), (1449, 2896)]
    assert table.lookup(problem(1500, dims=(("N", 512),)), VARIANTS) == (SECOND, None)


@pytest.mark.parametrize(
    ("covers", "left"),
    [
        ((1449, 2048), {1024: (513, 1448)}),
        ((1025, None), {1024: (513, 1024)}),
        ((0, 600), {1024: (601, 2048)}),
        ((513, 1023), {1024: (1024, 2048)}),
        # A part without the size in the key is named by the largest that was measured in it.
        ((600, 700), {513: (513, 599), 1024: (701, 2048)}),
        ((1000, 1100), {700: (513, 999), 1500: (1101, 2048)}),
        ((650, 1200), {513: (513, 649), 1500: (1201, 2048)}),
        # Where nothing was measured nothing stays.
        ((1500, 1600), {1024: (513, 1499)}),
        ((513, 1500), {}),
        ((2049, 4096), {1024: (513, 2048)}),
        ((0, 512), {1024: (513, 2048)}),
        ((0, None), {}),
    ],
)
def test_a_new_row_takes_what_it_covers_from_the_others(
    covers: tuple[int, int | None], left: dict[int, tuple[int, int]]
) -> None:
    also = {"513": 1.0, "700": 2.0, "1024": 3.0, "1500": 4.0}
    old = at(1024, SECOND, (513, 2048), also=also)
    new = at(covers[0], FIRST, covers)
    table = table_of(old, new)
    assert table.rows[new.key] is new
    assert len(table.rows) == 1 + len(left)
    for rows in range(2100):
        row = table.row(problem(rows))
        if rows in new.covers:
            assert row is new
            continue
        parts = [(stop, span) for stop, span in left.items() if rows in Span(*span)]
        if not parts:
            assert row is None
            continue
        ((stop, span),) = parts
        assert row is not None
        assert (row.stop, row.covers, row.variant, row.us) == (stop, span, "second", old.us)
        assert row.also == {at: us for at, us in also.items() if int(at) in Span(*span)}


def test_a_wide_row_that_is_measured_again_in_parts_keeps_the_rest() -> None:
    """As by `gristmill tune --rows 512 --again` after tuning from 1 to 512 rows."""
    wide = at(512, FIRST, (1, 512), also={"1": 4.0, "64": 5.0})
    table = table_of(wide, at(512, SECOND, (497, 512)), at(64, THIRD, (57, 64)))
    found = {row.stop: (row.covers, row.variant) for row in table.family(problem())}
    assert found == {
        1: ((1, 56), "first"),
        64: ((57, 64), "third"),
        512: ((497, 512), "second"),
    }


def test_a_row_that_is_measured_again_replaces_the_old_one_whatever_that_covered() -> None:
    table = table_of(at(64, FIRST, (33, 128)), at(1024, FIRST, (513, 2048)))
    again = at(1024, SECOND, (900, 1100), us=1.0)
    table.put(again)
    assert spans(table) == {64: (33, 128), 1024: (900, 1100)}
    assert table.row(problem(600)) is None
    assert table.row(problem(1000)) is again


def test_rows_come_back_from_the_file_with_what_they_cover(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    rows = [
        at(1024, FIRST, (513, 1448), also={"600": 1.5}),
        at(2048, SECOND, (1449, 2896)),
        at(65536, THIRD, (2897, None)),
    ]
    table_of(*rows).save(path)
    loaded = Table.load(path)
    assert loaded.lookup(problem(1500), VARIANTS) == (SECOND, None)
    assert list(loaded.family(problem())) == rows
    assert loaded == table_of(*rows)
    assert '"covers": [1449, 2896]' in path.read_text()
    assert '"covers": [2897, null]' in path.read_text()


def test_merging_into_a_file_takes_from_the_rows_that_are_there(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    table_of(at(1024, SECOND), at(64, THIRD)).save(path)
    table_of(at(2048, FIRST, (1449, 2896))).save(path)
    loaded = Table.load(path)
    assert spans(loaded) == {64: (33, 128), 1024: (513, 1448), 2048: (1449, 2896)}
    table_of(at(1000, FIRST, (900, 1100))).save(path)
    assert spans(Table.load(path)) == {64: (33, 128), 1000: (900, 1100), 2048: (1449, 2896)}


def overlapping(*rows: Row) -> Table:
    """As from files that somebody has merged by hand."""
    head = json.loads(table_of()._text([]))
    return parse(json.dumps({**head, "rows": [json.loads(row_to_json(row)) for row in rows]}), "")


def test_of_rows_that_overlap_in_a_file_the_one_that_begins_last_is_taken() -> None:
    """And of those that begin alike the one that ends first, in whatever order they stand."""
    rows = [
        at(1024, FIRST, (1, None)),
        at(64, SECOND, (33, 128)),
        at(256, THIRD, (100, 512)),
        at(500, FIRST, (100, 600)),
    ]
    for order in permutations(rows):
        table = overlapping(*order)
        found = {
            count: table.lookup(problem(count), VARIANTS)[0].name  # type: ignore[index]
            for count in (1, 32, 33, 99, 100, 128, 512, 513, 600, 10**6)
        }
        assert found == {
            1: "first",
            32: "first",
            33: "second",
            99: "second",
            100: "third",
            128: "third",
            512: "third",
            513: "first",
            600: "first",
            10**6: "first",
        }
        assert table.row(problem(600)) == rows[3]


def test_what_is_put_where_rows_overlap_covers_all_that_it_says() -> None:
    table = overlapping(at(1024, FIRST, (1, None)), at(64, SECOND, (33, 128)))
    new = at(100, THIRD, (90, 2000))
    table.put(new)
    assert spans(table) == {64: (33, 89), 100: (90, 2000)}
    assert all(table.row(problem(rows)) is new for rows in (90, 100, 2000))


SOME_SPANS = st.builds(
    lambda ends, endless: Span(min(ends), None if endless else max(ends)),
    st.tuples(st.integers(0, 200), st.integers(0, 200)),
    st.integers(0, 9).map(lambda chance: chance == 0),
)


@st.composite
def some_rows(draw: Any) -> Row:
    covers = draw(SOME_SPANS)
    stop = draw(st.integers(covers.least, 250 if covers.most is None else covers.most))
    others = st.integers(covers.least, 250 if covers.most is None else covers.most).map(str)
    also = draw(st.dictionaries(others, st.floats(0.5, 9.0), max_size=3))
    return at(stop, draw(st.sampled_from(VARIANTS)), covers, also=also)


def check_apart(table: Table) -> None:
    """Rows of a family are in order, overlap nowhere, and hold the size in their key."""
    family = table.family(problem())
    assert {row.key: row for row in family} == table.rows
    assert len(family) == len(table.rows)
    for one, other in pairwise(family):
        assert one.covers.end < other.covers.least
    for row in family:
        assert row.stop in row.covers
        assert all(int(rows) in row.covers for rows in row.also)


@hypothesis.settings(deadline=None)
@given(st.lists(some_rows(), max_size=12))
def test_after_any_rows_they_overlap_nowhere_and_the_newest_decides(rows: list[Row]) -> None:
    table = Table.for_device(H200)
    for row in rows:
        before = {count: table.row(problem(count)) for count in range(0, 260, 3)}
        table.put(row)
        check_apart(table)
        for count, old in before.items():
            found = table.row(problem(count))
            if count in row.covers:
                assert found is row
            elif found is None:
                # In its part of the old row nothing was measured.
                assert old is None or old.covers.least <= row.covers.end
            else:
                assert old is not None
                assert (found.family, found.us, found.launch()) == (
                    *(old.family, old.us, old.launch()),
                )
                assert found.key == old.key or found.stop in {old.rows, *map(int, old.also)}
                assert old.covers.least <= found.covers.least
                assert found.covers.end <= old.covers.end


@given(st.lists(some_rows(), max_size=8), st.lists(some_rows(), max_size=8))
def test_a_table_is_the_same_when_read_back_and_when_merged_in_a_file(
    old: list[Row], new: list[Row]
) -> None:
    first, second, both = (Table.for_device(H200) for _ in range(3))
    for row in old:
        first.put(row)
        both.put(row)
    for row in new:
        second.put(row)
    for row in second.rows.values():
        both.put(row)
    assert parse(first._text(first.rows.values()), "here") == first
    path = Path(os.environ["GRISTMILL_CACHE_DIR"]) / "merged.json"
    path.unlink(missing_ok=True)
    first.save(path)
    assert Table.load(path) == first
    second.save(path)
    assert Table.load(path) == both
    text = path.read_text()
    assert both._text(reversed(both.rows.values())) == text
    second.save(path)
    assert path.read_text() == text


# rows of several tables


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


def measured(solved: Problem, variant: Fake = FIRST) -> Row:
    """What a first call keeps of a problem that it meets."""
    key, covers = placed(solved)
    assert solved.asked().rows in covers
    row = row_of(solved, variant, key=key, covers=(covers.least, covers.most))
    assert row.stop in covers
    remember(H200, [row], keep=False)
    return row


@pytest.mark.parametrize("mine", ["process", "user"])
def test_a_new_row_covers_nothing_that_a_table_after_it_has_split_off(
    shipped: Path, mine: str
) -> None:
    """Measured at 1024, it says nothing of 2048, where another table has found another winner."""
    table_of(at(1024, SECOND, (513, 1448)), at(2048, THIRD, (1449, 2896))).save(shipped)
    reset_tables()
    row = measured(problem(1024))
    if mine == "user":
        users(row)
    assert (row.key, row.covers) == (problem().key(1024), (513, 1448))
    assert choice(1000)[0] == "first"
    assert choice(1448)[0] == "first"
    assert choice(1449) == ("third", "shipped table")
    assert not spoken_for(problem(1449), VARIANTS)
    assert placed(problem(1449)) == (problem().key(2048), (1449, 2896))


def test_a_row_that_is_measured_again_keeps_what_it_covers() -> None:
    """Where tuning has found a switch between two stops, its place stays."""
    users(at(1024, SECOND, (700, 1700)))
    for rows in (700, 1024, 1700):
        assert placed(problem(rows)) == (problem().key(1024), (700, 1700))
    measured(problem(900), THIRD)
    assert choice(1700) == ("third", "tuning of this process")
    assert choice(1701)[1] == "preference"


def test_a_new_row_lies_between_what_is_measured() -> None:
    users(at(600, SECOND, (400, 800)), at(1500, THIRD, (1400, 1600)))
    assert placed(problem(1000)) == (problem().key(1024), (801, 1399))
    # Where the usual row count is not covered, the nearest that is names the row.
    assert placed(problem(1700)) == (problem().key(1601), (1601, 2048))
    assert placed(problem(300)) == (problem().key(256), (129, 399))
    assert placed(problem(10**6)) == (problem().key(65536), (32769, None))
    row = measured(problem(1700))
    assert [choice(rows)[0] for rows in (1600, 1601, 2048)] == ["third", "first", "first"]
    assert (row.stop, row.rows) == (1601, 1700)


def test_a_new_row_takes_nothing_from_one_of_an_earlier_table(shipped: Path) -> None:
    """It replaces the shipped one at 1000, which has not seen the switch at 1449."""
    table_of(at(1024, THIRD, (513, 2048))).save(shipped)
    users(at(2048, SECOND, (1449, 2896)))
    assert placed(problem(1000)) == (problem().key(1024), (513, 1448))
    measured(problem(1000), FIRST)
    assert choice(1448) == ("first", "tuning of this process")
    assert choice(1449) == ("second", "user table")


def test_a_new_row_of_tiles_covers_its_own_stop() -> None:
    def here(rows: int) -> Problem:
        return problem(rows, sizes=TILED)

    assert placed(here(70)) == (here(1).key(72), (65, 72))
    assert placed(here(3)) == (here(1).key(4), (3, 4))
    assert placed(here(70000)) == (here(1).key(65537), (65537, None))
    users(at(60, SECOND, (57, 66)), at(71, THIRD, (71, 71)))
    assert placed(here(70)) == (here(1).key(70), (67, 70))
    assert placed(here(72)) == (here(1).key(72), (72, 72))


def test_inside_a_wide_stale_row_of_tiles_a_new_one_covers_its_own_stop() -> None:
    """What was measured at 120 rows is not known to hold at 70; the others are stale as before."""
    users(at(128, SECOND, (65, 128), source_hash="0" * 16), at(256, THIRD, (129, 256)))
    here = problem(70, sizes=TILED)
    assert not spoken_for(here, VARIANTS)
    row = measured(here, THIRD)
    assert (row.key, row.covers) == (problem().key(72), (65, 72))
    assert choice(70) == ("third", "tuning of this process")
    assert choice(73) == ("first", "preference")
    table_of(row).save(user_table_path(H200))
    assert spans(Table.load(user_table_path(H200))) == {
        72: (65, 72),
        128: (73, 128),
        256: (129, 256),
    }


def test_beside_a_stale_row_of_tiles_a_new_one_takes_nothing_from_its_neighbour() -> None:
    users(at(68, SECOND, (65, 68), source_hash="0" * 16), at(80, THIRD, (69, 80)))
    row = measured(problem(66, sizes=TILED))
    assert (row.stop, row.covers) == (68, (65, 68))
    assert choice(69) == ("third", "user table")


@pytest.mark.parametrize("sizes", [BUCKETS, TILED], ids=["nearest", "up"])
@hypothesis.settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_ranks_that_meet_sizes_in_other_orders_make_the_same_rows(sizes: Sizes, data: Any) -> None:
    """They agree by the key: two keys for one row would be two measurements."""
    known: list[Row] = data.draw(st.lists(some_rows(), max_size=5))
    stale: list[bool] = data.draw(st.lists(st.booleans(), min_size=5, max_size=5))
    met: list[int] = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=8, unique=True))
    path = user_table_path(H200)
    path.unlink(missing_ok=True)
    hashes = ("0" * 16, FIRST.source_hash(problem(), None))
    users(
        *(
            at(row.stop, FIRST, row.covers, source_hash=hashes[not old])
            for row, old in zip(known, stale, strict=False)
        )
    )
    ends = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "_shipped", list)
        for order in (met, data.draw(st.permutations(met))):
            reset_tables()
            found: dict[str, Span] = {}
            for rows in order:
                here = problem(rows, sizes=sizes)
                if not spoken_for(here, VARIANTS):
                    row = measured(here)
                    assert found.setdefault(row.key, row.covers) == row.covers
            ends.append(found)
    assert ends[0] == ends[1]


def test_what_this_process_measures_leaves_the_rest_of_a_users_row_as_it_was() -> None:
    users(at(1024, SECOND))
    remember(H200, [at(2048, FIRST, (1449, 2896))], keep=False)
    assert choice(1448) == ("second", "user table")
    assert choice(1449) == ("first", "tuning of this process")
    assert choice(2897)[1] == "preference"


def test_rows_cover_the_usual_row_counts_where_nothing_is_measured() -> None:
    assert placed(problem(1500)) == (problem().key(1024), (513, 2048))
    key, covers = placed(problem(1500, batch_invariant=True))
    assert key == problem().key(CANONICAL_ROWS)
    assert CANONICAL_ROWS in covers


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


def test_what_this_process_measures_does_not_move_what_is_batch_invariant(shipped: Path) -> None:
    table_of(at(CANONICAL_ROWS, THIRD)).save(shipped)
    reset_tables()
    remember(H200, [at(CANONICAL_ROWS + 1, FIRST, (129, 512))], keep=False)
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


@pytest.mark.parametrize("rows", [0, 512, 2049, 5000, 10**7])
def test_where_no_row_covers_a_size_all_is_as_without_tables(
    shipped: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    table_of(at(1024, THIRD), at(3000, SECOND, (2900, 4999))).save(shipped)
    users(at(1024, SECOND))
    assert (
        by_heuristics("toy", VARIANTS, problem(rows)) == ranked("toy", VARIANTS, problem(rows))[0]
    )
    here = ranked("toy", VARIANTS, problem(rows))
    monkeypatch.setenv("GRISTMILL_TABLE", "none")
    reload_settings()
    reset_tables()
    assert ranked("toy", VARIANTS, problem(rows)) == here


def test_a_table_with_many_rows_of_one_kind_is_asked_in_no_time() -> None:
    table = Table.for_device(H200)
    table.put_all(at(size, FIRST, (size, size)) for size in range(1, 40_000, 2))
    begin = time.process_time()
    for size in range(10**6, 10**6 + 2000):
        assert table.row(problem(size)) is None
    for size in range(20_001, 22_001, 2):
        assert table.row(problem(size)) is not None
        assert table.row(problem(size + 1)) is None
    assert time.process_time() - begin < 0.5


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
    path.write_text(json.dumps({**content, "schema": 2}))
    reset_tables()
    with caplog.at_level(logging.WARNING, logger="gristmill"):
        assert choice(1000) == ("first", "preference")
        assert choice(64) == ("first", "preference")
    (record,) = caplog.records
    assert "schema 2, this version reads 3; it is ignored" in record.getMessage()


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
