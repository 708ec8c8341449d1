"""Homes that are missing, read-only or something else than a folder: one warning, memory only."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_helpers import ARCH, run_child, write_source
from homes_child import load_as
from race_child import load_numbers

NOBODY = 65534
UNLISTED = 4_000_017  # in no list of users

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs users and modes of Unix")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    return write_source(tmp_path / "sources")


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that another user can get to: those of pytest are closed to others."""
    with tempfile.TemporaryDirectory(prefix="gristmill-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def file_in_the_way(place: Path) -> Path:
    (place / "file").write_text("in the way")
    return place / "file"


def folder_in_a_file(place: Path) -> Path:
    return file_in_the_way(place) / "cache"


def dangling_link(place: Path) -> Path:
    (place / "link").symlink_to(place / "missing" / "cache")
    return place / "link"


def loop(place: Path) -> Path:
    (place / "loop").symlink_to(place / "loop")
    return place / "loop"


def long_name(place: Path) -> Path:
    return place / ("x" * 300)


def closed_parent(place: Path) -> Path:
    (place / "closed").mkdir(mode=0o555)
    return place / "closed" / "a" / "cache"


def unreadable(place: Path) -> Path:
    (place / "unreadable").mkdir(mode=0o000)
    return place / "unreadable" / "cache"


@pytest.mark.parametrize(
    "make",
    [
        file_in_the_way,
        folder_in_a_file,
        dangling_link,
        loop,
        long_name,
        closed_parent,
        unreadable,
    ],
)
def test_a_cache_folder_that_cannot_be(make, place, sources) -> None:
    folder = make(place)
    result = run_child(load_as, NOBODY, str(sources), {"GRISTMILL_CACHE_DIR": str(folder)})
    check_memory_only(result, str(folder))


def check_memory_only(result: dict, word: str) -> None:
    assert result["right"] == [True] * 5
    assert (result["compiles"], result["hits"]) == (3, 0)
    (warning,) = result["warnings"]
    assert "in memory only" in warning
    assert word in warning
    assert not result["cached"]
    assert result["listed"] == []
    assert result["jit off"].startswith("KernelNotCached: ")


def test_a_home_that_cannot_be_written_to(place, sources) -> None:
    home = place / "home"
    home.mkdir(mode=0o555)
    variables = {"HOME": str(home), "XDG_CACHE_HOME": None, "GRISTMILL_CACHE_DIR": None}
    result = run_child(load_as, NOBODY, str(sources), variables)
    check_memory_only(result, str(home / ".cache" / "gristmill"))
    assert list(home.iterdir()) == []


def test_a_home_that_is_not_there(place, sources) -> None:
    place.chmod(0o555)
    variables = {"HOME": str(place / "gone"), "XDG_CACHE_HOME": None, "GRISTMILL_CACHE_DIR": None}
    result = run_child(load_as, NOBODY, str(sources), variables)
    check_memory_only(result, str(place / "gone" / ".cache"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user that is not listed")
@pytest.mark.parametrize("home", [None, "relative"])
def test_a_user_without_a_home(home, sources) -> None:
    variables = {"HOME": home, "XDG_CACHE_HOME": None, "GRISTMILL_CACHE_DIR": None}
    result = run_child(load_as, UNLISTED, str(sources), variables)
    assert result["user"] == UNLISTED
    check_memory_only(result, "GRISTMILL_CACHE_DIR")
    assert result["folder"] == "None"


@pytest.mark.skipif(os.getuid() != 0, reason="the folder must be another user's: root's")
def test_a_folder_of_root_is_read_and_not_written_to(place, sources) -> None:
    """An image built by root, run by somebody else."""
    folder, log = place / "cache", place / "log"
    made = run_child(load_numbers, str(folder), str(sources), str(log), 2, ARCH)
    assert made["compiles"] == 2
    for path in (folder, folder / "kernels"):
        path.chmod(0o755)
    for path in (folder / "kernels").iterdir():
        path.chmod(0o644)
    before = sorted(path.name for path in (folder / "kernels").iterdir())
    result = run_child(load_as, NOBODY, str(sources), {"GRISTMILL_CACHE_DIR": str(folder)})
    assert result["right"] == [True] * 5
    assert (result["compiles"], result["hits"]) == (1, 2 + 1)
    (warning,) = result["warnings"]
    assert "in memory only" in warning
    assert result["cached"]
    assert result["jit off"] == ""
    assert sorted(path.name for path in (folder / "kernels").iterdir()) == before


@pytest.mark.skipif(os.getuid() != 0, reason="the folder must be another user's: root's")
def test_a_folder_of_root_that_is_closed(place, sources) -> None:
    """As root leaves it: readable by nobody else."""
    folder, log = place / "cache", place / "log"
    run_child(load_numbers, str(folder), str(sources), str(log), 2, ARCH)
    result = run_child(load_as, NOBODY, str(sources), {"GRISTMILL_CACHE_DIR": str(folder)})
    check_memory_only(result, str(folder))
