"""The RMSNorm kernels, forward and backward, run on the CPU by the variants' own host code."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import exact
import pytest
import torch
from emulated_host import EmulatedHost, Run, build_cases
from rms_norm_cases import BF16, F16, F32, FORWARD_OPS, SCOPES, Case, configurations, sweep
from sampled import sampled

from gristmill.ops.registry import OPS
from gristmill.ops.rows.config import STRAIGHT, TWICE, RowConfig

# What the fp32 arithmetic of a kernel may lose, in half units of fp32's last place. Three or four
# roundings per element and, of the sum, half of what its longest chain of additions loses on
# average: 3.0 is enough for the cases here, 2.0 is not.
ROUNDINGS = 4.0
ORDERS = (0, 1, 7)


def _launch(host: EmulatedHost, case: Case, args: tuple[Any, ...], order: int = 0) -> Run:
    variant = case.find_variant()
    problem = case.problem(args)
    written = (0, 1) if case.op == "fused_add_rms_norm_" else ()
    config = case.config or variant.config(problem)
    return host.run(variant, problem, config, args, written=written, order=order)


def _outputs(case: Case, args: tuple[Any, ...], run: Run) -> tuple[torch.Tensor, ...]:
    if case.op == "fused_add_rms_norm_":
        return args[0], args[1]
    return run.outputs if isinstance(run.outputs, tuple) else (run.outputs,)


def _check_forward(case: Case, args: tuple[Any, ...], outputs: tuple[torch.Tensor, ...]) -> None:
    x, residual = args[0], None if case.op == "rms_norm" else args[1]
    weight = args[1] if residual is None else args[2]
    held, narrow = x, x.dtype
    normalised = product = F32
    if residual is not None:
        narrow = torch.promote_types(x.dtype, residual.dtype)
        held = x.float() + residual.float()
        total = held.to(residual.dtype if case.op == "fused_add_rms_norm_" else narrow)
        assert torch.equal(outputs[1], total)
        if case.op == "add_rms_norm":
            held = total
    if case.op == "fused_add_rms_norm_":
        normalised = product = F32 if weight is None else weight.dtype
    elif case.casting == "llama":
        normalised = narrow
        product = narrow if weight is None else torch.promote_types(narrow, weight.dtype)
    offset = 0.0 if case.op == "fused_add_rms_norm_" else case.weight_offset
    allowed = exact.forward(
        held,
        weight,
        case.eps,
        offset,
        normalised=normalised,
        product=product,
        roundings=ROUNDINGS,
    )
    out_dtype = case.dtypes[3] if case.op != "fused_add_rms_norm_" else None
    assert outputs[0].dtype == (out_dtype or x.dtype)
    allowed.check(outputs[0], "y")


def _check_backward(case: Case, args: tuple[Any, ...], outputs: tuple[torch.Tensor, ...]) -> None:
    dy, x, weight, dsum = args[:4]
    dx, dweight = outputs
    allowed_dx, allowed_dweight = exact.backward(
        dy, x, weight, dsum, case.eps, case.weight_offset, roundings=ROUNDINGS
    )
    assert dx.dtype == x.dtype
    allowed_dx.check(dx, "dx")
    if weight is None or not case.weight_grad:
        assert dweight.numel() == 0
    else:
        assert dweight.dtype == weight.dtype
        allowed_dweight.check(dweight, "dweight")


def _check(host: EmulatedHost, case: Case) -> list[Run]:
    """Right, with the strides that are promised, and the same bits in every order of threads."""
    runs, answers = [], []
    for order in ORDERS:
        args = case.arguments()
        before = case.arguments()
        run = _launch(host, case, args, order)
        outputs = _outputs(case, args, run)
        if case.op in FORWARD_OPS:
            _check_forward(case, before, outputs)
        else:
            _check_backward(case, before, outputs)
        x = before[0] if case.op in FORWARD_OPS else before[1]
        promised = x.stride() if case.op.endswith("_") else torch.empty_like(x).stride()
        assert outputs[0].stride() == promised
        runs.append(run)
        answers.append(outputs)
    for other in answers[1:]:
        for mine, theirs in zip(answers[0], other, strict=True):
            assert torch.equal(mine, theirs)
    return runs


CASES = [case for case in (*sweep(), *configurations()) if case.supported()]


@pytest.fixture(autouse=True, scope="module")
def _all_at_once(request: pytest.FixtureRequest) -> None:
    build_cases(request)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel(host: EmulatedHost, case: Case) -> None:
    _check(host, case)


@pytest.mark.parametrize("op", ["rms_norm", "rms_norm_backward"])
@pytest.mark.parametrize("variant", SCOPES)
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
    case = Case("add_rms_norm", variant, shape)
    args = case.arguments()
    run = _launch(host, case, args)
    assert [output.shape for output in run.outputs] == [args[0].shape] * 2
    backward = Case("rms_norm_backward", variant, shape)
    args = backward.arguments()
    run_backward = _launch(host, backward, args)
    assert run_backward.outputs[0].shape == args[1].shape
    assert torch.equal(run_backward.outputs[1], torch.zeros_like(args[2]))
    assert run.calls == run_backward.calls == []


@pytest.mark.parametrize("variant", SCOPES)
def test_a_row_that_is_not_finite_leaves_the_others_alone(host: EmulatedHost, variant: str) -> None:
    case = Case("rms_norm", variant, (9, 256))
    clean = case.arguments()
    expected = _launch(host, case, clean).outputs
    args = case.arguments()
    args[0][4, 17] = float("nan")
    args[0][6, 255] = float("inf")
    y = _launch(host, case, args).outputs
    untouched = [row for row in range(9) if row not in (4, 6)]
    assert torch.equal(y[untouched], expected[untouched])
    assert y[4].isnan().all()
    assert y[6].isnan()[255]
    assert (y[6, :255] == 0).all()


@pytest.mark.parametrize("op", ["add_rms_norm", "rms_norm_backward"])
@pytest.mark.parametrize("stride", [1, 2])
def test_weights_that_are_unaligned_or_strided(host: EmulatedHost, op: str, stride: int) -> None:
    case = Case(op, "cuda_block", (5, 512), dtypes=(BF16, BF16, F16, None))
    args = list(case.arguments())
    weight = torch.randn(1 + 512 * stride, generator=torch.Generator().manual_seed(3)).half()[1:]
    args[2] = weight[::stride]
    outputs = _outputs(case, tuple(args), _launch(host, case, tuple(args)))
    check = _check_forward if op == "add_rms_norm" else _check_backward
    check(case, tuple(args), outputs)


@pytest.mark.parametrize("feed", [STRAIGHT, TWICE])
@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm"])
def test_the_offset_is_added_to_the_weight_in_fp32(host: EmulatedHost, op: str, feed: int) -> None:
    """However narrow the weight: as in the reference, and unrounded in fp64."""
    config = RowConfig(threads=32, items=2, feed=feed, hold=feed != TWICE)
    case = Case(op, "cuda_block", (5, 256), dtypes=(F32, F32, BF16, None), config=config)
    case = replace(case, casting="llama", weight_offset=1.0)
    args = case.arguments()
    outputs = _outputs(case, args, _launch(host, case, args))
    _check_forward(case, args, outputs)
    expected = OPS[op].reference(*args)
    expected = expected if isinstance(expected, tuple) else (expected,)
    torch.testing.assert_close(outputs, expected, rtol=2 * ROUNDINGS * exact.UNIT, atol=0.0)
    # The test can tell: a weight rounded after the sum is off by far more.
    weight = args[1 if op == "rms_norm" else 2]
    assert not torch.equal((weight + 1.0).float(), weight.float() + 1.0)


@pytest.mark.parametrize("variant", SCOPES)
@pytest.mark.parametrize("first", ["dense", "columns first"])
def test_the_in_place_op_counts_as_a_write(host: EmulatedHost, first: str, variant: str) -> None:
    """Autograd would else compute gradients from what has been overwritten."""
    case = Case("fused_add_rms_norm_", variant, (3, 5, 256), layouts=(first, "dense"))
    args = case.arguments()
    factor = torch.ones(256, requires_grad=True)
    products = [factor * args[0], factor * args[1]]
    _launch(host, case, args)
    for made in products:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            made.sum().backward()


@pytest.mark.parametrize("op", ["fused_add_rms_norm_", "rms_norm_backward"])
@pytest.mark.parametrize("feed", [0, 2])
def test_rows_more_than_2_31_elements_apart(
    host: EmulatedHost, tmp_path: Path, op: str, feed: int
) -> None:
    """In a file of which only a few pages exist."""
    case = Case(op, "cuda_block", (3, 256), config=RowConfig(threads=32, items=1, feed=feed))
    args = list(case.arguments())
    apart = 2**31 + 8
    for index in (0, 1):
        file = tmp_path / f"sparse{index}"
        far = torch.from_file(str(file), shared=True, size=3 * apart, dtype=BF16)
        far = far.as_strided((3, 256), (apart, 1))
        args[index] = far.copy_(args[index])
    outputs = _outputs(case, tuple(args), _launch(host, case, tuple(args)))
    check = _check_forward if op in FORWARD_OPS else _check_backward
    check(case, case.arguments(), outputs)


BYTES = product([*FORWARD_OPS, "rms_norm_backward"], ["cuda_warp", "cuda_block", "cuda_cluster"])


@pytest.mark.parametrize(("op", "variant"), sampled(BYTES, 5))
def test_each_byte_moves_once(host: EmulatedHost, op: str, variant: str) -> None:
    """Rows are read once and written once, the weight once per team, whatever the feed."""
    rows, columns = 7, 256 if variant == "cuda_warp" else 2048
    case = Case(op, variant, (rows, columns), dtypes=(BF16, F32, F16, None), dsum=True)
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
        row_bytes = {"rms_norm": 2, "rms_norm_backward": 2 + 4 + 2}.get(op, 2 + 4)
        weight_bytes = 2 * columns * min(teams, rows)
        assert traffic.loaded + traffic.bulk == rows * columns * row_bytes + weight_bytes
        assert (traffic.bulk > 0) == (feed > 0)
        stored = rows * columns * (2 if op in ("rms_norm", "rms_norm_backward") else 2 + 4)
        if op == "rms_norm_backward":
            parts = call.grid // config.cluster
            stored += columns * (4 * parts if parts > 1 else 2)
        assert traffic.stored == stored


def test_the_weight_gradient_is_the_same_every_time(host: EmulatedHost) -> None:
    """However many blocks there are it is added up in a fixed order: run to run, not only once."""
    case = Case("rms_norm_backward", "cuda_block", (500, 64), dtypes=(F32, F32, F32, None))
    host.resident = 4
    answers = [_launch(host, case, case.arguments(), order).outputs[1] for order in range(6)]
    assert all(torch.equal(answers[0], other) for other in answers[1:])
