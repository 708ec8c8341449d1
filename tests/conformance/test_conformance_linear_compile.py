"""torch.compile and torch.export of `linear` and `matmul`: one node each, M symbolic."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conformance_graphs import Recorder, ops_of, ours
from conformance_helpers import DEVICES, same_bits
from torch._dynamo.testing import CompileCounterWithBackend

import gristmill
from gristmill.ops.registry import OPS

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++ here")
LINEAR, PRE, MATMUL = "gristmill.linear", "gristmill.linear_with_pre", "gristmill.matmul"


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(torch.nn.Module):
    """Two layers and scores of rows among each other; 24 columns."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.up = torch.nn.Linear(24, 40, device=device)
        self.down = torch.nn.Linear(40, 24, bias=False, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = gristmill.linear(x, self.up.weight, self.up.bias, "silu")
        y = gristmill.linear(h, self.down.weight, None, "relu")
        return gristmill.matmul(gristmill.matmul(y, y.mT).softmax(-1), x)


def gradients(function: Callable[..., torch.Tensor], x: torch.Tensor) -> list[Any]:
    leaf = x.detach().clone().requires_grad_()
    loss = function(leaf).square().mean()
    loss.backward()
    return [loss.detach(), leaf.grad]


def test_one_op_is_one_node() -> None:
    recorder = Recorder()
    gradients(torch.compile(Block(), backend=recorder, fullgraph=True), torch.randn(6, 24))
    assert ours(recorder.traced) == ours(recorder.forward) == [PRE, LINEAR, MATMUL, MATMUL]
    # Two of each: for what is multiplied on the left, and on the right.
    assert ours(recorder.backward) == [MATMUL] * 8
    assert not any(".mm" in name or ".addmm" in name for name in recorder.backward)


def test_without_gradients_no_sums_are_kept() -> None:
    recorder = Recorder()
    block = Block().requires_grad_(False)
    torch.compile(block, backend=recorder, fullgraph=True)(torch.randn(6, 24))
    assert ours(recorder.forward) == [LINEAR, LINEAR, MATMUL, MATMUL]
    torch._dynamo.reset()
    recorder = Recorder()
    with torch.no_grad():
        torch.compile(Block(), backend=recorder, fullgraph=True)(torch.randn(6, 24))
    assert ours(recorder.traced) == [LINEAR, LINEAR, MATMUL, MATMUL]


def test_what_is_frozen_is_in_no_graph() -> None:
    recorder = Recorder()
    up = torch.nn.Linear(24, 40)
    up.weight.requires_grad_(False)

    def function(x: torch.Tensor) -> torch.Tensor:
        return gristmill.linear(x, up.weight, up.bias, "gelu")

    torch.compile(function, backend=recorder, fullgraph=True)(torch.randn(6, 24)).sum().backward()
    assert ours(recorder.forward) == [PRE]
    assert ours(recorder.backward) == []
    assert up.bias.grad is not None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
def test_rows_are_symbolic(training: bool, device: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    block = Block(device)
    compiled = torch.compile(block, backend=counter, fullgraph=True, dynamic=True)

    def check(rows: int) -> None:
        x = torch.randn(3, rows, 24, device=device)
        if training:
            torch.testing.assert_close(gradients(compiled, x), gradients(block, x))
        else:
            torch.testing.assert_close(compiled(x), block(x))

    check(8)
    first = counter.frame_count
    for rows in (2, 5, 4, 17, 100):
        check(rows)
        assert counter.frame_count == first, rows
    # One row is a case of its own to Dynamo, whatever the op; it is compiled once.
    check(1)
    check(1)
    check(33)
    assert counter.frame_count <= first + 1


def test_unbacked_rows_compile() -> None:
    """A size that nobody knows, as after a selection by a mask."""
    weight = torch.randn(16, 24)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return gristmill.matmul(gristmill.linear(x[mask], weight, activation="gelu"), weight)

    x, mask = torch.randn(10, 24), torch.arange(10) % 3 == 0
    expected = gristmill.matmul(gristmill.linear(x[mask], weight, activation="gelu"), weight)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert same_bits(function(x, mask), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["linear", "matmul"])
def test_compiled_results_have_the_same_bits_and_strides(name: str, device: str) -> None:
    function = getattr(gristmill, name)
    for case in list(OPS[name].cases())[::6]:
        torch._dynamo.reset()
        args = case.make(device, 0)
        result = torch.compile(function, backend="aot_eager", fullgraph=True)(*args)
        expected = function(*args)
        assert result.stride() == expected.stride(), case.name
        assert same_bits(result, expected), case.name


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu", "gelu_tanh"])
def test_inlined_it_is_what_one_would_write(activation: str | None) -> None:
    recorder = Recorder()
    x, weight, bias = torch.randn(6, 24), torch.randn(40, 24), torch.randn(40)
    with gristmill.inline("linear", "matmul"):
        compiled = torch.compile(
            lambda x: gristmill.matmul(gristmill.linear(x, weight, bias, activation), weight),
            backend=recorder,
            fullgraph=True,
        )
        found = compiled(x)
    assert ours(recorder.traced) == []
    assert any("mm" in name for name in recorder.forward)
    plain = gristmill.linear(x, weight, bias, activation)
    torch.testing.assert_close(found, plain @ weight)


def test_a_wrong_argument_is_named_while_compiling() -> None:
    with pytest.raises(Exception, match=r"linear: x must end in K = 64"):
        torch.compile(gristmill.linear, backend="aot_eager", fullgraph=True)(
            torch.randn(2, 48), torch.randn(8, 64)
        )


@pytest.mark.parametrize("dynamic", [False, True])
def test_export(dynamic: bool) -> None:
    block = Block()
    shapes = ({0: torch.export.Dim("rows", min=2, max=4096)},) if dynamic else None
    program = torch.export.export(block, (torch.randn(6, 24),), dynamic_shapes=shapes)
    assert len(ours(ops_of(program.graph_module))) == 4
    x = torch.randn(90 if dynamic else 6, 24)
    torch.testing.assert_close(program.module()(x), block(x))


@needs_compiler
@pytest.mark.parametrize("device", DEVICES)
def test_inductor(device: str) -> None:
    block = Block(device)
    compiled = torch.compile(block, fullgraph=True)
    x = torch.randn(16, 24, device=device)
    torch.testing.assert_close(gradients(compiled, x), gradients(block, x), rtol=1e-4, atol=1e-5)


def test_compiled_autograd_takes_a_forward_that_ran_eagerly() -> None:
    weight = torch.randn(40, 24)
    eager = torch._dynamo.disable(lambda x: gristmill.linear(x, weight, None, "silu"))

    def step(x: torch.Tensor) -> None:
        eager(x).square().sum().backward()

    x = torch.randn(4, 24)
    grads = []
    for compiled in (False, True):
        own = x.clone().requires_grad_()
        with torch._dynamo.config.patch(compiled_autograd=compiled):
            (torch.compile(step, backend="eager") if compiled else step)(own)
        grads.append(own.grad)
    expected = x.clone().requires_grad_()
    F.silu(F.linear(expected, weight)).square().sum().backward()
    torch.testing.assert_close(grads, [expected.grad] * 2)
