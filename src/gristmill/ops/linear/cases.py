"""Inputs for tests, benchmarks and the doctor, ordinary and nasty, and what a call must cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from gristmill.errors import ArgumentError
from gristmill.ops.examples import normal, unaligned
from gristmill.ops.linear import semantics
from gristmill.ops.op import Arguments, Case, Cost

_BF16, _FP16, _FP32, _FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

Lay = Callable[[torch.Tensor], torch.Tensor]


def linear_cost(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> Cost:
    return _linear_cost(x, weight, bias, 1)


def linear_with_pre_cost(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> Cost:
    return _linear_cost(x, weight, bias, 2)


def matmul_cost(a: torch.Tensor, b: torch.Tensor) -> Cost:
    result = math.prod(semantics.result_shape(a, b))
    moved = (a.numel() + b.numel() + result) * a.element_size()
    return Cost(moved, 2 * result * a.shape[-1])


def _linear_cost(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, results: int
) -> Cost:
    columns, depth = weight.shape
    result = x.shape[:-1].numel() * columns
    elements = x.numel() + weight.numel() + (0 if bias is None else columns) + results * result
    return Cost(elements * x.element_size(), 2 * result * depth)


def sizes_of(op: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """M, N and K of an example: ``(M, K)`` has N = K, ``(M, N, K)`` any."""
    if len(shape) not in (2, 3):
        raise ArgumentError(f"{op}: an example is MxNxK, or MxK for N = K, got {shape}")
    return shape[0], shape[-2] if len(shape) == 3 else shape[-1], shape[-1]


def linear_example(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Arguments:
    rows, columns, depth = sizes_of("linear", shape)
    x = normal((rows, depth), dtype, device)
    return x, normal((columns, depth), dtype, device, max(depth, 1) ** -0.5), None, None


def linear_with_pre_example(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Arguments:
    x, weight, bias, _ = linear_example(shape, dtype, device)
    return x, weight, bias, "silu"


def matmul_example(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Arguments:
    rows, columns, depth = sizes_of("matmul", shape)
    a = normal((rows, depth), dtype, device)
    return a, normal((depth, columns), dtype, device, max(depth, 1) ** -0.5)


@dataclass(frozen=True)
class Spread:
    """How one case of a linear layer differs from an ordinary one."""

    leading: tuple[int, ...] = (5,)
    columns: int = 48
    depth: int = 64
    dtype: torch.dtype = _BF16
    bias: bool = False
    activation: str | None = None
    lay: Lay | None = None
    lay_weight: Lay | None = None
    lay_bias: Lay | None = None
    scale: float = 1.0


def _spreads() -> dict[str, Spread]:
    shapes = (
        ((1,), 64, 64),
        ((), 48, 32),
        ((3,), 1, 16),
        ((7,), 5, 1),
        ((1,), 1, 1),
        ((2, 3), 33, 80),
        ((2, 1, 4), 130, 96),
        ((0,), 16, 32),
        ((2, 0), 16, 32),
        ((4,), 0, 32),
        ((4,), 24, 0),
        ((17,), 31, 257),
        ((33,), 257, 512),
        ((64,), 96, 2048),
        ((130,), 200, 136),
        ((300,), 72, 40),
    )
    spreads = {
        f"{'x'.join(map(str, leading)) or 'vector'} by {columns}x{depth}": Spread(
            leading, columns, depth, bias=True
        )
        for leading, columns, depth in shapes
    }
    for dtype in (_FP32, _FP16, _BF16, _FP64):
        for activation in (None, *semantics.ACTIVATIONS):
            for bias in (False, True):
                word = f"{str(dtype)[6:]} {activation}{' bias' if bias else ''}"
                spreads[word] = Spread((9,), 40, 144, dtype, bias, activation)
    return spreads | {
        "relu of no columns": Spread((4,), 24, 0, bias=True, activation="relu"),
        "gelu of no columns, no bias": Spread((4,), 24, 0, activation="gelu"),
        "silu over batches": Spread((2, 3, 5), 40, 56, bias=True, activation="silu"),
        "long sums": Spread((3,), 24, 8192, bias=True, activation="silu"),
        "row slices": Spread((17,), depth=128, lay=_sliced),
        "row slices, narrow": Spread((17,), depth=128, lay=partial(_sliced, extra=3)),
        "transposed rows": Spread((6, 5), lay=lambda x: x.transpose(0, 1)),
        "transposed rows, silu": Spread(
            (6, 5), lay=lambda x: x.transpose(0, 1), activation="silu", bias=True
        ),
        "columns strided": Spread((6,), lay=_turned),
        "every second column": Spread(
            (6,), lay=lambda x: torch.repeat_interleave(x, 2, -1)[:, ::2]
        ),
        "expanded rows": Spread((6,), lay=lambda x: x[:1].expand(x.shape)),
        "expanded, all dims": Spread((6,), lay=lambda x: x[:1, :1].expand(x.shape)),
        "unaligned": Spread((6,), lay=unaligned),
        "weight transposed": Spread((6,), lay_weight=_turned, bias=True),
        "weight transposed, float32": Spread((6,), dtype=_FP32, lay_weight=_turned),
        "weight slices": Spread((6,), lay_weight=_sliced, activation="gelu"),
        "weight unaligned": Spread((6,), lay_weight=unaligned, bias=True),
        "weight expanded": Spread((6,), lay_weight=lambda w: w[:1].expand(w.shape)),
        "bias expanded": Spread((6,), bias=True, lay_bias=lambda b: b[:1].expand(b.shape)),
        "bias strided": Spread(
            (6,), bias=True, activation="silu", lay_bias=lambda b: torch.stack((b, b), 1)[:, 0]
        ),
        "zeros": Spread(scale=0.0, bias=True, activation="gelu_tanh"),
        "large values": Spread(dtype=_FP32, scale=1e15, bias=True),
        "large values, silu": Spread(dtype=_FP32, scale=1e15, bias=True, activation="silu"),
        "large values, gelu": Spread(dtype=_FP32, scale=1e5, activation="gelu"),
        "large values, gelu_tanh": Spread(scale=1e5, activation="gelu_tanh"),
        "large float16": Spread(dtype=_FP16, scale=4000.0, activation="relu"),
        "small values": Spread(dtype=_FP32, scale=1e-15, activation="silu"),
    }


def linear_cases() -> Iterator[Case]:
    for name, spread in _spreads().items():
        yield Case(name, partial(_linear, spread))


def linear_with_pre_cases() -> Iterator[Case]:
    for name, spread in _spreads().items():
        activation = spread.activation or "silu"
        yield Case(name, partial(_linear, replace(spread, activation=activation)))


def _linear(spread: Spread, device: torch.device | str, seed: int) -> Arguments:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(spread.dtype).to(device)

    size = max(spread.depth, 1) ** -0.5
    x = drawn(*spread.leading, spread.depth, scale=spread.scale)
    weight = drawn(spread.columns, spread.depth, scale=size)
    bias = drawn(spread.columns, scale=spread.scale) if spread.bias else None
    x = x if spread.lay is None else spread.lay(x)
    weight = weight if spread.lay_weight is None else spread.lay_weight(weight)
    if bias is not None and spread.lay_bias is not None:
        bias = spread.lay_bias(bias)
    return x, weight, bias, spread.activation


@dataclass(frozen=True)
class Stack:
    """How one case of a product of matrices differs from an ordinary one."""

    a: tuple[int, ...] = (6, 64)
    b: tuple[int, ...] = (64, 48)
    dtype: torch.dtype = _BF16
    lay_a: Lay | None = None
    lay_b: Lay | None = None
    scale: float = 1.0


def _stacks() -> dict[str, Stack]:
    shapes = (
        ((1, 1), (1, 1)),
        ((1, 64), (64, 64)),
        ((3, 16), (16, 1)),
        ((7, 1), (1, 5)),
        ((0, 16), (16, 8)),
        ((4, 16), (16, 0)),
        ((4, 0), (0, 8)),
        ((0, 4, 8), (8, 3)),
        ((2, 0, 8), (2, 8, 3)),
        ((17, 257), (257, 31)),
        ((130, 136), (136, 200)),
        ((5, 7, 24), (24, 33)),
        ((2, 3, 7, 24), (24, 33)),
        ((7, 24), (5, 24, 33)),
        ((5, 7, 24), (5, 24, 33)),
        ((5, 1, 24), (5, 24, 33)),
        ((2, 1, 7, 24), (3, 24, 33)),
        ((2, 3, 7, 24), (2, 1, 24, 33)),
        ((1, 7, 24), (4, 24, 8)),
        ((4, 7, 24), (1, 24, 8)),
        ((7, 24), (1, 1, 24, 8)),
        ((3, 8192), (8192, 24)),
    )
    stacks = {f"{'x'.join(map(str, a))} by {'x'.join(map(str, b))}": Stack(a, b) for a, b in shapes}
    for dtype in (_FP32, _FP16, _FP64):
        word = str(dtype)[6:]
        stacks[word] = Stack((19, 144), (144, 40), dtype)
        stacks[f"{word} batches"] = Stack((3, 19, 40), (3, 40, 24), dtype)
    return stacks | {
        "a transposed": Stack(lay_a=_turned),
        "b transposed": Stack(lay_b=_turned),
        "both transposed": Stack(dtype=_FP32, lay_a=_turned, lay_b=_turned),
        "batches transposed": Stack((3, 8, 40), (3, 40, 24), lay_a=_turned, lay_b=_turned),
        "heads of a row": Stack(
            (2, 3, 7, 24), (2, 3, 24, 7), lay_a=_heads, lay_b=lambda b: _heads(b.mT).mT
        ),
        "heads by one matrix": Stack((2, 3, 7, 24), (24, 16), lay_a=_heads),
        "slices": Stack(lay_a=_sliced, lay_b=_sliced),
        "unaligned": Stack(lay_a=unaligned, lay_b=unaligned),
        "expanded": Stack(lay_a=lambda a: a[:1].expand(a.shape)),
        "expanded batches": Stack(
            (4, 6, 24), (4, 24, 16), lay_a=lambda a: a[:1].expand(a.shape), lay_b=_sliced
        ),
        "every second column": Stack(lay_b=lambda b: torch.repeat_interleave(b, 2, -1)[:, ::2]),
        "large values": Stack(dtype=_FP32, scale=1e15),
        "small values": Stack(dtype=_FP32, scale=1e-15),
        "zeros": Stack(scale=0.0),
    }


def matmul_cases() -> Iterator[Case]:
    for name, stack in _stacks().items():
        yield Case(name, partial(_matmul, stack))


def _matmul(stack: Stack, device: torch.device | str, seed: int) -> Arguments:
    generator = torch.Generator().manual_seed(seed)
    size = max(stack.a[-1], 1) ** -0.5
    a = (torch.randn(stack.a, generator=generator) * stack.scale).to(stack.dtype).to(device)
    b = (torch.randn(stack.b, generator=generator) * size).to(stack.dtype).to(device)
    a = a if stack.lay_a is None else stack.lay_a(a)
    return a, b if stack.lay_b is None else stack.lay_b(b)


def _sliced(x: torch.Tensor, extra: int = 24) -> torch.Tensor:
    """Between others, as a slice of something wider lies."""
    wide = x.new_zeros((*x.shape[:-1], x.shape[-1] + extra))
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def _turned(x: torch.Tensor) -> torch.Tensor:
    """The same values, with the other one of the last two dims contiguous."""
    return x.mT.contiguous().mT


def _heads(x: torch.Tensor) -> torch.Tensor:
    """Batches that do not collapse: heads that lie within the rows."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)
