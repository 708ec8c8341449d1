"""Whatever sizes and layouts a call has that the rule means: its kernels are in the space."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from space.space_sets import DTYPES, ROW_OPS, AnyRows, kind_of, kinds, lays, programs, space

from gristmill.ops.registry import OPS
from gristmill.ops.rows.layout import Layout
from gristmill.ops.rows.space import DENSE, LONGEST, Lay
from gristmill.select.chooser import by_heuristics, ranked
from gristmill.select.device import KNOWN, Device
from gristmill.select.overrides import batch_invariant
from gristmill.select.problem import Problem

H200 = KNOWN["sm_90a"]
# Cards of one architecture share its bundle.
SISTERS = (
    replace(H200, name="NVIDIA H100 PCIe", multiprocessors=114),
    replace(H200, name="NVIDIA H20", multiprocessors=78),
    H200,
)
# The others are in the long run.
QUICK = ("rms_norm", "layer_norm_backward", "softmax", "cross_entropy_backward")
OFTEN = settings(
    max_examples=400, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
# The same ones in every run: what is random is for the long tests.
SELDOM = settings(OFTEN, max_examples=100, derandomize=True)

lengths = st.one_of(
    st.integers(1, 200),
    st.integers(1, 20_000),
    st.integers(1, 2**12).map(lambda n: 8 * n),
    st.integers(1, 2**17).map(lambda n: 8 * n),
    st.integers(1, 2**20),
    st.integers(0, 20).flatmap(
        lambda up: st.integers(-9, 9).map(lambda by: max(1, (1 << up) + by))
    ),
)
counts = st.one_of(
    st.integers(1, 40), st.integers(1, 700), st.integers(1, 9000), st.integers(1, 2**22)
)


def problem_of(draw: Any, name: str, dtype: torch.dtype, device: Device) -> Problem:
    columns = min(draw(lengths), LONGEST // dtype.itemsize)
    chosen = draw(st.sampled_from(kinds(name, dtype)))
    possible = lays(chosen, columns, dtype)
    if not possible:
        columns = -(-columns // 8) * 8
        possible = lays(chosen, columns, dtype)
    lay = draw(st.sampled_from(possible))
    rows = draw(counts)
    # Two levels of rows are not one only where both have several.
    leading = (max(2, rows // 3), 3) if lay.nested else (rows, 1)
    args = chosen.make(AnyRows(dtype, columns, lay, leading))
    odd = columns * dtype.itemsize % 16
    with batch_invariant(draw(st.booleans()) and not (odd and not chosen.lays)):
        return OPS[name].problem(*args, device=device)


def holds(name: str, dtype: torch.dtype, device: Device, seen: Device, data: Any) -> None:
    problem = problem_of(data.draw, name, dtype, seen)
    missing = set(programs(problem)) - space(name, device, dtype)
    assert not missing, (problem.key(problem.rows), problem.layout, missing)


@pytest.mark.parametrize("name", QUICK)
@SELDOM
@given(data=st.data())
def test_a_call_finds_its_kernels(name: str, data: Any) -> None:
    seen = data.draw(st.sampled_from(SISTERS))
    holds(name, torch.bfloat16, H200, seen, data)


@pytest.mark.parametrize("columns", [LONGEST // 2 - 6, LONGEST // 2 - 1])
def test_the_longest_ragged_rows_have_a_kernel(columns: int) -> None:
    """They touch one vector more than rows of whole vectors have."""
    for kind in kinds("softmax", torch.bfloat16):
        for lay in lays(kind, columns, torch.bfloat16):
            args = kind.make(AnyRows(torch.bfloat16, columns, lay, (1, 1)))
            problem = OPS["softmax"].problem(*args, device=H200)
            assert not set(programs(problem)) - space("softmax", H200, torch.bfloat16)


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80", "sm_100a"])
@pytest.mark.parametrize("name", ROW_OPS)
@OFTEN
@given(data=st.data())
def test_every_op_on_every_architecture(name: str, arch: str, data: Any) -> None:
    dtype = data.draw(st.sampled_from(DTYPES if arch == "sm_90a" else DTYPES[:1]))
    seen = data.draw(st.sampled_from(SISTERS)) if arch == "sm_90a" else KNOWN[arch]
    holds(name, dtype, KNOWN[arch], seen, data)


def conformance(name: str, dtypes: tuple[torch.dtype, ...]) -> list[tuple[str, Problem]]:
    """The cases of an op as problems on an H200, but for those that no kernel takes."""
    op, found = OPS[name], []
    for case in op.cases():
        problem = op.problem(*case.make("cpu", 0), device=H200)
        first = next(view for view in problem.layout.layout.views if view is not None)
        if problem.rows and problem.dim("N") and first.dtype in dtypes:
            found.append((case.name, problem))
    return found


def has_whole_mask(problem: Problem) -> bool:
    mask = getattr(problem.layout, "mask", "Absent")
    if mask == "Absent" or problem.layout.layout.ragged:
        return True
    element, access = mask.removeprefix("Tensor<").removesuffix(">").split(",")
    size = {"u8": 1, "float": 4}.get(element, 2)
    return int(access) == min(16, size * problem.layout.layout.vector)


def lies_as_meant(layout: Layout, possible: list[Lay]) -> bool:
    """Rows that are not dense: in two levels, or the first (and others alike) beside 16 bytes."""
    if layout.nested and not any(lay.nested for lay in possible):
        return False
    views = [view for view in layout.views if view is not None]
    if layout.nested and not layout.ragged:
        return all(view.bulk or view.dtype.itemsize == 1 for view in views)
    narrow = {
        view.access for view in views if view.access < min(16, layout.vector * view.dtype.itemsize)
    }
    if not narrow:
        return True
    shifts = {lay.shift for lay in possible if lay.shift}
    return not layout.nested and narrow == {views[0].access} and narrow <= shifts


def is_meant(name: str, problem: Problem) -> bool:
    """By the rule: a kind of call that the op knows, rows that lie as that kind's may."""
    layout = problem.layout.layout
    first = next(view for view in layout.views if view is not None)
    if first.dtype not in DTYPES or getattr(problem.layout, "strided", False):
        return False
    if problem.dim("N") * first.dtype.itemsize > LONGEST or not has_whole_mask(problem):
        return False
    dense = not layout.nested and all(
        view is None or view.access == min(16, layout.vector * view.dtype.itemsize)
        for view in layout.views
    )
    for kind in kinds(name, first.dtype):
        maker = AnyRows(first.dtype, 1024, DENSE, (2, 3))
        if kind_of(OPS[name].problem(*kind.make(maker), device=H200)) == kind_of(problem):
            possible = lays(kind, problem.dim("N"), first.dtype)
            return bool(possible) and (dense or lies_as_meant(layout, possible))
    return False


@pytest.mark.parametrize("name", QUICK)
def test_conformance_cases(name: str) -> None:
    check_cases(name, (torch.bfloat16,))


@pytest.mark.long
@pytest.mark.parametrize("name", ROW_OPS)
def test_conformance_cases_of_every_op_and_dtype(name: str) -> None:
    check_cases(name, DTYPES)


def check_cases(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    cases, meant = conformance(name, dtypes), 0
    for case, problem in cases:
        first = next(view for view in problem.layout.layout.views if view is not None)
        there = set(programs(problem)) <= space(name, H200, first.dtype)
        if is_meant(name, problem):
            meant += 1
            assert there, (case, problem.key(problem.rows), problem.layout)
    assert meant >= len(cases) / 3, "the rule means hardly any of them"


def test_by_heuristics_is_the_first_of_ranked_without_tables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gristmill.select.tables import reset_tables
    from gristmill.settings import reload_settings

    monkeypatch.setenv("GRISTMILL_TABLE", "none")
    reload_settings()
    reset_tables()
    draw = random.Random(0)
    try:
        for name in ROW_OPS:
            op = OPS[name]
            for kind in kinds(name, torch.bfloat16)[:2]:
                for _ in range(8):
                    columns = 8 * draw.choice([1, 7, 100, 1000, 5000, 20000, 100000])
                    leading = (draw.choice([1, 60, 200, 3000, 70000]), 1)
                    maker = AnyRows(torch.bfloat16, columns, DENSE, leading)
                    problem = op.problem(*kind.make(maker), device=H200)
                    mine, theirs = (
                        by_heuristics(name, op.variants, problem),
                        ranked(name, op.variants, problem)[0],
                    )
                    assert mine is not None
                    assert (mine.variant, mine.config) == (theirs.variant, theirs.config)
    finally:
        monkeypatch.undo()
        reload_settings()
        reset_tables()
