"""Folders that only their owner can write to, and files that are whole or not there.

A kernel that is read from a file runs with the user's rights, so it is read only from a folder
that nobody else could have put it in.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


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
        if found is not None and (reason := _why_unsafe(found)):
            return f"{place} {reason}"
        if place == top:
            break
    return None


def make_private(folder: Path, top: Path) -> None:
    """Create `folder` and its parents; from `top` down only the user may look inside.

    Each level gets its mode by itself: `Path.mkdir(parents=True)` gives it to the last one only,
    and under a umask of 002 the others would be writable by the group, hence not trusted.
    """
    top.parent.mkdir(parents=True, exist_ok=True)
    levels = [folder]
    while levels[-1] != top:
        levels.append(levels[-1].parent)
    for level in reversed(levels):
        level.mkdir(mode=0o700, exist_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees either all of it or what was there before."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _why_unsafe(found: os.stat_result) -> str | None:
    if not stat.S_ISDIR(found.st_mode):
        return "is not a folder"
    if not hasattr(os, "getuid"):
        return None  # Windows: a user's own folders are private by default, modes say nothing
    if found.st_uid not in (0, os.getuid()):
        return f"belongs to another user (uid {found.st_uid})"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written to by others (chmod go-w it after checking what is in it)"
    return None
