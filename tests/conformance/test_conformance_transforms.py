"""Transforms and compiled autograd around the ops, where torch's own ops set the example."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import gristmill
from gristmill import nvfp4


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
