"""Who may read and write what gristmill makes, whatever the umask."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_helpers import run_child, write_source
from modes_child import make_with_umask

from gristmill.jit import folder

NOBODY = 65534
Link = Callable[[Any, Any], None]

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs users and modes of Unix")


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that another user can write to: those of pytest are closed to others."""
    with tempfile.TemporaryDirectory(prefix="gristmill-test-") as name:
        Path(name).chmod(0o755)
        (Path(name) / "own").mkdir()
        if os.getuid() == 0:
            os.chown(Path(name) / "own", NOBODY, NOBODY)
        yield Path(name) / "own"


@pytest.mark.parametrize("user", [NOBODY, 0] if os.getuid() == 0 else [os.getuid()])
@pytest.mark.parametrize(
    "mask", [0, 0o002, 0o022, 0o077, 0o277, 0o477, 0o777], ids=lambda mask: f"{mask:03o}"
)
def test_folders_are_the_owners_alone(mask: int, user: int, place: Path, tmp_path: Path) -> None:
    sources = write_source(tmp_path / "sources")
    found = run_child(make_with_umask, mask, user, str(sources), str(place))
    assert found["warnings"] == []
    assert found["right"]
    assert found["hits"] == 1
    modes = found["modes"]
    cache = "home/.cache/gristmill"
    for path in ("home", "home/.cache", cache, f"{cache}/kernels", "a", "a/b", "a/b/c"):
        assert modes.pop(path) == 0o700, path
    assert modes.pop("a/private") == 0o600
    assert modes.pop("a/public") == 0o644
    assert modes.pop("a/one.bundle") == 0o644
    assert list(modes.values()) == [0o600]  # the kernel
    # At no moment could others have come in.
    assert [mode for mode in found["ever"] if mode & 0o077] == []


def test_folders_that_exist_keep_their_modes(tmp_path: Path) -> None:
    for name, mode in (("a", 0o755), ("a/b", 0o2750)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    folder.make_folders(tmp_path / "a" / "b")
    folder.make_folders(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a").stat().st_mode & 0o7777 == 0o755
    assert (tmp_path / "a" / "b").stat().st_mode & 0o7777 == 0o2750
    assert (tmp_path / "a" / "b" / "c").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_another_process_makes_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "exists", lambda self: self == tmp_path)
    (tmp_path / "a").mkdir()
    folder.make_folders(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        folder.make_folders(tmp_path / "file" / "b")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of the user's that nobody may change, outside the folder that others can write to."""
    path = tmp_path / "secret"
    path.write_bytes(b"secret")
    path.chmod(0o400)
    return path


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_link_in_the_place_of_the_temporary_file_changes_nothing(
    mode: int, link: Link, tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever can write to the folder can put one there as soon as the file is made."""
    make = tempfile.mkstemp

    def replaced(*args: Any, **options: Any) -> tuple[int, str]:
        handle, name = make(*args, **options)
        Path(name).unlink()
        link(secret, name)
        return handle, name

    monkeypatch.setattr(tempfile, "mkstemp", replaced)
    folder.write_whole(tmp_path / "file", b"new", mode)
    assert secret.stat().st_mode & 0o777 == 0o400
    assert secret.read_bytes() == b"secret"


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_that_is_written_to_is_replaced(link: Link, tmp_path: Path, secret: Path) -> None:
    link(secret, tmp_path / "file")
    folder.write_whole(tmp_path / "file", b"new", 0o644)
    assert (tmp_path / "file").read_bytes() == b"new"
    assert not (tmp_path / "file").is_symlink()
    assert secret.stat().st_mode & 0o777 == 0o400
    assert secret.read_bytes() == b"secret"


def test_a_link_in_the_place_of_a_new_folder_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other").chmod(0o755)
    make = Path.mkdir

    def replaced(self: Path, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self.rmdir()
        self.symlink_to(tmp_path / "other")

    monkeypatch.setattr(Path, "mkdir", replaced)
    with pytest.raises(OSError, match="folder"):
        folder.make_folders(tmp_path / "folder")
    assert (tmp_path / "other").stat().st_mode & 0o777 == 0o755


def test_files_and_folders_that_are_swapped_all_the_time(
    tmp_path: Path, secret: Path, umask: None
) -> None:
    """A thread puts links to the secret in the place of whatever appears in a shared folder."""
    shared, other = tmp_path / "shared", tmp_path / "other"
    for path in (shared, other):
        path.mkdir()
        path.chmod(0o755)
    over = threading.Event()
    swapped = {"file": 0, "folder": 0}

    def swap() -> None:
        while not over.is_set():
            for one in os.scandir(shared):
                with contextlib.suppress(OSError):
                    if one.is_symlink():
                        continue
                    if one.is_dir(follow_symlinks=False):
                        Path(one.path).rmdir()
                        Path(one.path).symlink_to(other)
                        swapped["folder"] += 1
                    elif one.name.endswith(folder.PART):
                        Path(one.path).unlink()
                        random.choice([os.symlink, os.link])(secret, one.path)
                        swapped["file"] += 1

    vandal = threading.Thread(target=swap)
    vandal.start()
    try:
        end = time.monotonic() + 20
        while min(swapped.values()) < 20 and time.monotonic() < end:
            with contextlib.suppress(OSError):
                folder.write_whole(shared / "file", b"new", 0o644)
            with contextlib.suppress(OSError):
                folder.make_folders(shared / f"folder{swapped['folder']}")
    finally:
        over.set()
        vandal.join()
    assert min(swapped.values()) >= 20
    assert secret.stat().st_mode & 0o777 == 0o400
    assert secret.read_bytes() == b"secret"
    assert other.stat().st_mode & 0o777 == 0o755


@pytest.fixture
def umask(secret: Path) -> Iterator[None]:
    """One under which every new folder has to be given its mode."""
    before = os.umask(0o277)
    yield
    os.umask(before)


def test_where_handles_have_no_modes_files_are_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Windows."""
    monkeypatch.delattr(os, "fchmod")
    folder.write_whole(tmp_path / "file", b"new", 0o644)
    assert (tmp_path / "file").read_bytes() == b"new"
