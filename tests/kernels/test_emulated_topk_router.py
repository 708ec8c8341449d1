"""The router's kernels, run on the CPU with their own host code, against the reference in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from emulated_host import EmulatedHost, Run
from emulation.harness import emulator_for

from gristmill.ops.examples import padded, unaligned
from gristmill.ops.op import Case, Op
from gristmill.ops.registry import OPS
from gristmill.ops.topk_router import TOPK_ROUTER, TOPK_ROUTER_BACKWARD, cases
from gristmill.ops.topk_router.cases import Spread, deepseek
from gristmill.ops.topk_router.cuda import MOST_WARPS, RouterConfig
from gristmill.select.device import KNOWN
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

H200, A100 = KNOWN["sm_90a"], KNOWN["sm_80"]
NAN, INF = float("nan"), float("inf")
ORDERS = (0, 1, 7)
Arguments = tuple[Any, ...]


def _kernel(op: Op) -> Variant:
    return next(one for one in op.variants if one.name == "cuda_warp")


def _supported() -> list[tuple[Op, Case]]:
    found = []
    for op in (TOPK_ROUTER, TOPK_ROUTER_BACKWARD):
        for case in op.cases():
            problem = op.problem(*case.make("cpu", 0), device=H200)
            if _kernel(op).supports(problem) is None:
                found.append((op, case))
    return found


CASES = _supported()
over_cases = pytest.mark.parametrize(
    ("op", "case"), CASES, ids=[f"{op.name}-{case.name}".replace(" ", "_") for op, case in CASES]
)
# What is asked for besides the cases.
ODD = {
    "nan": Spread(rows=6, experts=64, renormalize=False),
    "nan, renormalised": Spread(rows=6, experts=64),
    "nan, sigmoid": Spread(rows=6, experts=64, scoring="sigmoid", renormalize=False),
    "nan, deepseek v3": deepseek(rows=6),
    "nan, deepseek v2": deepseek("softmax", rows=6, bias=None, renormalize=False),
    "nan, bias": Spread(rows=6, experts=64, bias=torch.float32),
}


@pytest.fixture(autouse=True, scope="module")
def _built(pytestconfig: pytest.Config) -> None:
    programs = []
    for op, case in CASES:
        problem = op.problem(*case.make("cpu", 0), device=H200)
        if problem.rows:
            programs += _kernel(op).programs(problem, RouterConfig(1))
    for spread in ODD.values():
        problem = TOPK_ROUTER.problem(*cases.forward_arguments(spread, "cpu", 0), device=H200)
        programs += _kernel(TOPK_ROUTER).programs(problem, RouterConfig(1))
    emulator_for(pytestconfig).prepare(list(dict.fromkeys(programs)))


def _problem(op: Op, args: Arguments) -> Problem:
    return op.problem(*args, device=H200)


def _run(host: EmulatedHost, op: Op, args: Arguments, *, order: int = 0, warps: int = 2) -> Run:
    return host.run(_kernel(op), _problem(op, args), RouterConfig(warps), args, order=order)


def _results(run: Run) -> list[torch.Tensor]:
    return [run.outputs] if isinstance(run.outputs, torch.Tensor) else list(run.outputs)


def _exact(op: Op, args: Arguments) -> list[torch.Tensor]:
    """The reference in fp64."""
    wide = [
        arg.double() if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg
        for arg in args
    ]
    found = op.reference(*wide)
    return [found] if isinstance(found, torch.Tensor) else list(found)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """In every bit."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return one.shape == other.shape and torch.equal(one.view(bits), other.view(bits))


@over_cases
def test_against_fp64(host: EmulatedHost, op: Op, case: Case) -> None:
    args = case.make("cpu", 0)
    exact = _exact(op, args)
    expected = op.outputs(*args)
    expected = [expected] if isinstance(expected, torch.Tensor) else list(expected)
    roundings = 8 + _reach(op, args)
    for order in ORDERS if exact[0].numel() < 500 else ORDERS[:1]:
        results = _results(_run(host, op, args, order=order))
        for found, promised, truth in zip(results, expected, exact, strict=True):
            assert (found.dtype, found.stride()) == (promised.dtype, promised.stride())
            if found.is_floating_point():
                # Of its own size; of a gradient, whose parts cancel, also of that of its parts.
                size = truth.abs() if op is TOPK_ROUTER else truth.abs() + _parts(args)
                limits = torch.finfo(found.dtype)
                each = roundings * 2**-24 + limits.eps / 2
                allowed = size * each + limits.tiny * limits.eps + 2**-125
                assert ((found.double() - truth).abs() <= allowed).all(), order
            else:
                assert torch.equal(found.long(), truth), order


def _reach(op: Op, args: Arguments) -> float:
    """How far below the largest logit those are that count: that distance is rounded."""
    if "sigmoid" in args:
        return 0.0
    logits = args[0 if op is TOPK_ROUTER else 1].double()
    distance = (logits.amax(-1, keepdim=True) - logits).flatten()
    return max([0.0, *distance[distance < 104].tolist()])


def _parts(args: Arguments) -> torch.Tensor:
    """The size of what the gradients of a row are added up from."""
    dweights, logits, _, scoring, renormalize, scale = args
    size = (dweights.double() * scale).abs().amax(-1, keepdim=True)
    if scoring == "sigmoid" and renormalize:
        return 2 * size * torch.ones(logits.shape, dtype=torch.float64)
    values = logits.double()
    scores = values.sigmoid() if scoring == "sigmoid" else values.softmax(-1).nan_to_num(0.0)
    return 2 * size * (scores if scoring == "sigmoid" or not renormalize else 1.0)


def test_scores_far_from_zero_are_as_exact_as_near_ones(host: EmulatedHost) -> None:
    """What an exponent loses when it is rounded, and what 1 - s would, is not lost."""
    logits = torch.linspace(-80.0, 80.0, 32).unsqueeze(0)
    args = TOPK_ROUTER.bind_arguments(logits, 32, scoring="sigmoid", renormalize=False)
    weights, ids = _results(_run(host, TOPK_ROUTER, args))
    exact = logits.double().gather(1, ids.long())
    torch.testing.assert_close(weights.double(), exact.sigmoid(), rtol=4 * 2**-24, atol=0.0)
    back = (torch.ones_like(weights), logits, ids, "sigmoid", False, 1.0)
    (dlogits,) = _results(_run(host, TOPK_ROUTER_BACKWARD, back))
    slopes = logits.double().sigmoid() * (-logits.double()).sigmoid()
    torch.testing.assert_close(dlogits.double(), slopes, rtol=8 * 2**-24, atol=0.0)


def test_ids_out_of_range_touch_no_memory(host: EmulatedHost) -> None:
    """Of the gradient: the emulation stops at what is not there."""
    dweights, logits, ids, *options = cases.backward_arguments(Spread(rows=3), "cpu", 0)
    ids[0, 0], ids[1, 1], ids[2, 2] = -1, 128, 2**31 - 1
    (dlogits,) = _results(_run(host, TOPK_ROUTER_BACKWARD, (dweights, logits, ids, *options)))
    assert dlogits.isfinite().all()


def test_every_width_and_way_is_there() -> None:
    """The cases reach what the kernels are specialised on."""
    names = set()
    for op, case in CASES:
        problem = _problem(op, case.make("cpu", 0))
        names |= {program.names[0] for program in _kernel(op).programs(problem, RouterConfig(1))}
    text = "\n".join(sorted(names))
    for items in (1, 2, 3, 4, 8, 16):
        assert f",int,{items}," in text, items
    for word in ("f16,8", "bf16,8", "bf16,2", "float,16", "float,4", "long long", "Absent"):
        assert word in text, word
    forward = [name.split(",")[-4:] for name in names if name.startswith("topk_router<")]
    for position in range(4):
        assert {flags[position].strip(">") for flags in forward} == {"true", "false"}


@pytest.mark.parametrize("warps", [1, 3, MOST_WARPS])
@pytest.mark.parametrize("spread", [Spread(rows=5), deepseek(rows=5)], ids=["plain", "grouped"])
def test_a_token_alone_has_the_same_bits(host: EmulatedHost, spread: Spread, warps: int) -> None:
    args = cases.forward_arguments(spread, "cpu", 3)
    whole = _results(_run(host, TOPK_ROUTER, args, warps=warps))
    for row in range(5):
        one = _results(_run(host, TOPK_ROUTER, (args[0][row : row + 1], *args[1:]), warps=1))
        for found, expected in zip(one, whole, strict=True):
            assert _same(found, expected[row : row + 1])


@pytest.mark.parametrize("renormalize", [True, False])
def test_bits_do_not_depend_on_where_rows_lie(host: EmulatedHost, renormalize: bool) -> None:
    spread = Spread(rows=4, experts=513, topk=22, renormalize=renormalize, logits=torch.bfloat16)
    logits, *rest = cases.forward_arguments(spread, "cpu", 0)
    expected = _results(_run(host, TOPK_ROUTER, (logits, *rest)))
    places = {
        "far apart": padded(logits, 7),
        "unaligned": unaligned(logits),
        "columns strided": logits.t().contiguous().t(),
    }
    for name, placed in places.items():
        for one, other in zip(
            _results(_run(host, TOPK_ROUTER, (placed, *rest))), expected, strict=True
        ):
            assert _same(one, other), name


@pytest.mark.parametrize("wrong", [NAN, INF], ids=["nan", "inf"])
@pytest.mark.parametrize("name", ODD)
def test_what_is_no_number_is_as_in_the_reference(
    host: EmulatedHost, name: str, wrong: float
) -> None:
    args = list(cases.forward_arguments(ODD[name], "cpu", 0))
    args[0][1, 40] = wrong
    args[0][2] = wrong
    args[0][3, :2] = -wrong
    args[0][4, 7], args[0][4, 63] = wrong, -wrong
    if name == "nan, bias":
        args[4][[5, 60]] = wrong
    weights, ids = _results(_run(host, TOPK_ROUTER, tuple(args)))
    expected_weights, expected_ids = TOPK_ROUTER.reference(*args)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, equal_nan=True, rtol=2e-6, atol=0.0)
    for row in ids.tolist():
        assert len(set(row)) == len(row)
        assert all(0 <= one < args[0].shape[1] for one in row)
    if math.isnan(wrong) and name != "nan, bias":
        assert weights[1].isnan().any()
        assert ids[1, 0] == 40 or ODD[name].scoring == "softmax"
        assert weights[0].isfinite().all()


@pytest.mark.parametrize("name", ["1 rows, 8 of 128", "deepseek v3", "float32 sigmoid"])
def test_logits_are_read_once_in_one_launch(host: EmulatedHost, name: str) -> None:
    case = next(case for case in TOPK_ROUTER.cases() if case.name == name)
    args = case.make("cpu", 0)
    run = _run(host, TOPK_ROUTER, args)
    (call,), (traffic,) = run.calls, run.traffic
    logits, topk, bias = args[0], args[1], args[4]
    read = logits.nbytes
    if bias is not None:
        # The bias by each token, and the logits of the chosen once more: their unbiased scores.
        read += len(logits) * (bias.nbytes + topk * logits.element_size())
    assert traffic.loaded == read
    assert traffic.stored == len(logits) * topk * 8
    assert call.dependent
    assert call.shared == 0


def test_the_gradient_is_written_in_one_launch(host: EmulatedHost) -> None:
    args = cases.backward_arguments(Spread(rows=3), "cpu", 0)
    run = _run(host, TOPK_ROUTER_BACKWARD, args)
    (traffic,) = run.traffic
    chosen = 3 * 8
    # A renormalised softmax is one over the chosen logits.
    assert traffic.loaded == chosen * (4 + 4 + 4)
    assert traffic.stored == args[1].nbytes + chosen * 4


def test_blocks_are_small_while_tokens_are_few() -> None:
    kernel = _kernel(TOPK_ROUTER)
    for rows, warps in ((1, 1), (64, 1), (132, 1), (133, 4), (4096, 4)):
        args = TOPK_ROUTER.example((rows, 128), torch.bfloat16, "meta")
        problem = TOPK_ROUTER.problem(*args, device=H200)
        assert kernel.config(problem) == RouterConfig(warps)
        assert kernel.configs(problem)[0] == RouterConfig(warps)
        assert max(config.warps for config in kernel.configs(problem)) == MOST_WARPS


def test_no_launch_overlaps_where_gpus_cannot(host: EmulatedHost) -> None:
    args = cases.forward_arguments(Spread(rows=3), "cpu", 0)
    problem = TOPK_ROUTER.problem(*args, device=A100)
    run = host.run(_kernel(TOPK_ROUTER), problem, RouterConfig(1), args)
    assert not run.calls[0].dependent
    assert run.calls[0].grid == 3


def test_nothing_is_launched_for_no_tokens(host: EmulatedHost) -> None:
    for op in (TOPK_ROUTER, TOPK_ROUTER_BACKWARD):
        case = next(case for case in op.cases() if case.name == "0 rows, 8 of 64")
        run = _run(host, op, case.make("cpu", 0))
        assert not run.calls
        assert _results(run)[0].shape[0] == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"experts": 2049}, "a warp holds 2048 experts, not 2049"),
        ({"topk": 33}, "a warp chooses 32 experts, not 33"),
        ({"experts": 66, "groups": 33, "topk_groups": 32}, "account of 32 groups, not 33"),
        ({"logits": torch.float64}, "computes in fp32: logits is float64"),
        ({"bias": torch.float64}, "computes in fp32: bias is float64"),
    ],
)
def test_what_is_too_much_is_said(changes: dict[str, Any], reason: str) -> None:
    args = cases.forward_arguments(Spread(**changes), "cpu", 0)
    assert reason in str(_kernel(TOPK_ROUTER).supports(_problem(TOPK_ROUTER, args)))
    chosen = [one.name for one in OPS["topk_router"].variants if not _refuses(one, args)]
    assert "reference" in chosen
    assert "cuda_warp" not in chosen


def _refuses(variant: Variant, args: Arguments) -> bool:
    return variant.supports(_problem(TOPK_ROUTER, args)) is not None
