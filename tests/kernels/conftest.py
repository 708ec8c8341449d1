"""The host code of the ops, with the emulation where the GPU would be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from emulated_host import EmulatedHost
from emulation.harness import emulator_for

# What results are judged by.
sys.path.append(str(Path(__file__).parents[1] / "conformance"))


@pytest.fixture
def host(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> EmulatedHost:
    return EmulatedHost(emulator_for(pytestconfig), monkeypatch)
