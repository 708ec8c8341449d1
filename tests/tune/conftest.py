from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill.log import forget_warnings
from gristmill.ops.registry import OPS
from gristmill.select import reset_counters, reset_tables
from gristmill.select.chooser import forget_failures
from gristmill.select.record import forget_recorded
from gristmill.settings import PREFIX, reload_settings


def _forget() -> None:
    reload_settings()
    reset_tables()
    reset_counters()
    forget_failures()
    forget_recorded()
    forget_warnings()
    for op in OPS.values():
        op.forget_plans()


@pytest.fixture(autouse=True)
def clean_slate(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """No table, plan or warning of one test is seen by another; a GPU takes part where it must."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(PREFIX)]:
            patch.delenv(name)
        patch.setenv("GRISTMILL_CACHE_DIR", str(tmp_path / "cache"))
        if request.node.get_closest_marker("gpu") is None:
            patch.setattr("torch.cuda.is_available", lambda: False)
        _forget()
        yield
        monkeypatch.undo()
    _forget()
