"""`gristmill bench` on a machine without a GPU: options, files, runs that go on, comparing."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gristmill
from gristmill.bench.results import load
from gristmill.bench.runner import Runner
from gristmill.bench.suites import KERNEL_SUITES, SUITES

# What typer's runner returns has no public name.
Result = Any
Run = Callable[[str], Result]
SMALL = "--shape 8x64 --peers none --samples 1 --device cpu"


def test_bench_writes_rows_tables_and_plots(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run(
        f"bench --shape 8x64 --op rms_norm --op rms_norm_bwd --peers eager --samples 2 "
        f"--device cpu --output {out}"
    )
    assert result.exit_code == 0, result.output
    assert "[1/2] rms_norm 8x64 bfloat16" in result.stdout
    assert "no kernel of gristmill ran" in result.stdout
    names = {path.name for path in out.iterdir()}
    assert names >= {"results.json", "results.md", "rms_norm.svg", "rms_norm_bwd.svg"}
    assert "index.html" not in names
    data = json.loads((out / "results.json").read_text())
    assert {row["op"] for row in data["rows"]} == {"rms_norm", "rms_norm_bwd"}
    ours = [row for row in data["rows"] if row["impl"] == "gristmill"]
    assert len(ours) == 2
    assert all(row["us"] > 0 and row["tb_per_s"] >= 0 for row in ours)
    assert {row["peer"] for row in data["rows"]} == {"gristmill", "eager"}
    assert all(row["sets"] == [] for row in data["rows"])  # shapes by hand
    for key in ("gpu", "date", "torch", "gristmill", "peers", "copy_tb_per_s", "method"):
        assert data["meta"][key], key
    assert data["meta"]["finished"] is True


def test_bench_takes_suites_and_shapes_of_three_numbers(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    result = run(
        "bench softmax cross_entropy --op softmax_causal --op cross_entropy_fwd_bwd "
        f"--shape 2x4x8 --peers eager --samples 1 --device cpu --json {path}"
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert [(row["op"], row["impl"]) for row in rows] == [
        (op, impl)
        for op in ("softmax_causal", "cross_entropy_fwd_bwd")
        for impl in ("gristmill", "eager")
    ]
    assert all((row["M"], row["N"], row["shape"]) == (8, 8, "2x4x8") for row in rows)
    assert "2x4x8" in result.stdout


def test_bench_without_a_suite_measures_every_family(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(
        "gristmill.bench.runner.Runner.run", lambda self, tasks, advance: seen.extend(tasks)
    )
    result = run("bench --quick --device cpu")
    assert result.exit_code == 0, result.output
    families = {task.kind.suite for task in seen}
    assert families == set(KERNEL_SUITES)


def test_bench_takes_layers_and_rows_of_products(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    result = run(
        "bench nvfp4_linear --op nvfp4_linear --layers 64x128,48x32 --rows 1,3 --peers cublas "
        f"--samples 1 --device cpu --json {path}"
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert [(row["shape"], row["impl"]) for row in rows] == [
        (shape, impl)
        for shape in ("1x64x128", "3x64x128", "1x48x32", "3x48x32")
        for impl in ("gristmill", "cublas_bf16")
    ]
    assert all(row["fp64_error"] < 0.005 for row in rows)
    assert "errors against fp64" in result.output


def test_bench_shows_an_earlier_run(run: Run, tmp_path: Path) -> None:
    path, page = tmp_path / "r.json", tmp_path / "r.md"
    run(f"bench --shape 8x64 --op rms_norm --peers none --samples 1 --device cpu --json {path}")
    before = path.read_text()
    result = run(f"bench --read {path} --markdown {page}")
    assert result.exit_code == 0, result.output
    assert "8x64" in page.read_text()
    assert path.read_text() == before


def test_a_problem_that_does_not_fit_is_nobodys_mistake(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Any, task: Any) -> Any:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr("gristmill.bench.runner.Runner._measure", full)
    result = run("bench --shape 8x64 --op rms_norm --peers none --device cpu")
    assert result.exit_code == 0, result.output
    assert "gristmill was not timed on rms_norm 8x64: not enough memory" in result.stdout


def test_bench_fails_when_gristmill_is_wrong(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right = gristmill.rms_norm
    monkeypatch.setattr(gristmill, "rms_norm", lambda *args: right(*args) * 1.1)
    path = tmp_path / "r.json"
    result = run(
        f"bench --shape 8x64 --op rms_norm --peers eager --samples 1 --device cpu --json {path}"
    )
    assert result.exit_code == 1
    assert "gristmill was not timed on rms_norm 8x64" in result.stdout
    rows = {row["impl"]: row for row in json.loads(path.read_text())["rows"]}
    assert "us" not in rows["gristmill"]
    assert rows["eager"]["us"] > 0


def test_bench_has_a_default_command_and_another(run: Run) -> None:
    shown = run("bench --help").stdout
    assert "Usage: gristmill bench [OPTIONS]" in shown.replace("root bench", "gristmill bench")
    assert "--report" in shown
    assert "gristmill bench compare" in " ".join(shown.split())
    other = run("bench compare --help").stdout
    assert "--threshold" in other
    assert "--report" not in other


def test_bench_host_cost(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gristmill.bench.host_cost.SHAPES", ((1, 64),))
    monkeypatch.setattr("gristmill.bench.host_cost.time_host", lambda function, args: 5.0)
    result = run("bench host_cost --quick --device cpu")
    assert result.exit_code == 0, result.output
    for op in ("rms_norm", "layer_norm", "softmax", "cross_entropy", "linear"):
        assert f"{op} forward with grad" in result.stdout
    assert "took no part" not in result.stdout


def test_the_old_name_of_a_suite_is_guessed(run: Run) -> None:
    result = run("bench host --device cpu")
    assert result.exit_code == 2
    assert "unknown suite 'host' (did you mean host_cost?)" in result.stderr


@pytest.mark.parametrize("words", ["--all", "all"])
def test_all_are_all_suites(run: Run, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        "gristmill.cli.bench._measured", lambda plan, *_: seen.append(plan) or 1 / 0
    )
    run(f"bench {words} --quick --device cpu")
    (plan,) = seen
    assert list(plan.suites) == list(SUITES)
    assert {task.kind.suite for task in plan.tasks} == set(KERNEL_SUITES)
    assert set(plan.names) == set(SUITES)
    assert plan.points
    assert plan.grids
    assert plan.whole.blocks is not None


def test_an_op_narrows_every_suite_that_has_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        "gristmill.cli.bench._measured", lambda plan, *_: seen.append(plan) or 1 / 0
    )
    run("bench --all --op softmax --op llama3_8b_serving --device cpu")
    (plan,) = seen
    assert {task.name for task in plan.tasks} == {"softmax"}
    assert {suite: names for suite, names in plan.names.items() if suite not in KERNEL_SUITES} == {
        "host_cost": ["softmax"],
        "cold_start": ["llama3_8b_serving"],
        "regret": ["softmax"],
        "choice": ["softmax"],
    }
    assert {point.family.name for point in plan.points} == {"softmax"}
    assert plan.whole.blocks is None


def test_an_op_that_no_suite_has(run: Run) -> None:
    result = run("bench host_cost cold_start --op sofmax --device cpu")
    assert result.exit_code == 2
    assert "unknown op 'sofmax' (did you mean softmax?)" in result.stderr


def test_sets_are_of_kernel_time(run: Run) -> None:
    result = run("bench host_cost --sets decode --device cpu")
    assert result.exit_code == 2
    assert "choose problems of kernel time" in result.stderr
    result = run("bench --sets decod --device cpu")
    assert result.exit_code == 2
    assert "did you mean decode?" in result.stderr


def test_a_report_is_a_page_with_everything_beside_it(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "report"
    result = run(f"bench --op softmax {SMALL} --report {out}")
    assert result.exit_code == 0, result.output
    assert {path.name for path in out.iterdir()} >= {"index.html", "results.json", "results.md"}
    assert "softmax" in (out / "index.html").read_text()
    assert "choices: which variant ran, and why" in (out / "results.md").read_text()


def test_several_files_are_shown_as_one(run: Run, tmp_path: Path) -> None:
    for op in ("softmax", "rms_norm"):
        assert run(f"bench --op {op} {SMALL} --json {tmp_path / op}.json").exit_code == 0
    both = f"--read {tmp_path}/softmax.json --read {tmp_path}/rms_norm.json"
    result = run(f"bench {both} --json {tmp_path}/both.json")
    assert result.exit_code == 0, result.output
    assert "Rows are from 2 runs: softmax.json" in result.stdout
    merged = load(tmp_path / "both.json")
    assert [(row["op"], row["run"]) for row in merged.rows] == [("softmax", 0), ("rms_norm", 1)]
    assert [one["file"] for one in merged.meta["runs"]] == ["softmax.json", "rms_norm.json"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("softmax rms_norm", "softmax, rms_norm"),
        ("--all", "--all"),
        ("--quick --op softmax --op rms_norm", "--quick, --op"),
        ("--sets decode --layers few --rows 1", "--sets, --layers, --rows"),
        ("--shape 8x64 --dtype float32", "--shape, --dtype"),
        ("--models tiny --routing uniform", "--models, --routing"),
        ("--batches 1 --impls bf16", "--batches, --impls"),
        ("--peers none --samples 1", "--peers, --samples"),
        ("--device cpu --jobs 0 --resume", "--device, --jobs, --resume"),
    ],
)
def test_what_is_read_is_not_chosen(run: Run, tmp_path: Path, words: str, named: str) -> None:
    path, copy = tmp_path / "r.json", tmp_path / "copy.json"
    path.write_text('{"meta": {"gpu": "H200"}, "rows": []}')
    assert run(f"bench --read {path} --json {copy} --plots {tmp_path}").exit_code == 0
    copy.unlink()
    result = run(f"bench {words} --read {path} --json {copy}")
    assert result.exit_code == 2
    assert (
        "--read shows all that its files hold and measures nothing: leave out "
        f"{named}, or --read" in result.stderr
    )
    assert not copy.exists()


# ----------------------------------------------------------------------------- runs that go on


def test_a_run_that_was_ended_goes_on(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM, as from a time limit: what was measured is there, and is not measured again."""
    path = tmp_path / "r.json"
    line = f"bench --op softmax --op rms_norm {SMALL} --shape 4x64 --json {path}"
    measured: list[str] = []
    killed: list[bool] = []
    measure = Runner._measure

    def counted(self: Any, task: Any) -> Any:
        if len(measured) == 3 and not killed:
            killed.append(True)
            os.kill(os.getpid(), signal.SIGTERM)
        measured.append(str(task))
        return measure(self, task)

    monkeypatch.setattr("gristmill.bench.runner.Runner._measure", counted)
    before = signal.getsignal(signal.SIGTERM)
    assert run(line).exit_code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    cut = load(path)
    assert len(cut.rows) == 3
    assert cut.meta["finished"] is False
    told = run(f"bench --read {path}").stdout
    assert "This run was cut short. Not measured: rms_norm (1 problem)." in told

    result = run(f"{line} --resume")
    assert result.exit_code == 0, result.output
    assert "3 of 4 problems are there already" in result.stdout
    whole = load(path)
    assert whole.rows[:3] == cut.rows
    assert [(row["op"], row["shape"]) for row in whole.rows] == [
        ("softmax", "8x64"),
        ("softmax", "4x64"),
        ("rms_norm", "8x64"),
        ("rms_norm", "4x64"),
    ]
    assert whole.meta["finished"] is True
    assert whole.meta["unmeasured"] == []
    assert len(whole.meta["commands"]) >= 1
    assert len(measured) == 4


def test_a_run_goes_on_with_other_peers(run: Run, tmp_path: Path) -> None:
    """A problem that lacks one is measured again whole, or, if that would cost rows, not at all."""
    path = tmp_path / "r.json"
    line = f"bench nvfp4_linear --layers 64x128 --rows 1,3 --samples 1 --device cpu --json {path}"
    assert run(f"{line} --op nvfp4_linear --rows 1 --peers none").exit_code == 0
    (alone,) = load(path).rows
    more = run(f"{line} --op nvfp4_linear --peers cublas --resume")
    assert more.exit_code == 0, more.output
    assert "1 of 2 lack cublas, and are measured again whole" in more.stdout
    both = load(path)
    assert [(row["M"], row["impl"]) for row in both.rows] == [
        (rows, impl) for rows in (1, 3) for impl in ("gristmill", "cublas_bf16")
    ]
    assert both.rows[0] != alone
    assert both.meta["finished"] is True

    fewer = run(f"{line} --op nvfp4_linear --peers none --resume")
    assert fewer.exit_code == 0, fewer.output
    assert "2 of 2 problems are there already; what they have of cublas" in fewer.stdout
    assert load(path).rows == both.rows

    before = path.read_text().replace('"cublas', '"humming')
    path.write_text(before)
    refused = run(f"{line} --op nvfp4_linear --peers cublas --resume")
    assert refused.exit_code == 2
    assert "without humming, which it has and which takes no part now" in refused.stderr
    assert "(--peers cublas,humming), or measure into another file" in refused.stderr
    assert path.read_text() == before


def test_another_torch_does_not_go_on(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    assert run(f"bench --op softmax {SMALL} --json {path}").exit_code == 0
    data = json.loads(path.read_text())
    data["meta"]["torch"] = "1.0"
    path.write_text(json.dumps(data))
    result = run(f"bench --op softmax {SMALL} --json {path} --resume")
    assert result.exit_code == 2
    assert "torch 1.0, and here is" in result.stderr
    assert run(f"bench --op softmax {SMALL} --resume").exit_code == 2


# -------------------------------------------------------------------------------- compiling ahead


def test_what_was_compiled_ahead_has_no_first_call(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def compile_ahead(tasks: Any, peers: Any, device: Any, jobs: int, advance: Any) -> list[str]:
        seen.append(([task.name for task in tasks], [peer.name for peer in peers], jobs))
        return ["rms_norm 8x64: not compiled ahead, its process died or took too long"]

    monkeypatch.setattr("gristmill.bench.ahead.compiling.compile_ahead", compile_ahead)
    path = tmp_path / "r.json"
    line = f"bench --op softmax --shape 8x64 --samples 1 --device cpu --json {path}"
    result = run(f"{line} --peers eager --jobs 3")
    assert result.exit_code == 0, result.output
    assert seen == []  # eager compiles nothing
    first = {row["impl"]: row["first_call_s"] for row in load(path).rows}
    assert first["gristmill"] is None
    assert first["eager"] >= 0
    assert load(path).meta["jobs"] == 3


# -------------------------------------------------------------------------------------- comparing


def test_two_runs_are_compared(run: Run, tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    assert run(f"bench --op softmax {SMALL} --samples 5 --json {old}").exit_code == 0
    data = json.loads(old.read_text())
    for row in data["rows"]:
        row["spread_us"] = 0.001
    old.write_text(json.dumps(data))
    for row in data["rows"]:
        row["us"] *= 2
    new.write_text(json.dumps(data))
    same = run(f"bench compare {old} {old}")
    assert same.exit_code == 0, same.output
    slower = run(f"bench compare {old} {new} --json")
    assert slower.exit_code == 1, slower.output
    assert json.loads(slower.stdout)
    assert run(f"bench compare {old} {new} --threshold 400%").exit_code == 2
