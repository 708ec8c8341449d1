"""One emulator for all tests of the emulation."""

from __future__ import annotations

import pytest

from emulation.harness import Emulator, emulator_for


@pytest.fixture(scope="session")
def emulator(pytestconfig: pytest.Config) -> Emulator:
    return emulator_for(pytestconfig)
