"""torch.compile and torch.export of the NVFP4 ops: one node each, M symbolic, the same results."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conformance_graphs import Recorder, ops_of, ours
from conformance_helpers import DEVICES, same_bits
from torch._dynamo.testing import CompileCounterWithBackend

import gristmill
from gristmill import nvfp4
from gristmill.ops.nvfp4_linear import linear_of
from gristmill.ops.nvfp4_moe import moe_of
from gristmill.ops.registry import OPS

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++ here")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(torch.nn.Module):
    """A linear, a mixture with its router, and another linear; H = 64."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = torch.nn.Linear(64, 6)
        self.before = gristmill.nn.NVFP4Linear.from_linear(torch.nn.Linear(64, 64))
        self.experts = gristmill.nn.NVFP4MoE.from_experts(
            *(torch.randn(6, 32, 64) / 8 for _ in range(2)), torch.randn(6, 64, 32) / 8
        )
        self.after = nvfp4.quantize(torch.randn(48, 64)).to(device)
        self.to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.before(x)) + x
        weights, ids = torch.softmax(self.router(h), -1).topk(2)
        return nvfp4.linear(self.experts(h, weights, ids) + h, self.after)


def gradients(function: Callable[..., torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.detach().clone().requires_grad_()
    loss = function(leaf).square().mean()
    loss.backward()
    return [loss.detach(), leaf.grad]


def test_one_op_is_one_node() -> None:
    recorder = Recorder()
    block = Block()
    gradients(torch.compile(block, backend=recorder, fullgraph=True), torch.randn(6, 64))
    linear, moe = "gristmill.nvfp4_linear", "gristmill.nvfp4_moe"
    assert ours(recorder.traced) == ours(recorder.forward) == [linear, moe, linear]
    backward = ["gristmill.nvfp4_linear_backward", "gristmill.nvfp4_moe_backward"]
    assert ours(recorder.backward) == [*backward, backward[0]]
    assert not any("index" in name or "mm" in name for name in ours(recorder.forward))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
def test_rows_are_symbolic(training: bool, device: str) -> None:
    """Also over the number at which the mixture goes over from few tokens to many."""
    counter = CompileCounterWithBackend("aot_eager")
    block = Block(device)
    compiled = torch.compile(block, backend=counter, fullgraph=True, dynamic=True)

    def check(rows: int) -> None:
        x = torch.randn(rows, 64, device=device)
        if training:
            torch.testing.assert_close(gradients(compiled, x), gradients(block, x))
        else:
            torch.testing.assert_close(compiled(x), block(x))

    check(8)
    first = counter.frame_count
    for rows in (2, 3, 4, 17, 100):
        check(rows)
        assert counter.frame_count == first, rows
    # One row is a case of its own to Dynamo, whatever the op; it is compiled once.
    check(1)
    check(1)
    check(33)
    assert counter.frame_count <= first + 1


def test_unbacked_rows_compile() -> None:
    """A size that nobody knows, as after a selection by a mask."""
    weight = nvfp4.quantize(torch.randn(32, 64))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return nvfp4.linear(x[mask], weight)

    x, mask = torch.randn(10, 64), torch.arange(10) % 3 == 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert same_bits(function(x, mask), nvfp4.linear(x[mask], weight))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["nvfp4_linear", "nvfp4_moe"])
def test_compiled_results_have_the_same_bits_and_strides(name: str, device: str) -> None:
    function = linear_of if name == "nvfp4_linear" else moe_of
    for case in list(OPS[name].cases())[::5]:
        torch._dynamo.reset()
        args = case.make(device, 0)
        result = torch.compile(function, backend="aot_eager", fullgraph=True)(*args)
        expected = function(*args)
        assert result.stride() == expected.stride(), case.name
        assert same_bits(result, expected), case.name


def test_packed_weights_are_arguments_like_others() -> None:
    """A weight that comes in is no constant: another one needs no new graph."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(nvfp4.linear, backend=counter, fullgraph=True)
    x = torch.randn(3, 64)
    for _ in range(4):
        weight = nvfp4.quantize(torch.randn(32, 64))
        assert same_bits(compiled(x, weight), nvfp4.linear(x, weight))
    assert counter.frame_count == 1
    packed = weight.prepare("sm_100a")
    assert same_bits(compiled(x, packed), nvfp4.linear(x, packed))


def test_a_wrong_argument_is_named_while_compiling() -> None:
    weight = nvfp4.quantize(torch.randn(32, 64))
    with pytest.raises(Exception, match=r"nvfp4_linear: x must end in K = 64"):
        torch.compile(nvfp4.linear, backend="aot_eager", fullgraph=True)(torch.randn(2, 48), weight)


@pytest.mark.parametrize("dynamic", [False, True])
def test_export(dynamic: bool) -> None:
    block = Block()
    shapes = ({0: torch.export.Dim("rows", min=2, max=4096)},) if dynamic else None
    program = torch.export.export(block, (torch.randn(6, 64),), dynamic_shapes=shapes)
    assert len(ours(ops_of(program.graph_module))) == 3
    x = torch.randn(90 if dynamic else 6, 64)
    torch.testing.assert_close(program.module()(x), block(x))
    assert len(ours(ops_of(program.run_decompositions().graph_module))) == 3


@needs_compiler
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"mode": "reduce-overhead"}], ids=["default", "overhead"])
def test_inductor(options: dict[str, Any], device: str) -> None:
    block = Block(device)
    compiled = torch.compile(block, fullgraph=True, **options)
    for rows in (16, 24):
        x = torch.randn(rows, 64, device=device)
        expected = gradients(block, x)
        for _ in range(3):  # reduce-overhead captures on the second call, replays on the third
            torch.compiler.cudagraph_mark_step_begin()
            found = [value.clone() for value in gradients(compiled, x)]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
