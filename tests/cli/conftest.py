"""A command line as it is typed; files whose commands need more have a `run` of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from gristmill.cli.app import app


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return lambda line: CliRunner().invoke(app, line.split())
