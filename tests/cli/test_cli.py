"""Every command, its exit code and what it says, on a machine without a GPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import gristmill
from gristmill.cli.app import app
from gristmill.ops.op import Op
from gristmill.ops.registry import OPS
from gristmill.settings import VARIABLES, reload_settings

# What typer's runner returns has no public name.
Result = Any
Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs a command line with a cache of its own; more environment can be given by name."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    runner = CliRunner()

    def invoke(line: str, answer: str | None = None, **environment: str) -> Result:
        environment = {"GRISTMILL_CACHE_DIR": str(tmp_path / "cache"), **environment}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            try:
                reload_settings()
            except gristmill.errors.SettingsError:
                patch.setattr("gristmill.settings._current", None)
            result = runner.invoke(app, line.split(), input=answer)
        reload_settings()
        return result

    return invoke


def test_version(run: Run) -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"gristmill {gristmill.__version__}\n")


@pytest.mark.parametrize(
    "command", ["doctor", "explain", "warmup", "tune", "tables", "cache", "bench"]
)
def test_every_command_has_help(run: Run, command: str) -> None:
    assert command in run("--help").stdout
    result = run(f"{command} --help")
    assert result.exit_code == 0
    assert "Usage" in result.stdout


def test_python_m(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gristmill", "explain", "no_such_op"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path), "HOME": str(tmp_path)},
    )
    assert done.returncode == 2
    assert done.stderr.startswith("gristmill: unknown op 'no_such_op': there are rms_norm")
    assert "Traceback" not in done.stderr


# doctor


def test_doctor_tells_everything(run: Run) -> None:
    result = run("doctor --json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["device"]["kind"] == "cpu"
    assert report["cache"]["folder"].endswith("cache/kernels")
    assert report["cache"]["trusted"] is True
    assert [setting["name"] for setting in report["settings"]] == [one.name for one in VARIABLES]
    assert [op["op"] for op in report["ops"]] == list(OPS)
    for op in report["ops"]:
        assert op["check"]["passed"] is True
        assert 0 <= op["check"]["error"] < 2**-6
        assert op["chosen"] in ("library", "reference", "chunked")
        refused = [row for row in op["variants"] if row["status"] == "unsupported"]
        kernels = [row for row in op["variants"] if row["variant"].startswith("cuda_")]
        assert len(refused) >= len(kernels)
        assert all(row["reason"] for row in refused)
    assert report["broken"] == []


@pytest.fixture
def few_ops(monkeypatch: pytest.MonkeyPatch) -> dict[str, Op]:
    """What doctor looks at: to check every op takes seconds, and is another test's."""
    few = {name: OPS[name] for name in ("rms_norm", "softmax")}
    monkeypatch.setattr("gristmill.cli.doctor.OPS", few)
    return few


def test_doctor_as_text(run: Run, few_ops: dict[str, Op]) -> None:
    result = run("doctor")
    assert result.exit_code == 0
    for word in ("torch", "compiler", "cache", "GRISTMILL_JIT", "passed", *few_ops):
        assert word in result.stdout
    assert "Everything that should work here does." in result.stdout


@pytest.mark.usefixtures("few_ops")
def test_doctor_tells_where_settings_come_from(run: Run) -> None:
    report = json.loads(run("doctor --json", GRISTMILL_TABLE="off").stdout)
    origins = {one["name"]: (one["value"], one["origin"]) for one in report["settings"]}
    assert origins["GRISTMILL_TABLE"] == ("off", "environment")
    assert origins["GRISTMILL_JIT"] == ("on", "default")


@pytest.mark.usefixtures("few_ops")
def test_doctor_finds_an_op_that_computes_something_else(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = OPS["rms_norm"].reference
    monkeypatch.setattr(
        OPS["rms_norm"], "reference", lambda *args: reference(*args) * 1.1, raising=True
    )
    result = run("doctor")
    assert result.exit_code == 1
    assert "broken: rms_norm: the self-check failed" in result.stdout
    assert "should work here does" not in result.stdout


@pytest.mark.usefixtures("few_ops")
def test_doctor_warns_of_a_folder_that_others_can_write_to(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    result = run("doctor --json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert report["cache"]["trusted"] is False
    assert "can be written to by others" in report["warnings"][0]


def test_a_mistake_in_the_environment_is_one_line(run: Run) -> None:
    result = run("doctor", GRISTMILL_JIT="maybe")
    assert result.exit_code == 1
    assert re.fullmatch(r"gristmill: GRISTMILL_JIT='maybe' is not allowed.*\n", result.stderr)


# explain


def test_explain_for_the_device_here(run: Run) -> None:
    found = json.loads(run("explain rms_norm --shape 4096x8192 --json").stdout)
    assert found["op"] == "rms_norm"
    assert found["rows"] == 4096
    assert 8192 in found["dims"].values()
    assert found["chosen"] in ("library", "reference")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_explain_for_a_gpu_that_is_not_here(run: Run, arch: str) -> None:
    result = run(f"explain rms_norm --shape 2x2048x8192 --dtype fp16 --arch {arch} --json")
    found = json.loads(result.stdout)
    assert found["arch"] == arch
    assert found["rows"] == 4096
    assert "float16" in json.dumps(found["dtypes"])
    assert found["chosen"].startswith("cuda_")
    chosen = [row for row in found["variants"] if row["status"] == "chosen"]
    assert [row["variant"] for row in chosen] == [found["chosen"]]


@pytest.mark.parametrize(
    "op", [name for name, op in OPS.items() if any(one.name == "cuda_block" for one in op.variants)]
)
def test_explain_takes_every_op_and_more_leading_dims(run: Run, op: str) -> None:
    result = run(f"explain {op} --shape 8x1024x1024 --arch sm_90a --json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["op"], found["rows"]) == (op, 8192)
    assert found["chosen"].startswith("cuda_")


@pytest.mark.parametrize("op", ["softmax", "log_softmax_backward"])
def test_explain_takes_a_word_where_the_op_has_an_int(run: Run, op: str) -> None:
    words = f"explain {op} --shape 8x64x64 --arch sm_90a --set causal="
    for causal, flags in (("bottom_right", ["causal"]), ("none", [])):
        result = run(words + causal + " --json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["flags"] == flags
    result = run(words + "upper")
    assert result.exit_code == 2
    assert f"{op}: causal must be None, 'top_left' or 'bottom_right', got 'upper'" in result.output


def test_explain_takes_none_as_a_word_where_it_is_one(run: Run) -> None:
    words = "explain {} --arch sm_90a --json --set {}"
    losses = words.format("cross_entropy --shape 64x1024", "reduction=none")
    assert json.loads(run(losses).stdout)["chosen"]
    plain = words.format("linear --shape 8x64x64", "activation=none")
    assert json.loads(run(plain).stdout)["chosen"]


def test_explain_as_text_names_the_choice(run: Run) -> None:
    result = run("explain add_rms_norm --arch sm_90a")
    assert result.exit_code == 0
    assert re.search(r"^runs cuda_\w+, by ", result.stdout, re.MULTILINE)
    assert "NVIDIA H200" in result.stdout


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("explain rms_nrm", "unknown op 'rms_nrm' (did you mean rms_norm?): there are rms_norm"),
        ("explain rms_norm_bwd", "(did you mean rms_norm_backward?)"),
        ("explain rms_norm --shape 9999999999x9999999999", "is too large"),
        ("explain rms_norm --shape 12xx3", "'12xx3' is not a shape"),
        ("explain rms_norm --dtype int4", "'int4' is not one of bfloat16"),
        ("explain rms_norm --arch sm_50", "unknown architecture 'sm_50': there are sm_80"),
        ("warmup no_op --arch sm_90a", "unknown op 'no_op'"),
        ("warmup rmsnorm --arch sm_90a", "unknown op 'rmsnorm' (did you mean rms_norm?)"),
        ("tune rmsnorm", "unknown op 'rmsnorm' (did you mean rms_norm?)"),
        ("tables rmsnorm", "unknown op 'rmsnorm' (did you mean rms_norm?)"),
        ("warmup --arch h200", "unknown architecture 'h200'"),
        ("warmup", "there is no GPU here; name the architecture"),
        ("bench no_suite", "unknown suite 'no_suite': there are rms_norm"),
        ("bench --op no_op", "unknown op 'no_op'"),
        ("bench softmax --op rms_norm", "unknown op 'rms_norm': there are softmax"),
        ("bench host_cost --op no_op", "unknown op 'no_op'"),
        ("bench --peers quak", "did you mean quack?"),
        ("bench --shape 4", "'4': a benchmark takes rows x columns"),
        ("bench --layers no_model", "unknown set of layers 'no_model': there are few"),
        ("bench --layers 4x4x4", "'4x4x4': a layer is N x K"),
        ("bench linear --rows 0", "'0' is no number of rows"),
        ("bench softmax --rows 4", "none of these tasks has them"),
        ("bench --device tpu9", "'tpu9' is not a device"),
        ("bench --read no_such.json", "no_such.json is not a file of benchmark results"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(run: Run, line: str, words: str) -> None:
    result = run(line)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert result.stderr.startswith("gristmill: ")
    assert result.stderr.count("\n") == 1


def test_an_unknown_option_is_exit_code_2(run: Run) -> None:
    assert run("explain rms_norm --colour red").exit_code == 2
    assert run("no_such_command").exit_code == 2


# warmup and cache


@pytest.fixture
def nvrtc() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")


@pytest.mark.usefixtures("nvrtc")
def test_warmup_fills_the_cache_that_ls_lists_and_clear_empties(run: Run) -> None:
    line = "warmup rms_norm --shape 16x4096 --arch sm_90a"
    first, second = run(line), run(line)
    assert first.exit_code == second.exit_code == 0, first.output
    assert re.search(r"\d s +compiled +rms_norm cuda_\w+ \(.+\) for sm_90a", first.stdout)
    assert re.search(r"[1-9]\d* programs? compiled, 0 already in the cache", first.stdout)
    assert re.search(r"0 programs compiled, [1-9]\d* already in the cache", second.stdout)

    listed = json.loads(run("cache ls --json").stdout)
    assert listed["kernels"]
    for kernel in listed["kernels"]:
        assert kernel["arch"] == "sm_90a"
        assert kernel["source"].endswith(".cu")
        assert kernel["bytes"] > 1000
    assert listed["bytes"] == sum(kernel["bytes"] for kernel in listed["kernels"])
    assert "sm_90a" in run("cache ls").stdout

    count = len(listed["kernels"])
    kept = run("cache clear", answer="n\n")
    assert kept.exit_code == 1
    assert f"Delete {count} program" in kept.output
    assert len(json.loads(run("cache ls --json").stdout)["kernels"]) == count
    assert run("cache clear --yes").stdout.startswith(f"{count} program")
    assert json.loads(run("cache ls --json").stdout)["kernels"] == []


def test_an_empty_cache_lists_nothing(run: Run) -> None:
    result = run("cache ls")
    assert result.exit_code == 0
    assert result.stdout.startswith("0 programs")
    assert run("cache clear").stdout.startswith("0 programs deleted")  # nothing to ask about


@pytest.mark.usefixtures("nvrtc")
def test_warmup_with_compiling_forbidden_fails(run: Run) -> None:
    result = run("warmup rms_norm --shape 16x4096 --arch sm_89", GRISTMILL_JIT="off")
    assert result.exit_code == 1
    assert "GRISTMILL_JIT=off" in result.stderr
