from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from select_fakes import H200, Config, Fake, problem, row_of, table_of

from gristmill.errors import TableError
from gristmill.select import (
    Device,
    Problem,
    Row,
    Table,
    Variant,
    reset_tables,
    tables,
    tables_for,
)
from gristmill.select.table import row_from_json, row_to_json
from gristmill.select.tables import TableSource, slug, user_table_path
from gristmill.settings import reload_settings

TUNED = Config(threads=512, vector=8, order=(2, 0, 1), scope="block", cap=0.5)
FIRST = Fake("first", configured=True, source="v1")
SECOND = Fake("second")


def measured(variant: Fake = FIRST, rows: int = 1000, **changes: Any) -> Row:
    """The row of a win by `variant`, then with `changes` as a file might hold them."""
    config = TUNED if variant.config_type is not None else None
    return replace(row_of(problem(rows), variant, config), **changes)


def read_for(device: Device) -> tuple[TableSource, ...]:
    """The tables that were read from files; before them comes what this process measured."""
    measured_here, *others = tables_for(device)
    assert measured_here.label == "tuning of this process"
    assert measured_here.table.rows == {}
    return tuple(others)


def test_a_saved_row_is_found_again_with_its_config(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "h200.json"
    table_of(measured()).save(path)
    assert Table.load(path).lookup(problem(), [SECOND, FIRST]) == (FIRST, TUNED)


def test_a_variant_without_a_config_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    table_of(measured(SECOND, second=None)).save(path)
    assert Table.load(path).lookup(problem(), [SECOND, FIRST]) == (SECOND, None)


def test_a_row_serves_what_it_covers_and_nothing_else() -> None:
    found = table_of(measured(rows=1000))
    assert found.lookup(problem(rows=512), [FIRST]) is None
    assert found.lookup(problem(rows=513), [FIRST]) is not None
    assert found.lookup(problem(rows=2048), [FIRST]) is not None
    assert found.lookup(problem(rows=2049), [FIRST]) is None
    assert found.lookup(problem(dims=(("N", 512),)), [FIRST]) is None
    assert found.ignored == {}


@pytest.mark.parametrize("threads", [0, 33, 1056])
def test_a_row_names_a_launch_of_its_variant_or_is_passed_over(threads: int) -> None:
    class Checked(Fake):
        def source_hash(self, problem: Problem, config: Any) -> str:
            assert config.threads in range(32, 1025, 32)  # asked of launches alone
            return "v1"

    variant = Checked("first", configured=True)
    row = measured(variant)
    assert row.config is not None
    planted = replace(row, config={**row.config, "threads": threads})
    found = table_of(planted)
    assert found.lookup(problem(), [variant]) is None
    reason = "is not a multiple of 32 from 32 to 1024"
    assert reason in found.ignored[row.key]
    assert "config of first is rejected: threads=" in found.ignored[row.key]
    found.put(row)
    assert found.lookup(problem(), [variant]) == (variant, TUNED)
    assert found.ignored == {}


def test_without_a_rule_of_its_own_a_variant_takes_what_it_would_time() -> None:
    variant = Fake("first", configured=True, more=[Config(threads=64)])
    rejects = partial(Variant.rejects, variant, problem())
    assert rejects(Config(threads=128)) is None
    assert rejects(Config(threads=64)) is None
    assert "threads=96" in str(rejects(Config(threads=96)))
    assert Variant.rejects(Fake("second"), problem(), None) is None


def test_file_is_sorted_by_number_with_one_row_per_line(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    table_of(*(measured(rows=rows) for rows in (1024, 64, 256, 1))).save(path)
    lines = [line for line in path.read_text().splitlines() if '"key"' in line]
    assert [line.split("rows=")[1].split()[0] for line in lines] == ["1", "64", "256", "1024"]
    assert json.loads(path.read_text())["schema"] == 3


def test_save_keeps_other_rows_and_replaces_its_own(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    table_of(measured(rows=1), measured(rows=64)).save(path)
    table_of(measured(rows=64, us=3.0)).save(path)
    loaded = Table.load(path)
    assert [row.us for row in loaded.rows.values()] == [10.5, 3.0]


def test_save_writes_nothing_that_is_there_already(tmp_path: Path) -> None:
    """Each rank of a job keeps what one of them has measured, often in one file."""
    path = tmp_path / "h200.json"
    table_of(measured()).save(path)
    before = path.stat().st_ino
    told = row_from_json(row_to_json(measured()))
    table_of(told).save(path)
    assert path.stat().st_ino == before
    table_of(replace(told, us=1.5)).save(path)
    assert [row.us for row in Table.load(path).rows.values()] == [1.5]


def test_save_refuses_the_table_of_another_gpu_and_leaves_it(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    table_of(measured()).save(path)
    before = path.read_bytes()
    with pytest.raises(TableError, match=r"NVIDIA H200.*not for 'NVIDIA H100'"):
        table_of(measured(), device=replace(H200, name="NVIDIA H100")).save(path)
    assert path.read_bytes() == before


def test_a_save_that_breaks_off_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "h200.json"
    table_of(measured()).save(path)
    before = path.read_bytes()

    def refuse(source: str, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        table_of(measured(us=1.0)).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (measured(source_hash="0" * 16), "stale: first has changed since 2026-11-15"),
        (replace(measured(), variant="gone"), "'gone'"),
        (
            measured(config={"threads": 1}),
            "its fields are ['threads']; they must be ['threads', 'vector'",
        ),
        (measured(config=None), "needs a Config"),
        (measured(SECOND, config={"threads": 1}), "takes no config"),
    ],
)
def test_a_row_that_no_longer_holds_is_ignored_with_a_reason(row: Row, reason: str) -> None:
    made = table_of(row)
    assert made.lookup(problem(), [FIRST, SECOND]) is None
    assert list(made.ignored) == [row.key]
    assert reason in made.ignored[row.key]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("threads", "512"),
        ("threads", True),
        ("threads", 1.5),
        ("order", 3),
        ("order", [1, "2"]),
        ("scope", "grid"),
        ("cap", "none"),
    ],
)
def test_a_config_value_of_the_wrong_type_is_ignored(name: str, value: object) -> None:
    config = {**measured().config, name: value}  # type: ignore[dict-item]
    made = table_of(measured(config=config))
    assert made.lookup(problem(), [FIRST]) is None
    assert f"{name}=" in next(iter(made.ignored.values()))


def test_a_row_whose_variant_refuses_this_very_problem_is_ignored() -> None:
    few = Fake("few", refusal=lambda problem: "too many rows" if problem.rows > 1000 else None)
    made = table_of(measured(few))
    assert made.lookup(problem(rows=1000), [few]) == (few, None)
    assert made.lookup(problem(rows=1001), [few]) is None
    assert "too many rows" in made.ignored[measured(few).key]


def test_slug() -> None:
    assert slug("NVIDIA H200") == "nvidia-h200"
    assert slug("NVIDIA RTX PRO 6000 (Max-Q)") == "nvidia-rtx-pro-6000-max-q"


def test_user_table_is_read_once_and_again_after_a_reset() -> None:
    assert read_for(H200) == ()
    table_of(measured()).save(user_table_path(H200))
    assert read_for(H200) == ()
    reset_tables()
    (source,) = read_for(H200)
    assert source.label == "user table"
    assert source.table.lookup(problem(), [FIRST]) == (FIRST, TUNED)


def test_user_table_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    table_of(measured()).save(user_table_path(H200))
    monkeypatch.setenv("GRISTMILL_TABLE", "off")
    reload_settings()
    assert read_for(H200) == ()


OTHER_GPU = {"schema": 3, "gpu": "NVIDIA H100", "arch": "sm_90a", "multiprocessors": 1, "rows": []}


@pytest.mark.parametrize("text", ["nonsense", json.dumps(OTHER_GPU)])
def test_a_bad_user_table_is_ignored_with_one_warning(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = user_table_path(H200)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with caplog.at_level(logging.WARNING, logger="gristmill"):
        assert read_for(H200) == ()
        reset_tables()
        assert read_for(H200) == ()
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert "ignored" in record.getMessage()


@pytest.fixture(autouse=True)
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package folder of our own, to ship tables in; those of the package take no part here."""
    monkeypatch.setattr(tables.resources, "files", lambda package: tmp_path)
    return tmp_path / "tables"


def test_shipped_table_of_this_gpu_comes_after_the_users(shipped: Path) -> None:
    table_of(measured(us=5.0)).save(shipped / "nvidia-h200.json")
    table_of(device=replace(H200, name="NVIDIA H100")).save(shipped / "nvidia-h100.json")
    table_of(measured()).save(user_table_path(H200))
    user, ours = read_for(H200)
    assert (user.label, ours.label) == ("user table", "shipped table")
    assert ours.table.gpu == "NVIDIA H200"
    assert ours.note == "measured on NVIDIA H200"


def test_nearest_shipped_table_of_the_architecture_stands_in_and_says_so(shipped: Path) -> None:
    for name, arch, size in (
        ("NVIDIA H100 PCIe", "sm_90a", 114),
        ("NVIDIA GH200", "sm_90a", 130),
        ("NVIDIA B200", "sm_100a", 132),
    ):
        card = replace(H200, name=name, arch=arch, multiprocessors=size)
        table_of(device=card).save(shipped / f"{slug(name)}.json")
    (source,) = read_for(H200)
    assert source.table.gpu == "NVIDIA GH200"
    assert source.note == "measured on NVIDIA GH200, the nearest sm_90a GPU with a table"


def test_a_broken_shipped_table_does_not_hide_the_others(
    shipped: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table_of().save(shipped / "nvidia-h200.json")
    (shipped / "a-broken-one.json").write_text("{}")
    with caplog.at_level(logging.WARNING, logger="gristmill"):
        (source,) = read_for(H200)
    assert source.table.gpu == "NVIDIA H200"
    assert "a-broken-one.json" in caplog.text


def test_no_table_stands_in_on_a_cpu(shipped: Path) -> None:
    table_of(device=replace(H200, name="other", arch="")).save(shipped / "other.json")
    assert read_for(Device("cpu", "cpu")) == ()
