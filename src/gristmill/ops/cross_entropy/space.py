"""Kinds of calls of the cross entropy ops, for ops/rows/space.py: all their options together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from gristmill.ops.op import Arguments
from gristmill.ops.rows.space import NESTED, OTHERS, PITCHED, Kind, Lay, Maker, RowSpace

_IGNORE = -100
# Logits of a linear layer have rows at multiples of 16 bytes, whatever the number of classes.
_LAYS: tuple[Lay, ...] = (NESTED, PITCHED)


class _Options(NamedTuple):
    capped: bool
    smooth: bool
    weighted: bool
    reduction: str

    def values(self, maker: Maker) -> tuple[Any, ...]:
        weight = maker.vector(torch.float32) if self.weighted else None
        smoothing, cap = 0.1 if self.smooth else 0.0, 30.0 if self.capped else None
        return weight, _IGNORE, smoothing, 0.0, cap, self.reduction


def _options(*reductions: str) -> Iterator[_Options]:
    for reduction in reductions:
        for capped in (False, True):
            # Weights of classes are in the kernel only where every class takes part.
            for smooth, weighted in ((False, False), (False, True), (True, False), (True, True)):
                yield _Options(capped, smooth, weighted, reduction)


def _kind(make: Any, options: _Options) -> Kind:
    usual = not (options.capped or options.smooth or options.weighted)
    return Kind(make, True, OTHERS if usual else (), _LAYS if usual else (PITCHED,))


def forward(dtype: torch.dtype) -> Iterator[Kind]:
    # To add up losses takes one kernel more, to divide their sum none.
    for options in _options("mean", "none"):

        def make(maker: Maker, options: _Options = options) -> Arguments:
            return maker.rows(), maker.per_row(torch.int64), *options.values(maker), False

        yield _kind(make, options)


def backward(dtype: torch.dtype) -> Iterator[Kind]:
    for options in _options("mean"):

        def make(maker: Maker, options: _Options = options) -> Arguments:
            target, denominators = maker.per_row(torch.int64), torch.empty(2, device="meta")
            stats = target.new_empty((*target.shape, 2), dtype=torch.float32)
            beside = target, stats, denominators
            return denominators[0], None, maker.rows(), *beside, *options.values(maker), 0, 0

        yield _kind(make, options)


def shard(dtype: torch.dtype) -> Iterator[Kind]:
    for cap in (None, 30.0):
        for sums in (False, True):

            def make(maker: Maker, cap: float | None = cap, sums: bool = sums) -> Arguments:
                target, classes = maker.per_row(torch.int64), 2 * maker.columns
                return maker.rows(), target, maker.columns, classes, _IGNORE, cap, sums

            yield Kind(make, True, OTHERS, _LAYS)


def scale(dtype: torch.dtype) -> Iterator[Kind]:
    def make(maker: Maker) -> Arguments:
        return maker.rows(), torch.empty((), device="meta")

    yield Kind(make, True, OTHERS, _LAYS)


FORWARD: RowSpace = RowSpace(forward)
BACKWARD: RowSpace = RowSpace(backward)
SHARD: RowSpace = RowSpace(shard)
SCALE: RowSpace = RowSpace(scale)
