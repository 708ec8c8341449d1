"""The softmax kernels on calls that nobody thought of, run on the CPU."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import softmax_cases
import torch
from emulated_host import EmulatedHost
from exact import UNIT, Range
from fuzz_emulated import (
    DENSE,
    NORMAL,
    ORDERS,
    Guards,
    Numbers,
    Place,
    Room,
    affordable,
    doubles,
    examples,
    expect_prepared,
    given,
    judge,
    known,
    numbers,
    one_of_each,
    placed,
    places,
    same_bits,
    shapes,
    st,
)
from softmax_cases import BACKWARD, Case

from gristmill.ops.softmax.semantics import BOTTOM_RIGHT, EVERYTHING

NONE = -math.inf
ROUNDINGS = 8.0  # as in test_emulated_softmax
SAFE = 2.0**125  # far from fp32's largest number
LEAST = 2.0**-120  # near its smallest
MASK_KINDS = ("whole", "columns", "rows", "outer", "inner")


def _room(case: Case) -> Room:
    return known(case).room()


@functools.cache
def cases_of(op: str, short: bool) -> list[Case]:
    """Instantiations that are compiled for other tests, too."""
    every = (*softmax_cases.sweep(), *softmax_cases.configurations())
    own = [case for case in every if case.op == op and case.shape[-1] <= 5100]
    found = affordable(one_of_each(own) if short else own)
    return [case for case in found if _room(case).feasible]


@dataclass(frozen=True)
class Call:
    """A case with other rows, another mask and another scale. `other`: of dy, or of the mask."""

    case: Case
    shape: tuple[int, ...]
    scale: float = 1.0
    x: Numbers = NORMAL
    other: Numbers = NORMAL
    x_place: Place = DENSE
    other_place: Place = DENSE
    mask: str = "whole"
    kept: float = 0.7
    resident: int = 1
    order: int = 0

    @property
    def backward(self) -> bool:
        return self.case.op in BACKWARD

    @property
    def log(self) -> bool:
        return self.case.op.startswith("log")

    def arguments(self) -> tuple[Any, ...]:
        values = self.x.tensor(self.shape, self.case.dtypes[0])
        if not self.backward:
            return placed(values, self.x_place), self.case.code, self.scale, self._mask()
        values = -values.abs() if self.log else values
        dy = self.other.tensor(self.shape, self.case.dtypes[1])
        y = placed(values, self.x_place)
        return placed(dy, self.other_place), y, self.case.code, self.scale

    def _mask(self) -> torch.Tensor | None:
        if self.case.mask is None:
            return None
        *leading, columns = self.shape
        ones = [1] * len(leading)
        shape = {
            "whole": leading,
            "columns": [],
            "rows": leading[-1:],
            "outer": [*leading[:1], *ones[1:]],
            "inner": leading[1:],
        }[self.mask] + [columns]
        dtype = self.case.mask[1]
        generator = torch.Generator().manual_seed(self.other.seed)
        keep = torch.rand(shape, generator=generator) < self.kept
        if dtype == torch.bool:
            return placed(keep, self.other_place)
        return placed(self.other.tensor(shape, dtype).masked_fill(~keep, NONE), self.other_place)


@st.composite
def calls(draw: Any, op: str, short: bool) -> Call:
    case = draw(st.sampled_from(cases_of(op, short)))
    layout = known(case).layout
    room = _room(case)
    shape = draw(shapes(room, least_dims=1 if case.causal else 0))
    odd = not room.ragged and room.step < room.whole
    x_place = draw(places(layout.views[0], layout.vector, room.nested, odd=odd))
    other_place = Place()
    if case.op in BACKWARD:
        expandable = not room.ragged
        other_place = draw(places(layout.views[1], layout.vector, room.nested, expandable, odd))
    elif case.mask is not None:
        unit = 1 if room.ragged else math.gcd(16 // case.mask[1].itemsize, layout.vector)
        many = st.integers(0, 5)
        other_place = Place(unit * draw(many), unit * draw(many), unit * draw(many))
    scales = [1.0, 0.125, 3.0, 1e-3, -0.7, 0.0, -2.0]
    if case.op not in BACKWARD and case.mask is None:
        scales = scales[:4] if case.scale > 0 else scales[4:]
    return Call(
        case,
        shape,
        draw(st.sampled_from(scales)),
        draw(numbers(sizes=(0, 1, 5, -6, 12))),
        draw(numbers(sizes=(0, 1, 5))),
        x_place,
        other_place,
        draw(st.sampled_from(MASK_KINDS)),
        draw(st.sampled_from([0.0, 0.05, 0.7, 1.0])),
        draw(st.sampled_from([1, 1, 2])),
        draw(ORDERS),
    )


def run(host: EmulatedHost, call: Call, order: int) -> torch.Tensor:
    args = call.arguments()
    guards = Guards(args)
    problem = call.case.problem(args)
    facts = known(call.case)
    variant, config = facts.variant, facts.config
    expect_prepared(variant.programs(problem, config), facts.programs)
    host.resident = call.resident
    outputs: torch.Tensor = host.run(variant, problem, config, args, order=order).outputs
    guards.check()
    return outputs


def check(host: EmulatedHost, call: Call) -> None:
    result = run(host, call, 0)
    if call.order:
        assert same_bits([result], [run(host, call, call.order)])
    (_check_backward if call.backward else _check_forward)(call, call.arguments(), result)


def _hidden(shape: tuple[int, ...], causal: int) -> torch.Tensor:
    if causal == EVERYTHING:
        return torch.zeros(shape, dtype=torch.bool)
    queries, keys = shape[-2:]
    seen = torch.ones(queries, keys, dtype=torch.bool)
    return (~seen.tril(keys - queries if causal == BOTTOM_RIGHT else 0)).expand(shape)


def _check_forward(call: Call, args: tuple[Any, ...], y: torch.Tensor) -> None:
    x, causal, scale, mask = args
    plain = mask is None and scale > 0
    v, added = x.double() * scale, 0.0
    if mask is not None and mask.dtype != torch.bool:
        added = mask.double()
    size = (v.abs() + abs(added)) * (not plain)
    v = v + added
    out = _hidden(x.shape, causal)
    if mask is not None and mask.dtype == torch.bool:
        out = out | ~mask
    v = v.masked_fill(out, NONE)
    size = size.masked_fill(out | (v == NONE), 0.0)
    nobody = (v == NONE).all(-1, keepdim=True)
    largest = v.amax(-1, keepdim=True).masked_fill(nobody, 0.0)
    distance = (largest - v).masked_fill(v == NONE, 0.0)
    off = 2 * (distance + size + size.amax(-1, keepdim=True))
    terms = (v - largest).exp()
    total = terms.sum(-1, keepdim=True)
    truth = call.case.own.reference(*doubles(args))
    doubtful = (size.isfinite() & (size > SAFE)).any(-1, keepdim=True).expand(v.shape)
    if not call.log:
        p = (terms / total).masked_fill(nobody, 0.0)
        error = p * (ROUNDINGS + off) * UNIT
        judge(Range(p - error, p + error), y, truth, "y", doubtful)
        return
    logs = v - largest - total.log()
    error = (ROUNDINGS + off + total.log().abs()).masked_fill(v == NONE, 0.0) * UNIT
    # Distances beyond fp32 are infinite before they are scaled.
    doubtful = doubtful | (distance > SAFE) | (distance / max(abs(scale), 1e-9) > SAFE)
    judge(Range(logs - error, logs + error), y, truth, "y", doubtful)


def _check_backward(call: Call, args: tuple[Any, ...], dx: torch.Tensor) -> None:
    dy, y, causal, scale = args
    hidden = _hidden(y.shape, causal)
    d, p = dy.double().masked_fill(hidden, 0.0), y.double()
    truth = call.case.own.reference(*doubles(args)).masked_fill(hidden, 0.0)
    if not call.log:
        p = p.masked_fill(hidden, 0.0)
        products = d * p
        expected = scale * p * (d - products.sum(-1, keepdim=True))
        largest = products.abs().sum(-1, keepdim=True)
        size = p.abs() * (d.abs() + largest)
        faint = p.abs().masked_fill(p == 0, 1.0) < LEAST
        size = size * abs(scale)
    else:
        none = (p == NONE) | hidden
        d, p = d.masked_fill(none, 0.0), p.masked_fill(none, 0.0)
        total = d.sum(-1, keepdim=True)
        expected = scale * (d - p.exp() * total).masked_fill(none, 0.0)
        largest = d.abs().sum(-1, keepdim=True)
        size = d.abs() + p.exp() * (1 + p.abs()) * largest
        faint = p.exp() < LEAST
        size = abs(scale) * size.masked_fill(none, 0.0)
    # Of what is infinite a number that fp32 rounds to 0 leaves nothing.
    doubtful = (d.abs() + largest > SAFE) & largest.isfinite() | (size > SAFE) & size.isfinite()
    doubtful = (doubtful | (faint & largest.isinf())) & ~hidden
    expected = expected.masked_fill(hidden, 0.0)
    error = (size * ROUNDINGS * UNIT).masked_fill(hidden, 0.0)
    judge(Range(expected - error, expected + error), dx, truth, "dx", doubtful, either=True)


@pytest.fixture(autouse=True)
def _built(host: EmulatedHost, request: pytest.FixtureRequest) -> None:
    short = request.node.get_closest_marker("long") is None
    cases = cases_of(request.node.callspec.params["op"], short)
    host.build([program for case in cases for program in known(case).programs])


over_ops = pytest.mark.parametrize("op", tuple(softmax_cases.OPS))


@over_ops
@examples(28)
@given(data=st.data())
def test_any_call(host: EmulatedHost, op: str, data: Any) -> None:
    check(host, data.draw(calls(op, short=True)))


@pytest.mark.long
@over_ops
@examples(1000)
@given(data=st.data())
def test_many_calls(host: EmulatedHost, op: str, data: Any) -> None:
    check(host, data.draw(calls(op, short=False)))
