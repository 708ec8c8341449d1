"""The command of a row, parsed by the real command line, measures that row again."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import pytest
import torch
import typer
from bench.committed import committed
from bench.made_up import full_run

from gristmill.bench import host_cost
from gristmill.bench.choice import suite as choice
from gristmill.bench.cold_start import suite as cold_start
from gristmill.bench.commands import command_of, suite_of
from gristmill.bench.end_to_end import suite as end_to_end
from gristmill.bench.end_to_end.pieces import DECODING, TRAINING
from gristmill.bench.results import Row, label
from gristmill.bench.serving import suite as serving
from gristmill.bench.suites import KERNEL_SUITES, SUITES, written
from gristmill.cli import bench_plan
from gristmill.cli.app import app
from gristmill.cli.bench_plan import Options, Plan

CUDA = torch.device("cuda")
Planned = Callable[[str], tuple[Options, Plan]]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Planned:
    """What a command line would measure on a GPU with everything installed."""
    seen: list[Options] = []
    command = typer.main.get_command(app)
    monkeypatch.setattr("gristmill.cli.bench.run", seen.append)
    monkeypatch.setattr(bench_plan, "torch_device", lambda name: torch.device(name or "cuda"))
    monkeypatch.setattr(bench_plan, "choose", lambda *args: ([], {}))
    monkeypatch.setattr("gristmill.bench.serving.suite.missing", lambda device: None)
    monkeypatch.setattr("gristmill.bench.hugging_face.suite.missing", lambda: None)

    def plan(line: str) -> tuple[Options, Plan]:
        words = shlex.split(line)
        assert words[:2] == ["gristmill", "bench"]
        # Not by a runner for tests, which would make the whole command anew each time.
        seen.clear()
        command.main(words[1:], standalone_mode=False)
        assert seen, f"{line} ended with an error"
        return seen[-1], bench_plan.plan_of(seen[-1])

    return plan


def is_kernel(row: Row) -> bool:
    return not {"mode", "cache", "suite"} & set(row)


def one_of_each(rows: list[Row], key: Callable[[Row], Any]) -> list[Row]:
    return list({key(row): row for row in rows}.values())


def test_every_committed_row_of_kernel_time_is_selected_alone(planned: Planned) -> None:
    rows = [row for row in committed().rows if is_kernel(row)]
    assert len(rows) > 500
    for row in one_of_each(rows, lambda row: (row["op"], row["dtype"], label(row))):
        _, plan = planned(command_of(row))
        (task,) = plan.tasks
        assert (task.name, task.dtype) == (row["op"], row["dtype"])
        assert plan.points == []
        assert task.routing == row.get("routing")
        told = {**task.sizes, "shape": row.get("shape", task.sizes["shape"])}
        assert told == {key: row.get(key, told[key]) for key in told}
        assert label({**task.sizes, "op": task.name}) == label(row)


def test_every_problem_of_a_full_run_is_selected_alone(planned: Planned) -> None:
    rows = [row for row in full_run().rows if is_kernel(row)]
    for row in one_of_each(rows, lambda row: (row["op"], label(row))):
        _, plan = planned(command_of(row))
        assert [(task.name, label(task.sizes)) for task in plan.tasks] == [(row["op"], label(row))]


def test_committed_rows_of_regret_are_selected_alone(planned: Planned) -> None:
    rows = [row for row in committed().rows if row.get("suite") == "regret"]
    assert rows
    for row in rows:
        _, plan = planned(command_of(row))
        (point,) = plan.points
        assert {**point.family.problem(point.rows)}.items() <= row.items()
        assert plan.grids == []
        assert plan.tasks == []


def test_committed_cells_of_matrices_are_in_what_is_selected(planned: Planned) -> None:
    rows = [row for row in committed().rows if row.get("suite") == "matrix"]
    assert rows
    for row in one_of_each(rows, lambda row: (row["op"], row["M"])):
        _, plan = planned(command_of(row))
        (grid,) = plan.grids
        assert (grid.family.name, grid.family.dtype) == (row["op"], row["dtype"])
        assert row["M"] in grid.sizes


def test_committed_rows_of_host_cost_are_selected_alone(planned: Planned) -> None:
    rows = [row for row in committed().rows if suite_of(row) == "host_cost"]
    assert rows
    for row in rows:
        _, plan = planned(command_of(row))
        assert list(plan.names) == ["host_cost"]
        found = host_cost.problems(plan.names["host_cost"], plan.shapes)
        assert found == [(row["op"], (row["M"], row["N"]))]
        assert plan.dtype == row["dtype"]


def test_committed_starts_are_selected(planned: Planned) -> None:
    rows = [row for row in committed().rows if row.get("suite") == "cold_start"]
    assert {row["op"] for row in rows} >= {"import", "nvfp4_linear", "llama3_8b_serving"}
    for row in rows:
        _, plan = planned(command_of(row))
        found = cold_start.starts(CUDA, plan.names["cold_start"])
        assert {start.name for start in found} == {row["op"]}
        assert row["cache"] in found[0].caches
        assert row["shape"] in [start.about["shape"] for start in found]


def test_committed_choices_are_selected(planned: Planned) -> None:
    rows = [row for row in committed().rows if row.get("suite") == "choice"]
    assert rows
    for row in rows:
        _, plan = planned(command_of(row))
        steps = choice.planned(CUDA, dtype=plan.dtype, names=plan.names["choice"])
        assert {step.op for step in steps} == {row["op"]}
        assert row["op"] == choice.MULTIKERNEL or plan.dtype == row["dtype"]


def test_committed_rows_of_transformers_come_with_what_they_are_held_against(
    planned: Planned,
) -> None:
    rows = [row for row in committed().rows if row.get("suite") == "transformers"]
    assert rows
    for row in rows:
        _, plan = planned(command_of(row))
        cases = [(case.op, case.impl) for case in plan.whole.cases]
        assert (row["op"], row["impl"]) in cases
        baseline = "eager" if row["op"] != "generation" else "bf16"
        graph = "_graph" if row["impl"].endswith("_graph") else ""
        assert set(cases) == {(row["op"], row["impl"]), (row["op"], baseline + graph)}
        assert plan.whole.plan is None
        assert plan.tasks == []


@pytest.mark.parametrize("impl", serving.IMPLEMENTATIONS)
def test_rows_of_vllm_are_selected_alone(planned: Planned, impl: str) -> None:
    about = serving.IMPLEMENTATIONS[impl]
    for row in serving.rows("llama-8b", about, (1, 16), {"error": "did not start"}):
        _, plan = planned(command_of(row))
        found = plan.whole.plan
        assert found is not None
        names = [one.name for one in found.implementations]
        assert (found.models, names, found.batches) == (("llama-8b",), [impl], (row["batch"],))


@pytest.mark.parametrize("op", end_to_end.OPS)
def test_rows_of_end_to_end_come_with_what_they_are_held_against(planned: Planned, op: str) -> None:
    impls = [one.name for one in (TRAINING if op.startswith("training") else DECODING)]
    for impl in impls:
        row = {"suite": "end_to_end", "op": op, "impl": impl, "batch": 16, "dtype": "bfloat16"}
        options, plan = planned(command_of(row))
        found = end_to_end.problems(
            torch.device("cpu"),
            options.quick,
            ops=plan.names["end_to_end"],
            implementations=options.implementations,
            batches=[int(batch) for batch in options.batches],
        )
        assert {problem.op for problem in found} <= {op}
        assert set(options.implementations) == {"eager", impl}
        if not op.startswith("training"):
            assert [problem.batch for problem in found] == [16]


def test_every_suite_has_a_command(planned: Planned) -> None:
    """A suite that is new is told about here, or its rows would have no command."""
    assert set(SUITES) == {
        *KERNEL_SUITES,
        *("host_cost", "cold_start", "regret", "choice", "end_to_end", "vllm", "transformers"),
    }


def test_a_row_of_a_cpu_is_measured_on_the_cpu(planned: Planned) -> None:
    row = {"op": "rms_norm", "dtype": "float16", "M": 8, "N": 64, "impl": "gristmill"}
    options, plan = planned(command_of(row, device="cpu"))
    assert options.device == "cpu"
    (task,) = plan.tasks
    assert (task.name, written(task.shape), task.dtype) == ("rms_norm", "8x64", "float16")


def test_experts_of_no_known_model_are_told_by_their_shape(planned: Planned) -> None:
    row = {"op": "moe", "dtype": "bfloat16", "model": "4x2x64x32", "routing": "skewed", "M": 3}
    row |= {"shape": "3x4x2x64x32", "impl": "gristmill"}
    _, plan = planned(command_of(row))
    (task,) = plan.tasks
    assert (task.name, task.shape, task.routing) == ("moe", (3, 4, 2, 64, 32), "skewed")


def test_rows_of_nobody_have_no_command() -> None:
    assert command_of({"op": "gone", "M": 1, "N": 2, "impl": "gristmill"}) == ""
    assert suite_of({"op": "gone"}) is None


def test_a_hostile_name_is_one_word_of_the_shell() -> None:
    row = {"op": "rms_norm", "dtype": "bfloat16", "shape": "1x2; rm -rf ~", "impl": "x"}
    words = shlex.split(command_of(row))
    assert words[words.index("--shape") + 1] == "1x2; rm -rf ~"
