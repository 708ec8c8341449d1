"""Writing a file that others read and write too: one at a time, and in one step."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if sys.platform != "win32":
    import fcntl

# A table is merged and written in milliseconds; whoever holds the lock longer is stuck.
_PATIENCE_S = 5.0


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder` against other processes that write there.

    The lock is on the folder itself, so that no file is left behind. Where there is no lock to be
    had (other systems, some network drives), or not in time, the work is done without.
    """
    if sys.platform == "win32":
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        end = time.monotonic() + _PATIENCE_S
        while time.monotonic() < end:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                break
        yield
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Make `folder` and those above it; for the owner only, whatever the umask.

    The cache trusts no folder that others can write to.
    """
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    for one in reversed(missing):
        one.mkdir(mode=0o700, exist_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Put `text` into the file at `path`: readers find the old text or the new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).chmod(0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
