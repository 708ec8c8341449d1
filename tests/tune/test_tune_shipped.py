"""The tables that come with the package: every row is believed, and chosen where it speaks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from gristmill.ops.registry import OPS
from gristmill.select.device import KNOWN
from gristmill.select.table import Row, Table
from gristmill.select.tables import _shipped, reset_tables, tables_for
from gristmill.tune.listing import listed

TABLES = {table.gpu: table for table in _shipped()}
BY_NAME = {device.name: device for device in KNOWN.values()}


@pytest.fixture(autouse=True)
def tables_as_shipped() -> Iterator[None]:
    reset_tables()
    yield
    reset_tables()


def test_there_is_one_for_the_h200() -> None:
    rows = TABLES["NVIDIA H200"].rows
    assert len(rows) > 500
    assert {"rms_norm", "layer_norm", "softmax", "cross_entropy", "linear"} <= {
        key.split(" ")[0] for key in rows
    }


@pytest.mark.parametrize("gpu", sorted(TABLES))
def test_no_row_is_stale_or_of_something_unknown(gpu: str) -> None:
    device = BY_NAME[gpu]
    assert TABLES[gpu].arch == device.arch
    assert TABLES[gpu].multiprocessors == device.multiprocessors
    sources = tuple(source for source in tables_for(device) if source.shipped)
    rows = list(listed(sources, device))
    assert len(rows) == len(TABLES[gpu].rows)
    assert {one.row.key.split(" ")[0] for one in rows} <= set(OPS)
    assert [f"{one.row.key}: {one.stale}" for one in rows if one.stale] == []


@pytest.mark.parametrize("gpu", sorted(TABLES))
def test_rows_say_what_was_measured(gpu: str) -> None:
    table: Table = TABLES[gpu]
    for row in table.rows.values():
        assert row.us > 0, row.key
        assert row.spread_us >= 0, row.key
        assert row.rows in row.covers, row.key
        assert all(int(rows) in row.covers for rows in row.also), row.key
        assert str(row.rows) not in row.also, row.key
        assert row.candidates >= len(row.times) >= 1, row.key
        assert row.variant in row.times, row.key
        assert row.torch, row.key
        assert _is_date(row), row.key


@pytest.mark.parametrize("gpu", sorted(TABLES))
def test_no_two_rows_cover_the_same(gpu: str) -> None:
    families: dict[str, list[Row]] = {}
    for row in TABLES[gpu].rows.values():
        families.setdefault(row.family, []).append(row)
    for rows in families.values():
        rows.sort(key=lambda row: row.covers.least)
        for one, other in pairwise(rows):
            assert one.covers.end < other.covers.least, other.key


def _is_date(row: Row) -> bool:
    parts = row.date.split("-")
    return [len(part) for part in parts] == [4, 2, 2] and all(part.isdigit() for part in parts)
