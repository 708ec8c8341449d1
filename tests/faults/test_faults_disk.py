"""Disks that fail: every operation of the cache, with every error, once and for good.

The disk is a library preloaded into a process (faulty_disk.c). Whatever it does, a call gets the
right binary, there is at most one warning, no file stays open, and when the disk is well again so
is the cache.
"""

from __future__ import annotations

import errno
import sys

import pytest
from disk_child import SCENARIOS, every_fault, killed_at_every_operation
from fault_helpers import run_child
from faulty_disk import CLOSE, CODES, CREATE, LOCK, MKDIR, RENAME, SYNC, WRITE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs LD_PRELOAD")

# What a full disk refuses: all that needs room, while reading goes on.
NEEDS_ROOM = CREATE | MKDIR | WRITE | RENAME | SYNC | CLOSE
CHANGES = NEEDS_ROOM & ~CLOSE


# The others differ from these in few operations.
SHORT = ("empty", "warm", "jit off", "list", "folder layer", "bundle layer")


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize("scenario", SHORT)
def test_every_operation_may_fail(scenario, lasting, tmp_path, faulty_disk) -> None:
    codes = [errno.ENOSPC if lasting else errno.EIO]
    wrong = run_child(every_fault, str(tmp_path), scenario, codes, lasting, LD_PRELOAD=faulty_disk)
    assert wrong == []


@pytest.mark.long
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_operation_may_fail_with_every_error(
    scenario, lasting, tmp_path, faulty_disk
) -> None:
    wrong = run_child(every_fault, str(tmp_path), scenario, CODES, lasting, LD_PRELOAD=faulty_disk)
    assert wrong == []


@pytest.mark.parametrize(
    ("codes", "kinds"),
    [
        ([errno.ENOSPC], NEEDS_ROOM),
        ([errno.EROFS], CHANGES),
        ([errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES], LOCK),
    ],
    ids=["full", "read-only", "without locks"],
)
@pytest.mark.parametrize("scenario", ["empty", pytest.param("damaged", marks=pytest.mark.long)])
def test_a_disk_that_reads_and_refuses_the_rest(
    scenario, codes, kinds, tmp_path, faulty_disk
) -> None:
    """Full (a write takes half a page before it fails), read-only, or without locks."""
    wrong = run_child(
        every_fault, str(tmp_path), scenario, codes, True, kinds, 2048, LD_PRELOAD=faulty_disk
    )
    assert wrong == []


@pytest.mark.parametrize("step", [3000, pytest.param(50, marks=pytest.mark.long)])
def test_killed_at_every_operation_of_a_write(step, tmp_path, faulty_disk) -> None:
    wrong = run_child(killed_at_every_operation, str(tmp_path), step, LD_PRELOAD=faulty_disk)
    assert wrong == []
