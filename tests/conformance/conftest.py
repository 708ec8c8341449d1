from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from gristmill.log import forget_warnings
from gristmill.ops.registry import OPS
from gristmill.select.chooser import forget_failures
from gristmill.settings import reload_settings

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers share the cores; more threads than cores only wait for each other.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def clean_slate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No warning, failure, setting or plan of one test is seen by another."""
    forget_warnings()
    yield
    monkeypatch.undo()
    reload_settings()
    forget_failures()
    for op in OPS.values():
        op.forget_plans()
