"""The cross entropy kernels on calls that nobody thought of, run on the CPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import cross_entropy_cases
import cross_entropy_exact as exact
import pytest
import torch
from cross_entropy_cases import OPS, Case
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

from gristmill.ops.cross_entropy.problem import SHORTEST_RAGGED

ROUNDINGS = 4.0  # as in test_emulated_cross_entropy
SAFE = 2.0**120  # logits up to here stay within fp32 in whatever unit they are
KEPT = ("cross_entropy_one_pass", "cross_entropy_one_pass_")  # the others' rows pass by
ALONE = ("cross_entropy", "cross_entropy_shard", "cross_entropy_one_pass_", "scale_gradient_")
IN_PLACE = ("cross_entropy_one_pass_", "scale_gradient_")
# None: the first number beyond the classes.
WRONG = (None, -1, 1 << 20, 2**31 - 1, -(2**31), 2**40 + 3, -(2**62))


def _room(case: Case) -> Room:
    facts = known(case)
    room = facts.room(None if case.op in KEPT else 1 << 20)
    if room.ragged:
        return replace(room, shortest=SHORTEST_RAGGED)
    narrow = any(view is not None and not view.bulk for view in facts.layout.views)
    if narrow and case.op in ALONE and not (case.weight is not None and case.smoothing):
        return replace(room, longest=min(room.longest, SHORTEST_RAGGED - 1))
    return room


@functools.cache
def cases_of(op: str, short: bool) -> list[Case]:
    """Instantiations that are compiled for other tests, too."""
    every = (*cross_entropy_cases.sweep(), *cross_entropy_cases.configurations())
    own = [case for case in every if case.op == op and case.shape[-1] <= 5100]
    found = affordable(one_of_each(own) if short else own)
    return [case for case in found if _room(case).feasible]


@dataclass(frozen=True)
class Call:
    """A case with other rows, targets and options; those that are in its kernel stay.

    `wrong`: rows and their targets, which are no class; `factor`: of gradients.
    """

    case: Case
    shape: tuple[int, ...]
    logits: Numbers = NORMAL
    place: Place = DENSE
    wide: bool = True
    wrong: tuple[tuple[int, int | None], ...] = ()
    ignored: float = 0.3
    ignore_index: int = -100
    weighted: bool = False
    weight: Numbers = NORMAL
    smoothing: float = 0.1
    z_loss: float = 0.0
    softcap: float = 3.0
    mean: bool = True
    return_lse: bool = False
    factor: Numbers = NORMAL
    order: int = 0

    @property
    def op(self) -> str:
        return self.case.op

    @property
    def _means_of_weights(self) -> bool:
        """There a target that is no class counts as one of weight 1, which the truth leaves out."""
        return self.case.reduction != "none" and self.mean and self._weighted

    @property
    def _weighted(self) -> bool:
        case = self.case
        return case.weight is not None or (
            self.weighted and not case.smoothing and case.shards == 1
        )

    def arguments(self) -> tuple[Any, ...]:
        case, leading, columns = self.case, self.shape[:-1], self.shape[-1]
        generator = torch.Generator().manual_seed(self.logits.seed + 1)
        logits = placed(self.logits.tensor(self.shape, case.dtype), self.place)
        if self.op == "scale_gradient_":
            shape = leading if case.per_row else ()
            factor = self.factor.tensor((*shape, 1), torch.float32).squeeze(-1)
            ones = torch.rand(shape, generator=generator) < 0.3
            factor = torch.where(ones, 1.0, factor)
            return logits, placed(factor, Place()) if factor.dim() else factor
        classes = columns * case.shards
        target = torch.randint(0, classes, leading, generator=generator)
        out = torch.rand(leading, generator=generator) < self.ignored
        target = torch.where(out, self.ignore_index, target)
        for row, value in self.wrong if not self._means_of_weights else ():
            target.view(-1)[row % target.numel()] = classes if value is None else value
        target = target.to(torch.int64 if self.wide else torch.int32)
        target = placed(target, Place()) if target.dim() else target
        softcap = None if case.softcap is None else self.softcap
        smoothing = self.smoothing if case.smoothing else 0.0
        first = columns if case.shards > 1 else 0
        if self.op == "cross_entropy_shard":
            return logits, target, first, classes, self.ignore_index, softcap, smoothing > 0
        weight = None
        if self._weighted:
            weight = self.weight.tensor((columns,), case.weight or torch.float32).abs()
            weight = placed(weight, Place())
        reduction = case.reduction
        if reduction != "none":
            reduction = "mean" if self.mean else "sum"
        options = (weight, self.ignore_index, smoothing, self.z_loss, softcap, reduction)
        if self.op != "cross_entropy_backward":
            return logits, target, *options, self.return_lse
        known = torch.where((target >= 0) & (target < columns), target.long(), 0)
        known = torch.where(target == self.ignore_index, target.long(), known)
        _, _, denominators, stats = OPS["cross_entropy"].reference(logits, known, *options, True)
        rows = leading if reduction == "none" else ()
        dloss = self.factor.tensor((*rows, 1), torch.float32).squeeze(-1)
        dlse = None
        if case.dlse:
            dlse = replace(self.factor, seed=9).tensor((*leading, 1), torch.float32).squeeze(-1)
        shard = (first, classes) if case.shards > 1 else (0, 0)
        return dloss, dlse, logits, target, stats, denominators, *options, *shard


@st.composite
def calls(draw: Any, op: str, short: bool) -> Call:
    case = draw(st.sampled_from(cases_of(op, short)))
    layout = known(case).layout
    room = _room(case)
    shape = draw(shapes(room))
    view = layout.views[0]
    if room.ragged and case.op in ALONE:
        view = replace(view, access=view.dtype.itemsize)
        place = draw(places(view, 1, room.nested))
    else:
        odd = not room.ragged and room.step < room.whole and case.op not in ALONE
        place = draw(places(view, layout.vector, room.nested, odd=odd))
    wide = draw(st.booleans())
    wrong = st.sampled_from(WRONG if wide else WRONG[:5])
    return Call(
        case,
        shape,
        draw(numbers(sizes=(0, 1, 4, 10))),
        place,
        wide,
        tuple(draw(st.lists(st.tuples(st.integers(0, 50), wrong), max_size=2))),
        draw(st.sampled_from([0.0, 0.3, 1.0])),
        draw(st.sampled_from([-100, -1, 0, 3, 2**31 - 1])),
        draw(st.booleans()),
        draw(numbers(kinds=("zero",), sizes=(0,))),
        draw(st.sampled_from([0.1, 0.5, 1.0])),
        draw(st.sampled_from([0.0, 1e-2])),
        draw(st.sampled_from([3.0, 30.0])),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(numbers(sizes=(0,))),
        draw(ORDERS),
    )


def run(host: EmulatedHost, call: Call, order: int) -> tuple[torch.Tensor, ...]:
    args = call.arguments()
    written = (0,) if call.op in IN_PLACE else ()
    guards = Guards(args, written)
    problem = call.case.problem(args)
    facts = known(call.case)
    variant, config = facts.variant, facts.config
    expect_prepared(variant.programs(problem, config), facts.programs)
    outputs = host.run(variant, problem, config, args, written=written, order=order).outputs
    guards.check()
    if call.op == "scale_gradient_":
        return (args[0],)
    found = outputs if isinstance(outputs, tuple) else (outputs,)
    return (*found, args[0]) if written else found


def check(host: EmulatedHost, call: Call) -> None:
    outputs = run(host, call, 0)
    if call.order:
        assert same_bits(outputs, run(host, call, call.order))
    args = call.arguments()
    pairs, truths = _expected(call, args)
    logits = args[2 if call.op == "cross_entropy_backward" else 0]
    large = logits.isfinite() & (logits.abs() > SAFE)
    doubtful = large.any(-1)
    if call.op == "cross_entropy_backward":
        for gradient in args[:2]:
            if gradient is not None:
                doubtful = doubtful | (gradient.isfinite() & (gradient.abs() > SAFE))
    roundings, faint = ROUNDINGS + _chain(call), _faint(call, args, logits)
    for number, (output, pair, truth) in enumerate(zip(outputs, pairs, truths, strict=True)):
        value, terms = pair
        here = doubtful
        if call.op == "cross_entropy_shard":
            # A NaN is in the sum; the largest may be that of the others.
            unclear = logits.isnan().any(-1, keepdim=True)
            unclear = torch.nn.functional.pad(unclear, (0, output.shape[-1] - 1))
            here = doubtful.unsqueeze(-1) | unclear
        elif output.shape == logits.shape:
            here = doubtful.unsqueeze(-1)
        elif output.shape != doubtful.shape:
            here = doubtful.any()
        over = (terms > SAFE) & terms.isfinite()
        allowed = Range(value, value).widened(terms.nan_to_num(0.0) * roundings * UNIT)
        allowed = allowed.widened(torch.tensor(faint))
        judge(allowed, output, truth, f"result {number}", here | over, either=True)


def _chain(call: Call) -> float:
    """Terms that a thread adds one after another: equal ones are all rounded the same way."""
    config = known(call.case).config
    each = config.lanes if call.case.variant == "cuda_warp" else config.threads * config.cluster
    return call.shape[-1] / each


def _faint(call: Call, args: tuple[Any, ...], logits: torch.Tensor) -> float:
    """What a probability that fp32 rounds to 0 would have made of the slope of its row."""
    lse = float(logits.double().nan_to_num(0.0, 0.0, 0.0).abs().max()) + 10.0
    slope = 2.0 + 2.0 * call.z_loss * min(lse, SAFE)
    if call.op == "cross_entropy_backward":
        slope *= 1.0 + min(float(args[0].nan_to_num(0.0, 0.0, 0.0).abs().max()), SAFE)
    return 2.0**-126 * slope


def _expected(call: Call, args: tuple[Any, ...]) -> tuple[list[exact.Pair], list[torch.Tensor]]:
    if call.op == "scale_gradient_":
        pair = exact.scale(*args)
        return [pair], [pair[0]]
    pairs = {
        "cross_entropy": exact.forward,
        "cross_entropy_backward": exact.backward,
        "cross_entropy_shard": exact.shard,
    }.get(call.op, exact.one_pass)(*args)
    name = "cross_entropy_one_pass" if call.op in KEPT else call.op
    truths = OPS[name].reference(*doubles(args))
    return (
        pairs if isinstance(pairs, list) else [pairs],
        list(truths) if isinstance(truths, tuple) else [truths],
    )


@pytest.fixture(autouse=True)
def _built(host: EmulatedHost, request: pytest.FixtureRequest) -> None:
    short = request.node.get_closest_marker("long") is None
    cases = cases_of(request.node.callspec.params["op"], short)
    host.build([program for case in cases for program in known(case).programs])


over_ops = pytest.mark.parametrize("op", tuple(OPS))


@over_ops
@examples(18)
@given(data=st.data())
def test_any_call(host: EmulatedHost, op: str, data: Any) -> None:
    check(host, data.draw(calls(op, short=True)))


@pytest.mark.long
@over_ops
@examples(700)
@given(data=st.data())
def test_many_calls(host: EmulatedHost, op: str, data: Any) -> None:
    check(host, data.draw(calls(op, short=False)))
