"""Inputs for tests, benchmarks and the doctor, ordinary and nasty, and what a call must cost."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from gristmill.ops.norms.cases import (
    BF16,
    FP16,
    FP32,
    FP64,
    Spread,
    beside_strided,
    bytes_of,
    expanded_as_asked,
    name_of,
    random_tensors,
    spread_tensors,
    spreads_of_all_norms,
)
from gristmill.ops.op import Arguments, Case, Cost


def forward_cost(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, *options: Any
) -> Cost:
    out = options[-1] or x.dtype
    moved = x.numel() * (x.element_size() + out.itemsize) + bytes_of(weight, bias)
    return Cost(moved, 8 * x.numel())


def add_cost(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *options: Any,
) -> Cost:
    out = options[-1] or x.dtype
    total = torch.promote_types(x.dtype, residual.dtype)
    each = x.element_size() + residual.element_size() + out.itemsize + total.itemsize
    return Cost(x.numel() * each + bytes_of(weight, bias), 9 * x.numel())


def backward_cost(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    dsum: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    weight_grad: bool,
    bias_dtype: torch.dtype | None,
) -> Cost:
    moved = x.numel() * (dy.element_size() + 2 * x.element_size()) + bytes_of(dsum)
    moved += bytes_of(weight) * (2 if weight_grad else 1)
    moved += x.shape[-1] * bias_dtype.itemsize if bias_dtype is not None else 0
    return Cost(moved, 17 * x.numel())


def forward_example(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Arguments:
    x, weight, bias = random_tensors(device, dtype, shape, shape[-1:], shape[-1:])
    return x, weight, bias, 1e-5, 0.0, None


def add_example(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Arguments:
    x, residual, *affine = random_tensors(device, dtype, shape, shape, shape[-1:], shape[-1:])
    return x, residual, *affine, 1e-5, 0.0, None


def backward_example(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Arguments:
    dy, x, weight = random_tensors(device, dtype, shape, shape, shape[-1:])
    return dy, x, weight, None, 1e-5, 0.0, True, dtype


def forward_cases() -> Iterator[Case]:
    for name, spread in _spreads().items():
        yield Case(name, partial(_forward, spread))


def add_cases() -> Iterator[Case]:
    for name, spread in _spreads().items():
        yield Case(name, partial(_add, spread))
    for x, residual in ((BF16, FP32), (FP32, BF16), (FP16, BF16)):
        spread = Spread(x=x, residual=residual, weight=FP32)
        yield Case(f"residual {name_of(residual)} x {name_of(x)}", partial(_add, spread))
    yield Case("unaligned beside strided columns", partial(beside_strided, _add))


def backward_cases() -> Iterator[Case]:
    for name, spread in _spreads().items():
        if spread.out is None:
            yield Case(name, partial(_backward, spread))
    more = {
        "dsum": Spread(dsum=True),
        "dsum long": Spread((140, 16384), dsum=True),
        "dsum, mean 1e4": Spread(x=FP32, dsum=True, fill=lambda x: x + 1e4),
        "frozen weight": Spread(weight_grad=False),
        "frozen bias": Spread(bias_grad=False),
        "frozen weight and bias": Spread(weight_grad=False, bias_grad=False),
        "expanded dy": Spread(expanded=True),
        "expanded dy, all dims": Spread(expanded_scalar=True),
    }
    for name, spread in more.items():
        yield Case(name, partial(_backward, spread))
    yield Case("unaligned beside strided columns", partial(beside_strided, _backward))


def _spreads() -> dict[str, Spread]:
    spreads = spreads_of_all_norms()
    for x in (FP32, FP16, BF16, FP64):
        for weight, bias in ((FP32, FP32), (BF16, FP32), (FP16, None), (None, BF16), (None, None)):
            name = f"x {name_of(x)} weight {name_of(weight)} bias {name_of(bias)}"
            spreads[name] = Spread((19, 520), x=x, weight=weight, bias=bias)
    for out in (FP32, BF16, FP16):
        spreads[f"out {name_of(out)}"] = Spread(out=out)
    return spreads | {
        # What a variance of one pass, E[x^2] - E[x]^2, or a mean that is rounded gets wrong.
        "mean 1e4": Spread(x=FP32, weight=FP32, bias=FP32, fill=lambda x: x + 1e4),
        "mean 1e4, odd": Spread((5, 999), x=FP32, weight=None, bias=None, fill=lambda x: x + 1e4),
        "mean 1e4, long": Spread((3, 50000), x=FP32, weight=None, fill=lambda x: x + 1e4),
        "mean 1e4, rounded": Spread((9, 4096), fill=lambda x: x + 1e4),
        "mean -3e6": Spread((9, 4096), x=FP32, bias=None, fill=lambda x: x - 3e6),
        "a ramp": Spread((9, 4096), x=FP32, fill=lambda x: x * 1e-3 + _ramp(x)),
        "a step": Spread((9, 4096), x=FP32, fill=lambda x: x + 1e3 * (_ramp(x) > 3000)),
        "constant rows": Spread((7, 1000), x=FP32, eps=1e-5, fill=_constant_rows),
        "constant rows, rounded": Spread((7, 1000), eps=1e-5, fill=_constant_rows),
        "the first is an outlier": Spread((6, 4096), x=FP32, fill=_first_large),
        "two far apart": Spread((6, 512), x=FP32, fill=_two_far_apart),
    }


def _ramp(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[-1], dtype=x.dtype)


def _constant_rows(x: torch.Tensor) -> torch.Tensor:
    return x[:, :1].expand(x.shape) * 1e4


def _first_large(x: torch.Tensor) -> torch.Tensor:
    return x.index_fill(-1, torch.tensor([0]), 1e3)


def _two_far_apart(x: torch.Tensor) -> torch.Tensor:
    return x.index_fill(-1, torch.tensor([3]), -1e6).index_fill(-1, torch.tensor([400]), 1e6)


def _forward(spread: Spread, device: torch.device | str, seed: int) -> Arguments:
    x, weight, bias = spread_tensors(spread, device, seed, spread.x)
    return x, weight, bias, spread.eps, spread.offset, spread.out


def _add(spread: Spread, device: torch.device | str, seed: int) -> Arguments:
    tensors = spread_tensors(spread, device, seed, spread.x, spread.residual)
    return *tensors, spread.eps, spread.offset, spread.out


def _backward(spread: Spread, device: torch.device | str, seed: int) -> Arguments:
    x, dy, dsum, weight, bias = spread_tensors(spread, device, seed, *[spread.x] * 3)
    dy = expanded_as_asked(spread, dy)
    weight_grad = spread.weight_grad and weight is not None
    bias_dtype = bias.dtype if spread.bias_grad and bias is not None else None
    dsum = dsum if spread.dsum else None
    return dy, x, weight, dsum, spread.eps, spread.offset, weight_grad, bias_dtype
