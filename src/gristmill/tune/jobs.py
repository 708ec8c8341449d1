"""What is tuned ahead of time: problems by op and shape, or those that a run has recorded.

A job makes one row: the choice at one hint of one family (a family is all sizes of one kind of
problem). Its probes are sizes of the bucket that lie far from the hint; they get a row of their
own, which splits the bucket, only where that wins enough. Arguments are made when they are needed;
until then meta tensors stand for them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from gristmill.errors import ArgumentError, DtypeError, GristmillError
from gristmill.ops.op import Arguments, Op
from gristmill.ops.registry import OPS, known_op
from gristmill.select.device import Device
from gristmill.select.overrides import batch_invariant
from gristmill.select.problem import HINTS, Problem, bucket
from gristmill.select.record import Recorded, rebuilt
from gristmill.select.tables import tables_for
from gristmill.warmup import default_shapes

Make = Callable[[torch.device | str], Arguments]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Size:
    """A problem of one size, as meta tensors show it, and how to make its arguments."""

    problem: Problem
    make: Make

    @property
    def rows(self) -> int:
        return self.problem.rows


@dataclass(frozen=True)
class Job:
    """One row to be made: `size` is measured for all that are nearest to `hint`.

    `probes` are tried when the row is made, `asked` (sizes that the user has named) in any case.
    """

    op: Op
    hint: int
    size: Size
    probes: tuple[Size, ...] = ()
    asked: tuple[Size, ...] = ()

    @property
    def key(self) -> str:
        return self.size.problem.key(self.hint)


@dataclass
class Plan:
    """Jobs in the order in which they are done, and why others are none."""

    jobs: list[Job] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def plan_by_shapes(
    names: Sequence[str],
    device: Device,
    *,
    shapes: Sequence[Shape] = (),
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    hints: Sequence[int] = (),
    options: Mapping[str, Any] | None = None,
    probes: int = 1,
) -> Plan:
    """Every op at every shape and dtype, with `options` in the place of its example's arguments.

    Without `hints` a shape is tuned at the hint that its rows are nearest to, and if it is none
    itself, tried at its own size, too. With `hints`, at these sizes instead. Without `shapes`: at
    the usual row lengths of the op and all its hints. `probes` sizes between any two neighbouring
    hints are tried, too.
    """
    plan = Plan()
    for name in names:
        op = known_op(name)
        for dtype in dtypes:
            kind = Kind(op, dtype, options or {}, device)
            families = _families(kind, device, shapes, hints, plan.notes)
            for family in families.values():
                plan.jobs += family.jobs(probes)
    return plan


def plan_by_recording(recorded: Iterable[Recorded], device: Device, *, split: bool = True) -> Plan:
    """The problems of a recording, each tuned as it was met.

    Of the sizes in one bucket the one nearest to the hint is measured for all; with `split` the
    smallest and the largest are tried on their own, too.
    """
    plan = Plan()
    families: dict[str, tuple[Op, dict[int, Size]]] = {}
    for one in recorded:
        op = OPS.get(one.op)
        if op is None:
            plan.notes.append(
                f"{one.key}: {one.op} is no op of gristmill's (the program that has a MultiKernel "
                f"of that name can tune it)"
            )
            continue
        try:
            make = partial(_rebuilt, op, one)
            size = _size(op, make, device)
        except _MISFITS as error:
            plan.notes.append(f"{one.key}: the recorded call does not fit {one.op}: {error!r}")
            continue
        if size.rows > 0:
            _, sizes = families.setdefault(size.problem.family(), (op, {}))
            sizes[size.rows] = size
    for op, sizes in families.values():
        plan.jobs += _recorded_jobs(op, sizes, split)
    return plan


# What a line of a recording that was written by another version may lead to.
_MISFITS = (
    GristmillError,
    AttributeError,
    KeyError,
    IndexError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass
class _Family:
    """All sizes of one kind of problem that are asked for; `at` makes others, where it can."""

    op: Op
    hints: tuple[int, ...]
    at: Callable[[int], Size | None]
    sizes: set[int] = field(default_factory=set)

    def jobs(self, probes: int) -> list[Job]:
        hints = self.hints
        wanted = {bucket(rows, hints) for rows in self.sizes}
        if self.sizes >= set(HINTS):
            # All of them: also where a bucket was split before, whose row may be stale now.
            wanted |= set(hints)
        asked: dict[int, set[int]] = {hint: set() for hint in wanted}
        for rows in self.sizes - wanted:
            asked[bucket(rows, hints)].add(rows)
        between: dict[int, set[int]] = {}
        for low, high in itertools.pairwise(hints):
            # Only between usual hints: a split bucket is not split further.
            if {low, high} <= wanted & set(HINTS):
                between[high] = set(_between(low, high, probes)) - self.sizes
        return [
            Job(
                self.op,
                hint,
                size,
                self._all_at(between.get(hint, ())),
                self._all_at(asked[hint]),
            )
            for hint in sorted(wanted)
            if (size := self.at(hint)) is not None
        ]

    def _all_at(self, sizes: Iterable[int]) -> tuple[Size, ...]:
        found = (self.at(rows) for rows in sorted(sizes))
        return tuple(size for size in found if size is not None)


def _between(low: int, high: int, count: int) -> Iterator[int]:
    """`count` sizes between two hints, equally far apart in log space: one is the middle."""
    for number in range(1, count + 1):
        # Down, as a tie between two hints goes to the smaller one.
        size = int(low * (high / low) ** (number / (count + 1)) + 1e-9)
        if low < size < high:
            yield size


def _recorded_jobs(op: Op, sizes: Mapping[int, Size], split: bool) -> Iterator[Job]:
    hints = _hints(next(iter(sizes.values())).problem)
    buckets: dict[int, list[int]] = {}
    for rows in sorted(sizes):
        buckets.setdefault(bucket(rows, hints), []).append(rows)
    for hint, inside in sorted(buckets.items()):
        nearest = min(inside, key=lambda rows: abs(math.log(rows / hint)))
        ends = dict.fromkeys(rows for rows in (inside[0], inside[-1]) if rows != nearest)
        probes = tuple(sizes[rows] for rows in ends) if split else ()
        yield Job(op, hint, sizes[nearest], probes)


def _hints(problem: Problem) -> tuple[int, ...]:
    """The hints of a problem's family: the usual ones, and where any table has split a bucket."""
    return tables_for(problem.device)[0].table.hints(problem)


@dataclass(frozen=True)
class Kind:
    """What examples are made of, besides their shape."""

    op: Op
    dtype: torch.dtype
    options: Mapping[str, Any]
    target: Device

    def make(self, shape: Shape) -> Make:
        example = self.op.example_with
        return partial(example, self.options, shape, self.dtype, target=self.target)


def _families(
    kind: Kind,
    device: Device,
    shapes: Sequence[Shape],
    hints: Sequence[int],
    notes: list[str],
) -> dict[str, _Family]:
    families: dict[str, _Family] = {}
    op = kind.op
    for shape in shapes or default_shapes(op.name):
        try:
            size = _size(op, kind.make(shape), device)
        except (ArgumentError, DtypeError) as error:
            notes.append(str(error))
            continue
        if size.rows == 0:
            notes.append(f"{op.name}: {_words(shape)} has no rows")
            continue
        name = size.problem.family()
        at = partial(_resized, kind, shape, device, name)
        family = families.setdefault(name, _Family(op, _hints(size.problem), at))
        family.sizes |= set(hints) or {size.rows}
    return families


def _size(op: Op, make: Make, device: Device) -> Size:
    args = make("meta")
    op.check(*args)
    # Rows speak for ordinary calls: where rows must not depend on the batch, none is asked.
    with batch_invariant(False):
        return Size(op.problem(*args, device=device), make)


def _resized(kind: Kind, shape: Shape, device: Device, family: str, rows: int) -> Size | None:
    """The example of `shape` with so many rows instead; None if there is no such thing.

    The first dim is the rows, in what a shape means for a product too (MxNxK); an op over rows may
    have several leading dims, which become one.
    """
    for other in (shape, (rows, *shape[1:]), (rows, *shape[-1:])):
        try:
            size = _size(kind.op, kind.make(other), device)
        except (ArgumentError, DtypeError):
            continue
        if size.rows == rows and size.problem.family() == family:
            return size
    return None


def _rebuilt(op: Op, recorded: Recorded, device: torch.device | str) -> tuple[Any, ...]:
    args = rebuilt(recorded, device, limits=_limits(op, recorded))
    return args if op.sound is None else op.sound(*args)


def _limits(op: Op, recorded: Recorded) -> dict[int, int]:
    """For each argument that holds indices, by position, how many things they choose from."""
    names = [argument.name for argument in op.overload._schema.arguments]
    limits = {}
    for name, (indexed, dim) in op.indices.items():
        entry: Any = recorded.arguments[names.index(indexed)]
        limits[names.index(name)] = int(entry["shape"][dim])
    return limits


def _words(shape: Shape) -> str:
    return "x".join(map(str, shape))
