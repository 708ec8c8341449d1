"""Who may read and write what gristmill makes, whatever the umask."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_helpers import run_child, write_source
from modes_child import make_with_umask

from gristmill.jit import folder

NOBODY = 65534

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


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_link_in_the_place_of_the_temporary_file_changes_nothing(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever can write to the folder can put one there as soon as the file is made."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    secret.chmod(0o400)
    make = tempfile.mkstemp

    def replaced(*args: Any, **options: Any) -> tuple[int, str]:
        handle, name = make(*args, **options)
        Path(name).unlink()
        Path(name).symlink_to(secret)
        return handle, name

    monkeypatch.setattr(tempfile, "mkstemp", replaced)
    folder.write_whole(tmp_path / "file", b"new", mode)
    assert secret.stat().st_mode & 0o777 == 0o400
    assert secret.read_bytes() == b"secret"


def test_where_handles_have_no_modes_files_are_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Windows."""
    monkeypatch.delattr(os, "fchmod")
    folder.write_whole(tmp_path / "file", b"new", 0o644)
    assert (tmp_path / "file").read_bytes() == b"new"
