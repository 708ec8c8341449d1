"""Kinds of calls of the softmax ops, for ops/rows/space.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gristmill.ops.op import Arguments
from gristmill.ops.rows.space import NESTED, OTHERS, PITCHED, Kind, Maker, RowSpace

FP32 = torch.float32


def forward(dtype: torch.dtype) -> Iterator[Kind]:
    yield _forward(1.0, None, None, usual=True)
    yield _forward(1.0, None, "bottom_right")
    for mask in dict.fromkeys((torch.bool, dtype, FP32)):
        yield _forward(1.0, mask, None)
    yield _forward(1.0, torch.bool, "bottom_right")
    yield _forward(-1.0, None, None)  # the largest x has no longer the largest exponent


def _forward(
    scale: float, mask: torch.dtype | None, causal: str | None, usual: bool = False
) -> Kind:
    def make(maker: Maker) -> Arguments:
        x = maker.rows()
        beside = None if mask is None else torch.empty(x.shape, dtype=mask, device="meta")
        return x, scale, beside, causal

    if usual:
        return Kind(make, True, OTHERS, (NESTED, PITCHED))
    return Kind(make, True, odd_lays=() if mask else (NESTED,))


def backward(dtype: torch.dtype) -> Iterator[Kind]:
    def kind(gradient: torch.dtype, causal: str | None, **ways: Any) -> Kind:
        def make(maker: Maker) -> Arguments:
            y, dy = maker.rows(), maker.rows(gradient)
            return dy, y, 1.0, causal

        return Kind(make, **ways)

    yield kind(dtype, None, odd=True, lays=OTHERS, odd_lays=(NESTED, PITCHED))
    yield kind(dtype, "bottom_right", odd=True, odd_lays=(NESTED,))
    if dtype != FP32:
        yield kind(FP32, None)
        yield kind(FP32, "bottom_right")


FORWARD: RowSpace = RowSpace(forward)
BACKWARD: RowSpace = RowSpace(backward)
