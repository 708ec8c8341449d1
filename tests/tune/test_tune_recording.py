"""From a run that records its problems to their rows: in real processes, as users do it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tune_helpers import N, fake_times, table_rows, user_table
from typer.testing import CliRunner

from gristmill.cli.app import app
from gristmill.ops.registry import OPS
from gristmill.select.device import device_of
from gristmill.select.problem import Span
from gristmill.select.record import read_recording
from gristmill.tune.jobs import plan_by_recording

SOURCES = Path(__file__).resolve().parents[2] / "src"

# Forward and backward, in eager mode, compiled with a number of rows that changes, and in place.
PROGRAM = """
import sys, torch
import gristmill as gm

offset, count = int(sys.argv[1]), int(sys.argv[2])

def step(x, weight, target):
    return gm.cross_entropy(gm.softmax(gm.rms_norm(x, weight)), target)

compiled = torch.compile(step, backend="aot_eager", dynamic=True, fullgraph=True)
weight = torch.ones(32, requires_grad=True)
for rows in range(offset, offset + count):
    x = torch.randn(rows, 32, requires_grad=True)
    target = torch.randint(0, 32, (rows,))
    (step if rows % 2 else compiled)(x, weight, target).backward()
y = torch.randn(offset, 33)[:, 1:]
gm.fused_add_rms_norm_(y, torch.randn(offset, 32), weight.detach())
"""


def start(record: Path, offset: int, count: int, tmp_path: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "CUDA_VISIBLE_DEVICES": ""}
    environment["GRISTMILL_RECORD"] = str(record)
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(offset), str(count)],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes have written to one file at the same time."""
    folder = tmp_path_factory.mktemp("recorded")
    path = folder / "deep" / "run.jsonl"
    # 40 .. 69 and 60 .. 89 rows: some problems are met by both.
    processes = [start(path, offset, 30, folder) for offset in (40, 60)]
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    return path


def test_two_processes_write_whole_lines(recording: Path) -> None:
    lines = [json.loads(line) for line in recording.read_text().splitlines()]
    met = {(line["op"], line["key"]) for line in lines}
    ops = ("rms_norm", "softmax", "cross_entropy")
    expected = [*ops, *(f"{op}_backward" for op in ops)]
    for op in expected:
        rows = {int(key.split("rows=")[1].split(" ")[0]) for name, key in met if name == op}
        assert rows == set(range(40, 90)), op
    # Each process writes a problem once.
    assert len(lines) == 2 * (30 * len(expected) + 1)
    assert len(read_recording(recording)) == len(met) == 50 * len(expected) + 2


def test_what_is_rebuilt_is_the_problem_that_was_met(recording: Path) -> None:
    for one in read_recording(recording)[::7]:
        (family,) = plan_by_recording([one], device_of("cpu")).families
        size = family.at(*family.asked)
        args = size.make("cpu")
        assert OPS[one.op].problem(*args).key(size.rows) == one.key
        assert size.problem.key(size.rows) == one.key  # as meta tensors say
        OPS[one.op].run(*args)


def test_strides_and_alignment_are_those_of_the_run(recording: Path) -> None:
    (one,) = [
        one
        for one in read_recording(recording)
        if one.op == "fused_add_rms_norm_" and "rows=40 " in one.key
    ]
    (family,) = plan_by_recording([one], device_of("cpu")).families
    x, residual, *_ = family.at(40).make("cpu")
    assert (x.shape, x.stride(), x.data_ptr() % 64) == ((40, 32), (33, 1), 4)
    assert residual.data_ptr() % 64 == 0


def test_a_recording_is_tuned(recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU norm and softmax have two candidates; the others one, and nothing to choose."""
    asked = fake_times(
        monkeypatch, lambda name, rows: 5.0 if (name == "reference") == (rows < 60) else 10.0
    )
    result = CliRunner().invoke(app, ["tune", "--recorded", str(recording), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    # The smallest and the largest, then between them: 48, 56, 64, 72, 80 and 88 stand for others.
    assert [rows for rows, _ in asked] == [40, 89, 72, 56, 64] * 2
    assert len(found["problems"]) == 10
    assert len(found["rows"]) == 4
    assert table_rows() == {
        "rms_norm rows=56": "reference",
        "rms_norm rows=89": "library",
        "softmax rows=56": "reference",
        "softmax rows=89": "library",
    }
    covers = sorted(row.covers for row in user_table().rows.values())
    assert covers == [Span(26, 59)] * 2 + [Span(60, 150)] * 2
    again = CliRunner().invoke(app, ["tune", "--recorded", str(recording)])
    assert again.exit_code == 0
    assert "4 problems passed over: covered by a row already" in again.output
    assert len(asked) == 10


def test_only_some_ops_of_a_recording(recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fake_times(monkeypatch, lambda name, rows: 5.0)
    line = ["tune", "softmax", "--no-split", "--recorded", str(recording)]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0, result.output
    assert [rows for rows, _ in asked] == [40, 89]
    assert set(table_rows()) == {"softmax rows=89"}


def line_of(rows: int) -> dict[str, Any]:
    from gristmill.select.record import described

    op = OPS["rms_norm"]
    args = op.example((rows, N), torch.bfloat16, "cpu")
    key = op.problem(*args).key(rows)
    return {"op": "rms_norm", "key": key, "device": "cpu", "arguments": described(args)}


@pytest.mark.parametrize(
    "damage",
    [
        *('{"op": "rms_n', "[]", '{"op": "rms_norm", "key": "a"}', "3", '{"arguments": null}'),
        pytest.param("[" * 100_000, id="deep"),
        '{"op": "x", "key": "\\u001b[31m", "device": "cpu", "arguments": []}',
        '{"op": 1, "key": "x", "device": "cpu", "arguments": []}',
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join([json.dumps(line_of(64)), "", damage, json.dumps(line_of(70))]))
    result = CliRunner().invoke(app, ["tune", "--recorded", str(path)])
    assert result.exit_code == 2
    assert "line 3 is not one of a recording" in result.stderr


def test_a_recording_that_is_not_a_regular_file_is_an_error_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for make in (os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")):
        make(path)
        result = CliRunner().invoke(app, ["tune", "--recorded", str(path)])
        assert result.exit_code == 2
        assert "cannot be read" in result.stderr
        path.rmdir() if path.is_dir() else path.unlink()


def test_an_empty_recording_tunes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("\n")
    assert CliRunner().invoke(app, ["tune", "--recorded", str(path)]).exit_code == 1


def test_a_line_of_another_version_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_times(monkeypatch, lambda name, rows: 5.0)
    path = tmp_path / "run.jsonl"
    old = {**line_of(16), "op": "gone"}
    path.write_text("\n".join([json.dumps(old), json.dumps(line_of(64))]))
    result = CliRunner().invoke(app, ["tune", "--recorded", str(path)])
    assert result.exit_code == 0
    assert "gone is no op of gristmill's" in result.output
    assert set(table_rows()) == {"rms_norm rows=64"}


@pytest.mark.parametrize("change", [{"offset": float("inf")}, {"shape": [10**15, N]}], ids=str)
@pytest.mark.parametrize("command", ["tune", "warmup"])
def test_a_tensor_that_cannot_be_made_is_told(
    command: str, change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_times(monkeypatch, lambda name, rows: 5.0)
    path = tmp_path / "run.jsonl"
    wrong = line_of(16)
    wrong["arguments"][0] |= change
    path.write_text("\n".join([json.dumps(wrong), json.dumps(line_of(64))]))
    line = [command, "--recorded", str(path)]
    result = CliRunner().invoke(app, line if command == "tune" else [*line, "--arch", "sm_90a"])
    assert isinstance(result.exception, (SystemExit, type(None))), result.exception
    if "offset" in change:
        assert f"{path}: line 1: argument 0 cannot be made" in result.output.replace("\n", "")


def test_a_pipe_in_the_place_of_a_recording_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    process = start(tmp_path / "pipe", 1, 1, tmp_path)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert stderr.count("cannot be written to") == 1
