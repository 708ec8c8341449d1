"""Batch invariance of the CUDA kernels, bit by bit, in the emulation.

What the chooser takes is what runs here: the variant, its config, its own host code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import row_calls
import torch
from emulated_host import EmulatedHost
from emulation.harness import emulator_for
from row_calls import ROW_CALLS, Arguments, RowCall, chosen_for

import gristmill
from gristmill.ops.registry import OPS
from gristmill.ops.rows.config import AHEAD, ASYNC, STRAIGHT, TWICE
from gristmill.ops.rows.variant import SCOPES
from gristmill.ops.softmax.semantics import BOTTOM_RIGHT, EVERYTHING
from gristmill.select import reset_tables
from gristmill.select.device import KNOWN, Device
from gristmill.select.problem import Problem
from gristmill.settings import reload_settings

BF16, F32 = torch.bfloat16, torch.float32
CALLS = {str(call): call for call in ROW_CALLS}
# A large GPU for which a fixed number of rows is few, and a small one for which it is many.
LARGE, SMALL = 132, 3


@dataclass(frozen=True)
class Case:
    call: str
    columns: int
    dtype: torch.dtype = BF16
    multiprocessors: int = LARGE
    arch: str = "sm_90a"
    variant: str | None = None  # asked for by name

    def __str__(self) -> str:
        words = [self.call, str(self.columns), str(self.dtype)[6:], str(self.multiprocessors)]
        return "-".join([*words, self.arch, *([self.variant] if self.variant else [])])

    @property
    def machine(self) -> Device:
        return replace(KNOWN[self.arch], multiprocessors=self.multiprocessors)

    @property
    def rows(self) -> RowCall:
        return CALLS[self.call]

    def arguments(self, count: int) -> Arguments:
        torch.manual_seed(count)
        return self.rows.make(count, self.columns, self.dtype, "cpu")

    def chosen(self, args: Arguments) -> tuple[Any, Problem]:
        if self.variant is None:
            return chosen_for(self.rows, args, self.machine)
        with gristmill.use(self.rows.op, self.variant):
            return chosen_for(self.rows, args, self.machine)


# Rows of a warp, of a block, of a cluster, of a grid; whole vectors, halves of them, odd ones.
CASES = [
    Case("rms_norm", 256),
    Case("rms_norm", 131, F32),
    Case("rms_norm", 4100, multiprocessors=SMALL),
    Case("rms_norm", 8192, multiprocessors=SMALL),
    Case("rms_norm", 16392, multiprocessors=SMALL, variant="cuda_cluster"),
    Case("rms_norm", 4100, arch="sm_80", multiprocessors=12, variant="cuda_cooperative"),
    Case("add_rms_norm", 1001),
    Case("add_rms_norm", 2048),
    Case("fused_add_rms_norm_", 100),
    Case("fused_add_rms_norm_", 1032, multiprocessors=SMALL),
    Case("rms_norm_fp8", 520),
    Case("rms_norm_backward-dsum", 200),
    Case("rms_norm_backward", 2048, multiprocessors=SMALL),
    Case("rms_norm_backward-dsum", 1003, multiprocessors=SMALL),
    Case("layer_norm", 1024),
    Case("layer_norm", 4104, F32, multiprocessors=SMALL),
    Case("layer_norm", 16384, multiprocessors=SMALL),
    Case("add_layer_norm_fp8", 2052),
    Case("layer_norm_backward-dsum", 1500, multiprocessors=SMALL),
    Case("softmax", 77),
    Case("softmax-bool_mask", 1001),
    Case("softmax-mask", 4100, multiprocessors=SMALL),
    Case("softmax", 8192, multiprocessors=SMALL),
    Case("softmax", 34000, multiprocessors=SMALL),
    Case("log_softmax", 520, F32),
    Case("log_softmax-bool_mask", 3000, arch="sm_80", variant="cuda_cooperative"),
    Case("softmax_backward", 515),
    Case("log_softmax_backward", 5000, multiprocessors=SMALL),
    Case("cross_entropy", 999),
    Case("cross_entropy-options", 1300),
    Case("cross_entropy", 9000, variant="cuda_cluster"),
    Case("cross_entropy_one_pass-options", 601),
    Case("cross_entropy_one_pass", 4096),
    Case("cross_entropy_one_pass_", 260),
    Case("cross_entropy_backward-options", 333),
    Case("cross_entropy_backward-mean", 9000),
    Case("cross_entropy_shard", 1111),
]
over_cases = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(autouse=True)
def _no_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is tried is what the variants ask for, whatever was measured."""
    with monkeypatch.context() as patch:
        patch.setenv("GRISTMILL_TABLE", "none")
        reload_settings()
        reset_tables()
        yield
    reload_settings()
    reset_tables()


@pytest.fixture(autouse=True, scope="module")
def _all_at_once(pytestconfig: pytest.Config) -> None:
    """One build for the whole file, on all cores, instead of one per test."""
    programs = []
    with gristmill.batch_invariant():
        for case in CASES:
            choice, problem = case.chosen(case.arguments(2))
            programs += choice.variant.programs(problem, choice.config)
    emulator_for(pytestconfig).prepare(programs)


def _run(host: EmulatedHost, case: Case, args: Arguments) -> tuple[list[torch.Tensor], Any]:
    """The results that belong to rows, and the launch that made them."""
    choice, problem = case.chosen(args)
    own = tuple(row_calls.copy_of(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)
    written = OPS[case.rows.op].written
    run = host.run(choice.variant, problem, choice.config, own, written=written)
    first = next(call for call in run.calls if "total" not in call.name)
    launch = first.name, first.block, first.cluster, first.shared
    return case.rows.of_rows(own, run.outputs), launch


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    as_bits = integers[one.element_size()]
    return torch.equal(one.contiguous().view(as_bits), other.contiguous().view(as_bits))


def test_the_cases_reach_what_they_should() -> None:
    scopes, feeds, vectors = set(), set(), set()
    with gristmill.batch_invariant():
        for case in CASES:
            choice, problem = case.chosen(case.arguments(3))
            scopes.add(choice.variant.name)
            feeds.add(min(choice.config.feed, 2))
            vectors.add(problem.layout.layout.vector)
    assert scopes == set(SCOPES)
    assert feeds == {STRAIGHT, AHEAD, ASYNC, TWICE, 2}
    assert vectors >= {1, 4, 8}
    assert {case.rows.op for case in CASES} >= {
        call.op for call in ROW_CALLS if call.op not in ("scale_gradient_", "layer_norm_fp8")
    } - {"add_layer_norm", "add_rms_norm_fp8"}


@over_cases
def test_a_row_of_a_batch_is_that_row_alone(host: EmulatedHost, case: Case) -> None:
    host.resident = 2  # so that teams that do several rows do
    with gristmill.batch_invariant():
        args = case.arguments(5)
        whole, launch = _run(host, case, args)
        for row in (0, 4):
            alone = case.rows.part(args, [row])
            places = [
                case.rows.part(args, slice(row, row + 1)),
                *(case.rows.laid(alone, place) for place in row_calls.PLACES),
            ]
            for place, one in enumerate(places):
                found, own = _run(host, case, one)
                assert own == launch
                for result, expected in zip(found, whole, strict=True):
                    assert _same(result, expected[row : row + 1]), (row, place)
        turned, own = _run(host, case, case.rows.part(args, [3, 3, 4, 1, 0, 2, 0]))
        assert own == launch
        for result, expected in zip(turned, whole, strict=True):
            assert _same(result[2], expected[4])
            assert _same(result[6], expected[0])


@over_cases
def test_a_batch_that_lies_elsewhere(host: EmulatedHost, case: Case) -> None:
    with gristmill.batch_invariant():
        args = case.arguments(4)
        whole, launch = _run(host, case, args)
        for lay in (row_calls.nested, row_calls.far_apart):
            found, own = _run(host, case, case.rows.laid(args, lay))
            assert own == launch
            for result, expected in zip(found, whole, strict=True):
                assert _same(result.reshape(expected.shape), expected), lay.__name__


@over_cases
def test_the_order_of_threads_changes_nothing(host: EmulatedHost, case: Case) -> None:
    """Determinism, whatever mixes rows included: no block and no warp is waited for in turn."""
    args = case.arguments(3)
    with gristmill.batch_invariant():
        choice, problem = case.chosen(args)
        answers = []
        for order in (0, 1, 5):
            own = tuple(
                row_calls.copy_of(arg) if isinstance(arg, torch.Tensor) else arg for arg in args
            )
            written = OPS[case.rows.op].written
            run = host.run(
                choice.variant, problem, choice.config, own, written=written, order=order
            )
            results = run.outputs if isinstance(run.outputs, (tuple, list)) else [run.outputs]
            found = [one for one in results if one is not None] + [own[at] for at in written]
            answers.append([one for one in found if one.numel()])
    for again in answers[1:]:
        for one, other in zip(again, answers[0], strict=True):
            assert _same(one, other)


def _softmax(host: EmulatedHost, *args: Any) -> torch.Tensor:
    call = RowCall("softmax", (0,), (0,), lambda *_: ())
    with gristmill.batch_invariant():
        choice, problem = chosen_for(call, args, KNOWN["sm_90a"])
        assert choice.variant.name.startswith("cuda_")
        found: torch.Tensor = host.run(choice.variant, problem, choice.config, args).outputs
    return found


@pytest.mark.parametrize("columns", [33, 200, 1100])
def test_causal_rows_of_the_same_position(host: EmulatedHost, columns: int) -> None:
    torch.manual_seed(columns)
    x = torch.randn(3, 4, columns)
    y = _softmax(host, x, BOTTOM_RIGHT, 0.5, None)
    for batch in range(3):
        elsewhere = row_calls.unaligned(x[batch])
        assert _same(_softmax(host, elsewhere, BOTTOM_RIGHT, 0.5, None), y[batch])


def test_a_mask_of_many_dims_has_the_rows_of_a_plain_one(host: EmulatedHost) -> None:
    """Its rows are more levels apart than a kernel can follow, so that it is expanded first."""
    torch.manual_seed(1)
    leading = (2, 2, 2, 2, 2, 2, 2, 2)
    x, mask = torch.randn(*leading, 24), torch.randn(2, 1, 2, 1, 2, 1, 2, 1, 24)
    narrow = mask.expand(2, 1, 2, 1, 2, 1, 2, 1, 24).movedim(0, -2)
    masks = (mask, row_calls.unaligned(mask), torch.randn(2, 1, 2, 1, 2, 1, 2, 24), narrow)
    for one in masks:
        y = _softmax(host, x, EVERYTHING, 0.5, one)
        rows = one.expand(x.shape).reshape(-1, 24)
        plain = _softmax(host, x.view(-1, 24)[77:79], EVERYTHING, 0.5, rows[77:79])
        assert _same(plain, y.view(-1, 24)[77:79])


def test_gradients_are_scaled_element_by_element(host: EmulatedHost) -> None:
    """Their launch may follow the layout: no element knows of another."""
    case = Case("scale_gradient_", 1001)
    args = case.arguments(5)
    with gristmill.batch_invariant():
        (whole,), _ = _run(host, case, args)
        for place in row_calls.PLACES:
            (found,), _ = _run(host, case, case.rows.laid(case.rows.part(args, [3]), place))
            assert _same(found, whole[3:4])


@pytest.mark.parametrize(
    ("case", "few"),
    [
        # Rows of odd length are covered by aligned vectors: where they lie says who takes what.
        (Case("softmax", 1001, F32), False),
        # Few rows are shared by more threads each than many.
        (Case("rms_norm", 4096, F32, multiprocessors=SMALL), True),
        # Rows that are not aligned come in another way, to other threads.
        (Case("softmax", 8192, F32, multiprocessors=SMALL), False),
    ],
    ids=["ragged rows", "few rows", "unaligned rows"],
)
def test_without_the_mode_a_row_may_differ(host: EmulatedHost, case: Case, few: bool) -> None:
    """What the mode is for: rows alone (`few`), and a batch that lies elsewhere, need it."""
    host.resident = 2
    args = case.arguments(20)
    differ = []
    for invariant in (False, True):
        with gristmill.batch_invariant(invariant):
            (whole,), _ = _run(host, case, args)
            if few:
                alone = [_run(host, case, case.rows.part(args, [row]))[0][0] for row in range(20)]
                again = torch.cat(alone)
            else:
                (again,), _ = _run(host, case, case.rows.laid(args, row_calls.unaligned))
        differ.append(not _same(again, whole))
    assert differ == [True, False]
