"""What a warm-up of everything compiles, and what a call runs."""

from __future__ import annotations

import functools
from typing import Any

import torch

from gristmill.errors import VariantUnavailable
from gristmill.jit.compilers import Compilable
from gristmill.ops.registry import OPS
from gristmill.ops.rows.space import DENSE, Kind, Lay, Maker, RowSpace
from gristmill.ops.space import programs_of
from gristmill.select.chooser import ranked
from gristmill.select.device import Device
from gristmill.select.problem import Problem

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SPACES = {name: op.space.found() for name, op in OPS.items() if op.space is not None}
ROW_OPS = [name for name, found in SPACES.items() if isinstance(found, RowSpace)]
OTHER_OPS = [name for name, found in SPACES.items() if not isinstance(found, RowSpace)]


@functools.cache
def space(name: str, device: Device, dtype: torch.dtype) -> frozenset[Compilable]:
    return frozenset(programs_of([OPS[name]], device, [dtype]))


def programs(problem: Problem) -> tuple[Compilable, ...]:
    """What a call of this problem runs; nothing if no variant may."""
    op = OPS[problem.op]
    try:
        choice = ranked(op.name, op.variants, problem)[0]
    except VariantUnavailable:
        return ()
    return choice.variant.programs(problem, choice.config)


def kinds(name: str, dtype: torch.dtype) -> list[Kind]:
    found = SPACES[name]
    assert isinstance(found, RowSpace)
    return list(found.kinds(dtype))


def lays(kind: Kind, columns: int, dtype: torch.dtype) -> list[Lay]:
    """How rows of so many columns may lie in calls of this kind, by the rule."""
    if columns * dtype.itemsize % 16:
        return [*([DENSE] if kind.odd else []), *kind.odd_lays]
    return [DENSE, *kind.lays, *kind.odd_lays]


class AnyRows(Maker):
    """Makes tensors of any number of rows."""

    def __init__(self, dtype: torch.dtype, columns: int, lay: Lay, leading: tuple[int, int]):
        super().__init__(dtype, columns, lay)
        self._leading = leading

    def rows(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        small = super().rows(dtype)
        outer, inner = self._leading
        if self._laid(small):  # nested
            memory = torch.empty((inner, outer, self.columns), dtype=small.dtype, device="meta")
            return memory.transpose(0, 1)
        pitch, start = small.stride(1), small.storage_offset()
        memory = torch.empty(outer * inner * pitch + start, dtype=small.dtype, device="meta")
        shape = (outer, inner, self.columns)
        return memory.as_strided(shape, (inner * pitch, pitch, 1), start)

    def per_row(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(self._leading, dtype=dtype, device="meta")

    @staticmethod
    def _laid(small: torch.Tensor) -> bool:
        return small.stride(0) < small.stride(1)


def kind_of(problem: Problem) -> Any:
    """Of a call its dtypes and options, whatever its sizes and wherever its rows lie."""
    details = problem.layout
    options = {
        name: value
        for name, value in vars(details).items()
        if name not in ("layout", "copied", "strided", "offset", "mask_levels", "mask_sizes")
    }
    words = {"nested", "ragged", "narrow", "copied", "scaled"}
    return (
        problem.dtypes,
        frozenset(problem.flags) - words,
        tuple((name, _element(value)) for name, value in options.items()),
    )


def _element(value: Any) -> Any:
    return value.partition(",")[0] if isinstance(value, str) else bool(value)
