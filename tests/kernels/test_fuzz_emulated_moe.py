"""The kernels around experts on calls that nobody thought of, run on the CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import test_emulated_moe_combine as combining
import test_emulated_moe_grouped as activating
import test_emulated_moe_route as routing
import test_emulated_topk_router as choosing
import torch
from emulated_host import EmulatedHost
from fuzz_emulated import (
    DENSE,
    Guards,
    Place,
    examples,
    given,
    numbers,
    placed,
    st,
)
from moe_steps import filled_empty, local_experts, run_step

from gristmill.ops.experts.combine import Combine
from gristmill.ops.experts.ids import IdFacts
from gristmill.ops.experts.semantics import Activation
from gristmill.ops.moe import grouped
from gristmill.ops.topk_router import TOPK_ROUTER, TOPK_ROUTER_BACKWARD, reference
from gristmill.select.device import KNOWN

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
INTEGERS = (torch.int32, torch.int64)
DEVICE = KNOWN["sm_90a"]
FAR = (-1, 2**31 - 1, -(2**31), 2**32 + 1, -(2**62))
NAN = math.nan


# ---- who goes where ----


def _ids(draw: Any, tokens: int, topk: int, total: int) -> torch.Tensor:
    """Any ids at all, some of which are no expert, at any strides."""
    dtype = draw(st.sampled_from(INTEGERS))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    few = max(1, draw(st.sampled_from([total, total, 2])))
    ids = torch.randint(0, few, (tokens, topk), generator=generator)
    missing = draw(st.sampled_from([0.0, 0.2, 1.0]))
    ids[torch.rand(ids.shape, generator=generator) < missing] = -1
    far = st.sampled_from((*FAR[: 3 if dtype == torch.int32 else None], total))
    for at, value in draw(st.lists(st.tuples(st.integers(0, 5000), far), max_size=4)):
        ids.view(-1)[at % ids.numel()] = value
    ids = ids.to(dtype)
    kind = draw(st.sampled_from(["dense", "apart", "turned", "steps"]))
    if kind == "apart":
        return placed(ids, Place(draw(st.integers(0, 3)), draw(st.integers(1, 5))))
    if kind == "turned":
        return placed(ids.t(), DENSE).t()
    if kind == "steps":
        return placed(ids.repeat_interleave(2, 1), DENSE)[:, ::2]
    return placed(ids, DENSE)


def _map(draw: Any, total: int, experts: int) -> torch.Tensor | None:
    dtype = draw(st.sampled_from((None, *INTEGERS)))
    if dtype is None:
        return None
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    places = torch.randint(-1, experts + 1, (draw(st.integers(0, total)),), generator=generator)
    return placed(places.to(dtype), DENSE) if len(places) else places.to(dtype)


@st.composite
def routings(draw: Any) -> dict[str, Any]:
    tokens, topk = draw(st.integers(1, 90)), draw(st.integers(1, 12))
    experts = draw(st.sampled_from([1, 2, 3, 16, 100, 128, 500]))
    total = experts + draw(st.integers(0, 9))
    ids = _ids(draw, tokens, topk, total)
    x = None
    if draw(st.booleans()):
        dtype, access = draw(st.sampled_from([(BF16, 8), (BF16, 1), (F32, 4), (F32, 1)]))
        columns = access * draw(st.integers(1, 40))
        place = Place(access * draw(st.integers(0, 3)), access * draw(st.integers(0, 3)))
        x = placed(draw(numbers(sizes=(0,))).tensor((tokens, columns), dtype), place)
        x = x.masked_fill_(x.isnan(), 3.0)  # rows are compared
    sizes = sorted(draw(st.sets(st.integers(1, 130), max_size=4)))
    return {
        "ids": ids,
        "experts": experts,
        "expert_map": _map(draw, total, experts),
        "x": x,
        "sizes": tuple(sizes),
        "positions": draw(st.booleans()),
        "order": draw(st.integers(0, 3)),
    }


def check_routing(host: EmulatedHost, ids: torch.Tensor, **asked: Any) -> None:
    expert_map, x, sizes = (asked[name] for name in ("expert_map", "x", "sizes"))
    guards = Guards((ids, expert_map, x))
    experts = asked.pop("experts")
    run = routing._route(host, ids, experts, **asked)
    guards.check()
    routing._check(run.outputs, ids, experts, expert_map, x, sizes)


# ---- sums over them ----


@st.composite
def sums(draw: Any) -> dict[str, Any]:
    # A warp looks at 32 slots at a time.
    tokens, topk = (
        draw(st.integers(1, 12)),
        draw(st.one_of(st.integers(1, 11), st.integers(31, 40))),
    )
    experts = draw(st.sampled_from([1, 3, 16, 64]))
    dtype, out = draw(st.sampled_from([(F32, BF16), (BF16, BF16), (BF16, F32), (F16, F16)]))
    whole = draw(st.booleans())
    columns = 16 // dtype.itemsize
    hidden = draw(st.integers(1, 40 if topk < 12 else 9)) * columns
    hidden = hidden if whole else hidden + 1
    partial = draw(numbers(sizes=(0, 6))).tensor((tokens * topk, hidden), dtype)
    total = experts + 3
    weights = None
    if draw(st.booleans()):
        weights = draw(numbers(sizes=(0,))).tensor((topk, tokens), F32)
        weights = placed(weights, Place(1, draw(st.integers(0, 3)))).t()
    return {
        "ids": _ids(draw, tokens, topk, total),
        "expert_map": _map(draw, total, experts),
        "experts": experts,
        "partial": placed(partial, DENSE),
        "out": out,
        "gap": columns * draw(st.integers(0, 3)) if whole else draw(st.integers(0, 5)),
        "weights": weights,
        "order": draw(st.integers(0, 3)),
    }


def check_sum(
    host: EmulatedHost,
    ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    experts: int,
    partial: torch.Tensor,
    out: torch.dtype,
    gap: int,
    weights: torch.Tensor | None,
    order: int,
) -> None:
    """Bit by bit what adding one slot after another in fp32 gives."""
    tokens, topk = ids.shape
    hidden = partial.shape[1]
    y = placed(torch.full((tokens, hidden), NAN, dtype=out), Place(0, gap))
    taken = torch.tensor([one is not None for one in local_experts(ids, expert_map, experts)])
    partial[~taken] = NAN
    one = Combine(
        DEVICE,
        IdFacts.of(ids, expert_map),
        experts,
        hidden,
        partial.dtype,
        out,
        weights=None if weights is None else weights.dtype,
        weights_strides=(0, 0) if weights is None else (weights.stride(0), weights.stride(1)),
        y_stride=hidden + gap,
    )
    guards = Guards((partial, y, ids, expert_map, weights), written=(1,))
    combining._combine(host, one, partial, y, ids, expert_map, weights, order)
    guards.check()
    rows = partial.float().view(tokens, topk, hidden)
    expected = torch.zeros(tokens, hidden)
    kept = taken.view(tokens, topk)
    for j in range(topk):
        term = rows[:, j].double()
        if weights is not None:
            term = term * weights[:, j, None].double()
        # One rounding for a product and its sum.
        total = (expected.double() + term).float()
        expected = torch.where(kept[:, j, None], total, expected)
    torch.testing.assert_close(y, expected.to(out), rtol=0, atol=0, equal_nan=True)


# ---- what they do between their products ----


@st.composite
def activations(draw: Any) -> dict[str, Any]:
    counts = draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
    rows = sum(counts) + draw(st.integers(0, 5))
    width = 8 * draw(st.integers(1, 40))
    dtype = draw(st.sampled_from([BF16, F16]))
    name = draw(st.sampled_from(["silu", "gelu", "swiglu_oai"]))
    bias = None
    if draw(st.booleans()):
        bias = draw(numbers(sizes=(0,))).tensor((len(counts), 2 * width), F32)
        bias = placed(bias, DENSE)
    both = draw(numbers(sizes=(0, 2))).tensor((max(1, rows), 2 * width), dtype)
    return {
        "both": placed(both, DENSE),
        "ends": placed(torch.tensor(counts).cumsum(0).int(), DENSE),
        "bias": bias,
        "act": Activation(name, draw(st.sampled_from([None, 7.0, 0.5])), None),
        "order": draw(st.integers(0, 2)),
    }


def check_activation(
    host: EmulatedHost,
    both: torch.Tensor,
    ends: torch.Tensor,
    bias: torch.Tensor | None,
    act: Activation,
    order: int,
) -> None:
    count, width = both.shape[0], both.shape[1] // 2
    out = placed(torch.full((count, width), 77.0, dtype=both.dtype), DENSE)
    program = activating._program(both.dtype, None if bias is None else bias.dtype, act.name)

    def prepare() -> Any:
        start = grouped._start(program, DEVICE, count, len(ends), width, act)
        return lambda stream, *given: start(stream, *given[:3], given[3].data_ptr())

    guards = Guards((both, out, bias, ends), written=(1,))
    run_step(host, prepare, (both, out, bias, ends), written=(1,), order=order)
    guards.check()
    last = int(ends[-1])
    assert (out[last:] == 77).all()
    expert = torch.searchsorted(ends, torch.arange(last), right=True)
    exact = both[:last].double() + (0 if bias is None else bias[expert].double())
    # Numbers that fp32 does not hold on the way, and what is no number, stay where they are.
    gate, up = exact.chunk(2, -1)
    healthy = (gate.abs() < 2.0**60) & (up.abs() < 2.0**60)
    expected = activating._activated(act, gate, up)
    allowed = torch.finfo(both.dtype).eps * 0.51 * expected.abs()
    allowed = allowed + 2e-6 * (1 + up.abs()) + torch.finfo(both.dtype).tiny
    found = out[:last].double()
    rounded = expected.to(both.dtype).double()
    close = ((found - expected).abs() <= allowed) | (found == rounded)
    assert (close | ~healthy).all()
    assert found[gate.isnan() | up.isnan()].isnan().all()


# ---- how they are chosen ----

# Kernels of these: logits, scoring, renormalize, bias, ids, grouped.
ROUTERS = (
    (BF16, "softmax", True, None, torch.int32, False),
    (F32, "softmax", False, None, torch.int32, False),
    (F32, "sigmoid", True, F32, torch.int32, True),
    (F16, "softmax", True, None, torch.int64, True),
    (F32, "sigmoid", False, None, torch.int32, False),
    (BF16, "softmax", False, F32, torch.int32, False),
)
WIDTHS = ((4, 128), (132, 256))  # experts of one kernel


@st.composite
def choices(draw: Any) -> tuple[Any, ...]:
    dtype, scoring, renormalize, bias_dtype, ids, grouped_ = draw(st.sampled_from(ROUTERS))
    low, high = draw(st.sampled_from(WIDTHS))
    groups = draw(st.integers(2, 32)) if grouped_ else 1
    step = math.lcm(4, groups)
    least = -(-low // step)
    experts = step * draw(st.integers(least, max(least, high // step)))
    if experts > high:  # no multiple of both is in between
        experts, groups = low, 4
    topk_groups = draw(st.integers(1, groups - 1)) if grouped_ else 1
    topk = draw(st.integers(1, min(32, topk_groups * experts // groups)))
    rows = draw(st.integers(1, 12))
    place = Place(4 * draw(st.integers(0, 3)), 4 * draw(st.integers(0, 3)))
    logits = draw(numbers(sizes=(0, 1, 4))).tensor((rows, experts), dtype)
    if draw(st.integers(0, 4)) == 4:
        logits = logits.round()
    bias = None
    if bias_dtype is not None:
        bias = placed(draw(numbers(kinds=("zero",), sizes=(0,))).tensor((experts,), F32), DENSE)
    scale = draw(st.sampled_from([1.0, 2.5, -0.5, 0.0]))
    options = (topk, scoring, renormalize, bias, groups, topk_groups, scale, ids)
    return placed(logits, place), *options


def check_choice(host: EmulatedHost, args: tuple[Any, ...], warps: int) -> None:
    logits, topk, scoring, renormalize, bias, groups, _, scale, _ = args
    guards = Guards(args)
    weights, ids = choosing._results(choosing._run(host, TOPK_ROUTER, args, warps=warps))
    guards.check()
    exact = choosing._exact(TOPK_ROUTER, args)
    same = (ids.long() == exact[1]).all(-1)
    assert ((ids >= 0) & (ids < logits.shape[1])).all()
    assert all(len(set(row)) == topk for row in ids.tolist())
    if bias is None or groups == 1:
        # With a bias rounded scores are compared: of two nearly equal ones either may come first.
        ranked = logits.double()
        if bias is not None:
            ranked = reference.scores_of(ranked, scoring) + bias.double()
        ours, theirs = ranked.gather(1, ids.long()), ranked.gather(1, exact[1])
        near = (ours - theirs).abs() <= (4e-6 if bias is not None else 0.0)
        assert (same.unsqueeze(-1) | near).all()
    scores = reference.scores_of(logits.double(), scoring).gather(1, ids.long())
    if renormalize:
        scores = reference.shares_of(scores, scoring)
    truth = scores * scale
    plain = logits.isfinite().all(-1)
    reach = choosing._reach(TOPK_ROUTER, (logits[plain], *args[1:])) if plain.any() else 0.0
    allowed = truth.abs() * (8 + reach) * 2**-24 * 2 + 2**-125
    good = ((weights.double() - truth).abs() <= allowed) | (weights.isnan() & truth.isnan())
    good = good | (weights.double() == truth)
    # Infinite logits among others leave NaN, or nothing; that is for other tests.
    odd = ~plain & (logits == math.inf).any(-1)
    assert (good | odd.unsqueeze(-1)).all()
    if plain.all():
        check_slopes(host, args, ids, warps)


def check_slopes(host: EmulatedHost, args: tuple[Any, ...], ids: torch.Tensor, warps: int) -> None:
    logits, _, scoring, renormalize, _, _, _, scale, _ = args
    generator = torch.Generator().manual_seed(len(logits))
    dweights = placed(torch.randn(ids.shape, generator=generator), Place(0, 3))
    back = (dweights, logits, ids, scoring, renormalize, scale)
    guards = Guards(back)
    (found,) = choosing._results(choosing._run(host, TOPK_ROUTER_BACKWARD, back, warps=warps))
    guards.check()
    (truth,) = choosing._exact(TOPK_ROUTER_BACKWARD, back)
    limits = torch.finfo(found.dtype)
    each = (8 + choosing._reach(TOPK_ROUTER_BACKWARD, back)) * 2**-24 + limits.eps / 2
    size = truth.abs() + choosing._parts(back)
    assert ((found.double() - truth).abs() <= size * each + limits.tiny + 2**-125).all()


# ---- the tests ----


@pytest.fixture
def _nothing_is_right_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", filled_empty)


@pytest.mark.usefixtures("_nothing_is_right_by_chance")
@examples(50)
@given(call=routings())
def test_any_routing(host: EmulatedHost, call: dict[str, Any]) -> None:
    check_routing(host, **call)


@examples(50)
@given(call=sums())
def test_any_sum(host: EmulatedHost, call: dict[str, Any]) -> None:
    check_sum(host, **call)


@examples(40)
@given(call=activations())
def test_any_activation(host: EmulatedHost, call: dict[str, Any]) -> None:
    check_activation(host, **call)


@examples(60)
@given(args=choices(), warps=st.sampled_from([1, 3, 8]))
def test_any_choice(host: EmulatedHost, args: tuple[Any, ...], warps: int) -> None:
    check_choice(host, args, warps)


@pytest.mark.long
@pytest.mark.usefixtures("_nothing_is_right_by_chance")
@examples(1500)
@given(call=routings())
def test_many_routings(host: EmulatedHost, call: dict[str, Any]) -> None:
    check_routing(host, **call)


@pytest.mark.long
@examples(1500)
@given(call=sums())
def test_many_sums(host: EmulatedHost, call: dict[str, Any]) -> None:
    check_sum(host, **call)


@pytest.mark.long
@examples(1500)
@given(call=activations())
def test_many_activations(host: EmulatedHost, call: dict[str, Any]) -> None:
    check_activation(host, **call)


@pytest.mark.long
@examples(1500)
@given(args=choices(), warps=st.sampled_from([1, 3, 8]))
def test_many_choices(host: EmulatedHost, args: tuple[Any, ...], warps: int) -> None:
    check_choice(host, args, warps)
