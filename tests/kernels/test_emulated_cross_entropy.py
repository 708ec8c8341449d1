"""The cross entropy kernels, run on the CPU by the variants' own host code."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import cross_entropy_exact as truth
import pytest
import torch
from cross_entropy_cases import BF16, F32, OPS, SCOPES, Case, configurations, sweep
from emulated_host import EmulatedHost, Run, build_cases
from emulation.harness import EmulationError
from exact import UNIT, Range

from gristmill.ops.cross_entropy import reference
from gristmill.ops.rows.config import ASYNC, TWICE, RowConfig
from gristmill.settings import reload_settings

# What the fp32 arithmetic of a kernel may lose, in half units of fp32's last place of the terms.
ROUNDINGS = 4.0
ORDERS = (0, 1, 7)
WRITTEN = {"cross_entropy_one_pass_": (0,), "scale_gradient_": (0,)}


def _launch(host: EmulatedHost, case: Case, args: tuple[Any, ...], order: int = 0) -> Run:
    variant, problem = case.find_variant(), case.problem(args)
    config = case.config or variant.config(problem)
    written = WRITTEN.get(case.op, ())
    return host.run(variant, problem, config, args, written=written, order=order)


def _outputs(case: Case, args: tuple[Any, ...], run: Run) -> tuple[torch.Tensor, ...]:
    if case.op == "scale_gradient_":
        return (args[0],)
    if case.op == "cross_entropy_one_pass_":
        return *run.outputs, args[0]
    return run.outputs if isinstance(run.outputs, tuple) else (run.outputs,)


def _expected(case: Case, args: tuple[Any, ...]) -> list[truth.Pair]:
    if case.op == "cross_entropy":
        return truth.forward(*args)
    if case.op.startswith("cross_entropy_one_pass"):
        return truth.one_pass(*args)
    functions = {
        "cross_entropy_backward": truth.backward,
        "cross_entropy_shard": truth.shard,
        "scale_gradient_": truth.scale,
    }
    return [functions[case.op](*args)]


def _compare(
    case: Case, args: tuple[Any, ...], outputs: tuple[torch.Tensor, ...], faint: float = 0.0
) -> None:
    """`faint`: how large what fp32 has no normal number for may be; the kernels make 0 of it."""
    for number, (pair, output) in enumerate(zip(_expected(case, args), outputs, strict=True)):
        value, terms = pair
        assert output.shape == value.shape
        allowed = Range(value, value).widened(terms * ROUNDINGS * UNIT + faint)
        allowed.check(output, f"result {number}")


def _check(host: EmulatedHost, case: Case) -> list[Run]:
    """Right, with the strides that are promised, and the same bits in every order of threads."""
    runs, answers = [], []
    for order in ORDERS:
        args, before = case.arguments(), case.arguments()
        run = _launch(host, case, args, order)
        outputs = _outputs(case, args, run)
        _compare(case, before, outputs)
        promised = OPS[case.op].outputs(*before)
        if isinstance(promised, torch.Tensor):
            promised = (promised,)
        for want, found in zip(promised or (), outputs, strict=False):
            assert (found.stride(), found.dtype) == (want.stride(), want.dtype)
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


BLOCKED = {"cross_entropy_backward", "scale_gradient_"}  # ops that know no clusters
LAUNCHES = [
    Case(op, variant, (5, 256 if variant == "cuda_warp" else columns), ignored=0.0)
    for op in ("cross_entropy", "cross_entropy_one_pass", "cross_entropy_backward")
    for variant in SCOPES
    for columns in (2048, 2051)
    if not (variant == "cuda_cluster" and op in BLOCKED)
    if not (variant == "cuda_warp" and columns == 2051)
] + [
    Case(
        "cross_entropy_one_pass",
        "cuda_block",
        (5, columns),
        ignored=0.0,
        config=RowConfig(64, 2, feed=TWICE, hold=False),
    )
    for columns in (2048, 2051)
]
over_launches = pytest.mark.parametrize("case", LAUNCHES, ids=str)


def _with(case: Case, **changed: torch.Tensor) -> tuple[Any, ...]:
    """The arguments of a case with other logits or targets; stats are those of the new ones."""
    args = list(case.arguments())
    places = {"logits": 2, "target": 3} if case.op == "cross_entropy_backward" else None
    for name, value in changed.items():
        args[places[name] if places else {"logits": 0, "target": 1}[name]] = value
    if places:
        args[4] = reference.stats_of(args[2], None)
    return tuple(args)


def _logits(case: Case) -> torch.Tensor:
    return case.arguments()[2 if case.op == "cross_entropy_backward" else 0]


def _parts(case: Case, run: Run) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Losses (with reduction "none") and the gradient, where the op gives them."""
    if case.op == "cross_entropy_backward":
        return None, run.outputs
    if case.op == "cross_entropy":
        return run.outputs[0], None
    return run.outputs[0], run.outputs[2]


@over_launches
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_targets_that_are_no_class_are_never_looked_up(
    host: EmulatedHost, case: Case, dtype: torch.dtype
) -> None:
    """The emulation stops at a wild read. Loss and gradient of the row are NaN, others are not."""
    columns = case.shape[-1]
    bad = [-1, columns, 2**31 - 1, -(2**31)]
    if dtype == torch.int64:
        bad += [2**40 + 3, -(2**62), 2**63 - 1]
    for value in bad:
        target = torch.tensor([0, value, columns - 1, 1, 2]).to(dtype)
        weight = torch.rand(columns) if value == columns else None
        args = list(_with(replace(case, reduction="none"), target=target))
        args[6 if case.op == "cross_entropy_backward" else 2] = weight
        loss, gradient = _parts(case, _launch(host, replace(case, reduction="none"), tuple(args)))
        fine = [0, 2, 3, 4]
        if loss is not None:
            assert loss[1].isnan()
            assert loss[fine].isfinite().all()
        if gradient is not None:
            assert gradient[1].isnan().all()
            assert gradient[fine].isfinite().all()


@over_launches
def test_debug_mode_stops_the_grid(
    host: EmulatedHost, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = torch.tensor([0, -5, 1, 1, -100])
    args = _with(replace(case, reduction="none"), target=target)
    _launch(host, case, args)
    monkeypatch.setenv("GRISTMILL_DEBUG", "1")
    reload_settings()
    try:
        with pytest.raises(EmulationError, match="stopped the grid"):
            _launch(host, case, args)
        target[1] = 0
        _launch(host, case, args)
    finally:
        monkeypatch.undo()
        reload_settings()


@over_launches
def test_masked_classes(host: EmulatedHost, case: Case) -> None:
    """One finite logit in a row: threads, warps and blocks that see nothing but minus infinity."""
    case = replace(case, reduction="none")
    columns = case.shape[-1]
    for keep in (0, 7, columns // 2, columns - 1):
        logits = torch.full(case.shape, -torch.inf)
        logits[:, keep] = torch.tensor([0.0, 3.0, -200.0, 1e4, 1.0])
        logits[4, (keep + 9) % columns] = 2.0
        logits = logits.to(case.dtype)
        target = torch.full((5,), keep)
        args = _with(case, logits=logits, target=target)
        loss, gradient = _parts(case, _launch(host, case, args))
        p = torch.softmax(logits.double(), -1)
        if loss is not None:
            exact = -p[:, keep].log()
            torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=1e-6)
        if gradient is not None:
            p[:, keep] -= 1
            if case.op == "cross_entropy_backward":
                p *= args[0].double().unsqueeze(-1)
            torch.testing.assert_close(gradient.double(), p, rtol=2**-7, atol=1e-3)


@over_launches
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(host: EmulatedHost, case: Case, value: float) -> None:
    case = replace(case, reduction="none")
    clean = _parts(case, _launch(host, case, case.arguments()))
    logits = _logits(case)
    logits[3, 200] = value
    dirty = _parts(case, _launch(host, case, _with(case, logits=logits)))
    for one, other in zip(clean, dirty, strict=True):
        if one is not None:
            assert torch.equal(one[[0, 1, 2, 4]], other[[0, 1, 2, 4]])
            assert other[3].isnan().any()


@over_launches
def test_ignored_rows_are_passed_over(host: EmulatedHost, case: Case) -> None:
    """They cost a target each, and in the gradient a row of zeros, whatever they hold.

    Copies into shared memory do not wait for the target: those rows are read in vain.
    """
    case = replace(case, reduction="none")
    columns = case.shape[-1]
    logits = _logits(case)
    logits[1] = float("nan")
    logits[4] = float("inf")
    target = torch.tensor([3, -100, 5, 7, -100])
    run = _launch(host, case, _with(case, logits=logits, target=target))
    loss, gradient = _parts(case, run)
    twice = case.config is not None
    staged = case.find_variant().config(case.problem(case.arguments())).feed == ASYNC
    rows = 5 if staged and not twice else 3
    reads = rows * columns * logits.element_size() * (2 if twice else 1)
    # Targets and a few numbers for each row, once per thread.
    assert reads <= run.traffic[0].loaded
    if case.variant != "cuda_warp" or case.op != "cross_entropy_one_pass":
        threads = run.calls[0].block * run.calls[0].grid
        assert run.traffic[0].loaded <= reads + 64 * threads
    if loss is not None:
        assert loss[[1, 4]].tolist() == [0.0, 0.0]
        assert loss[[0, 2, 3]].isfinite().all()
    if gradient is not None:
        assert not gradient[[1, 4]].any()
        assert gradient.isfinite().all()


@pytest.mark.parametrize("columns", [1024, 1021])
@pytest.mark.parametrize("per_row", [False, True])
def test_a_factor_of_one_moves_nothing(host: EmulatedHost, columns: int, per_row: bool) -> None:
    case = Case("scale_gradient_", "cuda_block", (6, columns))
    gradient, _ = case.arguments()
    before = gradient.clone()
    factor = torch.ones(6) if per_row else torch.ones(())
    run = _launch(host, case, (gradient, factor))
    assert run.traffic[0].stored == 0
    assert run.traffic[0].loaded <= 4 * 6 * run.calls[0].block * run.calls[0].grid
    assert torch.equal(gradient, before)
    if per_row:
        factor[4] = 0.5
        run = _launch(host, case, (gradient, factor))
        assert run.traffic[0].stored == 2 * columns
        assert torch.equal(gradient[4], before[4] * 0.5)


@pytest.mark.parametrize("op", ["cross_entropy_one_pass_", "scale_gradient_"])
@pytest.mark.parametrize("layout", ["dense", "odd stride", "columns first"])
def test_in_place_counts_as_a_write(host: EmulatedHost, op: str, layout: str) -> None:
    """Autograd would else compute gradients from what has been overwritten."""
    case = Case(op, "cuda_block", (3, 5, 256), layout=layout)
    args = case.arguments()
    product = torch.ones(256, requires_grad=True) * args[0]
    _launch(host, case, args)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize(
    "op", ["cross_entropy", "cross_entropy_backward", "cross_entropy_one_pass"]
)
def test_each_byte_moves_once(host: EmulatedHost, op: str) -> None:
    case = Case(op, "cuda_block", (7, 4096), ignored=0.0, reduction="none")
    run = _launch(host, case, case.arguments())
    rows = 7 * 4096 * 2
    small = 64 * run.calls[0].block * run.calls[0].grid
    assert rows <= run.traffic[0].loaded <= rows + small
    written = {"cross_entropy": 0}.get(op, rows)
    numbers = {"cross_entropy": 4, "cross_entropy_one_pass": 2}.get(op, 0)
    assert written <= run.traffic[0].stored <= written + 7 * 4 * numbers


@pytest.mark.parametrize("op", ["cross_entropy", "cross_entropy_one_pass_"])
@pytest.mark.parametrize("columns", [256, 251])
def test_rows_more_than_2_31_elements_apart(
    host: EmulatedHost, tmp_path: Path, op: str, columns: int
) -> None:
    """In a file of which only a few pages exist."""
    case = Case(op, "cuda_block", (3, columns), reduction="none")
    args = list(case.arguments())
    apart = 2**31 + 8
    far = torch.from_file(str(tmp_path / "sparse"), shared=True, size=3 * apart, dtype=BF16)
    args[0] = far.as_strided((3, columns), (apart, 1)).copy_(args[0])
    run = _launch(host, case, tuple(args))
    _compare(case, case.arguments(), _outputs(case, tuple(args), run))


@pytest.mark.parametrize("scope", SCOPES)
def test_a_large_offset_cancels(host: EmulatedHost, scope: str) -> None:
    """Logits around 10^4 in fp32: loss and gradient are as right as those around 0."""
    columns = 256 if scope == "cuda_warp" else 4096
    for op in ("cross_entropy", "cross_entropy_one_pass"):
        case = Case(op, scope, (5, columns), dtype=F32, smoothing=0.1, reduction="none")
        args = list(case.arguments())
        args[0] = (args[0] + 1e4).float()
        run = _launch(host, case, tuple(args))
        pairs = _expected(case, tuple(args))
        for number in (0, 2) if op == "cross_entropy_one_pass" else (0,):
            value, terms = pairs[number]
            Range(value, value).widened(terms * ROUNDINGS * UNIT).check(
                run.outputs[number], f"{op} result {number}"
            )


LARGE = [
    replace(case, reduction="none", dtype=dtype, smoothing=smoothing)
    for case in LAUNCHES
    for dtype, smoothing in ((F32, 0.0), (BF16, 0.0), (F32, 0.1))
]


@pytest.mark.parametrize("case", LARGE, ids=lambda case: f"{case} {case.dtype} {case.smoothing}")
def test_logits_of_any_size(host: EmulatedHost, case: Case) -> None:
    """Far apart, or a few units of the last place: no number but their distances is rounded."""
    generator = torch.Generator().manual_seed(5)
    for size in (1e3, 1e8, 1e34):
        far = torch.randn(case.shape, generator=generator).double() * size
        unit = torch.finfo(case.dtype).eps * size
        near = size - unit * torch.randint(0, 9, case.shape, generator=generator).double()
        for logits in (far, near):
            args = _with(case, logits=logits.to(case.dtype))
            run = _launch(host, case, args)
            _compare(case, args, _outputs(case, args, run), faint=2.0**-124)


ONE_PASS = [
    replace(case, reduction="none", dtype=F32, return_lse=True)
    for case in LAUNCHES
    if case.op == "cross_entropy_one_pass"
]


@pytest.mark.parametrize("case", ONE_PASS, ids=str)
def test_lse_of_ignored_rows_of_any_size(host: EmulatedHost, case: Case) -> None:
    """Where it is asked for: loss and gradient of these rows are zero."""
    generator = torch.Generator().manual_seed(6)
    sizes = torch.tensor([1.0, 1e8, 1e34, 1e8, 1e34])[:, None]
    logits = torch.randn(case.shape, generator=generator) * sizes
    target = torch.tensor([-100, -100, -100, 4, -100])
    args = _with(case, logits=logits, target=target)
    outputs = _outputs(case, args, _launch(host, case, args))
    _compare(case, args, outputs, faint=2.0**-124)
    ignored = target == -100
    assert not outputs[0][ignored].any()
    assert not outputs[2][ignored].any()


@over_launches
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_one_class_and_the_largest_gradient(
    host: EmulatedHost, case: Case, smoothing: float
) -> None:
    """Of one class nothing is left, whatever the gradient of the loss; others are finite."""
    one = replace(case, shape=(5, 1), reduction="none", smoothing=smoothing, config=None)
    many = replace(case, reduction="none", smoothing=smoothing)
    for each in (one, many) if one.supported() else (many,):
        args = list(each.arguments())
        if each.op == "cross_entropy_backward":
            args[0] = torch.full((5,), torch.finfo().max)
        outputs = _outputs(each, tuple(args), _launch(host, each, tuple(args)))
        _compare(each, tuple(args), outputs)
        if each is one:
            for output in outputs if each.op == "cross_entropy_backward" else (outputs[0],):
                assert not output.any()
        assert outputs[0].isfinite().all()


@pytest.mark.parametrize("op", list(OPS))
@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (4, 0)])
def test_nothing_to_do_launches_nothing(
    host: EmulatedHost, op: str, shape: tuple[int, ...]
) -> None:
    case = Case(op, "cuda_block", shape, reduction="sum")
    args = list(OPS[op].example(shape, BF16, "cpu"))
    run = host.run(case.find_variant(), case.problem(tuple(args)), None, args)
    assert run.calls == []


def test_the_mean_is_the_same_every_time(host: EmulatedHost) -> None:
    """However the blocks of the cluster come, rows are added up in a fixed order."""
    case = Case("cross_entropy", "cuda_warp", (5000, 3), dtype=F32)
    answers = [_launch(host, case, case.arguments(), order).outputs for order in range(4)]
    for other in answers[1:]:
        assert all(torch.equal(*pair) for pair in zip(answers[0], other, strict=True))
    loss, _, denominators, _ = answers[0]
    args = case.arguments()
    assert denominators.tolist() == [float((args[1] != -100).sum())] * 2
    assert math.isclose(float(loss), float(truth.forward(*args)[0][0]), rel_tol=1e-6)
