"""Calls of the products and experts, ordinary and odd, as their variants see them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from gristmill.ops.nvfp4_linear.cases import random_weight
from gristmill.ops.op import Op
from gristmill.ops.registry import OPS
from gristmill.ops.space import in_every_mode
from gristmill.select.chooser import refusal
from gristmill.select.device import KNOWN, Device
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DEVICES = (Device("cpu", "cpu"), *KNOWN.values())
# Columns and depth of a product: of layers, odd, tiny, wide, deep.
SIZES = ((4096, 4096), (1003, 4112), (5, 48), (128256, 4096), (256, 65536), (1, 1), (33, 2880))
# Experts, chosen ones, hidden and inner size.
MODELS = ((128, 8, 2048, 768), (8, 2, 4096, 14336), (4, 2, 80, 48), (1, 1, 16, 16))


class Case(NamedTuple):
    """A variant, and a problem that it runs, as configs are asked about it."""

    variant: Variant
    problem: Problem

    def __str__(self) -> str:
        problem = self.problem
        return f"{self.variant.name} {problem.key(problem.rows)} {problem.device}"


def cases_of(op: Op, args: tuple[Any, ...], device: Device) -> Iterator[Case]:
    """In every mode, each variant that runs the call."""
    for problem in in_every_mode(op, device, args):
        for variant in op.variants:
            if refusal(variant, problem) is None:
                yield Case(variant, problem.asked())


def dense(device: Device, rows: int, columns: int, depth: int) -> Iterator[Case]:
    for dtype in (BF16, F16, F32):
        x, weight = _empty(rows, depth, dtype=dtype), _empty(columns, depth, dtype=dtype)
        turned = _empty(depth, columns, dtype=dtype)
        apart = _empty(columns, 2 * depth, dtype=dtype)[:, ::2]
        bias = _empty(columns, dtype=dtype)
        for args in (
            (x, weight, None, None),
            (x, turned.t(), bias, "gelu"),
            (x, apart, None, "silu"),
            (_empty(rows, depth + 1, dtype=dtype)[:, 1:], weight, bias, None),
        ):
            yield from cases_of(OPS["linear"], args, device)
        yield from cases_of(OPS["linear_with_pre"], (x, weight, bias, "gelu"), device)
        yield from cases_of(OPS["matmul"], (x, turned), device)
        yield from cases_of(OPS["matmul"], (_empty(depth, rows, dtype=dtype).t(), turned), device)
        several = _empty(3, rows, depth, dtype=dtype)
        yield from cases_of(OPS["matmul"], (several, weight.t().expand(3, -1, -1)), device)


def nvfp4(device: Device, rows: int, columns: int, depth: int) -> Iterator[Case]:
    depth = -(-depth // 16) * 16
    for dtype, layout in itertools.product((BF16, F16, F32), ("rows", "tiles", "fragments")):
        weight = random_weight((columns, depth), "meta", layout=layout)[:3]
        x, dy = _empty(rows, depth, dtype=dtype), _empty(rows, columns, dtype=dtype)
        for bias, out, act in ((None, None, None), (F32, BF16, None), (None, F32, "fp8")):
            shift = None if bias is None else _empty(columns, dtype=bias)
            yield from cases_of(OPS["nvfp4_linear"], (x, *weight, shift, layout, out, act), device)
        backward = (dy, *weight, layout, depth, dtype)
        yield from cases_of(OPS["nvfp4_linear_backward"], backward, device)


def experts(device: Device, rows: int, model: tuple[int, int, int, int]) -> Iterator[Case]:
    count, topk, hidden, inner = model
    for dtype, layout in itertools.product((BF16, F16), ("rows", "tiles", "fragments")):
        pair = layout == "fragments"
        w13 = random_weight((count, 2 * inner, hidden), "meta", layout=layout, pairs=pair)[:3]
        w2 = random_weight((count, hidden, inner), "meta", layout=layout)[:3]
        x, shares = _empty(rows, hidden, dtype=dtype), _empty(rows, topk, dtype=F32)
        ids = _empty(rows, topk, dtype=torch.int32)
        args = (x, shares, ids, *w13, *w2, None, None, "silu", None, None, layout, None)
        yield from cases_of(OPS["nvfp4_moe"], args, device)
        yield from cases_of(
            OPS["nvfp4_moe_backward"], (_empty(rows, hidden, dtype=dtype), *args), device
        )
        plain = (
            _empty(count, 2 * inner, hidden, dtype=dtype),
            _empty(count, hidden, inner, dtype=dtype),
        )
        args = (x, shares, ids, *plain, None, None, "silu", None, None, None)
        yield from cases_of(OPS["moe"], args, device)


def losses(device: Device, rows: int, classes: int, columns: int) -> Iterator[Case]:
    for dtype in (BF16, F32):
        args = OPS["linear_cross_entropy"].example_for(device, (rows, classes, columns), dtype)
        yield from cases_of(OPS["linear_cross_entropy"], (*args[:-1], 3), device)
        yield from cases_of(OPS["linear_cross_entropy"], args, device)


def every_case(device: Device, rows: int) -> Iterator[Case]:
    for columns, depth in SIZES:
        yield from dense(device, rows, columns, depth)
        yield from nvfp4(device, rows, columns, depth)
        yield from losses(device, rows, columns, depth)
    for model in MODELS:
        yield from experts(device, rows, model)


def _empty(*size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")
