"""The softmax kernels, forward and backward, run on the CPU by the variants' own host code."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_host import EmulatedHost, Run, build_cases
from exact import UNIT, Range
from sampled import sampled
from softmax_cases import (
    BACKWARD,
    BF16,
    F32,
    FORWARD,
    NONE,
    OPS,
    SCOPES,
    Case,
    configurations,
    laid_out,
    sweep,
)

from gristmill.ops.rows.config import AHEAD, ASYNC, STRAIGHT, TWICE, RowConfig
from gristmill.ops.softmax.semantics import BOTTOM_RIGHT, EVERYTHING

# What the fp32 arithmetic of a kernel may lose, in half units of fp32's last place: the factor
# of a thread's terms, the terms, the sum, its reciprocal, two products.
ROUNDINGS = 8.0
ORDERS = (0, 1, 7)
SMALLEST = 2.0**-126  # powers of two below are 0


def _exponents(args: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """v in fp64, and the size of what was added up to it where the kernel rounds that."""
    x, causal, scale, mask = args
    v = x.double() * scale
    size = torch.zeros_like(v)
    if mask is not None and mask.dtype != torch.bool:
        v = v + mask.double()
    if scale <= 0 or mask is not None:
        size = v.abs()
    if mask is not None and mask.dtype == torch.bool:
        v = v.masked_fill(~mask, NONE)
    if causal != EVERYTHING:
        queries, keys = x.shape[-2:]
        allowed = torch.ones(queries, keys, dtype=torch.bool)
        allowed = allowed.tril(keys - queries if causal == BOTTOM_RIGHT else 0)
        v = v.masked_fill(~allowed, NONE)
    return v, size.masked_fill(v == NONE, 0.0)


def _check_forward(case: Case, args: tuple[Any, ...], y: torch.Tensor) -> None:
    v, size = _exponents(args)
    nobody = (v == NONE).all(-1, keepdim=True)
    largest = v.amax(-1, keepdim=True).masked_fill(nobody, 0.0)
    distance = (v - largest).masked_fill(v == NONE, 0.0).abs()
    # Errors of exponents: of the difference, and of what it is one of.
    off = 2 * (distance + size + size.amax(-1, keepdim=True))
    terms = (v - largest).exp()
    total = terms.sum(-1, keepdim=True)
    if case.op == "softmax":
        p = (terms / total).masked_fill(nobody, 0.0)
        error = p * (ROUNDINGS + off) * UNIT
        low = torch.where(p < 2 * SMALLEST, torch.zeros_like(p), p - error)
        Range(low, p + error).check(y, "y")
        return
    logs = v - largest - total.log()
    none = logs.isinf() | nobody
    assert torch.equal(y == NONE, none)
    logs = logs.masked_fill(none, 0.0)
    error = (ROUNDINGS + off + total.log().abs().masked_fill(nobody, 0.0)) * UNIT
    Range(logs - error, logs + error).check(y.masked_fill(none, 0.0), "y")


def _check_backward(case: Case, args: tuple[Any, ...], dx: torch.Tensor) -> None:
    dy, y, _, scale = args
    d, p = dy.double(), y.double()
    if case.op == "softmax_backward":
        products = d * p
        expected = scale * p * (d - products.sum(-1, keepdim=True))
        size = abs(scale) * p * (d.abs() + products.abs().sum(-1, keepdim=True))
    else:
        none = p == NONE
        d = d.masked_fill(none, 0.0)
        expected = scale * (d - p.exp() * d.sum(-1, keepdim=True)).masked_fill(none, 0.0)
        power = p.exp() * (1 + p.abs().masked_fill(none, 0.0))
        size = abs(scale) * (d.abs() + power * d.abs().sum(-1, keepdim=True))
        size = size.masked_fill(none, 0.0)
    error = size * ROUNDINGS * UNIT
    Range(expected - error, expected + error).check(dx, "dx")


def _launch(host: EmulatedHost, case: Case, args: tuple[Any, ...], order: int = 0) -> Run:
    variant, problem = case.find_variant(), case.problem(args)
    return host.run(variant, problem, case.config or variant.config(problem), args, order=order)


def _check(host: EmulatedHost, case: Case) -> list[Run]:
    """Right, with the strides that are promised, and the same bits in every order of threads."""
    runs = []
    for order in ORDERS:
        args = case.arguments()
        run = _launch(host, case, args, order)
        (_check_forward if case.op in FORWARD else _check_backward)(case, args, run.outputs)
        x = args[0] if case.op in FORWARD else args[1]
        assert run.outputs.dtype == x.dtype
        assert run.outputs.stride() == torch.empty_like(x).stride()
        runs.append(run)
    for other in runs[1:]:
        assert torch.equal(runs[0].outputs, other.outputs)
    return runs


CASES = [case for case in (*sweep(), *configurations()) if case.supported()]


@pytest.fixture(autouse=True, scope="module")
def _all_at_once(request: pytest.FixtureRequest) -> None:
    build_cases(request)


def test_the_cases_reach_what_they_should() -> None:
    """A case that no variant supports would be left out in silence."""
    reached = {(case.op, case.variant) for case in CASES}
    assert reached == {(op, scope) for op in OPS for scope in SCOPES}
    problems = [case.problem(case.arguments()) for case in CASES]
    for op in OPS:
        flags = {flag for one in problems if one.op == op for flag in one.flags}
        assert flags >= {"causal", "scaled", "nested", "ragged", "narrow", "copied"}, op


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel(host: EmulatedHost, case: Case) -> None:
    _check(host, case)


def _run(host: EmulatedHost, case: Case, x: torch.Tensor, **options: Any) -> torch.Tensor:
    """The forward of `case` on x, by its variant and config."""
    args = (x, case.code, options.get("scale", case.scale), options.get("mask"))
    run = _launch(host, case, args)
    assert run.calls
    result: torch.Tensor = run.outputs
    return result


CONFIGS = {
    "cuda_warp": RowConfig(64, 4, lanes=32),
    "cuda_block": RowConfig(128, 4),
    "cuda_cluster": RowConfig(32, 4, cluster=4, feed=ASYNC, hold=False),
    "cuda_cooperative": RowConfig(64, 2, cluster=4, feed=AHEAD, hold=False),
}


def _special(variant: str, op: str, columns: int) -> Case:
    return Case(op, variant, (1, columns), dtypes=(F32, F32), multiprocessors=24)


@pytest.mark.parametrize("op", FORWARD)
@pytest.mark.parametrize("variant", SCOPES)
def test_slices_with_nobody_in_them(host: EmulatedHost, variant: str, op: str) -> None:
    """One finite value in a row: whole threads, warps and blocks have nothing but -inf."""
    columns = 512 if variant == "cuda_warp" else 4096
    case = replace(_special(variant, op, columns), config=None)
    x = torch.full((8, columns), NONE)
    at = [0, 1, 37, columns // 2, columns - 1]
    for row, column in enumerate(at):
        x[row, column] = -3.0
    x[5, 7], x[5, columns - 2] = 100.0, 100.0
    y = _run(host, case, x)
    expected = torch.zeros_like(x) if op == "softmax" else torch.full_like(x, NONE)
    for row, column in enumerate(at):
        expected[row, column] = 1.0 if op == "softmax" else 0.0
    half = 0.5 if op == "softmax" else torch.tensor(0.5).log()
    expected[5, 7] = expected[5, columns - 2] = half
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("op", FORWARD)
@pytest.mark.parametrize("columns", [1, 7, 8, 9, 65, 257, 300])
@pytest.mark.parametrize("feed", [STRAIGHT, ASYNC, TWICE])
def test_blocks_of_a_cluster_with_no_columns(
    host: EmulatedHost, feed: int, columns: int, op: str
) -> None:
    """The last blocks of a cluster may have no vector of a short row."""
    config = RowConfig(32, 1, cluster=16, feed=feed, hold=feed == STRAIGHT)
    case = Case(op, "cuda_cluster", (3, columns), config=config)
    _check(host, case)


SPECIAL = product([name for name in SCOPES if name != "cuda_cooperative"], [512, 509], FORWARD)


@pytest.mark.parametrize(("variant", "columns", "op"), sampled(SPECIAL, 5))
def test_nan_and_infinity_give_what_torch_gives(
    host: EmulatedHost, variant: str, columns: int, op: str
) -> None:
    x = torch.randn(7, columns, generator=torch.Generator().manual_seed(1))
    at = columns // 3
    x[1, at] = float("nan")
    x[2, at] = float("inf")
    x[3, :at] = NONE
    x[4, 0] = float("inf")
    x[4, 1:] = NONE
    x[5, :] = float("nan")
    for config in (CONFIGS[variant], replace(CONFIGS[variant], hold=False)):
        case = replace(_special(variant, op, columns), config=config)
        y = _run(host, case, x)
        expected = (torch.softmax if op == "softmax" else torch.log_softmax)(x, -1)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("op", FORWARD)
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("variant", SCOPES)
def test_a_large_offset_cancels(host: EmulatedHost, variant: str, scale: float, op: str) -> None:
    """Every thread takes differences before it scales, so that nothing of an offset is rounded."""
    generator = torch.Generator().manual_seed(2)
    x = 1e5 + torch.randint(0, 64, (4, 512), generator=generator) / 4
    y = _run(host, _special(variant, op, 512), x, scale=scale)
    expected = (torch.softmax if op == "softmax" else torch.log_softmax)(x.double() * scale, -1)
    torch.testing.assert_close(y.double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("op", FORWARD)
@pytest.mark.parametrize("size", [1e3, -693147.0, 693147.0, 2.0**25, -1e10, 1e25])
@pytest.mark.parametrize("variant", SCOPES)
def test_threads_agree_however_large_numbers_are(
    host: EmulatedHost, variant: str, size: float, op: str
) -> None:
    """A thread scales as the size of its largest number allows: 693147 is where that changes."""
    generator = torch.Generator().manual_seed(3)
    step = 2.0 ** max(-4, int(torch.tensor(abs(size)).log2()) - 22)
    x = size + step * torch.randint(-8, 8, (4, 512), generator=generator)
    assert len(x[0].unique()) > 8
    y = _run(host, _special(variant, op, 512), x)
    expected = (torch.softmax if op == "softmax" else torch.log_softmax)(x.double(), -1)
    torch.testing.assert_close(y.double(), expected, rtol=4e-6, atol=1e-9)


BYTES = product(
    [*FORWARD, *BACKWARD],
    [None, "top_left", "bottom_right"],
    ["cuda_warp", "cuda_block", "cuda_cluster"],
)


@pytest.mark.parametrize(("op", "causal", "variant"), sampled(BYTES, 5))
def test_each_byte_moves_once(
    host: EmulatedHost, op: str, causal: str | None, variant: str
) -> None:
    """What a causal limit hides is not read; everything is written, once."""
    columns = 256 if variant == "cuda_warp" else 2048
    rows = 40
    for feed, items in ((STRAIGHT, 4), (TWICE, 2)):
        if variant == "cuda_warp":
            if feed == TWICE:
                continue
            config = RowConfig(threads=64, items=items, lanes=32, feed=feed)
        else:
            cluster = 2 if variant == "cuda_cluster" else 1
            config = RowConfig(
                128 // cluster, items, cluster=cluster, feed=feed, hold=feed != TWICE
            )
        case = Case(op, variant, (2, rows, columns), causal=causal, config=config)
        traffic = _launch(host, case, case.arguments()).traffic[0]
        offset = columns - rows if causal == "bottom_right" else 0
        seen = [columns if causal is None else row + 1 + offset for row in range(rows)]
        read = 2 * sum(-(-one // 8) * 8 for one in seen)  # in vectors
        times = (2 if feed == TWICE else 1) * (2 if op in BACKWARD else 1)
        assert traffic.loaded == read * 2 * times
        assert traffic.stored == 2 * rows * columns * 2


@pytest.mark.parametrize("columns", [2040, 2041])
@pytest.mark.parametrize("feed", [STRAIGHT, ASYNC, TWICE])
@pytest.mark.parametrize("op", [*FORWARD, *BACKWARD])
def test_what_is_hidden_does_not_count(
    host: EmulatedHost, op: str, feed: int, columns: int
) -> None:
    """NaN beyond the causal limit, in the vectors that straddle it too."""
    config = RowConfig(64, 2 if feed == TWICE else 4, feed=feed, hold=feed == STRAIGHT)
    case = Case(op, "cuda_block", (50, columns), config=config, causal="top_left", scale=0.5)
    args = list(case.arguments())
    clean = _launch(host, case, tuple(args)).outputs
    hidden = torch.ones(50, columns, dtype=torch.bool).triu(1)
    for index in (0, 1) if op in BACKWARD else (0,):
        args[index] = args[index].masked_fill(hidden, float("nan"))
    spoiled = _launch(host, case, tuple(args)).outputs
    assert torch.equal(clean, spoiled)
    assert (clean[hidden] == (NONE if op == "log_softmax" else 0.0)).all()


CAUSAL_FORWARD = [case for case in CASES if case.causal and case.op in FORWARD]


@pytest.mark.parametrize("case", CAUSAL_FORWARD, ids=str)
def test_a_row_of_nan_is_nan_where_it_is_hidden(host: EmulatedHost, case: Case) -> None:
    """As torch's softmax of what was filled with -inf; a hidden NaN, or infinity, is none."""
    x, causal, scale, mask = case.arguments()
    rows, columns = x.shape[-2:]
    hidden = torch.ones(rows, columns, dtype=torch.bool)
    hidden = ~hidden.tril(columns - rows if case.causal == "bottom_right" else 0)
    x = x.clone(memory_format=torch.contiguous_format)
    first = x.view(-1, rows, columns)[0]
    first.masked_fill_(hidden, float("nan"))
    first[rows // 2, 0], first[rows - 1, -1] = float("nan"), float("inf")
    first[rows - 2, 0] = float("inf")
    args = (laid_out(x, case.layouts[0]), causal, scale, mask)
    v = _exponents(args)[0]
    none = (v == NONE).all(-1, keepdim=True)
    expected = getattr(torch, case.op)(v.masked_fill(none, 0.0), -1)
    expected = expected.masked_fill(none, 0.0 if case.op == "softmax" else NONE)
    assert expected.isnan().all(-1).any() or mask is not None
    for order in (0, 7):
        y = _launch(host, case, args, order).outputs
        assert torch.equal(y.isnan(), expected.isnan())
        torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=1e-3, equal_nan=True)


MASKS = {
    "of keys": ((2, 1, 1, 96), 0),
    "of queries and keys": ((5, 96), 0),
    "of all but heads": ((2, 1, 5, 96), 0),
    "one column": ((2, 1, 5, 1), 2 * 5 * 96),
    "scalar": ((), 96),
}


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_a_broadcast_mask_is_not_materialised(
    host: EmulatedHost, name: str, expanded: bool
) -> None:
    """The plan makes its result and, where columns do not lie side by side, one own-sized copy."""
    shape, copy = MASKS[name]
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(2, 3, 5, 96, generator=generator)
    mask = torch.rand(shape, generator=generator) < 0.8
    if expanded and mask.dim() == 4:
        mask = mask.expand(2, 3, 5, mask.shape[-1])
    case = Case("softmax", "cuda_warp", x.shape, dtypes=(F32, F32))
    y = _run(host, case, x, mask=mask)
    made = [storage.nbytes() for storage in host._watch.made.values()]
    assert sorted(made) == sorted([y.numel() * 4, *([copy] if copy else [])])
    _check_forward(case, (x, EVERYTHING, 1.0, mask), y)


def test_masks_that_no_kernel_can_walk_go_elsewhere() -> None:
    """More strides than the kernel has room for: declined with a reason, never expanded."""
    x = torch.randn(2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 8)
    mask = torch.rand([2 if dim % 2 else 1 for dim in range(14)] + [8]) < 0.5
    case = Case("softmax", "cuda_warp", x.shape, dtypes=(F32, F32))
    args = (x, EVERYTHING, 1.0, mask)
    problem = case.own.problem(*args, device=case.device)
    for variant in case.own.variants:
        if variant.name.startswith("cuda_"):
            assert "strides" in str(variant.supports(problem))
    assert torch.equal(case.own.run(*args), case.own.reference(*args))


@pytest.mark.parametrize("op", ["softmax", "softmax_backward"])
@pytest.mark.parametrize("columns", [256, 250])
@pytest.mark.parametrize("feed", [STRAIGHT, ASYNC, TWICE])
def test_rows_more_than_2_31_elements_apart(
    host: EmulatedHost, tmp_path: Path, feed: int, columns: int, op: str
) -> None:
    """In a file of which only a few pages exist."""
    config = RowConfig(threads=64, items=1, feed=feed, hold=feed != TWICE)
    case = Case(op, "cuda_block", (3, columns), config=config)
    args = list(case.arguments())
    apart = 2**31 + (8 if columns == 256 else columns % 8)
    for index in (0, 1) if op in BACKWARD else (0,):
        file = tmp_path / f"sparse{index}"
        far = torch.from_file(str(file), shared=True, size=3 * apart, dtype=BF16)
        args[index] = far.as_strided((3, columns), (apart, 1)).copy_(args[index])
    run = _launch(host, case, tuple(args))
    (_check_forward if op in FORWARD else _check_backward)(case, case.arguments(), run.outputs)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (4, 0)])
@pytest.mark.parametrize("op", [*FORWARD, *BACKWARD])
@pytest.mark.parametrize("variant", SCOPES)
def test_nothing_to_do_launches_nothing(
    host: EmulatedHost, variant: str, op: str, shape: tuple[int, ...]
) -> None:
    case = Case(op, variant, shape)
    x = torch.empty(shape, dtype=BF16)
    args = (x, EVERYTHING, 1.0, None) if op in FORWARD else (x, x, EVERYTHING, 1.0)
    run = _launch(host, case, args)
    assert run.outputs.shape == torch.Size(shape)
    assert run.calls == []


@pytest.mark.parametrize(("op", "variant"), sampled(product([*FORWARD, *BACKWARD], SCOPES), 3))
def test_many_rows_per_team(host: EmulatedHost, op: str, variant: str) -> None:
    """Loops over rows, their last turn ragged, with masks that change from row to row."""
    host.resident = 2 if variant != "cuda_cluster" else 5
    config = {
        "cuda_warp": RowConfig(64, 3, lanes=4, feed=AHEAD),
        "cuda_block": RowConfig(32, 1, feed=3),
        "cuda_cluster": RowConfig(32, 1, cluster=2, feed=2, hold=False),
        "cuda_cooperative": RowConfig(32, 1, cluster=2, feed=AHEAD, hold=False),
    }[variant]
    mask = ("inner", torch.bool) if op in FORWARD else None
    for causal in (None, "bottom_right"):
        case = Case(op, variant, (3, 101, 64), mask=mask, causal=causal, config=config)
        _check(host, replace(case, multiprocessors=20))


@pytest.mark.parametrize("op", FORWARD)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("variant", SCOPES)
def test_numbers_as_large_as_they_come(
    host: EmulatedHost, variant: str, masked: bool, op: str
) -> None:
    """Distances of the lowest numbers are zero, not those of what overflowed."""
    lowest = torch.finfo(F32).min
    x = torch.zeros(5, 512)
    x[0] = lowest
    x[1, ::2] = lowest
    x[2, 3] = -lowest
    x[3] = torch.linspace(-3e38, 3e38, 512, dtype=torch.float64)
    x[4, 1:] = lowest
    mask = None
    if masked:
        mask, x = x, torch.zeros_like(x)
    y = _run(host, _special(variant, op, 512), x, mask=mask)
    values = x if mask is None else mask
    expected = (torch.softmax if op == "softmax" else torch.log_softmax)(values.double(), -1)
    torch.testing.assert_close(y, expected.float(), rtol=1e-6, atol=0.0)
