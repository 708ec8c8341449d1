"""make_fx of every op: real, fake and symbolic tensors, forward and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance_helpers import ALL_OPS, copied, same_bits
from torch.fx.experimental.proxy_tensor import make_fx

from gristmill.ops.op import Op
from gristmill.ops.registry import OPS

MODES = ("real", "fake", "symbolic")
# Those whose backward op gives gradients of all that needs one here.
TRAINED = (
    "rms_norm",
    "add_rms_norm",
    "layer_norm",
    "add_layer_norm",
    "softmax",
    "log_softmax",
    "cross_entropy",
    "linear_cross_entropy",
    "linear",
    "linear_with_pre",
    "matmul",
    "moe",
    "topk_router",
)


def flat(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [one for one in result or () if one is not None]


def with_tensors(args: tuple[Any, ...], tensors: Any) -> tuple[Any, ...]:
    left = iter(tensors)
    return tuple(next(left) if isinstance(arg, torch.Tensor) else arg for arg in args)


def check(function: Any, mode: str, tensors: list[torch.Tensor], node: str) -> None:
    graph = make_fx(function, tracing_mode=mode)(*copied(tuple(tensors)))
    assert node in {str(one.target) for one in graph.graph.nodes}
    first, second = copied(tuple(tensors)), copied(tuple(tensors))
    for one, other in zip(flat(graph(*first)), flat(function(*second)), strict=True):
        assert same_bits(one, other)
        assert one.stride() == other.stride()
    for one, other in zip(first, second, strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", ALL_OPS)
def test_forward(op: Op, mode: str) -> None:
    args = op.example((6, 64), torch.float32, "cpu")
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]

    def run(*given: torch.Tensor) -> Any:
        return flat(op.overload(*with_tensors(args, given)))

    check(run, mode, tensors, f"gristmill.{op.name}.default")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TRAINED)
def test_gradients(name: str, mode: str) -> None:
    op = OPS[name]
    args = op.example((6, 64), torch.float32, "cpu")
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]

    def run(*given: torch.Tensor) -> Any:
        wanting = [one.detach().requires_grad_(one.is_floating_point()) for one in given]
        results = flat(op.call(tuple(wanting), with_tensors(args, wanting)))
        total = sum(one.float().square().sum() for one in results if one.requires_grad)
        into = [one for one in wanting if one.requires_grad]
        return [
            one for one in torch.autograd.grad(total, into, allow_unused=True) if one is not None
        ]

    check(run, mode, tensors, f"gristmill.{name}.default")


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm"])
def test_gradients_before_dispatch(name: str) -> None:
    """Here torch traces the implementations of torch ops, which must not read values."""
    op = OPS[name]
    args = op.example((6, 64), torch.float32, "cpu")
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]

    def run(*given: torch.Tensor) -> Any:
        wanting = [one.detach().requires_grad_() for one in given]
        total = sum(
            one.square().sum() for one in flat(op.call(wanting, with_tensors(args, wanting)))
        )
        return list(torch.autograd.grad(total, wanting))

    graph = make_fx(run, tracing_mode="real", pre_dispatch=True)(*tensors)
    for one, other in zip(graph(*tensors), run(*tensors), strict=True):
        torch.testing.assert_close(one, other)
