from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill.log import forget_warnings
from gristmill.ops.rms_norm import FUSED_ADD_RMS_NORM_, RMS_NORM
from gristmill.select import register_variants, reset_counters, reset_tables, sight
from gristmill.select.chooser import forget_failures
from gristmill.select.record import forget_recorded
from gristmill.settings import reload_settings


def _forget() -> None:
    reload_settings()
    reset_tables()
    reset_counters()
    forget_failures()
    forget_recorded()
    forget_warnings()
    RMS_NORM.forget_plans()
    FUSED_ADD_RMS_NORM_.forget_plans()


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


@pytest.fixture
def first_call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Switches tuning on, with more of the environment if given; call again to start anew."""

    def switch(**environment: str) -> None:
        for name, value in {"GRISTMILL_TUNE": "first-call", **environment}.items():
            monkeypatch.setenv(name, value)
        reload_settings()
        reset_tables()
        RMS_NORM.forget_plans()

    return switch


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of the problems that were measured, in order."""
    keys: list[str] = []
    real = sight.tune

    def counting(*args: Any, **options: Any) -> Any:
        keys.append(options["key"])
        return real(*args, **options)

    monkeypatch.setattr(sight, "tune", counting)
    return keys
