"""Exported programs in a new process that has nothing but torch, gristmill and the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from export_models import OPS, SIZES, Layer, exported, inputs, layer, run_python

import gristmill as gm

Results = dict[str, Any]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# For each call: what the program gives, and the gradients that autograd finds through it.
RUN = """
import sys
import torch
import gristmill

program, calls, results = sys.argv[1:]
module = torch.export.load(program).module()
found = {}
for name, args in torch.load(calls).items():
    module.zero_grad()
    loss, logits = module(*args)
    loss.backward()
    gradients = {key: one.grad for key, one in module.named_parameters()}
    found[name] = loss.detach(), logits, gradients
torch.save(found, results)
"""

WITHOUT = """
import sys
import torch

plain, program = sys.argv[1:]
x = torch.arange(12.0).view(3, 4)
y = torch.softmax(torch.nn.functional.rms_norm(x, (4,), eps=1e-6), -1)
torch.testing.assert_close(torch.export.load(plain).module()(x), y)
assert "gristmill" not in sys.modules
torch.export.load(program)
"""


class Head(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gm.softmax(gm.rms_norm(x))


def trained(model: Layer, args: tuple[torch.Tensor, ...]) -> Results:
    model.zero_grad()
    loss, logits = model(*args)
    loss.backward()
    gradients = {key: one.grad for key, one in model.named_parameters()}
    return {"loss": loss.detach(), "logits": logits, "gradients": gradients}


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(device: str) -> Layer:
    return layer(device)


@pytest.fixture(scope="module")
def saved(model: Layer, device: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "layer.pt2"
    program = exported(model, device)
    named = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {f"gristmill.{name}.default" for name in OPS} <= named
    torch.export.save(program, path)
    return path


@pytest.fixture(scope="module")
def elsewhere(saved: Path, device: str) -> Results:
    """What a new process makes of the file, for each call."""
    calls, results = saved.with_name("calls.pt"), saved.with_name("results.pt")
    torch.save({name: inputs(device, *sizes) for name, sizes in SIZES.items()}, calls)
    done = run_python(RUN, saved, calls, results)
    assert done.returncode == 0, done.stderr
    found: Results = torch.load(results)
    return found


@pytest.mark.parametrize("name", SIZES)
def test_results_and_gradients_are_the_models(
    elsewhere: Results, model: Layer, device: str, name: str
) -> None:
    loss, logits, gradients = elsewhere[name]
    expected = trained(model, inputs(device, *SIZES[name]))
    torch.testing.assert_close(loss, expected["loss"])
    torch.testing.assert_close(logits, expected["logits"])
    assert set(gradients) == set(expected["gradients"])
    for key, one in expected["gradients"].items():
        torch.testing.assert_close(gradients[key], one, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("device", ["cpu"], indirect=True)  # said before any device is touched
def test_a_process_without_gristmill(saved: Path) -> None:
    """Runs what was inlined, and is told which op it lacks otherwise."""
    plain = saved.with_name("plain.pt2")
    with gm.inline("rms_norm", "softmax"):
        torch.export.save(torch.export.export(Head(), (torch.randn(3, 4),)), plain)
    done = run_python(WITHOUT, plain, saved)
    assert done.returncode == 1
    assert "RuntimeError: We ran into an error when deserializing" in done.stderr
    assert "torch.ops.gristmill.rms_norm.default" in done.stderr


def test_a_strict_export_is_the_same(model: Layer, device: str) -> None:
    module = exported(model, device, strict=True).module()
    args = inputs(device, *SIZES["larger"])
    torch.testing.assert_close(module(*args), model(*args))


def test_forward_and_backward_in_one_graph(model: Layer, device: str) -> None:
    """torch's experimental joint export: our gradients are ops in it, and give what they should."""
    from torch.export.experimental import _export_forward_backward

    joint = _export_forward_backward(exported(model, device))
    named = {str(node.target) for node in joint.graph.nodes if node.op == "call_function"}
    backward = ("softmax", "rms_norm", "layer_norm", "cross_entropy", "moe", "nvfp4_linear")
    assert {f"gristmill.{name}_backward.default" for name in backward} <= named
    args = inputs(device, *SIZES["larger"])
    flat = joint._graph_module_flat_inputs(args, {})
    found = zip(joint.graph_signature.output_specs, joint.graph_module(*flat), strict=True)
    expected = trained(model, args)
    gradients = {spec.target: one for spec, one in found if "GRADIENT" in spec.kind.name}
    assert set(gradients) == set(expected["gradients"])
    for key, one in gradients.items():
        torch.testing.assert_close(one, expected["gradients"][key])
