"""Warm-ups of what was recorded, named or is all there is, and the bundle that they leave."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import gristmill
from gristmill.cli.app import app
from gristmill.errors import ArgumentError, KernelNotCached
from gristmill.formats.nvfp4.packing import kernel_name
from gristmill.jit import cache
from gristmill.jit.bundle import Bundle
from gristmill.jit.compilers import to_text
from gristmill.jit.program import Program
from gristmill.ops.registry import OPS
from gristmill.select.chooser import ranked
from gristmill.select.device import KNOWN
from gristmill.select.record import described, read_recording
from gristmill.select.tables import reset_tables, user_table_path
from gristmill.settings import reload_settings
from gristmill.tune.jobs import plan_by_recording
from gristmill.warmup import Wanted, jobs_of, warmup

pytest.importorskip("cuda.bindings.nvrtc")

H200 = KNOWN["sm_90a"]
BF16 = torch.bfloat16
Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GRISTMILL_CACHE_DIR", str(tmp_path / "cache"))
    _anew()
    yield
    monkeypatch.undo()
    _anew()


def _anew() -> None:
    reload_settings()
    reset_tables()
    cache.forget()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    def invoke(*words: str) -> Any:
        return CliRunner().invoke(app, ["warmup", *words])

    return invoke


def programs(op: str, *args: Any) -> tuple[Any, ...]:
    problem = OPS[op].problem(*args, device=H200)
    choice = ranked(op, OPS[op].variants, problem)[0]
    found: tuple[Any, ...] = choice.variant.programs(problem, choice.config)
    assert found
    return found


def rows(shape: tuple[int, int], dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_a_bundle_serves_where_nothing_may_be_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    wanted = programs("scale_gradient_", rows((4, 4096)), torch.empty(()))
    bundle = tmp_path / "kernels.zip"
    words = ("scale_gradient_", "--shape", "4x4096", "--arch", "sm_90a", "--bundle", str(bundle))
    result = run(*words)
    assert result.exit_code == 0, result.output
    assert "1 program compiled, 0 already in the cache" in result.output
    assert "MB, sha256" in result.output
    with Bundle.open(bundle) as opened:
        assert opened.sha256() in result.output
        assert [name.endswith(".kernel") for name in opened.names] == [True]

    monkeypatch.setenv("GRISTMILL_CACHE_DIR", str(tmp_path / "another"))
    monkeypatch.setenv("GRISTMILL_CACHE_LAYERS", str(bundle))
    monkeypatch.setenv("GRISTMILL_JIT", "off")
    _anew()
    assert cache.load_or_compile(wanted[0], "sm_90a").compiler
    other = programs("scale_gradient_", rows((4, 16384)), torch.empty(()))[0]
    assert other != wanted[0]
    with pytest.raises(KernelNotCached, match="gristmill warmup --arch sm_90a --bundle FILE"):
        cache.load_or_compile(other, "sm_90a")


def test_the_program_of_a_message_is_made_by_its_command(tmp_path: Path, run: Run) -> None:
    (program,) = programs("scale_gradient_", rows((4, 64)), torch.empty(()))
    bundle = tmp_path / "one.zip"
    text = to_text(program)
    result = run("--program", text, "--arch", "sm_90a", "--bundle", str(bundle), "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["compiled"], report["failed"]) == (1, 0)
    assert report["bundle"]["bytes"] == bundle.stat().st_size
    assert [one["kernels"] for one in report["programs"]] == [list(program.names)]
    assert cache.is_cached(program, "sm_90a")
    assert warmup(programs=[text], arch="sm_90a")[0].how == "cached"


def test_a_recording_of_another_gpu_is_warmed_up_for_without_one(tmp_path: Path, run: Run) -> None:
    shifted = torch.empty(4 * 4099 + 1, dtype=BF16).as_strided((4, 4096), (4099, 1), 1)
    calls = (shifted, torch.empty(()))
    lines = [
        {"op": "scale_gradient_", "key": "a", "device": "cpu", "arguments": described(calls)},
        {"op": "mine", "key": "b", "device": "cpu", "arguments": []},
    ]
    recording = tmp_path / "run.jsonl"
    recording.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = run("--recorded", str(recording), "--arch", "sm_90a")
    assert result.exit_code == 0, result.output
    assert "mine is no op of gristmill's" in result.output
    for program in programs("scale_gradient_", *calls):
        assert cache.is_cached(program, "sm_90a")


def test_a_recorded_call_with_the_arguments_of_another_version_is_told(tmp_path: Path) -> None:
    """Those of softmax were x, scale, mask, causal once, and of its gradient dy, y, scale, causal:
    as an int, 1.0 would be a causal limit."""
    x = torch.empty(4, 64, dtype=BF16)
    mask = torch.ones(4, 64, dtype=torch.bool)
    calls: dict[str, tuple[str, tuple[Any, ...]]] = {
        "plain": ("softmax", (x, 1.0, None, None)),
        "causal": ("softmax", (x, 1.0, None, "top_left")),
        "masked": ("log_softmax", (x, 1.0, mask, None)),
        "gradient": ("softmax_backward", (x, x, 1.0, None)),
        "causal gradient": ("softmax_backward", (x, x, 1.0, "top_left")),
    }
    lines = [
        {"op": op, "key": key, "device": "cpu", "arguments": described(args)}
        for key, (op, args) in calls.items()
    ]
    recording = tmp_path / "old.jsonl"
    recording.write_text("".join(json.dumps(line) + "\n" for line in lines))
    notes: list[str] = []
    assert jobs_of(Wanted(recorded=recording), H200, notes) == {}
    assert [note.partition(": ")[0] for note in notes] == list(calls)
    assert all("the recorded call does not fit" in note for note in notes)
    plan = plan_by_recording(read_recording(recording), H200)
    assert (plan.families, plan.notes) == ([], notes)


def test_a_whole_model_in_one_call() -> None:
    shapes = {"rms_norm": [(16, 4096)], "softmax": [(16, 512), (16, 1024)]}
    together = jobs_of(Wanted(shapes), H200, [])
    apart = {
        program
        for name, some in shapes.items()
        for program in jobs_of(Wanted(name, some), H200, [])
    }
    assert set(together) == apart
    assert {needed.problem.op for needed in together.values() if needed} == set(shapes)


def test_what_does_not_compile_hinders_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    bad = Program("cross_entropy_backward.cu", ("no_such_kernel<int>",))
    bundle = tmp_path / "rest.zip"
    words = ("scale_gradient_", "--shape", "4x4096", "--program", to_text(bad))
    result = run(*words, "--arch", "sm_90a", "--bundle", str(bundle))
    assert result.exit_code == 1
    assert "failed: no_such_kernel<int> for sm_90a: CompileError" in result.output
    assert "1 program compiled, 0 already in the cache, 1 failed" in result.output
    with Bundle.open(bundle) as opened:
        assert len(opened.names) == 1


def test_one_bundle_for_two_architectures(tmp_path: Path) -> None:
    bundle = tmp_path / "both.zip"
    done = warmup("scale_gradient_", shapes=[(4, 4096)], arch=["sm_90a", "sm_80"], bundle=bundle)
    assert {one.arch for one in done} == {"sm_90a", "sm_80"}
    with Bundle.open(bundle) as opened:
        assert opened.manifest["archs"] == ["sm_80", "sm_90a"]


def test_the_users_table_goes_along(tmp_path: Path) -> None:
    path = user_table_path(H200)
    assert path is not None
    path.parent.mkdir(parents=True, mode=0o700)
    path.write_text(
        json.dumps(
            {"schema": _schema(), "gpu": H200.name, "arch": "sm_90a", "multiprocessors": 132}
            | {"rows": []}
        )
    )
    reset_tables()
    bundle = tmp_path / "with_table.zip"
    warmup("scale_gradient_", shapes=[(4, 4096)], arch="sm_90a", bundle=bundle)
    with Bundle.open(bundle) as opened:
        (table,) = [name for name in opened.names if name.endswith(".json")]
        assert opened.read(table) == path.read_bytes()


def _schema() -> int:
    from gristmill.select.table import SCHEMA

    return SCHEMA


def test_all_is_listed_without_compiling_anything(run: Run) -> None:
    words = ("scale_gradient_", "--all", "--arch", "sm_90a", "--dry-run")
    result = run(*words)
    assert result.exit_code == 0, result.output
    assert "programs; nothing was compiled" in result.output
    listed = json.loads(run(*words, "--json").stdout)
    assert f"{len(listed)} programs" in result.output
    texts = {one["program"] for one in listed}
    (usual,) = programs("scale_gradient_", rows((4, 4096)), torch.empty(()))
    assert to_text(usual) in texts
    assert len(texts) == len(listed) > 10
    assert cache.entries() == []


@pytest.mark.long
def test_all_kernels_of_an_op_compile(tmp_path: Path) -> None:
    bundle = tmp_path / "all.zip"
    done = gristmill.warmup("scale_gradient_", every=True, arch="sm_90a", bundle=bundle)
    assert {one.how for one in done} == {"compiled"}
    with Bundle.open(bundle) as opened:
        assert len(opened.names) == len(done)


def test_many_programs_have_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from gristmill.cli import warmup as command
    from gristmill.warmup import Warmed

    out = Console(record=True, width=200)
    show = command._in_lines(out)
    one = Warmed(
        "rms_norm", "cuda_warp", "norm.cu", ("norm_forward<a>",), "sm_90a", 0.1, "compiled"
    )
    for number in range(1, 1001):
        show(one, number, 1000)
    lines = out.export_text().splitlines()
    assert len(lines) == 20
    assert lines[-1] == "[1000/1000] rms_norm norm_forward"
    show(replace(one, seconds=0.5), 1, 3)
    assert "0.500 s  compiled  rms_norm cuda_warp (norm_forward)" in out.export_text(clear=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--all", "--shape", "1x64"], "give one of --shape and --all, not both"),
        (["--recorded", "a.jsonl", "--dtype", "bf16"], "leave out --dtype"),
        (["--program", "{}"], ""),
        (["rms_norm", "--bundle", "/no/such/folder/k.zip"], "there is no such folder"),
    ],
)
def test_wrong_command_lines(run: Run, words: list[str], message: str) -> None:
    result = run(*words, "--arch", "sm_90a")
    assert result.exit_code == 2, result.output
    assert message in result.output


def test_wrong_arguments() -> None:
    with pytest.raises(ArgumentError, match="unknown architecture 'sm_1'"):
        warmup("rms_norm", arch=["sm_90a", "sm_1"])
    with pytest.raises(ArgumentError, match="cannot be read"):
        warmup(recorded="no_such_file.jsonl", arch="sm_90a")


@pytest.mark.gpu
def test_on_a_gpu_a_second_warm_up_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from gristmill.jit import parallel

    shapes = {"rms_norm": [(24, 4096), (4096, 4096)], "softmax": [(24, 4096)]}
    gristmill.warmup(shapes)
    monkeypatch.setattr(parallel, "_in_workers", lambda *args: pytest.fail("a worker"))
    assert {one.how for one in gristmill.warmup(shapes)} == {"cached"}
    before = gristmill.counters()["compiles"]
    x = torch.randn(24, 4096, device="cuda", dtype=BF16)
    gristmill.rms_norm(x, torch.ones(4096, device="cuda", dtype=BF16))
    gristmill.softmax(x)
    assert gristmill.counters()["compiles"] == before


@pytest.mark.parametrize(("arch", "count"), [("sm_90a", 2), ("sm_80", 2), ("sm_100a", 0)])
def test_what_packs_nvfp4_weights_is_warmed_up_with_them(arch: str, count: int) -> None:
    """It belongs to no op, and is needed before the first call of one."""
    for ops, times in (({"nvfp4_linear": [(1, 4096, 4096)]}, 1), ({"rms_norm": [(1, 4096)]}, 0)):
        jobs = jobs_of(Wanted(ops), KNOWN[arch], [])
        assert sum(one.source == "nvfp4_pack.cu" for one in jobs) == count * times


def test_every_kernel_that_packs_is_among_all(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[warmup.__module__]  # the package has the function under its name
    monkeypatch.setattr(module, "programs_of", lambda *_: {})
    jobs = jobs_of(Wanted("nvfp4_moe", every=True), KNOWN["sm_90a"], [])
    assert len(jobs) == 12
    codes = torch.empty((1, 64, 33), dtype=torch.uint8)[..., 1:]
    assert Program("nvfp4_pack.cu", (kernel_name("pack", codes, codes),)) in jobs


@pytest.mark.parametrize(
    "given",
    [{"every": True, "shapes": [(1, 64)]}, {"recorded": "x", "every": True}],
)
def test_one_way_to_say_what_is_wanted(given: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="give one of shapes, every and recorded"):
        warmup("rms_norm", arch="sm_90a", **given)


def test_a_folder_that_is_not_there_is_told_before_anything_is_compiled(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="there is no folder"):
        warmup("rms_norm", arch="sm_90a", bundle=tmp_path / "no" / "x.bundle")
