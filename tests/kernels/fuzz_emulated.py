"""What the fuzz tests of the emulated kernels draw their calls from.

A kernel is compiled by g++, so the template instantiations are few and fixed: those of the cases
that the other tests run. What is drawn is all that a kernel is told at run time: rows, columns,
strides, addresses, options, numbers. Tensors lie within poison, which no kernel may write and which
shows in the result of one that reads it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from exact import Range

from gristmill.jit import Program
from gristmill.ops.rows.config import TWICE, RowConfig
from gristmill.ops.rows.layout import Layout, View
from gristmill.ops.rows.problem import RowDetails
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

hypothesis = pytest.importorskip("hypothesis")
st, given = hypothesis.strategies, hypothesis.given

KINDS = ("nan", "inf", "-inf", "zero", "-zero", "largest", "-largest", "least", "normal")
GUARD = 64  # bytes on both sides of a tensor
LEAST = 2.0**-126  # below fp32's normal numbers products keep few digits, or none
MOST_THREADS = 2048  # of a team: the emulation gives each a stack
ORDERS = st.sampled_from([0, 1, 7])


def examples(count: int) -> Any:
    """The same ones in every run."""
    return hypothesis.settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


def special(kind: str, dtype: torch.dtype) -> float:
    limits = torch.finfo(dtype)
    return {
        "nan": math.nan,
        "inf": math.inf,
        "-inf": -math.inf,
        "zero": 0.0,
        "-zero": -0.0,
        "largest": limits.max,
        "-largest": limits.min,
        "least": limits.tiny * limits.eps,
        "normal": limits.tiny,
    }[kind]


@dataclass(frozen=True)
class Numbers:
    """Normal ones of size 2^exponent, rows differing by up to 2^spread, and special ones.

    A special one has a row, a column (None: all of them) and a kind, modulo what there is.
    """

    seed: int = 0
    exponent: int = 0
    spread: int = 0
    specials: tuple[tuple[int, int | None, str], ...] = ()

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        columns = shape[-1]
        rows = math.prod(shape[:-1])
        values = torch.randn(rows, columns, generator=generator)
        powers = torch.randint(-self.spread, self.spread + 1, (rows, 1), generator=generator)
        limit = torch.finfo(dtype).max / 2
        found = (values.double() * 2.0 ** (powers + self.exponent)).clamp(-limit, limit).to(dtype)
        for row, column, kind in self.specials:
            value = special(kind, dtype)
            if column is None:
                found[row % rows] = value
            else:
                found[row % rows, column % columns] = value
        return found.view(*shape)


NORMAL = Numbers()


@st.composite
def numbers(draw: Any, kinds: Sequence[str] = KINDS, sizes: Sequence[int] = (0, -6, 5)) -> Numbers:
    column = st.one_of(st.none(), st.integers(0, 5000))
    place = st.tuples(st.integers(0, 50), column, st.sampled_from(kinds))
    return Numbers(
        draw(st.integers(0, 1 << 20)),
        draw(st.sampled_from(sizes)),
        draw(st.sampled_from([0, 0, 3, 12])),
        tuple(draw(st.lists(place, max_size=4))),
    )


@dataclass(frozen=True)
class Place:
    """Where rows lie: elements before the first, between rows, and between groups of rows."""

    first: int = 0
    gap: int = 0
    outer: int = 0
    expanded: bool = False  # all rows are the first one


DENSE = Place()


def placed(values: torch.Tensor, place: Place) -> torch.Tensor:
    """The same numbers there, within poison; a view of all of it."""
    guard = GUARD // values.element_size()
    strides = [1] * values.dim()
    step = values.shape[-1] + place.gap
    for dim in range(values.dim() - 2, -1, -1):
        strides[dim] = 0 if place.expanded else step
        step = step * values.shape[dim] + place.outer * (dim == values.dim() - 2)
    last = sum((size - 1) * one for size, one in zip(values.shape, strides, strict=True))
    room = poison(guard + place.first + last + 1 + guard, values.dtype)
    view = room.as_strided(values.shape, strides, guard + place.first)
    if place.expanded:
        view[(0,) * (values.dim() - 1)].copy_(values[(0,) * (values.dim() - 1)])
        return view
    return view.copy_(values)


def poison(count: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.full((count,), math.nan, dtype=torch.float32).to(dtype)
    return torch.full((count,), 0x55, dtype=torch.uint8).to(dtype)


class Guards:
    """Sees whether what lies around arguments was written."""

    def __init__(self, args: Sequence[Any], written: Sequence[int] = ()) -> None:
        self._held = [
            (index in written, arg, arg._base, arg._base.clone())
            for index, arg in enumerate(args)
            if isinstance(arg, torch.Tensor) and arg._base is not None
        ]

    def check(self) -> None:
        for written, view, base, before in self._held:
            if written:
                place = view.shape, view.stride(), view.storage_offset()
                before.as_strided(*place).copy_(view)
            assert torch.equal(bits(base), bits(before)), "written beside a tensor"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(sizes[tensor.element_size()])


def same_bits(one: Any, other: Any) -> bool:
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(one, other, strict=True))


def judge(
    allowed: Range,
    actual: torch.Tensor,
    truth: torch.Tensor,
    what: str,
    doubtful: torch.Tensor | None = None,
    either: bool = False,
) -> None:
    """NaN and infinity where the truth in fp64 has them, and else within what is allowed.

    `doubtful`: what is not judged, because fp32 does not hold what is on the way. `either`: one may
    stand for the other, as where sums of infinite terms may be ordered in several ways.
    """
    assert actual.shape == truth.shape
    ours, left = actual.double(), ~truth.isfinite()
    judged = torch.ones_like(left) if doubtful is None else ~doubtful.expand(left.shape)
    same = (ours == truth) | (ours.isnan() & truth.isnan())
    same = same | (~ours.isfinite() if either else torch.zeros_like(same))
    wrong = left & judged & ~same
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(f"{what}{list(where)} is {ours[where]}, not {truth[where]}")
    left |= ~judged
    ends = (end.masked_fill(left, 0.0) for end in (allowed.low, allowed.high))
    Range(*ends).widened(torch.tensor(LEAST)).check(actual.masked_fill(left, 0.0), what)


def doubles(args: Sequence[Any]) -> list[Any]:
    """Arguments for a reference that is to compute in fp64."""
    return [
        one.double() if isinstance(one, torch.Tensor) and one.is_floating_point() else one
        for one in args
    ]


# ---- rows for an instantiation ----


@dataclass(frozen=True)
class Room:
    """What run-time arguments an instantiation of a row kernel may get.

    `columns`: multiples of `step` that are multiples of no more than it, up to `longest`;
    `nested`: rows lie in groups.
    """

    step: int
    whole: int  # the longest vector
    longest: int
    ragged: bool
    nested: bool
    shortest: int = 1

    @staticmethod
    def of(
        problem: Problem, config: RowConfig, lanes: bool, longest: int, shortest: int = 1
    ) -> Room:
        details: RowDetails = problem.layout
        layout = details.layout
        each = config.lanes if lanes else config.threads * config.cluster
        vectors = longest if config.feed == TWICE else min(longest, each * config.items)
        whole = 16 // min(v.dtype.itemsize for v in layout.views if v and v.dtype.itemsize > 1)
        step = 1 if layout.ragged else layout.vector
        # A ragged row touches up to one vector more than it has.
        columns = (vectors - 2) * whole + 2 if layout.ragged else vectors * layout.vector
        return Room(step, whole, columns, layout.ragged, layout.nested, shortest)

    @property
    def feasible(self) -> bool:
        return self.longest >= max(self.step, self.shortest)


@st.composite
def shapes(draw: Any, room: Room, most: int = 4000, least_dims: int = 0) -> tuple[int, ...]:
    longest = min(room.longest, most) // room.step
    shortest = -(-room.shortest // room.step)
    short = draw(st.booleans())
    count = draw(st.integers(shortest, min(longest, shortest + 12) if short else longest))
    count = longest if draw(st.integers(0, 5)) == 5 else count
    columns = count * room.step
    if room.step < room.whole and columns % (2 * room.step) == 0 and not room.ragged:
        columns -= room.step
    if room.ragged and columns % room.whole == 0:
        columns += 1 if columns < room.longest else -1
    few = max(2, min(40, 6000 // columns))
    if room.nested:
        return draw(st.integers(2, 3)), draw(st.integers(2, max(2, few // 3))), columns
    dims = draw(st.integers(least_dims, 2))
    leading = [draw(st.integers(1, few)) for _ in range(dims)]
    if dims == 2:
        leading[0] = min(leading[0], 3)
        leading[1] = max(1, leading[1] // 3)
    return (*leading, columns)


@st.composite
def places(
    draw: Any, view: View, vector: int, nested: bool, expandable: bool = False, odd: bool = False
) -> Place:
    """For rows that the same accesses fit as those of `view`; `odd`: not as new tensors lie."""
    size = view.dtype.itemsize
    unit = max(1, view.access // size)
    natural = math.gcd(16, vector * size) // size
    first = unit * draw(st.integers(0, 9))
    if unit < natural or odd:
        first = unit * (2 * draw(st.integers(0, 4)) + 1)
    gap = unit * draw(st.integers(0, 5))
    outer = unit * draw(st.integers(1, 4)) if nested else 0
    expanded = expandable and not nested and draw(st.integers(0, 6)) == 6
    return Place(first, gap, outer, expanded)


def expect_prepared(programs: Sequence[Program], prepared: Sequence[Program]) -> None:
    """Else a run would wait for g++ in every example."""
    known = {(one.source, name) for one in prepared for name in one.names}
    for one in programs:
        for name in one.names:
            assert (one.source, name) in known, f"another instantiation than was asked for: {name}"


@dataclass(frozen=True)
class Known:
    """What a case asks of its variant, once and for all its calls."""

    variant: Variant
    problem: Problem
    config: RowConfig
    programs: tuple[Program, ...]

    @property
    def layout(self) -> Layout:
        found: Layout = self.problem.layout.layout
        return found

    @property
    def threads(self) -> int:
        return self.config.threads * self.config.cluster

    def room(self, items: int | None = None, shortest: int = 1) -> Room:
        """`items`: of a thread, where that is not what the kernel was compiled for."""
        config = self.config if items is None else replace(self.config, items=items)
        longest = self.variant.longest(self.problem)  # type: ignore[attr-defined]
        return Room.of(self.problem, config, self.variant.name == "cuda_warp", longest, shortest)


@functools.cache
def known(case: Any) -> Known:
    variant, problem = case.find_variant(), case.problem(case.arguments())
    config = case.config or variant.config(problem)
    return Known(variant, problem, config, variant.programs(problem, config))


def affordable(cases: Iterable[Any], columns: int = 5100, rows: int = 1000) -> list[Any]:
    """Those of other tests whose teams are not too large to be emulated a thousand times."""
    return [
        case
        for case in cases
        if case.shape[-1] <= columns
        and case.shape[0] < rows
        and case.supported()
        and known(case).threads <= MOST_THREADS
    ]


def one_of_each(cases: Iterable[Any]) -> list[Any]:
    """For the short run: every scope with every way for rows to come."""
    found: dict[Any, Any] = {}
    for case in cases:
        feed = None if case.config is None else min(case.config.feed, 2)
        found.setdefault((case.op, case.variant, feed), case)
    return list(found.values())
