"""One emulator for all tests of the emulation."""

from __future__ import annotations

import pytest

from emulation.harness import Emulator, emulator_for
from emulation.tensor_lab import Lab as TensorLab


@pytest.fixture(scope="session")
def emulator(pytestconfig: pytest.Config) -> Emulator:
    return emulator_for(pytestconfig)


@pytest.fixture(scope="session", params=("registers", "ucontext"))
def tensor_lab(
    request: pytest.FixtureRequest, emulator: Emulator, tmp_path_factory: pytest.TempPathFactory
) -> TensorLab:
    """Everything is tried with both kinds of fiber switch."""
    if request.param == "ucontext":
        emulator = emulator_for(request.config, ("EMULATION_UCONTEXT",))
    return TensorLab(emulator, tmp_path_factory.mktemp("tensor"))
