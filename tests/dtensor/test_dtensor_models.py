"""Models as they are, under tensor parallelism, FSDP2 and both, beside one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mesh_pool import MeshPool

pytest.importorskip("torch.distributed.tensor")

import model_tasks as tasks


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return tasks.run_alone()


def compare(found: dict[str, Any], want: dict[str, Any]) -> None:
    torch.testing.assert_close(found["losses"], want["losses"], rtol=1e-9, atol=1e-12)
    assert found["gradients"].keys() == want["gradients"].keys()
    for kind, least in (("gradients", 1e-12), ("weights", 1e-7)):
        for name, tensor in want[kind].items():
            torch.testing.assert_close(
                found[kind][name], tensor, rtol=1e-8, atol=least, msg=lambda m, n=name: f"{n}: {m}"
            )


WAYS = ["tensor_parallel", "fully_sharded", "both", "all_dtensors", "linear_loss"]


@pytest.mark.parametrize("way", WAYS)
def test_trains_as_one_process(way: str, mesh_pool: MeshPool, alone: dict[str, Any]) -> None:
    for found in mesh_pool.run(f"model_tasks:run_{way}"):
        compare(found, alone)


@pytest.mark.long
def test_compiled_whole(mesh_pool: MeshPool, alone: dict[str, Any]) -> None:
    for found in mesh_pool.run("model_tasks:run_tensor_parallel", compiled=True, timeout=300):
        compare(found, alone)


def test_training_changes_the_loss(alone: dict[str, Any]) -> None:
    """Else nothing above would show that weights were right."""
    assert alone["losses"][2] < alone["losses"][0] - 0.1
