"""Tensors whose memory does not hold their values: negated views, zeros without memory, wrappers.

Every op, every tensor argument: what a kernel is given is read by its address alone, as kernels
read it, and results must be those of the same call on ordinary tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conformance_helpers import ALL_OPS, DEVICES, copied, same_bits

import gristmill
from gristmill.errors import ArgumentError
from gristmill.ops import op as op_module
from gristmill.ops.op import Op
from gristmill.ops.registry import OPS

SHAPE = (6, 64)
# What torch cannot negate it cannot hand us negated.
NEGATED = (*gristmill.ops.checks.FLOATS, torch.int64, torch.int32, torch.uint8)


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, stored with the other sign in memory laid out alike."""
    (copy,) = copied((tensor,))
    torch.neg(tensor, out=copy) if tensor.is_contiguous() else copy.copy_(-tensor)
    return torch._neg_view(copy)


def as_read(tensor: torch.Tensor) -> torch.Tensor:
    """What a kernel finds at the address."""
    assert not tensor.numel() or tensor.untyped_storage().data_ptr()
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


@pytest.fixture
def by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variant that is chosen sees memory, and nothing that torch knows besides."""

    def resolve(name: str, variants: Any, problem: Any) -> tuple[Any, Any]:
        choice, plan = chosen(name, variants, problem)

        def reading(*args: Any) -> Any:
            return plan(*(as_read(a) if isinstance(a, torch.Tensor) else a for a in args))

        return choice, reading

    chosen = op_module.resolve
    monkeypatch.setattr(op_module, "resolve", resolve)
    for op in OPS.values():
        op.forget_plans()


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [] if value is None else [one for one in value if isinstance(one, torch.Tensor)]


WAYS: dict[str, Callable[[Op, tuple[Any, ...]], Any]] = {
    "run": lambda op, args: op.run(*args),
    "call": lambda op, args: op.call(tuple(tensors_in(args)), args),
    "backward": lambda op, args: op.call_in_backward(tuple(tensors_in(args)), args),
    "torch.ops": lambda op, args: op.overload(*args),
}


def compare(op: Op, way: str, args: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    """The results, and what is written, of two calls, bit by bit."""
    expected, result = op.run(*args), WAYS[way](op, other)
    kept = [args[at] for at in op.written] + tensors_in(expected)
    found = [other[at] for at in op.written] + tensors_in(result)
    for one, two in zip(kept, found, strict=True):
        assert same_bits(one, two.resolve_neg())
        assert one.stride() == two.stride()


@pytest.mark.usefixtures("by_address")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("op", ALL_OPS)
def test_negated_views_are_resolved(op: Op, way: str, device: str) -> None:
    args = op.example(SHAPE, torch.float32, device)
    at = [n for n, one in enumerate(args) if isinstance(one, torch.Tensor) and one.dtype in NEGATED]
    for which in (*([n] for n in at), at):
        own = copied(args)
        lazy = tuple(negated(one) if n in which else one for n, one in enumerate(copied(args)))
        for _ in range(2):  # the second time there is a plan
            compare(op, way, own, lazy)


@pytest.mark.usefixtures("by_address")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("op", ALL_OPS)
def test_zeros_without_memory_are_made(op: Op, way: str, device: str) -> None:
    args = op.example(SHAPE, torch.float32, device)
    for at, one in enumerate(args):
        if not isinstance(one, torch.Tensor) or at in op.written or not one.is_floating_point():
            continue
        if one.element_size() < 2:
            continue  # scales of zero are no scales of a packed weight
        whole = (one.shape[0] + 1, *one.shape[1:]) if one.dim() else one.shape
        zeros = torch._efficientzerotensor(whole, dtype=one.dtype, device=device)
        zeros = zeros[1:] if one.dim() else zeros  # whose address is not 0, but an offset
        own, lazy = copied(args), copied(args)
        own = (*own[:at], torch.zeros_like(one), *own[at + 1 :])
        lazy = (*lazy[:at], zeros, *lazy[at + 1 :])
        for _ in range(2):
            compare(op, way, own, lazy)


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("op", [op for op in OPS.values() if op.written], ids=lambda op: op.name)
def test_zeros_without_memory_are_not_written(op: Op, way: str) -> None:
    args = op.example(SHAPE, torch.float32, "cpu")
    for at in op.written:
        zeros = torch._efficientzerotensor(args[at].shape)
        wrong = (*args[:at], zeros, *args[at + 1 :])
        with pytest.raises((ArgumentError, RuntimeError), match=r"zeros without memory|ZeroTensor"):
            WAYS[way](op, wrong)


@pytest.mark.usefixtures("by_address")
@pytest.mark.parametrize("device", DEVICES)
def test_a_conjugate_imaginary_part(device: str) -> None:
    z = torch.randn(6, 64, dtype=torch.complex64, device=device)
    x = z.conj().imag
    assert x.is_neg()
    assert same_bits(gristmill.softmax(x), gristmill.softmax(x.clone()))
    assert same_bits(gristmill.rms_norm(x), gristmill.rms_norm(x.clone()))


@pytest.mark.usefixtures("by_address")
@pytest.mark.parametrize("device", DEVICES)
def test_the_gradient_of_a_conjugate(device: str) -> None:
    """torch hands dy back as a negated view."""
    x = torch.randn(6, 64, device=device, requires_grad=True)
    weight = torch.randn(64, device=device, requires_grad=True)
    factor = torch.randn(6, 64, dtype=torch.complex64, device=device)
    seen = []

    def loss(y: torch.Tensor) -> torch.Tensor:
        y.register_hook(lambda dy: seen.append(dy.is_neg()))
        return (torch.complex(torch.zeros_like(y), y).conj() * factor).real.sum()

    found = torch.autograd.grad(loss(gristmill.rms_norm(x, weight)), (x, weight))
    plain = torch.nn.functional.rms_norm(x, (64,), weight, 1e-6)
    expected = torch.autograd.grad(loss(plain), (x, weight))
    assert any(seen)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("by_address")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_negated_views_in_a_graph(backend: str) -> None:
    if backend == "inductor":  # an argument that is negated it reads wrongly itself
        z = torch.randn(6, 64, dtype=torch.complex64)
        step = torch.compile(lambda z: gristmill.rms_norm(z.conj().imag) + 1, backend=backend)
        torch.testing.assert_close(step(z), gristmill.rms_norm(z.conj().imag) + 1)
        return

    def add(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        gristmill.fused_add_rms_norm_(x, residual)
        return x + residual

    with torch.no_grad():
        x, residual = torch.randn(6, 64), torch.randn(6, 64)
        lazy = negated(x), negated(residual)
        result = torch.compile(add, backend=backend, fullgraph=True)(*lazy)
        torch.testing.assert_close(result, add(x, residual))
        for one, other in zip(lazy, (x, residual), strict=True):
            torch.testing.assert_close(one.resolve_neg(), other)


@pytest.mark.parametrize("op", ALL_OPS)
def test_freed_memory_is_named(op: Op) -> None:
    """As FSDP frees it: the address is 0, whatever the shape says."""
    args = op.example(SHAPE, torch.float32, "cpu")
    names = [one.name for one in op.overload._schema.arguments]
    op.run(*copied(args))
    for at, one in enumerate(args):
        if isinstance(one, torch.Tensor) and one.numel():
            own = copied(args)
            own[at].untyped_storage().resize_(0)
            for way in WAYS.values():
                with pytest.raises(ArgumentError, match=rf": {names[at]} has no memory"):
                    way(op, own)


LOOKALIKES = {
    "functional": torch._to_functional_tensor,
    "escaped from grad": lambda x: _escaped(torch.func.grad, x),
    "inference": lambda x: _inference(x),
    "meta": lambda x: x.to("meta"),
}
REFUSED = {
    "sparse": lambda x: x.to_sparse(),
    "rows of sparse": lambda x: x.to_sparse_csr(),
    "mkldnn": lambda x: x.to_mkldnn(),
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "jagged": lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
    "complex": lambda x: torch.complex(x, x),
    "conjugate": lambda x: torch.complex(x, x).conj(),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8),
}


def _escaped(transform: Any, x: torch.Tensor) -> torch.Tensor:
    kept: list[torch.Tensor] = []
    transform(lambda one: (kept.append(one), one.sum())[1])(x)
    return kept[0]


def _inference(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


@pytest.mark.parametrize("kind", list(LOOKALIKES))
def test_lookalikes_of_plain_tensors(kind: str) -> None:
    """All are exactly torch.Tensor by their type; torch's own ops take them, so do ours."""
    x = torch.randn(6, 64)
    other = LOOKALIKES[kind](x)
    assert type(other) is torch.Tensor
    for _ in range(2):
        y = gristmill.rms_norm(other)
        if kind == "functional":
            y = torch._from_functional_tensor(y)
        assert y.shape == x.shape
        if kind != "meta":
            assert same_bits(y.detach(), gristmill.rms_norm(x))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", list(REFUSED))
def test_lookalikes_without_rows_in_memory(kind: str) -> None:
    with pytest.raises((ArgumentError, gristmill.errors.DtypeError), match=r"^rms_norm: x must "):
        gristmill.rms_norm(REFUSED[kind](torch.randn(6, 64)))
