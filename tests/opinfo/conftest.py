from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# What results are judged by, and what runs kernels in the emulation.
sys.path += [str(Path(__file__).parents[1] / name) for name in ("conformance", "kernels")]


@pytest.fixture(autouse=True)
def no_failure_is_remembered() -> Iterator[None]:
    """A variant that one test could not build is tried again by the next one."""
    from gristmill.select.chooser import forget_failures

    yield
    forget_failures()
