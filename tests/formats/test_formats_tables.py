"""The table that codes are looked up in: made once, and of use after whatever it was made in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from gristmill import nvfp4
from gristmill.formats.nvfp4 import NVFP4Tensor, dequantize, e2m1, quantize


def weight(*shape: int) -> NVFP4Tensor:
    return quantize(torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))))


W4 = weight(32, 64)
X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))


def linear(x: torch.Tensor) -> torch.Tensor:
    return nvfp4.linear(x, W4)


def values(x: torch.Tensor) -> torch.Tensor:
    """By way of dequantize, whose table is then made under the transform itself."""
    return x @ dequantize(W4).t()


def by_argument(x: torch.Tensor, q: NVFP4Tensor) -> torch.Tensor:
    return x @ dequantize(q).t()


def in_fake_mode() -> None:
    with FakeTensorMode() as mode:
        fake = pytree.tree_map(mode.from_tensor, W4)
        for dtype in (torch.float32, torch.bfloat16):
            result = dequantize(fake, dtype)
            assert (result.shape, result.dtype) == ((32, 64), dtype)
            assert type(result) is not torch.Tensor


Function = Callable[[torch.Tensor], torch.Tensor]
TRANSFORMS: dict[str, Callable[[Function], Any]] = {
    "grad": lambda run: torch.func.grad(lambda x: run(x).square().sum())(X),
    "vmap of grad": lambda run: torch.vmap(torch.func.grad(lambda x: run(x).square().sum()))(X),
    "functionalize": lambda run: torch.func.functionalize(run)(X),
    "make_fx": lambda run: make_fx(run)(X)(X),
    "make_fx of functionalize": lambda run: make_fx(torch.func.functionalize(run))(X)(X),
    "fakes in make_fx": lambda run: make_fx(by_argument, tracing_mode="fake")(X, W4)(X, W4),
    "fake mode": lambda run: in_fake_mode(),
    "compiled": lambda run: torch.compile(run, backend="aot_eager", fullgraph=True)(X),
    "inference mode": lambda run: torch.inference_mode()(run)(X),
}


@pytest.mark.parametrize("run", [linear, values])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_calls_after_a_transform(transform: Callable[[Function], Any], run: Function) -> None:
    """With no table made before, and then with one: neither may hinder what comes after."""
    torch._dynamo.reset()
    exact = X.double() @ dequantize(W4, torch.float64).t()
    e2m1._tables.clear()
    for _ in ("cold", "warm"):
        transform(run)
        assert all(type(table) is torch.Tensor for table in e2m1._tables.values())
        for call in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
            x = X.clone().requires_grad_()
            result = call(x)
            torch.testing.assert_close(result, exact.float())
            result.sum().backward()
            torch.testing.assert_close(x.grad, dequantize(W4).sum(0).expand(4, 64))
        in_fake_mode()


@pytest.mark.parametrize("run", [linear, values])
@pytest.mark.parametrize("cold", [True, False])
def test_what_transforms_give(run: Function, cold: bool) -> None:
    whole = dequantize(W4)
    expected = X @ whole.t()
    if cold:
        e2m1._tables.clear()
    torch.testing.assert_close(torch.func.functionalize(run)(X), expected)
    torch.testing.assert_close(make_fx(run)(X)(2 * X), 2 * expected)
    gradient = torch.func.grad(lambda x: run(x).square().sum())(X)
    torch.testing.assert_close(gradient, 2 * expected @ whole)


@pytest.mark.parametrize("cold", [True, False])
def test_forward_mode(cold: bool) -> None:
    expected = X @ dequantize(W4).t()
    if cold:
        e2m1._tables.clear()
    for run in (linear, values):
        result, tangent = torch.func.jvp(run, (X,), (X,))
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(tangent, expected)
    torch.testing.assert_close(linear(X), expected)
    in_fake_mode()


@pytest.mark.parametrize("cold", [True, False])
def test_in_a_fake_mode(cold: bool) -> None:
    if cold:
        e2m1._tables.clear()
    else:
        dequantize(W4)
        dequantize(W4, torch.bfloat16)
    in_fake_mode()


def test_tables_outlive_the_modes_they_were_made_in() -> None:
    """A table made in inference mode must serve a traced or differentiated call later."""
    e2m1._tables.clear()
    source = weight(6, 64)
    with torch.inference_mode():
        dequantize(source)
    x = torch.randn(4, 64, requires_grad=True)
    (x @ dequantize(source).t()).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, dequantize(source).sum(0).expand(4, 64))
    assert all(not table.is_inference() for table in e2m1._tables.values())


def test_no_table_of_a_fake_mode_is_kept() -> None:
    e2m1._tables.clear()
    source = weight(6, 64)
    with FakeTensorMode() as mode:
        fake = pytree.tree_map(mode.from_tensor, source)
        assert dequantize(fake).shape == (6, 64)
    assert not e2m1._tables
    assert dequantize(weight(6, 64)).abs().max() > 0
