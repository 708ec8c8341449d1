"""Column- and row-parallel NVFP4 layers, beside one process that has the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mesh_pool import MeshPool

import gristmill

pytest.importorskip("torch.distributed.tensor")

import nvfp4_tasks as tasks


def alone(bias: bool, dtype: torch.dtype) -> dict[str, Any]:
    model = tasks.Mlp(bias=bias).to(dtype)
    y, gradient = tasks.step(model, tasks.batch().to(dtype))
    return {"y": y, "dx": gradient, "dbias": [one.grad for one in tasks.biases(model)]}


def near(found: torch.Tensor, want: torch.Tensor) -> None:
    """Summands of four ranks are each rounded, and so is their sum."""
    assert found.dtype == want.dtype
    off = 8 * torch.finfo(want.dtype).eps
    torch.testing.assert_close(found, want, rtol=off, atol=off * float(want.abs().max()))


def test_every_style_as_one_process(mesh_pool: MeshPool) -> None:
    for found in mesh_pool.run("nvfp4_tasks:run_styles"):
        for (style, bias, dtype), one in found.items():
            want = alone(bias, dtype)
            near(one["y"], want["y"])
            near(one["dx"], want["dx"])
            assert len(one["dbias"]) == (2 if bias else 0)
            for mine, theirs in zip(one["dbias"], want["dbias"], strict=True):
                near(mine, theirs)
            assert one["is local"] == (style != "dtensors")


def test_a_rank_keeps_its_part_and_no_more(mesh_pool: MeshPool) -> None:
    up, down = (
        sum(part.nbytes for part in layer.buffers()) for layer in tasks.Mlp(bias=False).children()
    )
    for found in mesh_pool.run("nvfp4_tasks:run_style", "usual", False, torch.float32):
        column, row = found["bytes"]
        assert column * 4 == up
        assert row * 4 == down + 3 * tasks.WIDTH * 4  # every rank has all global scales
        assert found["held"] == found["bytes"]


def test_uneven_outputs(mesh_pool: MeshPool) -> None:
    torch.manual_seed(0)
    layer = gristmill.nn.NVFP4Linear.from_linear(torch.nn.Linear(64, 37))
    y, gradient = tasks.step(layer, tasks.batch())
    results = mesh_pool.run("nvfp4_tasks:uneven")
    assert [one["features"] for one in results] == [[64, 10], [64, 10], [64, 10], [64, 7]]
    for one in results:
        near(one["y"], y)
        near(one["dx"], gradient)


def test_state_dicts(mesh_pool: MeshPool) -> None:
    for found in mesh_pool.run("nvfp4_tasks:states"):
        assert found["shapes"] == {
            "up.bias": (128,),
            "up.weight": (32, 32),
            "up.weight_scale": (32, 4),
            "up.weight_scale_2": (32,),
            "down.bias": (64,),
            "down.weight": (64, 16),
            "down.weight_scale": (64, 2),
            "down.weight_scale_2": (64,),
        }
        kinds = {name for name, kind in found["kinds"].items() if kind != "Tensor"}
        assert kinds == {"up.bias", "down.bias"}
        assert found["zeroed"] == 0.0
        assert found["own"]
        assert found["of the whole"]
        assert found["from meta"]
        assert found["near"] < 1e-5
        assert found["from the first"]
        assert found["moved"] == ["torch.uint8", "torch.float64"]


def test_state_dicts_that_are_rejected(mesh_pool: MeshPool) -> None:
    """Each rank's layer keeps all that it had."""
    messages = {
        "rows": "size mismatch for weight:",
        "scales": "weight_scale: block scales must be neither negative nor NaN",
        "scales of all ranks": "weight_scale_2: global scales must be finite and not negative",
        "a weight for all": "weight must be a Tensor, got a DTensor",
        "bias": "size mismatch for bias",
        "dtype": "bias must have a floating-point dtype, got torch.int32",
        "mesh": "bias must be on the device mesh",
    }
    for found in mesh_pool.run("nvfp4_tasks:rejected"):
        assert found.keys() == messages.keys()
        for what, (problem, is_same) in found.items():
            assert messages[what] in problem, what
            assert is_same, what


@pytest.mark.parametrize(("arch", "layout"), [("sm_90a", "fragments"), ("sm_100a", "tiles")])
def test_layouts_of_gpus(arch: str, layout: str, mesh_pool: MeshPool) -> None:
    """A rank's part is packed by itself: 32 x 64 of the first weight, 64 x 32 of the second."""
    want = alone(True, torch.float32)
    for found in mesh_pool.run("nvfp4_tasks:packed", arch):
        assert found["layouts"] == [layout, layout]
        pieces = [(1, 1, 2048), (1, 1, 2048)] if layout == "fragments" else [(32, 32), (64, 16)]
        assert found["shapes"] == pieces
        assert found["saved"] == (32, 32)
        near(found["y"], want["y"])
        near(found["dx"], want["dx"])
        assert found["again"]


def test_training(mesh_pool: MeshPool) -> None:
    model = tasks.Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for _ in range(3):
        loss = model(tasks.batch()).square().mean()
        losses.append(loss.item())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for found in mesh_pool.run("nvfp4_tasks:train"):
        assert found["losses"] == pytest.approx(losses, rel=1e-5)
        assert found["norm"] == pytest.approx(float(norm), rel=1e-5)
        for mine, want in zip(found["biases"], tasks.biases(model), strict=True):
            torch.testing.assert_close(mine, want.detach(), rtol=1e-4, atol=1e-5)


def test_under_fsdp(mesh_pool: MeshPool) -> None:
    want = alone(True, torch.float32)
    for found in mesh_pool.run("nvfp4_tasks:under_fsdp"):
        for mine, theirs in zip(found["dbias"], want["dbias"], strict=True):
            near(mine, theirs)


def test_compiled_whole(mesh_pool: MeshPool) -> None:
    for eager, compiled in mesh_pool.run("nvfp4_tasks:compiled"):
        torch.testing.assert_close(compiled, eager)


def test_beside_layers_of_torch(mesh_pool: MeshPool) -> None:
    for found in mesh_pool.run("nvfp4_tasks:beside_torch"):
        near(found["found"], found["want"])
        near(found["of a dtensor"], found["want"])


SAID = {
    "linear": "DtypeError: NVFP4ColwiseParallel: the module must be a gristmill.nn.NVFP4Linear, "
    "got Linear; use ColwiseParallel of torch",
    "other": "DtypeError: NVFP4ColwiseParallel: the module must be a gristmill.nn.NVFP4Linear, "
    "got LayerNorm",
    "columns": "ArgumentError: NVFP4RowwiseParallel: in_features must leave each of 4 ranks a "
    "multiple of 16 columns, which share a scale; got 96, 24 for each",
    "few": "ArgumentError: NVFP4RowwiseParallel: in_features must leave each of 4 ranks",
    "twice": "ArgumentError: NVFP4ColwiseParallel: the module is parallel already",
    "subclass": "DtypeError: NVFP4ColwiseParallel: the module must be a gristmill.nn.NVFP4Linear "
    "and no subclass of it, got Mine",
    "mesh": "ArgumentError: NVFP4ColwiseParallel: the mesh must have one dim, got 2",
    "x": "ArgumentError: nvfp4_linear: x must end in K = 64",
}


def test_what_cannot_be_is_said(mesh_pool: MeshPool) -> None:
    for said in mesh_pool.run("nvfp4_tasks:refusals"):
        for name, words in SAID.items():
            assert said[name].startswith(words), (name, said[name])
