"""Kinds of calls of the softmax ops, for ops/rows/space.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gristmill.ops.op import Arguments
from gristmill.ops.rows.space import NESTED, OTHERS, PITCHED, Kind, Maker, RowSpace
from gristmill.ops.softmax.semantics import BOTTOM_RIGHT, EVERYTHING

FP32 = torch.float32


def forward(dtype: torch.dtype) -> Iterator[Kind]:
    yield _forward(EVERYTHING, 1.0, None, usual=True)
    yield _forward(BOTTOM_RIGHT, 1.0, None)
    for mask in dict.fromkeys((torch.bool, dtype, FP32)):
        yield _forward(EVERYTHING, 1.0, mask)
    yield _forward(BOTTOM_RIGHT, 1.0, torch.bool)
    yield _forward(EVERYTHING, -1.0, None)  # the largest x has no longer the largest exponent


def _forward(causal: int, scale: float, mask: torch.dtype | None, usual: bool = False) -> Kind:
    def make(maker: Maker) -> Arguments:
        x = maker.rows()
        beside = None if mask is None else torch.empty(x.shape, dtype=mask, device="meta")
        return x, causal, scale, beside

    if usual:
        return Kind(make, True, OTHERS, (NESTED, PITCHED))
    return Kind(make, True, odd_lays=() if mask else (NESTED,))


def backward(dtype: torch.dtype) -> Iterator[Kind]:
    def kind(gradient: torch.dtype, causal: int, **ways: Any) -> Kind:
        def make(maker: Maker) -> Arguments:
            y, dy = maker.rows(), maker.rows(gradient)
            return dy, y, causal, 1.0

        return Kind(make, **ways)

    yield kind(dtype, EVERYTHING, odd=True, lays=OTHERS, odd_lays=(NESTED, PITCHED))
    yield kind(dtype, BOTTOM_RIGHT, odd=True, odd_lays=(NESTED,))
    if dtype != FP32:
        yield kind(FP32, EVERYTHING)
        yield kind(FP32, BOTTOM_RIGHT)


FORWARD: RowSpace = RowSpace(forward)
BACKWARD: RowSpace = RowSpace(backward)
