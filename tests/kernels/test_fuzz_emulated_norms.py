"""The norms' kernels on calls that nobody thought of, run on the CPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import exact
import layer_norm_cases
import pytest
import rms_norm_cases
import torch
from emulated_host import EmulatedHost
from fuzz_emulated import (
    DENSE,
    LEAST,
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

from gristmill.ops.registry import OPS
from gristmill.ops.rows.config import RowConfig

Case = rms_norm_cases.Case
F32 = torch.float32
# As in test_emulated_rms_norm and test_emulated_layer_norm.
ROUNDINGS, BACKWARD_ROUNDINGS = 4.0, 5.0
# What those of the forward stand for: a sum over a row is off by two. Its mean is off by one more,
# and so is eps added to it. A root halves that, and is rounded; so is the product with it.
SUM = 2.0
# Sums of squares up to here are far from fp32's largest number, those beyond there are infinite.
SAFE, OVER = 2.0**125, 2.0**129


def _room(case: Case) -> Room:
    return known(case).room()


@functools.cache
def cases_of(op: str, short: bool) -> list[Case]:
    """Instantiations that are compiled for other tests, too."""
    every = (
        *rms_norm_cases.sweep(),
        *rms_norm_cases.configurations(),
        *layer_norm_cases.sweep(),
        *layer_norm_cases.configurations(),
    )
    own = [case for case in every if case.op == op and case.shape[-1] <= 5100]
    found = affordable(one_of_each(own) if short else own)
    return [case for case in found if _room(case).feasible]


@dataclass(frozen=True)
class Call:
    """A case with other rows. `others`: of the residual, or of dy and dsum."""

    case: Case
    shape: tuple[int, ...]
    x: Numbers = NORMAL
    other: Numbers = NORMAL
    weight: Numbers = NORMAL
    bias: Numbers = NORMAL
    x_place: Place = DENSE
    other_place: Place = DENSE
    weight_place: Place = DENSE
    eps: float = 1e-5
    offset: float = 0.0
    resident: int = 1
    order: int = 0

    @property
    def op(self) -> str:
        return self.case.op

    @property
    def centered(self) -> bool:
        return "layer" in self.op

    @property
    def backward(self) -> bool:
        return self.op.endswith("backward")

    def arguments(self) -> tuple[Any, ...]:
        case, columns = self.case, self.shape[-1:]
        x_dtype, other_dtype, weight_dtype, out = case.dtypes
        assert x_dtype is not None
        assert other_dtype is not None
        x = placed(self.x.tensor(self.shape, x_dtype), self.x_place)
        other = placed(self.other.tensor(self.shape, other_dtype), self.other_place)
        weight = None
        if weight_dtype is not None:
            weight = placed(self.weight.tensor(columns, weight_dtype), self.weight_place)
        options = (self.eps, self.offset)
        if self.op == "fused_add_rms_norm_":
            return x, other, weight, self.eps
        dsum = None
        if self.backward and case.dsum:
            dsum = placed(replace(self.other, seed=77).tensor(self.shape, x_dtype), Place())
        if not self.centered:
            if self.backward:
                return other, x, weight, dsum, *options, case.weight_grad
            rows = (x,) if self.op == "rms_norm" else (x, other)
            return *rows, weight, *options, case.casting, out
        assert isinstance(case, layer_norm_cases.Case)
        if self.backward:
            return other, x, weight, dsum, *options, case.weight_grad, case.bias
        bias = None
        if case.bias is not None:
            bias = placed(self.bias.tensor(columns, case.bias), Place())
        rows = (x,) if self.op == "layer_norm" else (x, other)
        return *rows, weight, bias, *options, out


@st.composite
def calls(draw: Any, op: str, short: bool) -> Call:
    case = draw(st.sampled_from(cases_of(op, short)))
    layout = known(case).layout
    room = _room(case)
    shape = draw(shapes(room))
    in_place = case.op.endswith("_")
    beside = draw(places(layout.views[0], layout.vector, room.nested))
    other = Place()
    if layout.views[1] is not None:
        expandable = not in_place and case.op.endswith("backward")
        other = draw(places(layout.views[1], layout.vector, room.nested, expandable))
    weight = Place(layout.vector * draw(st.integers(0, 3)))
    if case.dtypes[2] is not None:
        weight = replace(weight, first=weight.first * (16 // case.dtypes[2].itemsize))
    return Call(
        case,
        shape,
        draw(numbers(sizes=(0, 0, -6, 5, 12, -14))),
        draw(numbers(sizes=(0, 0, -6, 5))),
        draw(numbers(sizes=(0,))),
        draw(numbers(sizes=(0,))),
        beside,
        other,
        weight,
        draw(st.sampled_from([1e-6, 1e-5, 0.1, 0.0])),
        draw(st.sampled_from([0.0, 1.0])),
        draw(st.sampled_from([1, 1, 2])),
        draw(ORDERS),
    )


def run(host: EmulatedHost, call: Call, order: int) -> tuple[Any, tuple[torch.Tensor, ...]]:
    args = call.arguments()
    written = (0, 1) if call.op == "fused_add_rms_norm_" else ()
    guards = Guards(args, written)
    problem = call.case.problem(args)
    facts = known(call.case)
    variant, config = facts.variant, facts.config
    expect_prepared(variant.programs(problem, config), facts.programs)
    host.resident = call.resident
    outputs = host.run(variant, problem, config, args, written=written, order=order).outputs
    guards.check()
    if written:
        return args, (args[0], args[1])
    return args, outputs if isinstance(outputs, tuple) else (outputs,)


def check(host: EmulatedHost, call: Call) -> None:
    _, outputs = run(host, call, 0)
    if call.order:
        assert same_bits(outputs, run(host, call, call.order)[1])
    (_check_backward if call.backward else _check_forward)(call, call.arguments(), outputs)


def _doubtful(h: torch.Tensor, centered: bool, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows whose sums fp32 may not hold, and those whose sums of squares it surely does not.

    Without an eps also those whose squares are too small for it, or nothing beside their mean.
    """
    wide, spread = h.double(), h.double()
    if centered:
        mean = wide.mean(-1, keepdim=True)
        wide, spread = wide.abs() + mean.abs(), wide - mean
    total = wide.square().sum(-1, keepdim=True)
    finite = wide.isfinite().all(-1, keepdim=True)
    doubtful = total > SAFE
    if eps == 0.0:
        small = spread.square().sum(-1, keepdim=True)
        doubtful = doubtful | ((small < 2.0**-100) & (centered | (small > 0.0)))
        doubtful = doubtful | (centered & (small < total * 2.0**-30))
    return finite & doubtful, finite & (total > OVER)


def _doubtful_slopes(args: tuple[Any, ...], centered: bool) -> torch.Tensor:
    """Rows whose products fp32 may not hold, in whatever order a kernel multiplies."""
    dy, x, weight, dsum, eps, offset, *_ = args
    # Of what is finite: the rest is known to be NaN, or infinite.
    wide = x.double().nan_to_num(1.0, 1.0, 1.0)
    h = wide - (wide.mean(-1, keepdim=True) if centered else 0.0)
    inverse = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps).clamp(min=1.0)
    g = dy.double().nan_to_num(1.0, 1.0, 1.0).abs()
    if weight is not None:
        g = g * ((weight.double() + offset).abs() + 1.0).nan_to_num(1.0, 1.0, 1.0)
    largest = (
        inverse**3
        * (h.abs().amax(-1, keepdim=True) + 1.0)
        * (g * (h.abs() + 1.0)).sum(-1, keepdim=True)
    )
    if dsum is not None:
        largest = largest + dsum.double().nan_to_num(1.0, 1.0, 1.0).abs().amax(-1, keepdim=True)
    return largest > SAFE


def _check_forward(call: Call, args: tuple[Any, ...], outputs: tuple[torch.Tensor, ...]) -> None:
    case, x = call.case, args[0]
    added = call.op not in ("rms_norm", "layer_norm")
    weight = args[2 if added else 1]
    offset = 0.0 if call.op.endswith("_") else call.offset
    h, narrow = x, x.dtype
    if added:
        narrow = torch.promote_types(x.dtype, args[1].dtype)
        h = x.float() + args[1].float()
        total = h.to(args[1].dtype if call.op.endswith("_") else narrow)
        torch.testing.assert_close(outputs[1], total, rtol=0, atol=0, equal_nan=True)
        h = h if call.op.endswith("_") else total
    if call.centered:
        bias = args[3 if added else 2]
        allowed = exact.layer_norm(h, weight, bias, call.eps, call.offset, roundings=ROUNDINGS)
    else:
        normalised = product = F32
        if call.op.endswith("_"):
            normalised = product = F32 if weight is None else weight.dtype
        elif case.casting == "llama":
            normalised = narrow
            product = narrow if weight is None else torch.promote_types(narrow, weight.dtype)
        allowed = exact.forward(
            h,
            weight,
            call.eps,
            offset,
            normalised=normalised,
            product=product,
            roundings=ROUNDINGS,
        )
    doubtful, over = _doubtful(h, call.centered, call.eps)
    if call.centered:
        truth = OPS["layer_norm"].reference(*doubles((h, weight, bias)), call.eps, offset, None)
    else:
        truth = OPS["rms_norm"].reference(*doubles((h, weight)), call.eps, offset, "once", None)
    # What is exactly 0 in fp64, or nearly, is times infinity NaN, or infinite.
    either = weight is not None and not bool(weight.isfinite().all())
    judge(allowed, outputs[0], truth, "y", doubtful, either)
    if not call.centered and (weight is None or weight.isfinite().all()):
        assert (outputs[0][over.squeeze(-1)] == 0).all()


def _from_center(call: Call, x: torch.Tensor) -> torch.Tensor:
    """How far from a row's mean a kernel takes the distances that it adds up.

    Less than four lanes start from the mean of their first values, which may be any; more of them
    leave out what is far off (`Start` in norm.cuh).
    """
    facts = known(call.case)
    lanes = facts.config.lanes if facts.variant.name == "cuda_warp" else 32
    if not call.centered or lanes >= 4:
        return torch.zeros(())
    firsts = x.double()[..., : lanes * facts.layout.vector : facts.layout.vector]
    return (firsts.mean(-1, keepdim=True) - x.double().mean(-1, keepdim=True)).abs()


def _size(values: torch.Tensor) -> torch.Tensor:
    """Of what is rounded: below fp32's normal numbers roundings become no finer."""
    return values.abs() + LEAST


def _exact_dx(call: Call, args: tuple[Any, ...]) -> exact.Range:
    """dx, and what the kernel's formula may lose: every rounding at the size of what it rounds.

    `exact.backward` has the same few roundings for each term. That is enough where the products of
    a row cancel, for its slope is small then. Where one of them is larger than all others nothing
    cancels, and dx is -rstd * h * slope in the other columns. That has nine roundings (g, two of a
    sum, 1 / N, times that, times rstd, h, fma, times rstd), and three times those of rstd.
    """
    dy, x, weight, dsum, eps, offset, *_ = args
    d, wide = dy.double(), x.double()
    center = _from_center(call, x)
    c, distance = wide, torch.zeros(())
    if call.centered:
        c = wide - wide.mean(-1, keepdim=True)
        distance = c.abs().mean(-1, keepdim=True)
    # A difference from the mean, which is off by a sum of distances from the center and two more.
    c_off = (c.abs() + (SUM + 2) * (distance + center)) * call.centered
    # Of the squares, what they exceed the variance by is taken away again.
    variance = c.square().mean(-1, keepdim=True)
    variance_off = SUM * (variance + center**2) + (2 * SUM * (distance + center) + center) * center
    argument = variance + exact._fp32(eps)
    rstd = torch.rsqrt(argument)
    rstd_off = 1 + (variance_off / argument + 2) / 2  # of its size; an _off below is without it
    g, g_off = d, torch.zeros_like(d)
    if weight is not None:
        g = d * (weight.double() + offset)
        g_off = _size(g) * (2 if offset else 1)
    # The sum of the products; then 1 / N, the product with it, and with rstd.
    product = (g * c).mean(-1, keepdim=True)
    terms_off = g.abs() * c_off + g_off * c.abs()
    terms_off = terms_off + SUM * _size(g * (c.abs() + distance + 2 * center))
    slope = product * rstd
    slope_off = rstd * (terms_off.mean(-1, keepdim=True) + 2 * _size(product)) + _size(slope)
    h = c * rstd
    h_off = c_off * rstd + _size(h)
    if call.centered:
        mean = g.mean(-1, keepdim=True)
        mean_off = (g_off + SUM * _size(g)).mean(-1, keepdim=True) + 2 * _size(mean)
        g = g - mean
        g_off = g_off + mean_off + _size(g)
    # dx = rstd * fma(-h, slope, g): rstd is a factor of g, and three times one of the other term.
    value = g - h * slope
    off = g_off + h.abs() * slope_off + h_off * slope.abs() + 2 * _size(value)
    off = rstd * (off + rstd_off * (g - 3 * h * slope).abs())
    dx = rstd * value
    if dsum is not None:
        dx = dx + dsum.double()
        off = off + dx.abs()
    return exact.Range(dx, dx).widened(off * exact.UNIT)


def _check_backward(call: Call, args: tuple[Any, ...], outputs: tuple[torch.Tensor, ...]) -> None:
    case = call.case
    dy, x, weight, dsum = args[:4]
    exactly = exact.layer_norm_backward if call.centered else exact.backward
    roundings = BACKWARD_ROUNDINGS if call.centered else ROUNDINGS
    tensors = (dy, x, weight, dsum, call.eps, call.offset)
    doubtful = _doubtful(x, call.centered, call.eps)[0] | _doubtful_slopes(args, call.centered)
    truth = OPS[call.op].reference(*doubles(args))
    judge(_exact_dx(call, args), outputs[0], truth[0], "dx", doubtful, either=True)
    if doubtful.any():
        return
    # Rows of any sizes are added one after another: each sum is rounded.
    allowed = exactly(*tensors, roundings=roundings + x[..., 0].numel())
    if weight is None or not case.weight_grad:
        assert outputs[1].numel() == 0
    else:
        judge(allowed[1], outputs[1], truth[1], "dweight", either=True)
    if call.centered and args[-1] is not None:
        judge(allowed[2], outputs[2], truth[2], "dbias", either=True)


@pytest.fixture(autouse=True)
def _built(host: EmulatedHost, request: pytest.FixtureRequest) -> None:
    short = request.node.get_closest_marker("long") is None
    cases = cases_of(request.node.callspec.params["op"], short)
    host.build([program for case in cases for program in known(case).programs])


WIDE = (F32, F32, torch.bfloat16, None)
ONE_LANE, TWO_LANES = RowConfig(64, 16, lanes=1), RowConfig(64, 8, lanes=2)
ROUNDED = {
    "one product of a row is larger than all others": Call(
        Case("rms_norm_backward", "cuda_warp", (203, 64), WIDE, dsum=True, config=ONE_LANE),
        (8, 4),
        Numbers(53193),
        Numbers(149),
        Numbers(specials=((0, 0, "largest"),)),
        eps=1e-6,
    ),
    "the first number of a row is far from its mean": Call(
        layer_norm_cases.Case(
            "layer_norm_backward", "cuda_warp", (203, 64), WIDE, dsum=True, config=ONE_LANE
        ),
        (36, 64),
        weight=Numbers(6),
        eps=1e-6,
    ),
    "products below fp32 times a large rstd": Call(
        Case("rms_norm_backward", "cuda_warp", (203, 64), WIDE, dsum=True, config=TWO_LANES),
        (11, 36),
        Numbers(4602, -6, 12),
        Numbers(1 << 20, -6, 3, ((10, None, "normal"),)),
        Numbers(27191, 0, 3),
        eps=0.0,
        offset=1.0,
    ),
}


@pytest.mark.parametrize(("op", "name"), [(call.op, name) for name, call in ROUNDED.items()])
def test_roundings_of_dx(host: EmulatedHost, op: str, name: str) -> None:
    """Calls that `exact.backward` and `exact.layer_norm_backward` allow too little."""
    check(host, ROUNDED[name])


NAMES = [*rms_norm_cases.FORWARD_OPS, "rms_norm_backward", *layer_norm_cases.OPS_OF_ROWS]
over_ops = pytest.mark.parametrize("op", NAMES)


@over_ops
@examples(24)
@given(data=st.data())
def test_any_call(host: EmulatedHost, op: str, data: Any) -> None:
    check(host, data.draw(calls(op, short=True)))


@pytest.mark.long
@over_ops
@examples(600)
@given(data=st.data())
def test_many_calls(host: EmulatedHost, op: str, data: Any) -> None:
    check(host, data.draw(calls(op, short=False)))
