"""The disk of faulty_disk.c, from inside a process that has it preloaded."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOOK, OPEN, CREATE, MKDIR, READ, WRITE = 1, 2, 4, 8, 16, 32
RENAME, REMOVE, LOCK, MODE, SYNC, CLOSE = 64, 128, 256, 512, 1024, 2048
ALL = 4095
KILL = -1

# What a full, read-only, forbidden, broken, distant or odd disk answers.
CODES = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ESTALE,
    errno.ENOLCK,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EINVAL,
    errno.EMFILE,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.ETIMEDOUT,
)


@contextmanager
def faults(
    under: Path,
    at: int,
    code: int,
    *,
    lasting: bool = False,
    kinds: int = ALL,
    step: int = 0,
    pause_us: int = 0,
) -> Iterator[None]:
    """Let operation number `at` below `under` fail with `code`; `lasting`: and all after it.

    `at` counts operations of these `kinds` from 1; 0 lets none fail. `step`: the most bytes that
    one write takes.
    """
    library = ctypes.CDLL(None)
    library.faulty_disk(os.fsencode(under), at, code, int(lasting), kinds, step, pause_us)
    try:
        yield
    finally:
        library.faulty_disk(os.fsencode(under), 0, 0, 0, 0, 0, 0)


def count() -> int:
    """How many operations there were since the last `faults` began, which must not have ended."""
    return int(ctypes.CDLL(None).faulty_disk_count())
