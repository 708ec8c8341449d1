"""The kernels of a row op: every kind of call, at every length and number of rows that matters.

A kernel of a row op depends on its kind of call (dtypes, options, how rows lie) and on the launch,
which is a step function of the length in vectors and of the number of rows. So each kind is made
once, at some length, and then looked at around every number at which a rule of a launch may change
its mind. Rules see little of a kind: those that they cannot tell apart share the points at which
another kernel begins.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from gristmill.ops.op import Arguments, Op
from gristmill.ops.rows.config import column_bytes
from gristmill.ops.rows.layout import Layout
from gristmill.ops.rows.problem import RowDetails
from gristmill.ops.rows.variant import BOUNDS
from gristmill.ops.space import Needed, chosen, in_every_mode
from gristmill.select.chooser import by_heuristics
from gristmill.select.device import Device
from gristmill.select.problem import CANONICAL_ROWS, Problem
from gristmill.select.tables import tables_for

LONGEST = 2 << 20  # bytes of a row, in its narrowest dtype
_WIDEST = 16
_CLUSTERS = (1, 2, 4, 8, 16)
_ITEMS = (1, 2, 3, 4, 5, 6, 7, 8)
SHORT = 128  # columns below which no op takes ragged rows, if others do not
# What no rule of a launch reads: types in the kernel but for what `_rough` leaves of them, and
# where things lie.
_UNSEEN = frozenset(
    {
        *("copied", "strided", "offset", "normalised", "product", "scaling", "amax"),
        *("mask_levels", "mask_sizes"),
    }
)

Point = tuple[int, int]  # vectors of a row, and rows


@dataclass(frozen=True)
class Lay:
    """How the rows of a kind lie.

    `shift`: bytes beyond a multiple of 16 at which each row begins, `alike`: in all tensors, else
    in the first alone. `pitched`: rows are at multiples of 16 bytes, whatever their length.
    """

    name: str
    shift: int = 0
    alike: bool = False
    pitched: bool = False
    nested: bool = False


DENSE = Lay("dense")
PITCHED, NESTED = Lay("pitched", pitched=True), Lay("nested", nested=True)
OTHERS = (
    NESTED,
    *(Lay(f"first by {shift}", shift) for shift in (2, 8)),
    *(Lay(f"all by {shift}", shift, alike=True) for shift in (2, 8)),
)


class Maker:
    """Makes the tensors of one call, which have no memory."""

    def __init__(self, dtype: torch.dtype, columns: int, lay: Lay) -> None:
        self.dtype, self.columns, self._lay, self._made = dtype, columns, lay, 0
        self.odd = bool(columns * dtype.itemsize % _WIDEST)

    def rows(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype = dtype or self.dtype
        lay = self._lay if self._lay.alike or self._lay.nested or not self._made else DENSE
        self._made += 1
        if lay.nested:
            return torch.empty((3, 2, self.columns), dtype=dtype, device="meta").transpose(0, 1)
        if not (lay.shift or lay.pitched):
            return torch.empty((2, 3, self.columns), dtype=dtype, device="meta")
        whole, size = _WIDEST // dtype.itemsize, max(1, lay.shift // dtype.itemsize)
        pitch, start = -(-self.columns // whole) * whole + whole, 0
        if lay.shift:
            pitch, start = pitch + size, size
        memory = torch.empty(6 * pitch + start, dtype=dtype, device="meta")
        return memory.as_strided((2, 3, self.columns), (3 * pitch, pitch, 1), start)

    def vector(self, dtype: torch.dtype | None) -> torch.Tensor | None:
        """One value per column, or None."""
        return None if dtype is None else torch.empty(self.columns, dtype=dtype, device="meta")

    def per_row(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((2, 3), dtype=dtype, device="meta")


@dataclass(frozen=True)
class Kind:
    """Calls that differ in lengths and rows alone.

    `odd`: lengths that are no multiple of 16 bytes, too. `lays`: how rows of whole vectors may lie
    beside densely; those of any length in `odd_lays`. Only the usual kind, which has `lays`, has
    odd lengths in batch-invariant mode: there each greatest vector has kernels of its own.
    """

    make: Callable[[Maker], Arguments]
    odd: bool = False
    lays: tuple[Lay, ...] = ()
    odd_lays: tuple[Lay, ...] = ()


@dataclass(frozen=True)
class RowSpace:
    """The `space` of a row op, from its kinds of calls on rows of a dtype."""

    kinds: Callable[[torch.dtype], Iterable[Kind]]

    def __call__(self, op: Op, device: Device, dtype: torch.dtype) -> Iterator[Needed]:
        points: dict[Any, list[Point]] = {}
        done = set()
        for kind in self.kinds(dtype):
            for maker in _makers(kind, dtype):
                for problem in in_every_mode(op, device, kind.make(maker)):
                    if problem.batch_invariant and maker.odd and not kind.lays:
                        continue
                    # A class of problems: whatever differs within it, it has these kernels.
                    key = _class(problem)
                    if key not in done:
                        done.add(key)
                        yield from _kernels(op, problem, points)


def _makers(kind: Kind, dtype: torch.dtype) -> Iterator[Maker]:
    """One for each way in which rows may lie, and for each greatest vector.

    Short rows have kinds of their own: they are never ragged in some ops.
    """
    for lay in (DENSE, *kind.lays, *kind.odd_lays):
        yield Maker(dtype, 1024, lay)
        yield Maker(dtype, 64, lay)
        if (kind.odd and lay is DENSE) or lay in kind.odd_lays:
            for vector in (1, 2, 4):
                yield Maker(dtype, 129 * vector, lay)
                yield Maker(dtype, 7 * vector, lay)


def _class(problem: Problem) -> tuple[Any, ...]:
    layout = problem.layout.layout
    views = tuple(view and replace(view, outer=0, inner=0) for view in layout.views)
    standing = replace(layout, rows=0, columns=0, inner_rows=1 + layout.nested, views=views)
    details, short = replace(problem.layout, layout=standing), _is_short(layout.columns)
    return problem.flags, problem.dtypes, problem.batch_invariant, details, short


def _is_short(columns: int) -> bool:
    return columns < SHORT


def _kernels(op: Op, problem: Problem, points: dict[Any, list[Point]]) -> Iterator[Needed]:
    seen = _seen(problem)
    if seen not in points:
        points[seen] = _points(op, problem)
    for vectors, rows in points[seen]:
        here = _at(problem, vectors, rows)
        choice = by_heuristics(op.name, op.variants, here)
        if choice is not None:
            yield Needed(here, choice)
    for here in _tabled(op, problem):
        yield from chosen(op, here)


def _points(op: Op, problem: Problem) -> list[Point]:
    """Where kernels begin: for each that is preferred somewhere, one length and number of rows."""
    found: dict[Any, Point] = {}
    short = _is_short(problem.layout.layout.columns)
    for vectors in _vectors(problem):
        if _is_short(_columns(problem.layout.layout, vectors)) != short:
            continue
        for rows in _rows(problem, vectors):
            here = _at(problem, vectors, rows)
            choice = by_heuristics(op.name, op.variants, here)
            if choice is not None:
                programs = choice.variant.programs(here, choice.config)
                if programs:
                    found.setdefault(programs, (vectors, rows))
    return list(found.values())


def _at(problem: Problem, vectors: int, rows: int) -> Problem:
    """The same kind of problem with so many vectors in a row, and so many rows."""
    return _sized(problem, _columns(problem.layout.layout, vectors), rows)


def _columns(layout: Layout, vectors: int) -> int:
    if layout.ragged:  # the least that touch so many
        return max(1, (vectors - 2) * layout.vector + 2)
    return vectors * layout.vector


def _sized(problem: Problem, columns: int, rows: int) -> Problem:
    details: RowDetails = problem.layout
    layout = replace(details.layout, columns=columns, rows=rows)
    return replace(
        problem, rows=rows, dims=(("N", columns),), layout=replace(details, layout=layout)
    )


def _seen(problem: Problem) -> tuple[Any, ...]:
    """What the rules of a launch see of a kind of problem."""
    details: RowDetails = problem.layout
    layout = details.layout
    views = tuple(view and (view.dtype, view.bulk) for view in layout.views)
    own = [
        (one.name, _rough(getattr(details, one.name)))
        for one in dataclasses.fields(details)
        if one.name != "layout" and one.name not in _UNSEEN
    ]
    causal = "causal" in problem.flags
    return (
        *(problem.op, problem.batch_invariant, problem.dtype("residual") is None, causal, *own),
        *(layout.vector, layout.ragged, _is_short(layout.columns), views),
    )


def _rough(value: Any) -> Any:
    """Of a tensor's type in the kernel its element; of a number whether it is there."""
    if isinstance(value, str):
        return value.partition(",")[0]
    return bool(value)


def _vectors(problem: Problem) -> list[int]:
    """The greatest lengths before a rule may change its mind."""
    layout, device = problem.layout.layout, problem.device
    steps = set(range(1, 129))
    steps |= {math.prod(sizes) for sizes in itertools.product(BOUNDS, _ITEMS, _CLUSTERS)}
    steps |= {part << up for part in (4, 5, 6, 7) for up in range(5, 16)}
    steps |= {1 << up for up in range(30)}
    whole = layout.vector * layout.narrowest == _WIDEST
    if whole:  # then a share of a row may lie in shared memory, and so may two
        each = layout.vector * column_bytes(problem.layout)
        rooms = [(device.shared_per_block - kept) // each for kept in (1024, 8192, 9 * 1024)]
        steps |= {part * up for room in rooms for part in (room // 2, room) for up in _CLUSTERS}
    if not (whole or layout.ragged):  # an even number of vectors would be half as many wider ones
        steps = {step - 1 | 1 for step in steps}
    most = replace(layout, columns=LONGEST // layout.narrowest).vectors
    if layout.ragged:  # of which the longest touch more vectors than dense ones have
        steps.add(most)
    return sorted(step for step in steps if 0 < step <= most)


def _rows(problem: Problem, vectors: int) -> list[int]:
    """The least numbers of rows at which a rule has changed its mind."""
    count = max(2, problem.device.multiprocessors)
    # The kernel that adds up the losses of rows has its own.
    adding = {1, 4097, 65537} if problem.op.startswith("cross_entropy") else {1}
    if problem.batch_invariant:
        return sorted({CANONICAL_ROWS, *adding})
    steps = {count // 2, *(count * each for each in (1, 2, 8, 32)), 32 * count - 1}
    if vectors <= 128:
        steps |= {count << up for up in range(9)}
    return sorted({step + 1 for step in steps} | adding)


_COLUMNS = re.compile(r"(?<= N=)\d+")


def _tabled(op: Op, problem: Problem) -> Iterator[Problem]:
    """The sizes of this kind of problem for which a table in force has a row."""
    family = problem.family()
    for source in tables_for(problem.device):
        for row in source.table.rows.values():
            found = _COLUMNS.search(row.family)
            if found is None or not row.key.startswith(f"{op.name} "):
                continue
            columns = int(found[0])
            if _COLUMNS.sub(found[0], family) != row.family or not _fits(problem, columns):
                continue
            here = _sized(problem, columns, row.stop)
            least, most = row.covers
            for rows in {max(1, least), row.stop, most or row.stop}:
                yield replace(here, rows=rows, layout=_sized(here, columns, rows).layout)


def _fits(problem: Problem, columns: int) -> bool:
    """Whether rows of so many columns lie as those of the problem do."""
    layout: Layout = problem.layout.layout
    if layout.ragged:
        return bool(columns % layout.vector)
    whole = layout.vector * layout.narrowest == _WIDEST
    return columns % layout.vector == 0 and (whole or columns // layout.vector % 2 == 1)
