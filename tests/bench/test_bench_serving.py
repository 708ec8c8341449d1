"""The suite `vllm`: which engines, what they are told, what their answers become."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from gristmill.bench import whole_models
from gristmill.bench.results import Results, load
from gristmill.bench.serving import processes
from gristmill.bench.serving import suite as serving
from gristmill.bench.serving.models import KNOWN, kv_cache_bytes, weight_bytes, write_config
from gristmill.bench.serving.report import tables
from gristmill.cli.app import app
from gristmill.errors import ArgumentError, GristmillError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CHOICES = {"rms_norm:cuda_row": 2, "nvfp4_linear:cuda_mma": 3}
# It speaks by files alone: importing torch in three processes would take ten seconds.
CHILD = """
import json, os, time
from pathlib import Path

def main(words):
    spec = json.loads(words[0])
    place = Path(spec["place"])
    if spec["how"] == "falls":
        raise ValueError("no kernel for this")
    if spec["how"] == "hangs":
        time.sleep(600)
    (place / "ready").touch()
    while not (place / "go").exists():
        time.sleep(0.02)
    start = time.time()
    time.sleep(0.2)
    answer = {"span": [start, time.time()], "word": os.environ["A_WORD"], "parent": spec["parent"]}
    (place / "answer.json").write_text(json.dumps(answer))
    if spec["how"] == "falls late":
        os._exit(7)
"""


def answer(scale: float = 1.0, choices: dict[str, int] = CHOICES, **more: Any) -> dict[str, Any]:
    """What a child says."""
    batches = [
        {"batch": batch, "ms": ms * scale, "tokens_per_s": 200.0, "prefill_ms": 9.0}
        for batch, ms in ((1, 5.0), (16, 6.0))
    ]
    shared = {"version": "0.26.0", "start_s": 60.0, "peak_gib": 20.0, "choices": choices}
    return {**shared, "fallbacks": {}, "batches": batches, **more}


def rows_of(name: str, said: Any) -> list[dict[str, Any]]:
    return serving.rows("llama-8b", serving.IMPLEMENTATIONS[name], (1, 16), said)


def test_ratios_are_speeds_against_bf16_and_marlin() -> None:
    # Not in the order of the suite: engines are put together as memory allows.
    found = rows_of("nvfp4_gristmill_norms", answer(0.5)) + rows_of("bf16", answer(choices={}))
    found += rows_of("nvfp4_marlin", answer(0.8, choices={}))
    (title, (header, body)), (_, (_, beside)) = tables(found)
    assert title == "vLLM, llama-8b: ms per decode step"
    assert header[1:] == [
        *("batch 1", "batch 16", "vs bf16, 1", "vs bf16, 16", "vs Marlin, 1", "vs Marlin, 16")
    ]
    assert body[0] == ["bf16", "5.00", "6.00", "1.00x", "1.00x", "0.80x", "0.80x"]
    assert body[1][0] == "nvfp4_marlin"
    ours = ["nvfp4_gristmill_norms", "2.50", "3.00", "2.00x", "2.00x", "1.60x", "1.60x"]
    assert body[2] == ours
    assert beside[2][-1] == "rms_norm:cuda_row, nvfp4_linear:cuda_mma"


@pytest.mark.parametrize("said", [GristmillError("it died"), {"error": "it died"}])
def test_a_failure_is_a_row_for_each_batch(said: Any) -> None:
    found = rows_of("nvfp4_marlin", said)
    assert [(row["batch"], row["error"]) for row in found] == [(1, "it died"), (16, "it died")]
    (_, (_, body)), _ = tables(found)
    assert body == [["nvfp4_marlin", "failed", "failed", "", ""]]


@pytest.mark.parametrize(
    ("name", "choices", "error"),
    [
        ("nvfp4_gristmill", {"rms_norm:x": 1}, "no NVFP4 layer of gristmill's ran"),
        ("bf16_norms", {"nvfp4_linear:x": 1}, "no norm of gristmill's ran"),
        ("nvfp4_gristmill_norms", CHOICES, None),
        ("nvfp4_gristmill", {"nvfp4_moe:x": 1}, None),
        ("bf16", {}, None),
    ],
)
def test_an_engine_must_run_what_it_was_asked_to(
    name: str, choices: dict[str, int], error: str | None
) -> None:
    assert [row["error"] for row in rows_of(name, answer(choices=choices))] == [error, error]


def test_what_an_engine_is_told(tmp_path: Path) -> None:
    options = {
        name: serving.spec("llama-8b", one, (1, 64), CUDA, 3, tmp_path)["options"]
        for name, one in serving.IMPLEMENTATIONS.items()
    }
    assert all(
        one["load_format"] == "dummy" and one["max_num_seqs"] == 64 for one in options.values()
    )
    assert not any("enforce_eager" in one for one in options.values())
    for name, one in options.items():
        assert ("ir_op_priority" in one) == name.endswith("_norms")
        assert (one.get("quantization") == "gristmill_nvfp4") == ("gristmill" in name)
        assert (one.get("moe_backend") == "marlin") == ("marlin" in name)
    # Many sequences have room for their keys and values.
    large = serving.spec("llama-8b", serving.IMPLEMENTATIONS["bf16"], (512,), CUDA, 3, tmp_path)
    assert large["options"]["kv_cache_memory_bytes"] > kv_cache_bytes(KNOWN["llama-8b"], 512 * 192)


def test_configs_and_sizes(tmp_path: Path) -> None:
    write_config(tmp_path, "qwen3-30b-a3b", nvfp4=True)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == "W4A16_NVFP4"
    # 8.03 and 30.5 billion parameters.
    assert weight_bytes(KNOWN["llama-8b"], nvfp4=False) == pytest.approx(16.06e9, rel=0.001)
    assert weight_bytes(KNOWN["qwen3-30b-a3b"], nvfp4=False) == pytest.approx(61.1e9, rel=0.002)
    assert weight_bytes(KNOWN["llama-8b"], nvfp4=True) == pytest.approx(6.03e9, rel=0.01)
    assert kv_cache_bytes(KNOWN["llama-8b"], 1) == 131072


def test_engines_start_together_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (150 * 10**9, 150 * 10**9))
    monkeypatch.setattr(serving.os, "cpu_count", lambda: 16)

    def waves(model: str) -> list[list[str]]:
        plan = serving.plan(CUDA, models=[model])
        return [[one.name for one in wave] for wave in serving._waves(model, plan, CUDA)]

    assert len(waves("llama-8b")) == 1
    moe = waves("qwen3-30b-a3b")
    assert [wave[0] for wave in moe] == ["bf16", "bf16_norms"]
    assert sorted(name for wave in moe for name in wave) == sorted(serving.IMPLEMENTATIONS)


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "a_child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(str(tmp_path))

    def start(name: str, how: str) -> processes.Started:
        place = tmp_path / name
        return processes.start(name, "a_child", {"how": how}, {"A_WORD": "x y"}, place)

    return start


def test_processes_run_one_at_a_time_and_none_is_left(child: Any) -> None:
    started = [child("a", "works"), child("b", "falls"), child("c", "falls late")]
    said = {
        one.name: answer
        for one, answer in processes.in_turns(
            started, lambda name: None, start_limit_s=60, run_limit_s=30
        )
    }
    assert (said["a"]["word"], said["a"]["parent"]) == ("x y", os.getpid())
    assert "ended with code 1" in str(said["b"])
    assert "no kernel for this" in str(said["b"])
    # What falls over after it has answered has answered.
    assert said["c"]["span"][0] >= said["a"]["span"][1]
    assert all(one.has_ended for one in started)


def test_a_child_waits_until_it_is_told_to_go(tmp_path: Path) -> None:
    threading.Timer(0.3, (tmp_path / "go").touch).start()
    start = time.monotonic()
    processes.wait_for_turn(tmp_path)
    assert time.monotonic() - start > 0.2
    assert (tmp_path / "ready").exists()
    processes.write_answer(tmp_path, {"ms": 1.5})
    assert json.loads((tmp_path / "answer.json").read_text()) == {"ms": 1.5}


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    """A parent that is killed leaves nothing behind, though its child is in a group of its own."""
    child = (
        "import os, sys, time; sys.path.insert(0, sys.argv[1]);"
        "from gristmill.bench.fresh import end_with; end_with(int(sys.argv[2]));"
        "open(sys.argv[3], 'w').write(str(os.getpid())); time.sleep(120)"
    )
    parent = (
        "import os, subprocess, sys, time;"
        "subprocess.Popen([sys.executable, '-c', sys.argv[1], sys.argv[2], str(os.getpid()), "
        "sys.argv[3]], start_new_session=True); time.sleep(120)"
    )
    source, told = str(Path(processes.__file__).parents[3]), tmp_path / "pid"
    process = subprocess.Popen([sys.executable, "-c", parent, child, source, str(told)])
    _until(lambda: told.exists() and told.read_text() != "")
    pid = int(told.read_text())
    process.kill()
    process.wait()
    _until(lambda: not Path(f"/proc/{pid}").exists() or _is_dead(pid))


def _is_dead(pid: int) -> bool:
    """Nobody may be there to reap it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def _until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_process_that_hangs_is_ended(child: Any) -> None:
    started = [child("a", "hangs")]
    begin = time.monotonic()
    turns = processes.in_turns(started, lambda name: None, start_limit_s=1, run_limit_s=1)
    (_, said) = next(turns)
    assert "was still running" in str(said)
    turns.close()
    assert started[0].has_ended
    assert time.monotonic() - begin < 30


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, ["bench", *words])


def test_without_vllm_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving.importlib.util, "find_spec", lambda name: None)
    done = invoke("vllm", "--device", "cpu")
    assert done.exit_code == 2
    assert "needs vLLM" in done.output
    assert "Traceback" not in done.output
    # Beside all others it is a note.
    chosen = whole_models.choose(["vllm", "host_cost"], ["all"], CPU, whole_models.Filters())
    assert chosen.plan is None
    assert "needs vLLM" in chosen.notes[0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("vllm", "--models", "llama-9b"), "did you mean llama-8b?"),
        (("vllm", "--impls", "nvfp4_marlim"), "did you mean nvfp4_marlin?"),
        (("vllm", "--batches", "0"), "is no number of sequences"),
        (("host_cost", "--batches", "4"), "name one of these"),
        (("vllm", "--op", "training"), "unknown op 'training'"),
    ],
)
def test_mistakes_are_told(
    words: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "missing", lambda device: None)
    done = invoke(*words, "--device", "cpu")
    assert done.exit_code == 2
    assert says in done.output


def test_filters_of_other_suites_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "missing", lambda device: None)
    suites = ["vllm", "nvfp4_moe"]
    other = whole_models.Filters(models=["deepseek-v3"])
    assert whole_models.choose(suites, suites, CPU, other).plan is None
    shared = whole_models.Filters(models=["qwen3-30b-a3b"])
    plan = whole_models.choose(suites, suites, CPU, shared).plan
    assert plan is not None
    assert plan.models == ("qwen3-30b-a3b",)


def test_engines_that_have_rows_are_not_started_again() -> None:
    chosen = serving.plan(CPU, models=["llama-8b"], batches=[1, 16])
    results = Results({})
    results.add(rows_of("bf16", answer(choices={})))
    results.add(rows_of("nvfp4_gristmill", {"error": "out of memory"})[:1])
    left = serving.todo("llama-8b", chosen, results).implementations
    names = [one.name for one in left]
    assert "bf16" not in names
    assert "nvfp4_gristmill" in names  # of one batch only there is a row
    assert len(serving.todo("qwen3-30b-a3b", chosen, results).implementations) == len(left) + 1


def test_end_to_end_is_chosen_like_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    suites, choose = ["end_to_end", "rms_norm"], whole_models.choose
    filters = whole_models.Filters(ops=["decoding"], implementations=["eager"], batches=[2])
    assert choose(suites, suites, CPU, filters).blocks == {
        "ops": ["decoding"],
        "implementations": ["eager"],
        "batches": [2],
    }
    for other in ({"ops": ["rms_norm"]}, {"models": ["tiny"]}):
        filters = whole_models.Filters(**other)  # type: ignore[arg-type]
        assert choose(suites, suites, CPU, filters).blocks is None
    assert choose(["rms_norm"], [], CPU, whole_models.Filters()).blocks is None
    with pytest.raises(ArgumentError, match="models of end_to_end go by --op"):
        choose(suites[:1], [], CPU, whole_models.Filters(models=["tiny"]))
    with pytest.raises(ArgumentError, match=r"'eagr' \(did you mean eager\?\)"):
        choose(suites, [], CPU, whole_models.Filters(implementations=["eagr"]))


def test_another_gpu_than_the_first_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving.importlib.util, "find_spec", lambda name: object())
    assert serving.missing(torch.device("cuda:0")) is None
    assert "CUDA_VISIBLE_DEVICES" in str(serving.missing(torch.device("cuda:1")))
    with pytest.raises(ArgumentError, match="at least"):
        serving.plan(CPU, batches=[0])


def test_recorded_results_are_shown_again(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results = Results({"gpu": "H200", "methods": {"vllm": serving.METHOD}}, path=path)
    results.add(rows_of("bf16", answer(choices={})))
    results.add(rows_of("nvfp4_gristmill", {"error": "out of memory"}))
    page = tmp_path / "page.md"
    done = invoke("--read", str(path), "--markdown", str(page))
    assert done.exit_code == 1  # gristmill's own row failed
    assert (
        "nvfp4_gristmill was not timed on llama-8b batch 1, batch 16: out of memory" in done.output
    )
    assert "| bf16 | 5.00 | 6.00 | 1.00x | 1.00x |" in page.read_text()
    assert "Method of vllm" in page.read_text()
    marlin = load(path)
    marlin.rows = rows_of("bf16", answer(choices={})) + rows_of("nvfp4_marlin", {"error": "no"})
    marlin.path = path
    marlin.save()
    assert invoke("--read", str(path)).exit_code == 0  # a peer's did
