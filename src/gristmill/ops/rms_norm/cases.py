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


def forward_cost(x: torch.Tensor, weight: torch.Tensor | None, *options: Any) -> Cost:
    out = options[-1] or x.dtype
    moved = x.numel() * (x.element_size() + out.itemsize) + bytes_of(weight)
    return Cost(moved, 4 * x.numel())


def add_cost(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, *options: Any
) -> Cost:
    out = options[-1] or x.dtype
    total = torch.promote_types(x.dtype, residual.dtype)
    each = x.element_size() + residual.element_size() + out.itemsize + total.itemsize
    return Cost(x.numel() * each + bytes_of(weight), 5 * x.numel())


def fused_add_cost(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> Cost:
    each = 2 * x.element_size() + 2 * residual.element_size()
    return Cost(x.numel() * each + bytes_of(weight), 5 * x.numel())


def backward_cost(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    dsum: torch.Tensor | None,
    *options: Any,
) -> Cost:
    moved = x.numel() * (dy.element_size() + 2 * x.element_size())
    moved += bytes_of(dsum) + bytes_of(weight) * (2 if options[-1] else 1)
    return Cost(moved, 11 * x.numel())


def forward_example(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Arguments:
    x, weight = random_tensors(device, dtype, shape, shape[-1:])
    return x, weight, 1e-6, 0.0, "once", None


def add_example(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Arguments:
    x, residual, weight = random_tensors(device, dtype, shape, shape, shape[-1:])
    return x, residual, weight, 1e-6, 0.0, "once", None


def fused_add_example(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Arguments:
    x, residual, weight = random_tensors(device, dtype, shape, shape, shape[-1:])
    return x, residual, weight, 1e-6


def backward_example(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Arguments:
    dy, x, weight = random_tensors(device, dtype, shape, shape, shape[-1:])
    return dy, x, weight, None, 1e-6, 0.0, True


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


def fused_add_cases() -> Iterator[Case]:
    for name, spread in _spreads().items():
        if spread.casting == "once" and spread.out is None and name != "expanded rows":
            yield Case(name, partial(_fused_add, spread))
    yield Case("unaligned beside strided columns", partial(beside_strided, _fused_add))


def backward_cases() -> Iterator[Case]:
    for name, spread in _spreads().items():
        if spread.casting == "once" and spread.out is None:
            yield Case(name, partial(_backward, spread))
    yield Case("dsum", partial(_backward, Spread(dsum=True)))
    yield Case("dsum long", partial(_backward, Spread((140, 16384), dsum=True)))
    yield Case("frozen weight", partial(_backward, Spread(weight_grad=False)))
    yield Case("expanded dy", partial(_backward, Spread(expanded=True)))
    yield Case("expanded dy, all dims", partial(_backward, Spread(expanded_scalar=True)))
    yield Case("unaligned beside strided columns", partial(beside_strided, _backward))


def _spreads() -> dict[str, Spread]:
    spreads = spreads_of_all_norms()
    for x in (FP32, FP16, BF16, FP64):
        for weight in (FP32, BF16, FP16, None):
            name = f"x {name_of(x)} weight {name_of(weight)}"
            spreads[name] = Spread((19, 520), x=x, weight=weight)
            spreads[f"{name} llama"] = Spread((19, 520), x=x, weight=weight, casting="llama")
    for out in (FP32, BF16, FP16):
        spreads[f"out {name_of(out)}"] = Spread(out=out)
        spreads[f"out {name_of(out)} llama"] = Spread(out=out, casting="llama")
    return spreads | {
        "offset llama": Spread(offset=1.0, casting="llama"),
        "eps none": Spread(eps=None, fill=lambda x: x * 1e-4),
    }


def _forward(spread: Spread, device: torch.device | str, seed: int) -> Arguments:
    x, weight, _ = spread_tensors(spread, device, seed, spread.x)
    return x, weight, spread.eps, spread.offset, spread.casting, spread.out


def _add(spread: Spread, device: torch.device | str, seed: int) -> Arguments:
    x, residual, weight, _ = spread_tensors(spread, device, seed, spread.x, spread.residual)
    return x, residual, weight, spread.eps, spread.offset, spread.casting, spread.out


def _fused_add(spread: Spread, device: torch.device | str, seed: int) -> Arguments:
    return *_add(spread, device, seed)[:3], 1e-6 if spread.eps is None else spread.eps


def _backward(spread: Spread, device: torch.device | str, seed: int) -> Arguments:
    x, dy, dsum, weight, _ = spread_tensors(spread, device, seed, *[spread.x] * 3)
    dy = expanded_as_asked(spread, dy)
    weight_grad = spread.weight_grad and weight is not None
    return dy, x, weight, dsum if spread.dsum else None, spread.eps, spread.offset, weight_grad
