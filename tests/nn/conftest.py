"""CPUs that pass for GPUs: modules then lay their weights out as those want them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from nn_layouts import PACKED

from gristmill.formats.nvfp4 import tensor as formats

Become = Callable[[str], None]


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> Become:
    """Makes CPUs pass for a GPU of some architecture, or for CPUs again."""

    def change(arch: str) -> None:
        monkeypatch.setattr(
            formats, "arch_of", lambda device: arch if device.type == "cpu" else "cpu"
        )

    return change


@pytest.fixture(params=PACKED)
def arch(request: pytest.FixtureRequest, become: Become) -> str:
    """An architecture whose kernels want another layout than checkpoints have."""
    become(request.param)
    return str(request.param)
