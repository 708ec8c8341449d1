"""Writers of checkpoints that are killed at any operation on files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from checkpoint_child import killed_writers
from fault_helpers import run_child

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs LD_PRELOAD")


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2)])
def test_a_killed_writer_leaves_no_mixture(
    before: int, after: int, tmp_path: Path, faulty_disk: str
) -> None:
    """The old checkpoint, then one that is visibly incomplete, then the new one."""
    found = run_child(
        killed_writers, str(tmp_path), before, after, alone=False, LD_PRELOAD=faulty_disk
    )
    assert found["how"] == 0
    outcomes = found["outcomes"]
    order = [one for n, one in enumerate(outcomes) if n == 0 or one != outcomes[n - 1]]
    assert order == ["old", "incomplete", "new"]
    assert len(outcomes) >= 15
