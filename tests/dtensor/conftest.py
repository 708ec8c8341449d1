"""The ranks that all tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from mesh_pool import MeshPool


@pytest.fixture(scope="session")
def mesh_pool() -> Iterator[MeshPool]:
    """Four gloo processes; they start with the first task and end with the test run."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    pool = MeshPool(4)
    yield pool
    pool.close()
