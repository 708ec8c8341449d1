from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill.log import forget_warnings
from gristmill.select import register_variants, reset_counters, reset_tables
from gristmill.select.chooser import forget_failures
from gristmill.settings import reload_settings


def _forget() -> None:
    reload_settings()
    reset_tables()
    reset_counters()
    forget_failures()
    forget_warnings()


@pytest.fixture(autouse=True)
def clean_slate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No table, warning, counter or failure of one test is seen by another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRISTMILL_CACHE_DIR", str(tmp_path / "cache"))
        _forget()
        register_variants("toy", ["first", "second", "third", "reference"])
        yield
        monkeypatch.undo()
    _forget()
