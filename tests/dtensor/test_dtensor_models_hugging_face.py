"""A patched model of transformers under tensor parallelism and FSDP2, beside one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mesh_pool import MeshPool

import gristmill

pytest.importorskip("transformers")
pytest.importorskip("torch.distributed.tensor")

import hugging_face_tasks as tasks


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The patched model, in one process."""
    model, tokens, labels = tasks.model_and_data()
    gristmill.patch(model)
    return tasks.train(model, tokens, labels)


def compare(found: dict[str, Any], want: dict[str, Any]) -> None:
    """Everything is in fp32, and sums are taken in another order."""
    torch.testing.assert_close(found["losses"], want["losses"], rtol=1e-6, atol=1e-6)
    assert found["weights"].keys() == want["weights"].keys()
    for name, tensor in want["weights"].items():
        torch.testing.assert_close(found["weights"][name], tensor, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize(
    ("first", "local_logits"),
    [
        ("patch", False),
        pytest.param("patch", True, marks=pytest.mark.long),
        pytest.param("parallel", False, marks=pytest.mark.long),
        pytest.param("parallel", True, marks=pytest.mark.long),
    ],
)
def test_tensor_parallel(
    first: str, local_logits: bool, mesh_pool: MeshPool, alone: dict[str, Any]
) -> None:
    for found in mesh_pool.run("hugging_face_tasks:run_tensor_parallel", first, local_logits):
        compare(found, alone)


@pytest.mark.parametrize("first", ["parallel", pytest.param("patch", marks=pytest.mark.long)])
def test_fully_sharded(first: str, mesh_pool: MeshPool, alone: dict[str, Any]) -> None:
    for found in mesh_pool.run("hugging_face_tasks:run_fully_sharded", first):
        compare(found, alone)


@pytest.mark.long
def test_tensor_parallelism_of_transformers(mesh_pool: MeshPool, tmp_path: Path) -> None:
    """`from_pretrained(tp_plan="auto")`, which works on local tensors by hooks."""
    model, tokens, labels = tasks.model_and_data()
    model.save_pretrained(tmp_path)
    gristmill.patch(model)
    want = model(input_ids=tokens, labels=labels)
    for found in mesh_pool.run("hugging_face_tasks:run_tp_plan", str(tmp_path)):
        assert found["parallel"]
        torch.testing.assert_close(found["loss"], want.loss.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found["logits"], want.logits.detach(), rtol=1e-4, atol=1e-5)
