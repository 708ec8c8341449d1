"""The kernels that round to FP8 and NVFP4 on calls that nobody thought of, run on the CPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import exact
import exact_fp8
import pytest
import test_emulated_norm_fp8 as norms
import test_emulated_quantize_tokens as tokens
import torch
from emulated_host import EmulatedHost
from fuzz_emulated import (
    DENSE,
    NORMAL,
    ORDERS,
    Guards,
    Numbers,
    Place,
    affordable,
    bits,
    doubles,
    examples,
    expect_prepared,
    given,
    known,
    numbers,
    one_of_each,
    placed,
    places,
    same_bits,
    shapes,
    st,
)

from gristmill.ops.nvfp4_linear.quantizers import KINDS, TYPES, quantizer_program
from gristmill.ops.registry import OPS

SAFE = 2.0**100  # sums of squares up to here are far from fp32's largest number
PLAIN = ("zero", "-zero", "least", "normal")
Case = norms.Case


def _feasible(case: Case) -> bool:
    return known(case).room().feasible


@functools.cache
def cases_of(short: bool) -> list[Case]:
    """Instantiations that are compiled for other tests, too."""
    found = affordable(one_of_each(norms.CASES) if short else norms.CASES)
    return [case for case in found if _feasible(case)]


@dataclass(frozen=True)
class Call:
    """A case with other rows, and another scale if it is given."""

    case: Case
    shape: tuple[int, ...]
    x: Numbers = NORMAL
    residual: Numbers = NORMAL
    weight: Numbers = NORMAL
    x_place: Place = DENSE
    residual_place: Place = DENSE
    scale: float = 0.01
    resident: int = 1
    order: int = 0

    def arguments(self) -> tuple[Any, ...]:
        case, columns = self.case, self.shape[-1:]
        x_dtype, other_dtype, weight_dtype = case.dtypes
        assert x_dtype is not None
        assert other_dtype is not None
        rows = [placed(self.x.tensor(self.shape, x_dtype), self.x_place)]
        if case.added:
            residual = self.residual.tensor(self.shape, other_dtype)
            rows.append(placed(residual, self.residual_place))
        weight = bias = None
        if weight_dtype is not None:
            weight = placed(self.weight.tensor(columns, weight_dtype), DENSE)
        if case.bias:
            bias = placed(replace(self.weight, seed=8).tensor(columns, other_dtype), DENSE)
        scale = None if case.scale is None else placed(torch.tensor([self.scale]), DENSE)
        options = (case.eps, case.weight_offset)
        if case.centered:
            return (*rows, weight, bias, scale, *options, case.amax)
        return (*rows, weight, scale, *options, case.casting, case.amax)


@st.composite
def calls(draw: Any, short: bool) -> Call:
    case = draw(st.sampled_from(cases_of(short)))
    facts = known(case)
    layout, room = facts.layout, facts.room()
    residual = DENSE
    if layout.views[1] is not None:
        residual = draw(places(layout.views[1], layout.vector, room.nested))
    return Call(
        case,
        draw(shapes(room)),
        draw(numbers(sizes=(0, -6, 5, 12))),
        draw(numbers(sizes=(0, -6, 5))),
        draw(numbers(kinds=PLAIN, sizes=(0,))),
        draw(places(layout.views[0], layout.vector, room.nested)),
        residual,
        draw(st.sampled_from([0.01, 1.0, 1e-6, 1e5, 2.0**-126])),
        draw(st.sampled_from([1, 2])),
        draw(ORDERS),
    )


def run(host: EmulatedHost, call: Call, order: int) -> tuple[torch.Tensor, ...]:
    args = call.arguments()
    guards = Guards(args)
    problem = call.case.problem(args)
    facts = known(call.case)
    expect_prepared(facts.variant.programs(problem, facts.config), facts.programs)
    host.resident = call.resident
    run = host.run(facts.variant, problem, facts.config, args, order=order)
    guards.check()
    outputs: tuple[torch.Tensor, ...] = run.outputs
    return outputs


def check(host: EmulatedHost, call: Call) -> None:
    outputs = run(host, call, 0)
    if call.order:
        assert same_bits(outputs, run(host, call, call.order))
    case, args = call.case, call.arguments()
    h = args[0]
    y, *total, scales, largest = outputs
    if case.added:
        dtype = torch.promote_types(h.dtype, args[1].dtype)
        h = (h.float() + args[1].float()).to(dtype)
        torch.testing.assert_close(total[0], h, rtol=0, atol=0, equal_nan=True)
    weight, bias = args[1 + case.added], args[2 + case.added] if case.centered else None
    z = norms._norm(case, args)
    name = "layer_norm" if case.centered else "rms_norm"
    given_ = (weight, bias) if case.centered else (weight,)
    end = (None,) if case.centered else ("once", None)
    truth = OPS[name].reference(*doubles((h, *given_)), case.eps, case.weight_offset, *end)
    doubtful = (h.double().square().sum(-1) > SAFE) & h.isfinite().all(-1)
    sound = truth.isfinite().all(-1) & ~doubtful
    ours = y.double()
    scale = case.scale_of(args)
    nan = truth.isnan()
    if scale is None:
        nan = nan.any(-1, keepdim=True).expand(nan.shape)
        assert scales.squeeze(-1)[~doubtful].isnan().equal(nan[..., 0][~doubtful])
    assert ours.isnan()[~doubtful].equal(nan[~doubtful])
    if sound.any():
        clean = exact.Range(z.low[sound], z.high[sound])
        allowed, allowed_scale, _ = exact_fp8.quantised(clean, scale)
        found = ours[sound]
        assert ((allowed.low <= found) & (found <= allowed.high)).all()
        if scale is None:
            allowed_scale.check(scales[sound], "scale")
    if case.amax and truth.isnan().any():
        assert largest.isnan()
    elif case.amax and sound.all():
        exact_fp8.quantised(z, scale)[2].check(largest, "amax")


@st.composite
def matrices(draw: Any) -> tuple[str, torch.dtype, tuple[int, int], Numbers, Place, int]:
    """To be rounded: rows are at multiples of 16 bytes, and so long."""
    kind, dtype = draw(st.sampled_from(KINDS)), draw(st.sampled_from(list(TYPES)))
    columns = 16 * draw(st.one_of(st.integers(1, 12), st.integers(1, 300)))
    rows = draw(st.integers(1, max(2, min(140, 4000 // columns))))
    unit = 16 // dtype.itemsize
    place = Place(unit * draw(st.integers(0, 3)), unit * draw(st.integers(0, 3)))
    sizes = (0, -6, 12, -14)
    return kind, dtype, (rows, columns), draw(numbers(sizes=sizes)), place, draw(ORDERS)


def check_rounding(
    host: EmulatedHost,
    kind: str,
    dtype: torch.dtype,
    shape: tuple[int, int],
    values: Numbers,
    place: Place,
    order: int,
) -> None:
    """Bit by bit as in torch; what is not finite spoils its row and no other."""
    x = placed(values.tensor(shape, dtype), place)
    guards = Guards((x,))
    found = tokens._quantize(host, kind, x, order).outputs
    guards.check()
    wrong = ~x.isfinite().all(-1)
    clean = x.masked_fill(wrong.unsqueeze(-1), 0.0)
    expected = tokens.TORCH[kind](clean)
    for name, one, other in zip(found._fields, found, expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), name
        if name == "scales":
            rows, blocks = shape[0], shape[1] // 16
            one = tokens.tiles.unswizzle(one, rows, blocks)
            other = tokens.tiles.unswizzle(other, rows, blocks)
        assert torch.equal(bits(one[~wrong]), bits(other[~wrong])), name
    assert not found.scale[wrong].isfinite().any()


@pytest.fixture(autouse=True)
def _built(host: EmulatedHost, request: pytest.FixtureRequest) -> None:
    cases = cases_of(request.node.get_closest_marker("long") is None)
    programs = [program for case in cases for program in known(case).programs]
    rounding = [quantizer_program(kind, dtype) for kind in KINDS for dtype in TYPES]
    host.build([*programs, *rounding])


@examples(80)
@given(call=calls(short=True))
def test_any_norm(host: EmulatedHost, call: Call) -> None:
    check(host, call)


@examples(60)
@given(call=matrices())
def test_any_rounding(host: EmulatedHost, call: Any) -> None:
    check_rounding(host, *call)


@pytest.mark.long
@examples(2000)
@given(call=calls(short=False))
def test_many_norms(host: EmulatedHost, call: Call) -> None:
    check(host, call)


@pytest.mark.long
@examples(1500)
@given(call=matrices())
def test_many_roundings(host: EmulatedHost, call: Any) -> None:
    check_rounding(host, *call)
