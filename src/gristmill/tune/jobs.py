"""What is tuned ahead of time: problems by op and shape, or those that a run has recorded.

A family is one kind of problem at all its row counts. It is tuned as a whole: how far the choice at
one row count holds shows only at others. Arguments are made when they are needed; until then meta
tensors stand for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from gristmill.errors import ArgumentError, DtypeError, GristmillError
from gristmill.names import counted
from gristmill.ops.op import Arguments, Op
from gristmill.ops.registry import OPS, known_op
from gristmill.select.device import Device
from gristmill.select.overrides import batch_invariant
from gristmill.select.problem import Problem, Sizes, tiled
from gristmill.select.record import Recorded, rebuilt
from gristmill.select.tables import tables_for
from gristmill.tune.search import Search
from gristmill.warmup import default_shapes

Make = Callable[[torch.device | str], Arguments]
Shape = tuple[int, ...]

# The batches for which vLLM captures CUDA graphs by default, at most 512 sequences.
CAPTURE_SIZES = {"vllm": (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))}
# A recording may have thousands of row counts. Those that share one of these spans are too close
# together for a switch between them to matter.
_RECORDED = tiled()


@dataclass(frozen=True)
class Size:
    """A problem of one size, as meta tensors show it, and how to make its arguments."""

    problem: Problem
    make: Make

    @property
    def rows(self) -> int:
        return self.problem.rows


@dataclass(frozen=True)
class Family:
    """One kind of problem: `at` gives it with any of the row counts of `search`.

    `asked`, ascending, are measured in any case. Without `split` nothing else is.
    """

    op: Op
    search: Search
    asked: tuple[int, ...]
    at: Callable[[int], Size]
    split: bool = True

    @property
    def key(self) -> str:
        return self.at(self.asked[0]).problem.family()


@dataclass
class Plan:
    """Families in the order in which they are tuned, and why others are not."""

    families: list[Family] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def plan_by_shapes(
    names: Sequence[str],
    device: Device,
    *,
    shapes: Sequence[Shape] = (),
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    rows: Sequence[int] = (),
    within: Sequence[int] = (),
    options: Mapping[str, Any] | None = None,
    probes: int = 1,
    split: bool = True,
) -> Plan:
    """Every op at every shape and dtype, with `options` in the place of its example's arguments.

    `rows` are measured in the place of those of the shapes. Of `within` the first and the last are,
    and no others than these are measured between them. Without both a shape is measured at its own
    rows and, where row counts go with the nearest stop, at that stop. Without `shapes`: at the
    usual row lengths of the op and all its stops. Between two stops of that kind are `probes` more.
    """
    if rows and within:
        raise ArgumentError("tune: rows and within both name row counts; give one of them")
    plan = Plan()
    for name in names:
        op = known_op(name)
        for dtype in dtypes:
            kind = Kind(op, dtype, options or {}, device)
            for size, shape, asked in _asked(kind, shapes, rows or within, plan.notes):
                sizes = _refined(size.problem, asked, 0 if within else probes)
                asked = set(_one_of_each(sizes, asked))
                known = asked if within else _stops_between(sizes, asked)
                found = _available(kind, shape, known, size)
                plan.notes += [
                    f"{op.name}: {_words(shape)} cannot have {counted(count, 'row')}"
                    for count in sorted(asked - set(found))
                ]
                asked &= set(found)
                if within and asked:
                    asked = {min(asked), max(asked)}
                if asked:
                    plan.families.append(_family(op, found, asked, sizes, split=split))
    return plan


def plan_by_recording(recorded: Iterable[Recorded], device: Device, *, split: bool = True) -> Plan:
    """The problems of a recording, each tuned as it was met.

    The smallest and the largest row count of a kind of problem are measured; with `split` others of
    the recording as well, where the choice changes. Of row counts that are close together the
    largest stands for all.
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
            families.setdefault(size.problem.family(), (op, {}))[1][size.rows] = size
    for op, found in families.values():
        problem = found[min(found)].problem
        up = problem.sizes.up
        kept = set(_one_of_each(problem.sizes if up else _RECORDED, found))
        kept |= set() if up else {min(found)}
        found = {rows: size for rows, size in found.items() if rows in kept}
        sizes = _with_stops(problem, found)
        plan.families.append(_family(op, found, {min(found), max(found)}, sizes, split=split))
    return plan


def _family(
    op: Op, found: Mapping[int, Size], asked: Collection[int], sizes: Sizes, *, split: bool
) -> Family:
    search = Search(tuple(sorted(found)), sizes)
    return Family(op, search, tuple(sorted(asked)), found.__getitem__, split)


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


def _asked(
    kind: Kind, shapes: Sequence[Shape], rows: Sequence[int], notes: list[str]
) -> list[tuple[Size, Shape, set[int]]]:
    """For each kind of problem among the shapes one size, its shape, and the rows to measure."""
    found: dict[str, tuple[Size, Shape, set[int]]] = {}
    op = kind.op
    for shape in shapes or default_shapes(op.name):
        try:
            size = _size(op, kind.make(shape), kind.target)
        except (ArgumentError, DtypeError) as error:
            notes.append(str(error))
            continue
        if size.rows == 0:
            notes.append(f"{op.name}: {_words(shape)} has no rows")
            continue
        _, _, asked = found.setdefault(size.problem.family(), (size, shape, set()))
        sizes = size.problem.sizes
        if rows:
            asked |= set(rows)
        else:
            asked |= {size.rows} if sizes.up else {size.rows, sizes.stop(size.rows)}
    return list(found.values())


def _refined(problem: Problem, asked: Iterable[int], probes: int) -> Sizes:
    """The sizes of a problem, with more stops between those that go with the nearest one."""
    sizes = problem.sizes
    if sizes.up:
        return sizes
    stops = [stop for stop in sizes.stops if min(asked) <= stop <= max(asked)]
    more = [rows for low, high in pairwise(stops) for rows in _between(low, high, probes)]
    return _with_stops(problem, [*asked, *more])


def _with_stops(problem: Problem, rows: Iterable[int]) -> Sizes:
    """The sizes of a problem, with more stops: `rows`, and those that tables know already."""
    sizes = problem.sizes
    if sizes.up:
        return sizes
    known = (row.stop for one in tables_for(problem.device) for row in one.table.family(problem))
    return Sizes(tuple(sorted({*sizes.stops, *rows, *known})))


def _one_of_each(sizes: Sizes, rows: Iterable[int]) -> Collection[int]:
    """The largest of all row counts that one measurement holds for."""
    return {sizes.span(one): one for one in sorted(rows)}.values()


def _stops_between(sizes: Sizes, asked: set[int]) -> set[int]:
    """`asked`, and the stops between them that they do not stand for."""
    named = {sizes.span(rows) for rows in asked}
    stops = [stop for stop in sizes.stops if min(asked) <= stop <= max(asked)]
    return asked | {stop for stop in stops if sizes.span(stop) not in named}


def _between(low: int, high: int, count: int) -> Iterator[int]:
    """`count` sizes between two stops, equally far apart in log space: one is the middle."""
    for number in range(1, count + 1):
        # Down, as a tie between two stops goes to the smaller one.
        size = int(low * (high / low) ** (number / (count + 1)) + 1e-9)
        if low < size < high:
            yield size


def _available(kind: Kind, shape: Shape, rows: Iterable[int], known: Size) -> dict[int, Size]:
    """The example of `shape`, which is `known`, with other row counts, where it can have them."""
    family = known.problem.family()
    found = {
        count: known if count == known.rows else _resized(kind, shape, family, count)
        for count in rows
    }
    return {count: size for count, size in found.items() if size is not None}


def _resized(kind: Kind, shape: Shape, family: str, rows: int) -> Size | None:
    """The example of `shape` with so many rows instead; None if there is no such thing.

    The first dim is the rows, in what a shape means for a GEMM as well (MxNxK); an op over rows may
    have several leading dims, which become one.
    """
    for other in ((rows, *shape[1:]), (rows, *shape[-1:])):
        try:
            size = _size(kind.op, kind.make(other), kind.target)
        except (ArgumentError, DtypeError):
            continue
        if size.rows == rows and size.problem.family() == family:
            return size
    return None


def _size(op: Op, make: Make, device: Device) -> Size:
    args = make("meta")
    op.check(*args)
    # Rows of tables are for ordinary calls: in batch-invariant mode none is asked.
    with batch_invariant(False):
        return Size(op.problem(*args, device=device), make)


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
