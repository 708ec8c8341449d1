from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gristmill.log import forget_warnings
from gristmill.multikernel import forget_plans
from gristmill.ops.registry import OPS
from gristmill.select import reset_counters, reset_tables
from gristmill.select.record import forget_recorded
from gristmill.settings import reload_settings


def _forget() -> None:
    reload_settings()
    reset_tables()
    reset_counters()
    forget_warnings()
    forget_recorded()
    forget_plans()
    for op in OPS.values():
        op.forget_plans()


@pytest.fixture(autouse=True)
def clean_slate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No table, warning, counter or plan of one test is seen by another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRISTMILL_CACHE_DIR", str(tmp_path / "cache"))
        _forget()
        yield
        monkeypatch.undo()
    _forget()
    torch.set_num_threads(threads)
