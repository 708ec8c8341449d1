"""The host code of the ops, with the emulation where the GPU would be."""

from __future__ import annotations

import pytest
from emulated_host import EmulatedHost
from emulation.harness import emulator_for


@pytest.fixture
def host(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> EmulatedHost:
    return EmulatedHost(emulator_for(pytestconfig), monkeypatch)
