"""Batch invariance, bit by bit: a row of a batch is that row alone, wherever either lies.

And determinism: a second run gives the same bits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import row_calls
import torch
from conformance_helpers import DEVICES, same_bits
from row_calls import CALLS, PLACES, ROW_CALLS, Arguments, RowCall, chosen_for, launch_of

import gristmill
from gristmill.errors import VariantUnavailable
from gristmill.ops.op import Op
from gristmill.ops.registry import OPS
from gristmill.ops.softmax.semantics import BOTTOM_RIGHT, TOP_LEFT
from gristmill.select.chooser import ranked
from gristmill.select.device import KNOWN
from gristmill.select.tables import tables_for
from gristmill.settings import reload_settings

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
over_calls = pytest.mark.parametrize("call", CALLS, ids=str)


def columns_of(call: RowCall, columns: int) -> int:
    return math.ceil(columns / call.multiple) * call.multiple


def check_rows(
    call: RowCall,
    args: Arguments,
    rows: Sequence[int],
    places: Sequence[Callable[[torch.Tensor], torch.Tensor]] = PLACES,
) -> None:
    """Each of `rows`: in the batch, as a view of it, alone elsewhere, and in another batch."""
    whole = call.run(args)
    count = args[call.rows[0]].shape[0]
    for row in rows:
        expected = [result[row : row + 1] for result in whole]
        view = call.part(args, slice(row, row + 1))
        alone = call.part(args, [row])
        calls = [view, *(call.laid(alone, place) for place in places)]
        for place, one in enumerate(calls):
            for found, result in zip(call.run(one), expected, strict=True):
                assert same_bits(found, result), (row, place)
    # The rows the other way round, and more of them: others before and behind each.
    order = [count - 1 - row for row in range(count)] + [0] * 3
    turned = call.run(call.part(args, order))
    for row in rows:
        for found, result in zip(turned, whole, strict=True):
            assert same_bits(found[count - 1 - row], result[row]), row


def some(count: int) -> list[int]:
    """Rows of a batch: the first, the last, and some between."""
    return sorted({0, count - 1, *range(1, count, max(1, count // 4))})


@pytest.fixture
def invariant() -> Iterator[None]:
    with gristmill.batch_invariant():
        yield


def test_every_op_is_here_that_promises_it() -> None:
    promised = set()
    for op in OPS.values():
        for device in (KNOWN["sm_90a"], None):
            args = op.example((2, 32), torch.bfloat16, "cpu")
            with gristmill.batch_invariant():
                problem = op.problem(*args, device=device)
            if any(
                one.supports(problem) is None and one.varies_with_batch(problem) is None
                for one in op.variants
            ):
                promised.add(op.name)
    assert promised == {call.op for call in CALLS}


@pytest.mark.usefixtures("invariant")
@pytest.mark.parametrize("count", [1, 2, 3, 17])
@over_calls
def test_a_row_of_a_batch_is_that_row_alone(call: RowCall, count: int) -> None:
    torch.manual_seed(count)
    for columns in (97, 100, 512):
        args = call.make(count, columns_of(call, columns), torch.bfloat16, "cpu")
        check_rows(call, args, some(count))


@pytest.mark.usefixtures("invariant")
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: str(dtype)[6:])
@over_calls
def test_every_dtype(call: RowCall, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    args = call.make(5, columns_of(call, 131), dtype, "cpu")
    check_rows(call, args, (0, 3, 4))


@pytest.mark.usefixtures("invariant")
@over_calls
def test_many_rows(call: RowCall) -> None:
    torch.manual_seed(6)
    args = call.make(300, columns_of(call, 65), torch.float32, "cpu")
    check_rows(call, args, (0, 7, 150, 299), (row_calls.unaligned,))


@pytest.mark.usefixtures("invariant")
@pytest.mark.parametrize("call", ROW_CALLS, ids=str)
def test_rows_that_several_threads_share(call: RowCall) -> None:
    """torch splits what is longer than 32768 elements."""
    torch.manual_seed(7)
    args = call.make(3, 40001, torch.float32, "cpu")
    check_rows(call, args, (0, 2), (row_calls.aligned,))


@pytest.mark.usefixtures("invariant")
@pytest.mark.parametrize("lay", [row_calls.nested, row_calls.far_apart, row_calls.spread])
@over_calls
def test_a_batch_that_lies_elsewhere(call: RowCall, lay: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(8)
    args = call.make(6, columns_of(call, 100), torch.bfloat16, "cpu")
    if lay is row_calls.nested and call.op.startswith(("nvfp4", "moe", "matmul", "topk")):
        pytest.skip("rows of one dim, or matrices")
    expected, found = call.run(args), call.run(call.laid(args, lay))
    for one, other in zip(found, expected, strict=True):
        assert same_bits(one.reshape(other.shape), other)


@pytest.mark.usefixtures("invariant")
@pytest.mark.parametrize("code", [TOP_LEFT, BOTTOM_RIGHT])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_causal_rows_of_the_same_position(name: str, code: int) -> None:
    torch.manual_seed(9)
    x = torch.randn(3, 2, 7, 33, dtype=torch.bfloat16)
    mask = torch.rand(2, 1, 33) < 0.7
    dy = torch.randn_like(x)
    y = OPS[name].run(x, code, 0.5, mask)
    dx = OPS[f"{name}_backward"].run(dy, y, code, 0.5)
    for batch in range(3):
        one = OPS[name].run(x[batch, 1], code, 0.5, mask[1])
        assert same_bits(one, y[batch, 1])
        back = OPS[f"{name}_backward"].run(
            row_calls.unaligned(dy[batch, 1]), row_calls.far_apart(one), code, 0.5
        )
        assert same_bits(back, dx[batch, 1])


@pytest.mark.usefixtures("invariant")
def test_a_stack_of_products_has_the_rows_of_its_members() -> None:
    torch.manual_seed(10)
    a, b = torch.randn(3, 5, 24, dtype=torch.bfloat16), torch.randn(3, 24, 9, dtype=torch.bfloat16)
    c = gristmill.matmul(a, b)
    assert same_bits(gristmill.matmul(a[2, 3:4], b[2]), c[2, 3:4])
    assert same_bits(gristmill.matmul(row_calls.unaligned(a[1]), row_calls.spread(b[1])), c[1])
    one = gristmill.matmul(a[:, :2], b[1])
    assert same_bits(one[1], c[1, :2])


# --- through the functions that users call


def test_the_backward_pass_follows_its_forward_pass() -> None:
    torch.manual_seed(11)
    weight = torch.randn(65)
    rows = torch.randn(9, 65)

    def gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        with gristmill.batch_invariant():
            y = gristmill.layer_norm(gristmill.softmax(x, scale=0.2), weight)
        (y * y).sum().backward()
        assert x.grad is not None
        return x.grad

    whole = gradient(rows)
    for row in range(9):
        assert same_bits(gradient(rows[row : row + 1]), whole[row : row + 1])


def test_one_pass_has_the_rows_of_the_mean_that_it_is_told() -> None:
    """Under a mean a row's gradient knows how many rows there are, and nothing else of them."""
    torch.manual_seed(12)
    logits, target = torch.randn(8, 77), torch.randint(0, 77, (8,))
    other = torch.cat((logits[:4], torch.randn(4, 77)))
    gradients = []
    for values in (logits, other):
        x = values.clone().requires_grad_()
        with gristmill.batch_invariant():
            gristmill.cross_entropy(x, target, one_pass=True).backward()
        assert x.grad is not None
        gradients.append(x.grad)
    assert same_bits(gradients[0][:4], gradients[1][:4])
    assert not same_bits(gradients[0], gradients[1])


def test_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRISTMILL_BATCH_INVARIANT", "1")
    reload_settings()
    x, weight = torch.randn(4, 64), torch.randn(64)
    assert gristmill.explain("rms_norm", x, weight).chosen == "reference"
    with gristmill.batch_invariant(False):
        assert gristmill.explain("rms_norm", x, weight).chosen == "library"


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_one_row_at_a_time_is_the_last_resort(op: Op) -> None:
    """Whatever a kernel says of torch's own, which takes no part."""
    args = op.example((4, 64), torch.bfloat16, "meta")
    with gristmill.batch_invariant():
        problem = op.problem(*args, device=KNOWN["sm_90a"])
        choices = ranked(op.name, op.variants, problem)
    assert [choice.variant.name for choice in choices].index("reference") == len(choices) - 1


def test_what_makes_no_promise_refuses() -> None:
    x, weight = torch.randn(4, 64), torch.randn(64)
    with gristmill.batch_invariant():
        with (
            gristmill.use("rms_norm", "library"),
            pytest.raises(VariantUnavailable, match="not batch-invariant"),
        ):
            gristmill.rms_norm(x, weight)
        with pytest.raises(VariantUnavailable, match="under a torch"):
            torch.vmap(gristmill.rms_norm)(x)


# --- the launches of the kernels, which need no GPU to be looked at


@pytest.mark.parametrize("arch", sorted(KNOWN))
@pytest.mark.parametrize("call", ROW_CALLS, ids=str)
def test_the_launch_knows_neither_the_rows_nor_where_they_lie(call: RowCall, arch: str) -> None:
    """One variant, one config and one kernel for each row length."""
    if call.op == "scale_gradient_":
        pytest.skip("element by element: its launch does not matter")
    for columns in (8, 64, 100, 1001, 4096, 12288, 40001, 131072):
        one = call.make(1, columns, torch.bfloat16, "cpu")
        expected = None
        places = [one, *(call.laid(one, place) for place in PLACES)]
        for count in (3, 300, 5000, 2_000_000):
            places.append(call.laid(one, partial(_of_many, count)))
        expected = launch_of(call, one, KNOWN[arch])
        assert expected[0].startswith("cuda_")
        for place, args in enumerate(places):
            assert launch_of(call, args, KNOWN[arch]) == expected, (columns, place)


@pytest.mark.parametrize("call", ROW_CALLS, ids=str)
def test_a_tuned_launch_is_taken_for_any_number_of_rows(call: RowCall) -> None:
    """Tables have rows for many sizes of a batch; in this mode one of them counts."""
    device, counts = KNOWN["sm_90a"], (1, 3, 300, 2048, 4096, 70_000)
    tables = [source.table for source in tables_for(device)]
    families = {row.family for table in tables for row in table.rows.values()}
    named = [family for family in families if family.startswith(f"{call.op} ")]
    for columns in sorted({int(re.search(r" N=(\d+)", family)[1]) for family in named}):
        one = call.make(1, columns, torch.bfloat16, "meta")
        batches = [call.laid(one, partial(_of_many, count)) for count in counts]
        assert len({launch_of(call, batch, device) for batch in batches}) == 1, columns


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "softmax", "cross_entropy"])
def test_without_the_mode_the_launch_follows_the_rows(name: str) -> None:
    """And with it the last bits of a row: what the mode is for."""
    call = next(call for call in ROW_CALLS if call.op == name)
    one = call.make(1, 2048, torch.bfloat16, "meta")
    launches = set()
    for count in (3, 300, 2048, 4096, 70_000):
        choice, _ = chosen_for(call, call.laid(one, partial(_of_many, count)), KNOWN["sm_90a"])
        launches.add((choice.variant, choice.config))
    assert len(launches) > 1


def _of_many(count: int, row: torch.Tensor) -> torch.Tensor:
    return torch.empty((count, *row.shape[1:]), dtype=row.dtype, device="meta")


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm_backward", "softmax", "cross_entropy"])
def test_more_rows_than_a_launch_has_are_refused(name: str) -> None:
    """They would take another kernel than the same rows in a smaller batch."""
    op = OPS[name]
    args = op.example((2**31, 8), torch.bfloat16, "meta")
    with gristmill.batch_invariant():
        problem = op.problem(*args, device=KNOWN["sm_90a"])
        with pytest.raises(VariantUnavailable, match="rows"):
            ranked(name, op.variants, problem)
        fewer = op.example((2**31 - 1, 8), torch.bfloat16, "meta")
        ranked(name, op.variants, op.problem(*fewer, device=KNOWN["sm_90a"]))


# --- on a GPU


LENGTHS = [
    (64, torch.bfloat16),
    (100, torch.bfloat16),
    (257, torch.float32),
    (1024, torch.float16),
    (4096, torch.bfloat16),
    (4096, torch.float32),
    (8200, torch.bfloat16),
    (16384, torch.bfloat16),
]


@pytest.mark.gpu
@pytest.mark.usefixtures("invariant")
@pytest.mark.parametrize(
    ("call", "columns", "dtype"),
    [
        pytest.param(call, columns, dtype, id=f"{call}-{columns}-{dtype}")
        for call in CALLS
        for columns, dtype in LENGTHS
        # A larger product is slow where each row is computed alone.
        if call in ROW_CALLS or columns <= 4096
    ],
)
def test_rows_on_a_gpu(call: RowCall, columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(columns)
    counts = (1, 3, 129, 5000) if call in ROW_CALLS else (1, 3, 40)
    for count in counts:
        args = call.make(count, columns_of(call, columns), dtype, "cuda")
        check_rows(call, args, some(count)[:5])


@pytest.mark.gpu
@pytest.mark.usefixtures("invariant")
@pytest.mark.parametrize("columns", [65536, 50257, 131072])
@pytest.mark.parametrize("call", ROW_CALLS, ids=str)
def test_long_rows_on_a_gpu(call: RowCall, columns: int) -> None:
    torch.manual_seed(columns)
    for count in (1, 2, 70):
        args = call.make(count, columns, torch.bfloat16, "cuda")
        check_rows(call, args, some(count)[:3])


@pytest.mark.gpu
@pytest.mark.usefixtures("invariant")
@pytest.mark.parametrize("columns", [64, 1001, 4096, 33000])
def test_causal_rows_on_a_gpu(columns: int) -> None:
    torch.manual_seed(columns)
    x = torch.randn(3, 40, columns, device="cuda", dtype=torch.bfloat16)
    y = gristmill.softmax(x, scale=0.1, causal="bottom_right")
    for batch in range(3):
        one = gristmill.softmax(row_calls.unaligned(x[batch]), scale=0.1, causal="bottom_right")
        assert same_bits(one, y[batch])


# --- determinism


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("device", DEVICES)
@over_calls
def test_a_second_run_gives_the_same_bits(call: RowCall, device: str) -> None:
    """Whatever mixes rows, too, by every variant that says nothing against it."""
    op = OPS[call.op]
    torch.manual_seed(13)
    args = call.make(67, columns_of(call, 1000), torch.float32, device)
    problem = op.problem(*args)
    for variant in op.variants:
        if variant.supports(problem) or variant.indeterminate(problem):
            continue
        answers = []
        for _ in range(3):
            own = tuple(
                row_calls.copy_of(arg) if isinstance(arg, torch.Tensor) else arg for arg in args
            )
            with gristmill.use(op.name, variant.name):
                answers.append(_tensors(op.run(*own)) + [own[at] for at in op.written])
        for again in answers[1:]:
            for one, other in zip(again, answers[0], strict=True):
                assert same_bits(one, other), variant.name


def _tensors(results: Any) -> list[torch.Tensor]:
    if results is None:
        return []
    return [results] if isinstance(results, torch.Tensor) else list(results)


def test_what_is_not_deterministic_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the plan that was made for it before the flag was set."""
    op = OPS["rms_norm"]
    library = next(variant for variant in op.variants if variant.name == "library")
    monkeypatch.setattr(
        type(library), "indeterminate", lambda self, problem: "its sums come as they are ready"
    )
    x, weight = torch.randn(4, 64), torch.randn(64)
    args = (x, weight, 1e-6, 0.0, "once", None)

    def plans() -> tuple[int, int]:
        choices = gristmill.counters()["choices"]
        return tuple(choices.get(f"rms_norm:{one}", 0) for one in ("library", "reference"))

    op.forget_plans()
    op.run(*args)
    library_plans, reference_plans = plans()
    assert library_plans
    torch.use_deterministic_algorithms(True)
    try:
        assert gristmill.explain("rms_norm", x, weight).chosen == "reference"
        op.run(*args)
        assert plans() == (library_plans, reference_plans + 1)
        with (
            gristmill.use("rms_norm", "library"),
            pytest.raises(VariantUnavailable, match="not deterministic: its sums come as they"),
        ):
            op.run(*args)
    finally:
        torch.use_deterministic_algorithms(False)
    op.run(*args)  # by the plan of the beginning
    assert plans() == (library_plans, reference_plans + 1)
