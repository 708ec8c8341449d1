"""Folders and files that only the user and root can write to, and atomic writes.

A kernel that is read from a file runs with the user's rights. So it is read only from a folder that
only the user and root can write to, and from a file of which the same is true. Handles are checked,
not paths: a path may name another file a moment later.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

# No kernel comes near it (the largest are 0.2 MB): whatever is larger is something else.
MOST_BYTES = 64 * 1024 * 1024
# A temporary file is there for milliseconds; what is older was left by a process that was killed.
STALE_S = 3600
PART = ".part"

# Not there on Windows, where a user's own folders are private by default.
_FOLDER = getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_FILE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


class UntrustedError(OSError):
    """A file or folder that somebody else could have written."""


def why_untrusted(folder: Path, top: Path) -> str | None:
    """The reason not to read from `folder`, or None.

    It and its parents up to `top` must be folders that belong to this user or to root and that
    nobody else can write to. A folder that does not exist cannot hold anything bad.
    """
    for place in (folder, *folder.parents):
        try:
            found = place.stat()
        except FileNotFoundError:
            found = None
        except OSError as error:
            return f"{place} cannot be read ({error.strerror})"
        if found is not None:
            reason = None if stat.S_ISDIR(found.st_mode) else "is not a folder"
            if reason := reason or _why_unsafe(found):
                return f"{place} {reason}"
        if place == top:
            break
    return None


def read_file(folder: Path, name: str, most: int = MOST_BYTES) -> bytes:
    """The content of a file in `folder`, which `why_untrusted` has nothing against.

    OSError if it does not exist, is not a regular file, is larger than `most`, or if others can
    write to it or to the folder.
    """
    place = open_folder(folder)
    try:
        return _content(open_file(name, place), str(folder / name), most)
    finally:
        os.close(place)


def read_plain(path: Path, most: int = MOST_BYTES) -> bytes:
    """The content of a regular file, whoever can write to it, if it is not larger than `most`."""
    return _content(open_plain(path), str(path), most)


def open_plain(path: Path) -> int:
    """A handle of a regular file, whoever can write to it. Does not wait for a pipe's writer."""
    handle = os.open(path, os.O_RDONLY | _FILE)
    try:
        if stat.S_ISREG(os.fstat(handle).st_mode):
            return handle
        raise OSError(f"{path} is not a regular file")
    except BaseException:
        os.close(handle)
        raise


def open_folder(folder: Path) -> int:
    """A handle of `folder`, if only the user and root can write there."""
    handle = os.open(folder, os.O_RDONLY | _FOLDER)
    return _checked(handle, str(folder))


def open_file(name: str | Path, folder: int | None = None) -> int:
    """A handle of a regular file that only the user and root can write to, for reading.

    `folder` is the handle of the folder that `name` is in. Does not wait for a pipe's writer.
    """
    handle = os.open(name, os.O_RDONLY | _FILE, dir_fd=folder)
    return _checked(handle, str(name), regular=True)


def _content(handle: int, name: str, most: int) -> bytes:
    """What the file of `handle` holds; closes it."""
    try:
        size = os.fstat(handle).st_size
        if size > most:
            raise UntrustedError(f"{name} has {size} bytes, more than {most}")
        with os.fdopen(os.dup(handle), "rb") as file:
            return file.read(most)
    finally:
        os.close(handle)


def names_in(folder: Path, prefix: str = "", suffix: str = "") -> list[str]:
    """The names of files in `folder`, sorted; none where it cannot be read."""
    try:
        with os.scandir(folder) as found:
            names = [one.name for one in found]
    except OSError:
        return []
    return sorted(name for name in names if name.startswith(prefix) and name.endswith(suffix))


def make_folders(folder: Path) -> None:
    """Make `folder` and its missing parents, each with mode 0700 whatever the umask.

    Folders that exist are not changed.
    """
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    for one in reversed(missing):
        try:
            one.mkdir(mode=0o700)
        except FileExistsError:  # another process was first
            if not one.is_dir():
                raise
        else:
            _restore_mode(one)


def write_whole(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file in one step: a reader sees either all of it or what was there before.

    It gets `mode`, whatever the umask. The mode is set through the handle: in a folder that others
    can write to, the temporary file's name may have become a link to another file.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PART)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            if hasattr(os, "fchmod"):  # Windows has no such modes
                os.fchmod(handle, mode)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def remove_stale_parts(folder: Path) -> None:
    """Delete what writers that were killed have left behind in `folder`."""
    for path in stale_parts(folder):
        path.unlink(missing_ok=True)


def stale_parts(folder: Path) -> Iterator[Path]:
    """Temporary files whose writers are gone."""
    before = time.time() - STALE_S
    for name in names_in(folder, ".", PART):
        path = folder / name
        try:
            old = path.lstat().st_mtime < before
        except OSError:
            continue
        if old:
            yield path


def _restore_mode(folder: Path) -> None:
    """Give a new folder the mode 0700 where the umask has taken a part of it, without following a
    link that has replaced it.
    """
    if hasattr(os, "O_PATH"):  # opens a folder of mode 0000
        handle = os.open(folder, os.O_PATH | os.O_NOFOLLOW | _FOLDER)
        try:
            if os.fstat(handle).st_mode & 0o777 != 0o700:
                Path(f"/proc/self/fd/{handle}").chmod(0o700)
        finally:
            os.close(handle)
    elif os.chmod in os.supports_follow_symlinks:
        folder.chmod(0o700, follow_symlinks=False)


def _checked(handle: int, name: str, regular: bool = False) -> int:
    """`handle`, if only the user and root can write to its file or folder."""
    try:
        found = os.fstat(handle)
        if regular and not stat.S_ISREG(found.st_mode):
            raise UntrustedError(f"{name} is not a regular file")
        if reason := _why_unsafe(found):
            raise UntrustedError(f"{name} {reason}")
    except BaseException:
        os.close(handle)
        raise
    return handle


def _why_unsafe(found: os.stat_result) -> str | None:
    if not hasattr(os, "getuid"):
        return None  # Windows: modes say nothing
    if found.st_uid not in (0, os.getuid()):
        return f"belongs to another user (uid {found.st_uid})"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written to by others (chmod go-w it after checking what is in it)"
    return None
