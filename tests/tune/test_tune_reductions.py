"""A row of cross entropy speaks for every reduction: the kernel that is chosen is the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gristmill.explain import explain_call
from gristmill.ops import launch
from gristmill.ops.op import Arguments
from gristmill.ops.registry import OPS
from gristmill.select.chooser import Choice, ranked
from gristmill.select.device import KNOWN
from gristmill.select.problem import Problem
from gristmill.select.record import Recorded, described
from gristmill.select.tables import _shipped
from gristmill.tune.jobs import plan_by_recording

H200 = KNOWN["sm_90a"]
REDUCTIONS = ("mean", "sum", "none")
BACKWARD, IN_PLACE = "cross_entropy_backward", "cross_entropy_one_pass_"
ADDING = ("cross_entropy", "cross_entropy_one_pass", IN_PLACE)
TABLE, ORDER = "shipped table", "preference"
SHAPES = ((4096, 32000), (4096, 32768), (32768, 512), (1, 128256), (300, 50257))
# Where the table has no row, whatever the reduction.
SILENT = {(32768, 512): (*ADDING, BACKWARD), (4096, 32000): (IN_PLACE,), (300, 50257): (IN_PLACE,)}


def arguments(op: str, shape: tuple[int, ...], reduction: str, device: str = "meta") -> Arguments:
    args = OPS[op].example_with({"reduction": reduction}, shape, torch.bfloat16, device, H200)
    if op != BACKWARD or reduction == "mean":
        return args
    dloss = torch.ones(shape[:-1] if reduction == "none" else (), device=device)
    return dloss, *args[1:5], torch.empty(0, device=device), *args[6:]


def problem_of(op: str, shape: tuple[int, ...], reduction: str) -> Problem:
    args = arguments(op, shape, reduction)
    OPS[op].check(*args)
    return OPS[op].problem(*args, device=H200)


def choice_of(problem: Problem) -> Choice:
    return ranked(problem.op, OPS[problem.op].variants, problem)[0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", [*ADDING, BACKWARD])
def test_all_reductions_choose_the_same_row(op: str, shape: tuple[int, ...]) -> None:
    problems = [problem_of(op, shape, reduction) for reduction in REDUCTIONS]
    assert len({problem.key(problem.rows) for problem in problems}) == 1
    choices = [choice_of(problem) for problem in problems]
    launches = {(one.variant.name, one.config, one.source) for one in choices}
    assert len(launches) == 1, launches
    assert choices[0].source == (ORDER if op in SILENT.get(shape, ()) else TABLE)


@pytest.mark.parametrize("op", [*ADDING, BACKWARD])
def test_a_row_is_as_stale_for_one_reduction_as_for_another(op: str) -> None:
    problems = [problem_of(op, (256, 32768), reduction) for reduction in REDUCTIONS]
    for variant in OPS[op].variants:
        config = variant.config(problems[0])
        assert len({variant.source_hash(problem, config) for problem in problems}) == 1


def bound(monkeypatch: pytest.MonkeyPatch, problem: Problem) -> list[launch.KernelCall]:
    """The launches that the plan for a problem prepares, as a GPU would be told of them."""
    calls: list[launch.KernelCall] = []

    def prepare(call: launch.KernelCall, device_index: int) -> Any:
        calls.append(call)

    monkeypatch.setattr(launch, "prepare", prepare)
    monkeypatch.setattr(launch, "resident_blocks", lambda *args: 2)
    monkeypatch.setattr(launch, "resident_clusters", lambda *args: 9)
    choice = choice_of(problem)
    choice.variant.bind(problem, choice.config)
    assert {call.program for call in calls} == set(choice.variant.programs(problem, choice.config))
    return calls


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", [*ADDING, BACKWARD])
def test_only_what_adds_up_the_rows_differs(
    op: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {one: bound(monkeypatch, problem_of(op, shape, one)) for one in REDUCTIONS}
    program = calls["none"][0].program
    mains = {replace(several[0], program=program) for several in calls.values()}
    assert len(mains) == 1, "the very same launch, whatever follows it"
    assert len(calls["none"]) == 1
    assert not any("total" in name for name in program.names)
    assert calls["mean"] == calls["sum"]
    others = [call.name.partition("<")[0] for call in calls["mean"][1:]]
    assert others == (["cross_entropy_total"] if op in ADDING else [])


@pytest.mark.parametrize("op", [*ADDING, BACKWARD])
def test_each_reduction_has_a_plan_of_its_own(op: str) -> None:
    for reduction in (*REDUCTIONS, *REDUCTIONS):
        OPS[op].run(*arguments(op, (4, 32), reduction, "cpu"))
    assert len(OPS[op]._plans) == len(REDUCTIONS)


def test_a_shard_finds_its_rows() -> None:
    for shape in ((1, 128256), (4096, 32768)):
        args = OPS["cross_entropy_shard"].example_for(H200, shape, torch.bfloat16)
        problem = OPS["cross_entropy_shard"].problem(*args, device=H200)
        assert choice_of(problem).source == TABLE
        assert not problem.layout.added


def test_no_key_of_a_shipped_table_names_a_reduction() -> None:
    keys = [key for table in _shipped() for key in table.rows if key.startswith("cross_entropy")]
    assert len(keys) > 100
    assert [key for key in keys if set(key.split()) & set(REDUCTIONS)] == []


def test_explain_shows_the_row_and_the_command_that_tunes_it() -> None:
    told = {}
    for reduction in REDUCTIONS:
        args = arguments("cross_entropy", (4096, 32000), reduction)
        problem = OPS["cross_entropy"].problem(*args, device=H200)
        found = explain_call(OPS["cross_entropy"], args, problem)
        assert found.source == TABLE
        (evidence,) = found.evidence
        assert not evidence.ignored
        assert evidence.row.key == problem.key(4096)
        assert "gristmill tune cross_entropy --shape 4096x32000 --dtype bfloat16" in found.changes
        told[reduction] = (found.chosen, evidence.row)
    assert told["mean"] == told["sum"] == told["none"]


def test_a_recording_of_several_reductions_is_one_kind() -> None:
    recorded = []
    for reduction in REDUCTIONS:
        args = arguments("cross_entropy", (4096, 32000), reduction)
        key = OPS["cross_entropy"].problem(*args, device=H200).key(4096)
        recorded.append(Recorded("cross_entropy", key, H200.name, tuple(described(args))))
    (family,) = plan_by_recording(recorded, H200).families
    assert family.asked == (4096,)
    assert family.key == "cross_entropy rows=* N=32000 logits=bfloat16 target=int64"
