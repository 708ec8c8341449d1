"""Transforms and compiled autograd around the ops, where torch's own ops set the example."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import gristmill
from gristmill import nvfp4
from gristmill.errors import VariantUnavailable


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def weight() -> nvfp4.NVFP4Tensor:
    return nvfp4.quantize(torch.randn(32, 64))


def test_autocast_holds_under_vmap() -> None:
    w4, x = weight(), torch.randn(4, 64)
    with torch.autocast("cpu", torch.bfloat16):
        each = torch.vmap(lambda row: nvfp4.linear(row, w4))(x)
        theirs = torch.vmap(lambda row: torch.nn.functional.linear(row, nvfp4.dequantize(w4)))(x)
        assert each.dtype == theirs.dtype == torch.bfloat16
        # Sums in fp32 on both ways, so at most the last bit of bf16 is another one.
        torch.testing.assert_close(each, nvfp4.linear(x, w4), rtol=2**-7, atol=0.0)
        # Not one of those that torch's CPU autocast converts.
        norms = torch.vmap(gristmill.rms_norm)(x.bfloat16())
        assert torch.equal(norms, gristmill.rms_norm(x.bfloat16()))


@pytest.mark.parametrize("name", ["nvfp4", "rms_norm"])
def test_compiled_autograd_takes_a_forward_that_ran_eagerly(name: str) -> None:
    w4, gain = weight(), torch.randn(64, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        return nvfp4.linear(x, w4) if name == "nvfp4" else gristmill.rms_norm(x, gain)

    def step(x: torch.Tensor) -> Any:
        eager = torch._dynamo.disable(function)
        eager(x).square().sum().backward()

    x = torch.randn(4, 64)
    grads = []
    for compiled in (False, True):
        own = x.clone().requires_grad_()
        with torch._dynamo.config.patch(compiled_autograd=compiled):
            (torch.compile(step, backend="eager") if compiled else step)(own)
        grads.append(own.grad)
    torch.testing.assert_close(*grads)


def functions() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Of a ``(4, 64)`` x each, by ops that differ in how they are called."""
    w4, dense, gain = weight(), torch.randn(32, 64), torch.randn(64)
    target = torch.tensor([3, 1, -100, 63])
    return {
        "rms_norm": lambda x: gristmill.rms_norm(x, gain),
        "add_layer_norm": lambda x: gristmill.add_layer_norm(x, x.flip(0), gain)[0],
        "softmax": lambda x: gristmill.softmax(x, 0, scale=0.5),
        "linear": lambda x: gristmill.linear(x, dense, activation="silu"),
        "cross_entropy": lambda x: gristmill.cross_entropy(x, target, one_pass=True),
        "nvfp4": lambda x: nvfp4.linear(x, w4),
    }


over_functions = pytest.mark.parametrize("name", list(functions()))


@over_functions
def test_transforms_in_compiled_code_differentiate_as_in_eager_mode(name: str) -> None:
    function, x = functions()[name], torch.randn(4, 64)

    def transforms(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, tangent = torch.func.jvp(function, (x,), (x.sin(),))
        return tangent, torch.func.grad(lambda x: function(x).square().sum())(x)

    compiled = torch.compile(transforms, fullgraph=True, backend="eager")
    tangent, gradient = transforms(x)
    assert tangent.count_nonzero()
    torch.testing.assert_close(compiled(x), (tangent, gradient), rtol=1e-4, atol=1e-5)


@over_functions
def test_dual_numbers_have_graphs_of_their_own(name: str) -> None:
    function, x = functions()[name], torch.randn(4, 64)
    graphs: list[set[str]] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return graph

    def call_dual() -> None:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, x.sin())
            found, expected = (
                forward_ad.unpack_dual(one(dual)).tangent for one in (compiled, function)
            )
        assert found is not None
        assert found.count_nonzero()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    def call_plain() -> None:
        torch.testing.assert_close(compiled(x), function(x), rtol=1e-4, atol=1e-5)

    for first, second in ((call_dual, call_plain), (call_plain, call_dual)):
        torch.compiler.reset()
        compiled = torch.compile(function, fullgraph=True, backend=keep)
        for call in (first, first, second, second):
            call()
    of_ops = [any(target.startswith("gristmill.") for target in graph) for graph in graphs]
    assert of_ops == [False, True, True, False]


def test_compiled_code_refuses_to_differentiate_what_must_be_batch_invariant() -> None:
    compiled = torch.compile(
        torch.func.grad(lambda x: gristmill.softmax(x).square().sum()), backend="eager"
    )
    with gristmill.batch_invariant(), pytest.raises(Exception, match="batch-invariant") as caught:
        compiled(torch.randn(4, 64))
    assert isinstance(caught.value, VariantUnavailable) or "VariantUnavailable" in str(caught.value)


@over_functions
def test_gradients_come_in_batches(name: str) -> None:
    if name == "cross_entropy":  # its gradient is made once, and gone
        function: Any = lambda x: gristmill.cross_entropy(x, torch.arange(4))  # noqa: E731
    else:
        function = functions()[name]
    x = torch.randn(4, 64, requires_grad=True)
    y = function(x.view(2, 2, 64)) if name == "linear" else function(x)
    several = torch.randn(3, *y.shape)
    (batched,) = torch.autograd.grad(y, x, several, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, x, one, retain_graph=True)[0] for one in several]
    torch.testing.assert_close(batched, torch.stack(each), rtol=1e-5, atol=1e-6)


def test_anomaly_detection_names_the_op() -> None:
    x = torch.randn(4, 64, requires_grad=True)
    y = gristmill.softmax(x * torch.nan)
    assert y.grad_fn is not None
    assert y.grad_fn.name() == "gristmill_softmaxBackward"
    with (
        pytest.warns(UserWarning, match="Anomaly"),
        torch.autograd.detect_anomaly(),
        pytest.raises(RuntimeError, match="gristmill_softmaxBackward"),
    ):
        y.sum().backward()
