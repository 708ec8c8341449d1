"""Tuned tables on bad disks, in the hands of others, and damaged: ignored with one warning."""

from __future__ import annotations

import errno
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_helpers import heard_warnings, run_child
from faulty_disk import CODES
from tables_child import H200, begin, every_fault_of_tables, known_rows, row, saved, tune_as

from gristmill.jit import bundle
from gristmill.select import Table, tables
from gristmill.select.tables import remember, reset_tables, table_name
from gristmill.settings import reload_settings

NOBODY = 65534
# A disk that says of a table that it is not there makes anybody write a new one.
HONEST = [code for code in CODES if code not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)]


@pytest.fixture(autouse=True)
def tables_of_this_test(home) -> Iterator[None]:
    reset_tables()
    yield
    reset_tables()


@pytest.fixture
def path(home) -> Path:
    """The user's table, with one row."""
    return saved(home, "old")


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize(
    "codes",
    [[errno.EIO, errno.EACCES], pytest.param(HONEST, marks=pytest.mark.long)],
    ids=["some", "all"],
)
def test_every_operation_may_fail(codes, lasting, tmp_path, faulty_disk) -> None:
    wrong = run_child(
        every_fault_of_tables, str(tmp_path), codes, lasting, alone=False, LD_PRELOAD=faulty_disk
    )
    assert wrong == []


def check_ignored(path: Path, word: str) -> None:
    """The table is not read and stays as it is; choices go on; one warning each way."""
    content = path.read_bytes() if path.is_file() and not path.is_symlink() else None
    with heard_warnings() as heard:
        assert known_rows() == set()
        reset_tables()
        assert known_rows() == set()
    (message,) = heard
    assert str(path.parent) in message
    assert word in message
    assert "ignored" in message
    with heard_warnings() as heard:
        remember(H200, [row("new")])
        remember(H200, [row("newer")])
    assert known_rows() == {"new", "newer"}
    assert len(heard) <= 1
    if content is not None:
        assert path.read_bytes() == content


DAMAGES = {
    "empty": b"",
    "no text": b"\xff\xfe\x00",
    "no JSON": b"{",
    # With names, because what deflates too well may not be in a bundle.
    "deep": b"".join(b'{"%x":' % level for level in range(100_000)),
    "a list": b"[]",
    "another schema": b'{"schema": 99}',
    "the last schema": b'{"schema": 2, "gpu": "NVIDIA H200", "arch": "sm_90a", "rows": []}',
    "no rows": b'{"schema": 3, "gpu": "NVIDIA H200", "arch": "sm_90a", "multiprocessors": 132}',
    "odd rows": (
        b'{"schema": 3, "gpu": "NVIDIA H200", "arch": "sm_90a", "multiprocessors": 132,'
        b'"rows": [{"key": 3}]}'
    ),
    "another GPU": b'{"schema": 3, "gpu": "x", "arch": "sm_90a", "multiprocessors": 1, "rows": []}',
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_table_is_ignored_and_stays(damage, path) -> None:
    path.write_bytes(DAMAGES[damage])
    check_ignored(path, "table")


def test_a_table_that_is_cut_off_or_changed_never_stops_anything(path, monkeypatch) -> None:
    monkeypatch.setattr(tables, "_shipped", list)  # large, and not what is damaged
    content = path.read_bytes()
    chance = random.Random(0)
    for length in range(0, len(content), 3):
        path.write_bytes(content[:length])
        reset_tables()
        assert known_rows() in (set(), {"old"})
    for place in range(0, len(content), 3):
        changed = bytearray(content)
        changed[place] = chance.randrange(256)
        path.write_bytes(bytes(changed))
        reset_tables()
        known_rows()


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
@pytest.mark.parametrize("which", ["cache", "tables"])
def test_a_folder_that_others_can_write_to(which, mode, path) -> None:
    place = path.parent if which == "tables" else path.parent.parent
    place.chmod(mode)
    check_ignored(path, f"{place} can be written to by others")


def test_a_table_that_others_can_write_to(path) -> None:
    path.chmod(0o666)
    check_ignored(path, "can be written to by others")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("which", ["cache", "tables", "file"])
def test_a_table_of_another_user(which, path) -> None:
    place = {"cache": path.parent.parent, "tables": path.parent, "file": path}[which]
    os.chown(place, 4_000_017, -1)
    check_ignored(path, "belongs to another user")


def test_a_pipe_in_the_place_of_a_table(path, impatient) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)
    check_ignored(path, "table")


def test_a_folder_in_the_place_of_a_table(path) -> None:
    path.unlink()
    path.mkdir()
    check_ignored(path, "table")


def test_a_huge_table_is_not_read(path, impatient) -> None:
    with path.open("r+b") as file:
        file.truncate(10 * 2**30)
    with heard_warnings() as heard:
        assert known_rows() == set()
        remember(H200, [row("new")])
        assert known_rows() == {"new"}
    assert 1 <= len(heard) <= 2


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A folder that another user can get to."""
    with tempfile.TemporaryDirectory(prefix="gristmill-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_users_who_cannot_have_tables(open_place) -> None:
    homes = {name: open_place / name for name in ("closed", "read-only", "missing", "a file")}
    saved(homes["closed"], "old")
    homes["read-only"].mkdir(mode=0o555)
    homes["a file"].touch()
    open_place.chmod(0o555)
    results = run_child(tune_as, NOBODY, list(map(str, homes.values())), alone=False)
    for name, result in zip(homes, results, strict=True):
        if name == "closed" and os.getuid() != 0:
            continue  # it is this user's own
        assert result["before"] == [], name
        assert result["after"] == ["new", "newer"], name
        assert 1 <= len(result["warnings"]) <= 2, name
        assert any("in memory only" in message for message in result["warnings"]), name


# ---- tables in layers ----


def layer_with(folder: Path, content: bytes) -> Path:
    (folder / "kernels").mkdir(parents=True)
    (folder / "tables").mkdir()
    (folder / "tables" / table_name(H200)).write_bytes(content)
    return folder


def table_text(tmp_path: Path, *names: str) -> bytes:
    table = Table.for_device(H200)
    for name in names:
        table.put(row(name))
    table.save(tmp_path / "text" / "a.json")
    return (tmp_path / "text" / "a.json").read_bytes()


@pytest.mark.parametrize("kind", ["folder", "bundle"])
@pytest.mark.parametrize("damage", [None, *DAMAGES])
def test_a_table_in_a_layer(damage, kind, tmp_path, home, monkeypatch) -> None:
    content = table_text(tmp_path, "kept") if damage is None else DAMAGES[damage]
    layer = layer_with(tmp_path / "layer", content)
    if kind == "bundle":
        layer = tmp_path / "kernels.bundle"
        bundle.write(layer, [], [(table_name(H200), content)])
    begin(home)
    monkeypatch.setenv("GRISTMILL_CACHE_LAYERS", str(layer))
    reload_settings()
    with heard_warnings() as heard:
        rows = known_rows()
    assert rows == ({"kept"} if damage is None else set())
    assert len(heard) == (0 if damage is None else 1)


@pytest.mark.parametrize("which", ["", "tables", "tables/file"])
def test_a_table_in_a_layer_that_others_can_write_to(which, tmp_path, home, monkeypatch) -> None:
    layer = layer_with(tmp_path / "layer", table_text(tmp_path, "planted"))
    place = layer / which.replace("file", table_name(H200))
    place.chmod(place.stat().st_mode | 0o022)
    begin(home)
    monkeypatch.setenv("GRISTMILL_CACHE_LAYERS", str(layer))
    reload_settings()
    with heard_warnings() as heard:
        assert known_rows() == set()
    (message,) = heard
    assert "can be written to by others" in message
