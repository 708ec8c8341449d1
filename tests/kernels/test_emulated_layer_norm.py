"""The LayerNorm kernels, forward and backward, run on the CPU by the variants' own host code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import exact
import pytest
import torch
from emulated_host import EmulatedHost, Run, build_cases
from layer_norm_cases import BF16, F16, F32, OPS_OF_ROWS, SCOPES, Case, configurations, sweep
from sampled import sampled

from gristmill.ops.rows.config import ASYNC, STRAIGHT, TWICE, RowConfig

# What the fp32 arithmetic of a kernel may lose, in half units of the last place: as for RMSNorm,
# but backward two more roundings per element, those of the mean of x and of the mean of g.
ROUNDINGS, BACKWARD_ROUNDINGS = 4.0, 5.0
ORDERS = (0, 1, 7)


def _launch(host: EmulatedHost, case: Case, args: tuple[Any, ...], order: int = 0) -> Run:
    variant = case.find_variant()
    problem = case.problem(args)
    return host.run(variant, problem, case.config or variant.config(problem), args, order=order)


def _outputs(run: Run) -> tuple[torch.Tensor, ...]:
    return run.outputs if isinstance(run.outputs, tuple) else (run.outputs,)


def _check_results(case: Case, args: tuple[Any, ...], outputs: tuple[torch.Tensor, ...]) -> None:
    if case.op == "layer_norm_backward":
        _check_backward(case, args, outputs)
        return
    h, weight, bias = args[0], args[-5], args[-4]
    if case.op == "add_layer_norm":
        narrow = torch.promote_types(h.dtype, args[1].dtype)
        h = (h.float() + args[1].float()).to(narrow)
        assert torch.equal(outputs[1], h)
    assert outputs[0].dtype == (case.dtypes[3] or args[0].dtype)
    allowed = exact.layer_norm(h, weight, bias, case.eps, case.weight_offset, roundings=ROUNDINGS)
    allowed.check(outputs[0], "y")


def _check_backward(case: Case, args: tuple[Any, ...], outputs: tuple[torch.Tensor, ...]) -> None:
    dy, x, weight, dsum = args[:4]
    dx, dweight, dbias = outputs
    allowed = exact.layer_norm_backward(
        dy, x, weight, dsum, case.eps, case.weight_offset, roundings=BACKWARD_ROUNDINGS
    )
    assert dx.dtype == x.dtype
    allowed[0].check(dx, "dx")
    if weight is None or not case.weight_grad:
        assert dweight.numel() == 0
    else:
        assert dweight.dtype == weight.dtype
        allowed[1].check(dweight, "dweight")
    if case.bias is None:
        assert dbias.numel() == 0
    else:
        assert dbias.dtype == case.bias
        allowed[2].check(dbias, "dbias")


def _check(host: EmulatedHost, case: Case) -> None:
    """Right, with the strides that are promised, and the same bits in every order of threads."""
    answers = []
    for order in ORDERS:
        args = case.arguments()
        outputs = _outputs(_launch(host, case, args, order))
        _check_results(case, case.arguments(), outputs)
        x = args[1 if case.op == "layer_norm_backward" else 0]
        assert outputs[0].stride() == torch.empty_like(x).stride()
        answers.append(outputs)
    for other in answers[1:]:
        for mine, theirs in zip(answers[0], other, strict=True):
            assert torch.equal(mine, theirs)


CASES = [case for case in (*sweep(), *configurations()) if case.supported()]


@pytest.fixture(autouse=True, scope="module")
def _all_at_once(request: pytest.FixtureRequest) -> None:
    build_cases(request)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel(host: EmulatedHost, case: Case) -> None:
    _check(host, case)


@pytest.mark.parametrize(
    ("op", "variant"), sampled(product(["layer_norm", "layer_norm_backward"], SCOPES), 3)
)
def test_many_rows_per_team(host: EmulatedHost, op: str, variant: str) -> None:
    """Loops over rows, their last turn ragged; with resident blocks the partial rows are many."""
    host.resident = 2 if variant != "cuda_cluster" else 5
    case = Case(op, variant, (1009, 24), dtypes=(BF16, BF16, BF16, None), multiprocessors=20)
    _check(host, case)


@pytest.mark.parametrize("variant", SCOPES)
@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (4, 0)])
def test_nothing_to_do_launches_nothing(
    host: EmulatedHost, variant: str, shape: tuple[int, ...]
) -> None:
    case = Case("add_layer_norm", variant, shape)
    args = case.arguments()
    run = _launch(host, case, args)
    assert [output.shape for output in run.outputs] == [args[0].shape] * 2
    backward = Case("layer_norm_backward", variant, shape)
    args = backward.arguments()
    run_backward = _launch(host, backward, args)
    assert run_backward.outputs[0].shape == args[1].shape
    for gradient in run_backward.outputs[1:]:
        assert torch.equal(gradient, torch.zeros_like(args[2]))
    assert run.calls == run_backward.calls == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("variant", SCOPES)
def test_a_row_that_is_not_finite_leaves_the_others_alone(
    host: EmulatedHost, variant: str, value: float
) -> None:
    case = Case("layer_norm", variant, (9, 256))
    expected = _launch(host, case, case.arguments()).outputs
    args = case.arguments()
    args[0][4, 17], args[0][6, 255] = value, value
    y = _launch(host, case, args).outputs
    untouched = [row for row in range(9) if row not in (4, 6)]
    assert torch.equal(y[untouched], expected[untouched])
    assert y[4].isnan().all()
    assert y[6].isnan().all()


# Rows that a variance of one pass, a poor center or a rounded mean gets wrong.
FILLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean 1e4": lambda x: x + 1e4,
    "mean -3e6": lambda x: x - 3e6,
    "warps around means of their own": lambda x: x * 1e-2 + torch.arange(x.shape[-1]) // 128,
    "a step": lambda x: x + 1e3 * (torch.arange(x.shape[-1]) > x.shape[-1] // 2),
    "the first is an outlier": lambda x: x.index_fill(-1, torch.tensor([0]), 1e3),
    "the last is an outlier": lambda x: x.index_fill(-1, torch.tensor([x.shape[-1] - 1]), 1e3),
    "tiny": lambda x: x * 1e-15,
    "huge": lambda x: x * 1e15,
    "constant": lambda x: x[:, :1].expand_as(x).contiguous() * 1e4,
}
LAUNCHES = (
    ("cuda_warp", RowConfig(64, items=16, lanes=32)),
    ("cuda_block", RowConfig(128, items=4, feed=STRAIGHT)),
    ("cuda_block", RowConfig(96, items=6, feed=ASYNC, hold=False)),
    ("cuda_block", RowConfig(64, items=2, feed=TWICE, hold=False)),
    ("cuda_cluster", RowConfig(64, items=2, cluster=4, feed=2)),
    ("cuda_cooperative", RowConfig(64, items=2, cluster=4, feed=-1)),
)


@pytest.mark.parametrize(
    ("variant", "config"), LAUNCHES, ids=[f"{v}-{c.feed}" for v, c in LAUNCHES]
)
@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS.keys())
@pytest.mark.parametrize("op", ["layer_norm", "layer_norm_backward"])
def test_rows_that_are_hard_to_center(
    host: EmulatedHost,
    op: str,
    fill: Callable[[torch.Tensor], torch.Tensor],
    variant: str,
    config: RowConfig,
) -> None:
    if op == "layer_norm_backward" and config.feed == TWICE:
        pytest.skip("rows are kept in the backward pass")
    case = Case(op, variant, (5, 2048), dtypes=(F32, F32, F32, None), bias=F32, config=config)
    case = replace(case, eps=1e-30 if fill is FILLS["tiny"] else 1e-5, multiprocessors=8)
    args = list(case.arguments())
    x = 1 if op == "layer_norm_backward" else 0
    args[x] = fill(args[x])
    outputs = _outputs(_launch(host, case, tuple(args)))
    if fill is FILLS["constant"] and op == "layer_norm":
        # Not a rounding off: every distance from the mean is zero.
        assert torch.equal(outputs[0], args[2].expand_as(outputs[0]))
    _check_results(case, tuple(args), outputs)


@pytest.mark.parametrize("op", OPS_OF_ROWS)
@pytest.mark.parametrize("stride", [1, 2])
def test_weights_that_are_unaligned_or_strided(host: EmulatedHost, op: str, stride: int) -> None:
    case = Case(op, "cuda_block", (5, 512), dtypes=(BF16, BF16, F16, None))
    args = list(case.arguments())
    generator = torch.Generator().manual_seed(3)
    weight, bias = (
        torch.randn(1 + 512 * stride, generator=generator).half()[1::stride] for _ in range(2)
    )
    at = {"layer_norm": 1}.get(op, 2)
    args[at] = weight
    if op != "layer_norm_backward":
        args[at + 1] = bias
    _check_results(case, tuple(args), _outputs(_launch(host, case, tuple(args))))


BYTES = product(OPS_OF_ROWS, ["cuda_warp", "cuda_block", "cuda_cluster"])


@pytest.mark.parametrize(("op", "variant"), sampled(BYTES, 4))
def test_each_byte_moves_once(host: EmulatedHost, op: str, variant: str) -> None:
    """Rows are read once and written once, weight and bias once per team, whatever the feed."""
    rows, columns = 7, 256 if variant == "cuda_warp" else 2048
    case = Case(op, variant, (rows, columns), dtypes=(BF16, F32, F16, None), bias=F32, dsum=True)
    for feed in (0, -1, 1, 2):
        if variant == "cuda_warp" and feed > 0:
            continue
        if variant == "cuda_warp":
            config = RowConfig(threads=64, items=2, lanes=32, feed=feed)
        else:
            cluster = 2 if variant == "cuda_cluster" else 1
            config = RowConfig(threads=128, items=4 // cluster, cluster=cluster, feed=feed)
        run = _launch(host, replace(case, config=config), case.arguments())
        call, traffic = run.calls[0], run.traffic[0]
        teams = call.grid // config.cluster * (call.block // 32 if variant == "cuda_warp" else 1)
        backward = op == "layer_norm_backward"
        row_bytes = {"layer_norm": 2, "add_layer_norm": 2 + 4}.get(op, 2 + 4 + 2)
        affine_bytes = (2 if backward else 2 + 4) * columns * min(teams, rows)
        assert traffic.loaded + traffic.bulk == rows * columns * row_bytes + affine_bytes
        assert (traffic.bulk > 0) == (feed > 0)
        stored = rows * columns * (2 + 4 if op == "add_layer_norm" else 2)
        if backward:
            parts = call.grid // config.cluster
            stored += columns * (2 * 4 * parts if parts > 1 else 2 + 4)
        assert traffic.stored == stored


@pytest.mark.parametrize("bias", [BF16, None])
@pytest.mark.parametrize("weight", [BF16, None])
def test_both_gradients_are_finished_in_one_launch(
    host: EmulatedHost, weight: torch.dtype | None, bias: torch.dtype | None
) -> None:
    host.resident = 4
    case = Case("layer_norm_backward", "cuda_block", (50, 96), dtypes=(BF16, BF16, weight, None))
    run = _launch(host, replace(case, bias=bias), (*case.arguments()[:-1], bias))
    assert len(run.calls) == (1 if weight is None and bias is None else 2)
    if len(run.calls) == 2:
        assert run.calls[1].grid == 12 * ((weight is not None) + (bias is not None))


def test_the_gradients_are_the_same_every_time(host: EmulatedHost) -> None:
    """However many blocks there are they are added up in a fixed order."""
    case = Case("layer_norm_backward", "cuda_block", (500, 64), dtypes=(F32, F32, F32, None))
    host.resident = 4
    answers = [_launch(host, case, case.arguments(), order).outputs[1:] for order in range(4)]
    for other in answers[1:]:
        assert all(torch.equal(*pair) for pair in zip(answers[0], other, strict=True))
