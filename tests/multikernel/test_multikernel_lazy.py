"""Lazily negated tensors and zeros without memory, given to functions that read addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gristmill.multikernel import MultiKernel


def as_read(tensor: torch.Tensor) -> torch.Tensor:
    """What a raw kernel finds at the address."""
    assert tensor.untyped_storage().data_ptr()
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def accumulate(x: torch.Tensor, y: torch.Tensor) -> None:
    as_read(y).add_(as_read(x))


def twice(x: torch.Tensor) -> torch.Tensor:
    return as_read(x) * 2


def compiled(kernel: MultiKernel) -> Any:
    torch._dynamo.reset()  # all kernels are one function to its limit of recompilations
    return torch.compile(kernel, backend="aot_eager", fullgraph=True)


WAYS: dict[str, Callable[[MultiKernel], Any]] = {
    "function": lambda one: one,
    "torch.ops": lambda one: one.op,
    "graph": compiled,
}


@pytest.mark.parametrize("way", list(WAYS))
def test_writes_go_through_a_negated_view(way: str) -> None:
    one = MultiKernel(
        "lazy_accumulate",
        {"raw": accumulate},
        schema="(Tensor x, Tensor(a!) y) -> ()",
        fake=lambda x, y: None,
    )
    call = WAYS[way](one)
    x, y = torch.randn(8), torch.randn(8)
    call(x, y.clone())  # there is a plan
    for given, total in ((x, y.clone()), (torch._neg_view(-x), torch._neg_view(-y))):
        call(given, total)
        assert torch.equal(total.resolve_neg(), x + y)
        call(torch._neg_view(-x), total)
        assert torch.allclose(total.resolve_neg(), x + x + y)


@pytest.mark.parametrize("way", list(WAYS))
def test_writes_go_through_negated_views_in_a_list(way: str) -> None:
    """Of a list some tensors may be views, some not."""

    def accumulate_all(x: torch.Tensor, ys: list[torch.Tensor]) -> None:
        for y in ys:
            accumulate(x, y)

    one = MultiKernel(
        "lazy_accumulate_all",
        {"raw": accumulate_all},
        schema="(Tensor x, Tensor(a!)[] ys) -> ()",
        fake=lambda x, ys: None,
    )
    call = WAYS[way](one)
    x, first, second = (torch.randn(8) for _ in range(3))
    call(x, [first.clone(), second.clone()])  # there is a plan
    for given in (x, torch._neg_view(-x)):
        totals = [torch._neg_view(-first), second.clone()]
        call(given, totals)
        for total, start in zip(totals, (first, second), strict=True):
            assert torch.equal(total.resolve_neg(), x + start)


@pytest.mark.parametrize("way", list(WAYS))
def test_arguments_are_resolved(way: str) -> None:
    one = MultiKernel(
        "lazy_twice", {"raw": twice}, schema="(Tensor x) -> Tensor", fake=torch.empty_like
    )
    call, x = WAYS[way](one), torch.randn(8)
    for given in (x, torch._neg_view(-x), torch.complex(x, -x).conj().imag):
        assert torch.equal(call(given), 2 * x)
    assert torch.equal(call(torch._efficientzerotensor(8)), torch.zeros(8))


@pytest.mark.parametrize("way", ["function", "torch.ops"])
def test_writes_go_through_a_conjugated_view(way: str) -> None:
    one = MultiKernel(
        "lazy_complex",
        {"raw": accumulate},
        schema="(Tensor x, Tensor(a!) y) -> ()",
        fake=lambda x, y: None,
    )
    x = torch.randn(8, dtype=torch.complex64)
    y = torch.randn(8, dtype=torch.complex64)
    total = y.conj().resolve_conj().conj()
    assert total.is_conj()
    WAYS[way](one)(x.conj().resolve_conj().conj(), total)
    assert torch.equal(total.resolve_conj(), x + y)
