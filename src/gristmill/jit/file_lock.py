"""Locks between processes, on files or folders: a help that is never a need.

Where there is no lock to be had (other systems, some network drives), or not in time, the work is
done without one: twice perhaps, but never wrongly.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from gristmill.log import logger

if sys.platform != "win32":
    import fcntl

_PAUSE_S = 0.01
_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)


@contextlib.contextmanager
def locked_file(path: Path, patience_s: float) -> Iterator[None]:
    """Hold the lock of the file at `path`, which is made if it is not there."""
    with _locked(path, os.O_RDWR | os.O_CREAT | _FLAGS, patience_s):
        yield


@contextlib.contextmanager
def locked_folder(path: Path, patience_s: float) -> Iterator[None]:
    """Hold the lock of a folder itself, so that no file is left behind."""
    with _locked(path, os.O_RDONLY | _FLAGS, patience_s):
        yield


@contextlib.contextmanager
def _locked(path: Path, flags: int, patience_s: float) -> Iterator[None]:
    if sys.platform == "win32":
        yield
        return
    try:
        handle = os.open(path, flags, 0o600)
    except OSError as error:
        logger.debug("no lock on %s (%s): going on without it", path, error)
        yield
        return
    try:
        _wait(handle, path, patience_s)
        yield
    finally:
        # In so many words: a fork of this process has the handle, too, and may live for hours. What
        # an ailing disk says to either is of no consequence.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        with contextlib.suppress(OSError):
            os.close(handle)


def _wait(handle: int, path: Path, patience_s: float) -> None:
    end = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= end:
                logger.debug("no lock on %s in %g s: going on without it", path, patience_s)
                return
            time.sleep(_PAUSE_S)
        except OSError as error:
            logger.debug("no lock on %s (%s): going on without it", path, error)
            return
