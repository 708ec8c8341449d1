"""The sharding rules of all ops: what ranks find together is what one process finds."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from mesh_pool import HERE, SOURCE, MeshPool
from rule_cases import RUNNERS
from sampled import sampled

from gristmill.integrations.dtensor import RULES
from gristmill.ops.registry import OPS

# Refuses every DTensor.
REFUSES = "cross_entropy_one_pass_"
# Parts of gradients, which only DTensors need.
HELPERS = ("row_products",)


def test_every_op_has_a_rule() -> None:
    assert set(RULES) == {*OPS, *RUNNERS, *HELPERS, "runner_gradient"}


@pytest.mark.parametrize(
    "name", sampled([name for name in (*OPS, *RUNNERS, *HELPERS) if name != REFUSES], 2)
)
def test_every_way_gives_what_one_process_gives(name: str, mesh_pool: MeshPool) -> None:
    for counts in mesh_pool.run("rule_tasks:every_way", name):
        assert counts
        # More than the way in which all is replicated, on one mesh at least.
        assert sum(count for _, count in counts) > len(counts) + 1


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("rms_norm", [0, 1]),
        ("add_rms_norm", [0, 1]),
        ("layer_norm", [0, 1]),
        ("add_layer_norm", [0, 1]),
        ("softmax", [0, 1]),
        ("log_softmax", [0, 1]),
        ("linear", [0, 1]),
        ("linear, uneven", [0]),
        ("linear gelu", [0, 1]),
        ("linear gelu, uneven", [0, 1, 2]),
        ("matmul", [0, 1]),
        ("matmul, uneven", [0, 1]),
        ("cross_entropy none", [0, 1]),
        ("cross_entropy sum", [0, 1]),
        ("linear_cross_entropy", [0, 1]),
        ("moe", [0]),
        ("topk_router", [0]),
        ("nvfp4_linear", [0, 1]),
    ],
)
def test_gradients_of_sharded_rows(name: str, dims: list[int], mesh_pool: MeshPool) -> None:
    """Rows' gradients lie as the rows do, those of what rows share are partial; nothing is sent."""
    mesh_pool.run("gradient_tasks:gradients", name, dims)


@pytest.mark.parametrize("task", ["products", "sharded_twice", "moved", "options"])
def test_task(task: str, mesh_pool: MeshPool) -> None:
    """Each says in its docstring, in gradient_tasks.py, what it shows."""
    mesh_pool.run(f"gradient_tasks:{task}")


def test_what_cannot_be_is_refused(mesh_pool: MeshPool) -> None:
    for told in mesh_pool.run("gradient_tasks:refused"):
        unequal, columns, in_place, mixed, wrong, twice = told
        assert "fused_add_rms_norm_: works in place" in unequal
        assert "residual [Replicate()]" in unequal
        assert "x [Shard(dim=1)]" in columns
        assert "cross_entropy_one_pass_: logits must be a plain tensor" in in_place
        assert "mixed torch.Tensor and DTensor" in mixed
        assert wrong.startswith("ArgumentError: rms_norm: eps must be")
        assert "rms_norm_backward: this gradient has no gradient of its own" in twice


@pytest.mark.parametrize(
    "how",
    [
        "compiled",
        pytest.param("eager", marks=pytest.mark.long),
        pytest.param("op", marks=pytest.mark.long),
    ],
)
def test_rules_are_there_when_a_dtensor_first_comes(how: str) -> None:
    """Nobody has imported them, and gristmill's import has not imported DTensor."""
    done = subprocess.run(
        [sys.executable, str(HERE / "first_use.py"), how],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_without_rules_plain_tensors_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A torch whose DTensor is another than the one that is known."""
    from gristmill.ops import op

    def fail(name: str) -> None:
        raise ImportError(f"no {name}")

    import torch.distributed.tensor

    monkeypatch.setattr(op, "import_module", fail)
    with torch.device("meta"):
        assert torch.ops.gristmill.rms_norm(torch.empty(2, 8)).shape == (2, 8)
    assert "no sharding rules: ImportError: no gristmill.integrations.dtensor" in caplog.text
