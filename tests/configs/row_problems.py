"""Problems of every row op, of every kind of call and every way for rows to lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from gristmill.ops.op import Op
from gristmill.ops.registry import OPS
from gristmill.ops.rows.space import DENSE, Maker, RowSpace
from gristmill.ops.rows.variant import RowVariant
from gristmill.ops.space import in_every_mode
from gristmill.select.device import KNOWN, Device
from gristmill.select.problem import Problem

H200 = KNOWN["sm_90a"]
# Others of its architecture, which its table covers as well.
H100_PCIE = replace(H200, name="NVIDIA H100 PCIe", multiprocessors=114)
H20 = replace(H200, name="NVIDIA H20", multiprocessors=78)
SLICE = replace(H200, name="NVIDIA H200 MIG 1g.18gb", multiprocessors=16)
ROW_OPS = {
    name: op
    for name, op in OPS.items()
    if any(isinstance(variant, RowVariant) for variant in op.variants)
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def row_variants(op: Op) -> list[RowVariant]:
    return [variant for variant in op.variants if isinstance(variant, RowVariant)]


def of_rows(problem: Problem, rows: int, device: Device = H200) -> Problem:
    """The same problem with so many rows, on another device."""
    details = problem.layout
    layout = replace(details.layout, rows=rows)
    return replace(problem, rows=rows, device=device, layout=replace(details, layout=layout))


def is_real(problem: Problem) -> bool:
    """Whether a call has this layout: `ragged_layout` gives none for so many rows."""
    return not (problem.layout.layout.ragged and problem.layout.layout.rows >= 2**31)


def problems(op: Op, columns: int, dtype: torch.dtype) -> Iterator[Problem]:
    """Few rows of so many columns on an H200: every kind of call, in every mode."""
    space = op.space.found()  # type: ignore[union-attr]
    assert isinstance(space, RowSpace)
    for kind in space.kinds(dtype):
        for lay in (DENSE, *kind.lays, *kind.odd_lays):
            yield from in_every_mode(op, H200, kind.make(Maker(dtype, columns, lay)))


def usual(name: str, rows: int, columns: int, device: Device = H200) -> Problem:
    """An op's example in bf16."""
    example = OPS[name].example((2, columns), torch.bfloat16, "meta")
    return of_rows(OPS[name].problem(*example, device=device), rows, device)
