"""Tuning where it matters: real kernels, real times."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import gristmill as gm
from gristmill.cli.app import app
from gristmill.ops.registry import OPS
from gristmill.select.device import device_of
from gristmill.select.table import Table
from gristmill.select.tables import user_table_path
from gristmill.tune import TuneReport

pytestmark = pytest.mark.gpu


def ops_of(report: TuneReport) -> list[str]:
    return [outcome.row.key.split(" ")[0] for outcome in report.outcomes]


def arguments() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(256, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return x, torch.ones(4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return gm.rms_norm(x, weight).float().square().mean()


@pytest.mark.alone
def test_forward_and_backward_of_a_step() -> None:
    x, weight = arguments()
    expected = step(x, weight)

    def train() -> torch.Tensor:
        loss = step(x, weight)
        loss.backward()
        return loss

    report = gm.tune(train)
    assert ops_of(report) == ["rms_norm", "rms_norm_backward"]
    torch.testing.assert_close(report.result, expected, rtol=1e-2, atol=0)
    table = Table.load(user_table_path(device_of("cuda")))
    for outcome in report.outcomes:
        row = table.rows[outcome.row.key]
        assert row.candidates >= 3
        assert row.second is not None
        # The incumbent stays within noise, so the winner need not be the very smallest.
        assert 0 < row.us <= 1.05 * min(row.times.values())
    found = gm.explain(gm.rms_norm, x, weight)
    assert found.chosen == report.outcomes[0].row.variant
    assert gm.tune(train).outcomes == []


def test_the_backward_pass_of_a_compiled_function() -> None:
    """It runs in a thread of autograd's, which has no context of the caller's."""
    x, weight = arguments()
    compiled = torch.compile(step, fullgraph=True)
    compiled(x, weight).backward()
    with gm.tune() as report:
        compiled(x, weight).backward()
    assert ops_of(report) == ["rms_norm", "rms_norm_backward"]


@pytest.mark.alone
def test_thorough_times_more_launches() -> None:
    x, weight = arguments()
    with torch.no_grad():
        (usual,) = gm.tune(gm.rms_norm, x, weight).outcomes
        (thorough,) = gm.tune(gm.rms_norm, x, weight, again=True, thorough=True).outcomes
    assert thorough.row.candidates > usual.row.candidates
    assert thorough.row.us <= 1.05 * usual.row.us


def test_nothing_is_timed_in_a_capture() -> None:
    x, weight = arguments()
    with torch.no_grad():
        gm.rms_norm(x, weight)
        graph = torch.cuda.CUDAGraph()
        with gm.tune() as report, torch.cuda.graph(graph):
            gm.rms_norm(x, weight)
    graph.replay()
    torch.cuda.synchronize()
    assert report.outcomes == []


def test_the_command() -> None:
    line = "tune rms_norm linear --shape 64x1024 --shape 256x1024 --quick --json"
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["device"] == torch.cuda.get_device_name()
    # 64 and 256 rows of each op, and where the heuristics or the winners change between them.
    measured = {(one["key"].split(" ")[0], one["rows"]) for one in found["problems"]}
    assert {(op, rows) for op in ("rms_norm", "linear") for rows in (64, 256)} <= measured
    assert found["notes"] == []
    assert found["not_compiled"] == []
    again = CliRunner().invoke(app, line.split())
    again = json.loads(again.stdout)
    assert (again["problems"], again["rows"]) == ([], [])
    assert again["held"] >= 4


def test_every_op_can_be_tuned() -> None:
    """Where there is a choice; nothing fails, whatever an op writes to."""
    line = f"tune {' '.join(OPS)} --shape 64x1024 --quick --no-split --json"
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert len({one["key"].split(" ")[0] for one in found["problems"]}) + found["alone"] == len(OPS)
    assert found["notes"] == []
    for problem in found["problems"]:
        assert problem["failures"] == {}, problem["key"]
