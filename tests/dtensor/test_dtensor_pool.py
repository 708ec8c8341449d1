"""The ranks' harness: one group for all tasks, failures that say where, and a fresh start."""

from __future__ import annotations

import mesh_pool as module
import pytest
from mesh_pool import MeshPool, RankFailedError


def test_tasks_share_the_processes_and_failures_name_the_rank(mesh_pool: MeshPool) -> None:
    first = mesh_pool.run("pool_tasks:add_ranks", 1.0)
    assert [float(total) for _, total in first] == [10.0] * 4
    assert len({pid for pid, _ in first}) == 4
    with pytest.raises(RankFailedError, match="on rank 0, 1, 2, 3") as caught:
        mesh_pool.run("pool_tasks:no_such_task")
    assert "AttributeError" in str(caught.value)
    again = mesh_pool.run("pool_tasks:add_ranks", value=1.0)
    assert [pid for pid, _ in first] == [pid for pid, _ in again]


@pytest.mark.long
def test_ranks_that_hang_are_stopped_and_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE", 1.0)
    pool = MeshPool(2)
    try:
        before = pool.run("pool_tasks:add_ranks", 0.0)
        with pytest.raises(RankFailedError, match="rank 1 has had enough") as caught:
            pool.run("pool_tasks:fail_on", 1)
        assert "no answer from rank 0" in str(caught.value)
        with pytest.raises(RankFailedError, match="no answer from rank 1"):
            pool.run("pool_tasks:end_on", 1)
        after = pool.run("pool_tasks:add_ranks", 0.0)
        assert {pid for pid, _ in before}.isdisjoint(pid for pid, _ in after)
        assert [float(total) for _, total in after] == [1.0, 1.0]
    finally:
        pool.close()
