"""The suite `vllm`: which engines, what they are told, what their answers become."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench.committed import FOLDER
from rich.console import Console
from typer.testing import CliRunner

from gristmill.bench import whole_models
from gristmill.bench.page import page
from gristmill.bench.report import markdown, print_results
from gristmill.bench.results import Results, load
from gristmill.bench.serving import child as serving_child
from gristmill.bench.serving import goals, processes
from gristmill.bench.serving import suite as serving
from gristmill.bench.serving.models import KNOWN, kv_cache_bytes, weight_bytes, write_config
from gristmill.bench.serving.report import VARIANTS, is_alarm, parts
from gristmill.cli.app import app
from gristmill.errors import ArgumentError, GristmillError
from gristmill.tune.jobs import CAPTURE_SIZES

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
        {
            "batch": batch,
            "ms": ms * scale,
            "tokens_per_s": batch / (ms * scale) * 1e3,
            "prefill_ms": 9.0,
        }
        for batch, ms in ((1, 5.0), (16, 6.0))
    ]
    shared = {"version": "0.26.0", "start_s": 60.0, "peak_gib": 20.0, "choices": choices}
    return {**shared, "fallbacks": {}, "batches": batches, **more}


def rows_of(name: str, said: Any) -> list[dict[str, Any]]:
    return serving.rows("llama-8b", serving.IMPLEMENTATIONS[name], (1, 16), said)


def test_tables_have_a_row_for_each_batch() -> None:
    # Not in the order of the suite: engines are put together as memory allows.
    found = rows_of("nvfp4_gristmill_norms", answer(0.5)) + rows_of("bf16", answer(choices={}))
    found += rows_of("nvfp4_marlin", answer(0.8, choices={}))
    tokens, steps, engines = parts(found)
    assert tokens.title == "vLLM, llama-8b: tokens/s"
    assert tokens.grid == (
        ["batch", "bf16", "marlin", "gristmill_norms", "vs best peer"],
        [
            ["1", "200", "250", "400", "1.60x"],
            ["16", "2,667", "3,333", "5,333", "1.60x"],
        ],
    )
    assert steps.title == "vLLM, llama-8b: ms per decode step"
    assert steps.grid == (
        ["batch", "bf16", "marlin", "gristmill_norms"],
        [["1", "5.00", "4.00", "2.50"], ["16", "6.00", "4.80", "3.00"]],
    )
    header, body = engines.grid
    assert header == ["what runs", "GiB", "start s", "prefill ms, 1 / 16", VARIANTS]
    assert body[0] == ["bf16", "20.0", "60.0", "9.00 / 9.00", ""]
    assert body[2][-1] == "rms_norm: cuda_row; nvfp4_linear: cuda_mma"


# ms of a decode step that somebody could measure, at each of the suite's batches.
STEPS = {
    "bf16": (4.81, 4.83, 4.86, 5.1, 5.62, 6.0, 6.4, 6.8, 8.2),
    "nvfp4_marlin": (3.4, 3.5, 3.69, 4.5, 6.15, 8.0, 9.1, 11.0, 15.0),
    "nvfp4_gristmill": (2.59, 2.8, 2.96, 3.4, 4.23, 5.3, 6.1, 9.5, 8.0),
}


def full_run(model: str = "llama-8b", scale: float = 1.0) -> list[dict[str, Any]]:
    """Of every implementation at every batch; gristmill's norms take 2% off a step."""
    norms = {"fused_add_rms_norm_:cuda_block": 10, "fused_add_rms_norm_:cuda_cluster": 12}
    norms["rms_norm:cuda_block"] = 22
    linears = {"nvfp4_linear:cuda_mma": 6, "nvfp4_linear:cuda_wgmma": 82}
    found = []
    for name, one in serving.IMPLEMENTATIONS.items():
        steps = STEPS[name.removesuffix("_norms")]
        share = scale * (0.98 if name.endswith("_norms") else 1.0)
        batches = [
            {
                "batch": batch,
                "graph": batch,
                "ms": ms * share,
                "tokens_per_s": batch / (ms * share) * 1e3,
                "prefill_ms": 8 + 1.5 * batch,
                "kernel_us": ms * share * 1e3,
            }
            for batch, ms in zip(serving.BATCHES, steps, strict=True)
        ]
        choices = norms.copy() if name.endswith("_norms") else {}
        choices |= linears if "gristmill" in name else {}
        said = {"start_s": 101.6, "peak_gib": 19.54, "choices": choices, "batches": batches}
        found += serving.rows(model, one, serving.BATCHES, said)
    return found


def printed(rows: list[dict[str, Any]], width: int = 100) -> list[str]:
    """As a terminal of this width shows it."""
    out = Console(file=io.StringIO(), width=width)
    results = Results({"gpu": "H200"})
    results.rows = rows
    print_results(results, out)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue().splitlines()


@pytest.mark.parametrize("scale", [1.0, 0.01])  # the largest have more than 99,999 tokens/s
def test_a_terminal_of_100_columns_shows_all_of_nine_batches(scale: float) -> None:
    lines = printed(full_run(scale=scale))
    tables = [line for line in lines if line.startswith(tuple("┏┃┡│└"))]
    assert max(map(len, tables)) <= 100
    assert "…" not in "".join(lines)
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in tables]
    by_batch = [line for line in cells if line[0].isdigit()]
    assert [line[0] for line in by_batch] == [str(batch) for batch in serving.BATCHES] * 2
    for name in serving.IMPLEMENTATIONS:  # none is folded
        assert any(line[0] == name for line in cells)


def test_numbers_in_a_terminal() -> None:
    lines = printed(full_run())
    cells = [[cell.strip() for cell in line.strip("┃│").split("│")] for line in lines]
    tokens = ["208", "212", "294", "300", "386", "394", "1.34x"]
    assert ["1", *tokens] in cells
    assert ["160", "23,529", "24,010", "14,545", "14,842", "16,842", "17,186", "0.73x"] in cells
    assert ["160", "6.80", "6.66", "11.0", "10.8", "9.50", "9.31"] in cells
    fast = printed(full_run(scale=0.01))
    assert any(" 3122k " in line for line in fast)


def test_missed_goals_are_told_beneath_the_table() -> None:
    lines = printed(full_run())
    (told,) = [line for line in lines if line.startswith(goals.MISSED)]
    assert told == (
        "Goals missed at 1 of 9 batches (tokens/s of gristmill over the faster of bf16 and "
        "nvfp4_marlin: 1.25x up to batch 64, 1.00x above): "
        "batch 160: 0.73x of bf16, goal 1.00x."
    )
    assert lines[lines.index(told) - 1].startswith("└")
    assert is_alarm(told)


def verdict(rows: list[dict[str, Any]]) -> str | None:
    lines = [line for line in parts(rows)[0].lines if line.startswith("Goals")]
    assert len(lines) <= 1
    return lines[0] if lines else None


def without(rows: list[dict[str, Any]], *impls: str, batch: int) -> list[dict[str, Any]]:
    """The same where these failed at a batch."""
    return [
        {"error": "out of memory"} | {key: row[key] for key in ("suite", "op", "impl", "batch")}
        if row["impl"] in impls and row["batch"] == batch
        else row
        for row in rows
    ]


def test_goals_apply_where_both_peers_ran() -> None:
    rows = full_run()
    # bf16 at 160 is what was missed against; Marlin alone is not judged.
    assert "met at 8 batches" in str(verdict(without(rows, "bf16", batch=160)))
    assert "met at 8 batches" in str(verdict(without(rows, "nvfp4_marlin", batch=160)))
    # The faster of gristmill's two counts, and both failing is a miss.
    one = without(rows, "nvfp4_gristmill_norms", batch=1)
    assert "batch 1:" not in str(verdict(one))
    both = without(one, "nvfp4_gristmill", batch=1)
    assert "2 of 9 batches" in str(verdict(both))
    assert "batch 1: failed, goal 1.25x; batch 160:" in str(verdict(both))
    # An engine that ran another layer than it was asked for is not gristmill's.
    for row in (other := full_run()):
        row["error"] = "no NVFP4 layer" if "gristmill" in row["impl"] else None
    assert "9 of 9 batches" in str(verdict(other))
    # Nothing of gristmill's, or a model that has no goal: no line.
    assert verdict([row for row in rows if "gristmill" not in row["impl"]]) is None
    assert verdict([row for row in rows if row["impl"] != "bf16"]) is None
    assert verdict(full_run("qwen3-30b-a3b")) is None


@pytest.mark.parametrize(
    ("batch", "ratio", "says"),
    [
        (64, 1.25, "Goals met at 1 batch "),
        (64, 1.2499, "batch 64: 1.25x (rounded up) of bf16, goal 1.25x"),
        (64, 1.2449, "batch 64: 1.24x of bf16, goal 1.25x"),
        (65, 1.0, "Goals met at 1 batch "),
        (65, 0.996, "batch 65: 1.00x (rounded up) of bf16, goal 1.00x"),
        (65, 0.994, "batch 65: 0.99x of bf16, goal 1.00x"),
    ],
)
def test_a_goal_is_judged_by_the_exact_ratio(batch: int, ratio: float, says: str) -> None:
    times = {"bf16": ratio, "nvfp4_marlin": 2.0, "nvfp4_gristmill": 1.0}
    of_batch = {impl: {"impl": impl, "ms": ms} for impl, ms in times.items()}
    assert says in str(goals.verdict("llama-8b", {batch: of_batch}))


def test_goals_are_of_models_and_implementations_that_there_are() -> None:
    assert set(goals.GOALS) <= set(KNOWN)
    assert {*goals.OURS, *goals.PEERS} <= set(serving.IMPLEMENTATIONS)
    assert [goals.goal_at("llama-8b", batch) for batch in (1, 64, 65, 512)] == [1.25, 1.25, 1, 1]
    assert goals.goal_at("tiny", 1) is None


def test_what_a_step_is_besides_kernels_is_told() -> None:
    rows = full_run()
    for row in rows:
        if row["batch"] == 256 and row["impl"] == "bf16":
            row["kernel_us"] *= 0.8
        if row["batch"] == 96:
            row["graph"] = 104
        if row["batch"] == 160:
            row["graph"] = None
    waits, graphs = parts(rows)[0].lines[1:]
    assert waits.endswith("the GPU waits for the host: batch 256: bf16 80%.")
    assert graphs.endswith("batch 96 ran in that of 104; batch 160 ran without one.")


def test_pages_show_the_same_tables_and_lines() -> None:
    results = Results({"gpu": "H200"})
    results.rows = full_run()
    text = markdown(results)
    assert "| 160 | 23,529 | 24,010 | 14,545 | 14,842 | 16,842 | 17,186 | 0.73x |" in text
    assert "\n\nGoals missed at 1 of 9 batches" in text
    shown = page(results)
    assert "<th scope=col>gristmill_norms<th scope=col>vs best peer" in shown
    assert '<p class="loud"><strong>Goals missed at 1 of 9 batches' in shown


@pytest.mark.parametrize("said", [GristmillError("it died"), {"error": "it died"}])
def test_a_failure_is_a_row_for_each_batch(said: Any) -> None:
    found = rows_of("nvfp4_marlin", said)
    assert [(row["batch"], row["error"]) for row in found] == [(1, "it died"), (16, "it died")]
    tokens, steps, engines = (part.grid[1] for part in parts(found))
    assert tokens == [["1", "failed", ""], ["16", "failed", ""]]
    assert steps == [["1", "failed"], ["16", "failed"]]
    assert engines == [["nvfp4_marlin", "", "", "failed / failed", ""]]


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
    assert all(one["max_num_batched_tokens"] == 16384 for one in options.values())
    assert not any("compilation_config" in one for one in options.values())
    # Many sequences have room for their keys and values.
    large = serving.spec("llama-8b", serving.IMPLEMENTATIONS["bf16"], (512,), CUDA, 3, tmp_path)
    assert large["options"]["kv_cache_memory_bytes"] > kv_cache_bytes(KNOWN["llama-8b"], 512 * 192)
    # All their prompts fit into one step.
    assert large["options"]["max_num_batched_tokens"] == 512 * serving.PROMPT


def test_each_batch_has_a_graph_of_its_size(tmp_path: Path) -> None:
    def sizes(*batches: int, device: torch.device = CUDA) -> list[int] | None:
        one = serving.IMPLEMENTATIONS["bf16"]
        options = serving.spec("llama-8b", one, batches, device, 3, tmp_path)["options"]
        found = options.get("compilation_config")
        return None if found is None else found["cudagraph_capture_sizes"]

    assert sizes(*serving.BATCHES) is None  # vLLM captures all of these by itself
    assert sizes(*serving.QUICK_BATCHES) is None
    assert sizes(1, 16, 64) is None
    assert sizes(3) == [1, 2, 3, 4]
    assert sizes(3, device=CPU) is None
    between = sizes(100, 1024)
    assert between is not None
    assert {96, 100, 104, 512, 1024} <= set(between)
    assert between == sorted(set(between))
    assert serving.captured(256) == CAPTURE_SIZES["vllm"]
    assert {*serving.BATCHES, *serving.QUICK_BATCHES} <= set(CAPTURE_SIZES["vllm"])
    assert serving.captured(64)[-1] == 128
    assert serving.captured(1) == (1, 2)


def test_batches_of_a_run() -> None:
    assert serving.plan(CUDA).batches == (1, 8, 16, 32, 64, 96, 128, 160, 256)
    assert serving.plan(CUDA, quick=True).batches == (1, 16, 64, 160)
    assert serving.plan(CUDA, quick=True, batches=[7, 7]).batches == (7,)


def test_more_batches_and_repeats_may_take_longer() -> None:
    assert serving.run_limit_s((1,), 1) > serving.RUN_LIMIT_S
    assert serving.run_limit_s(serving.BATCHES, 3) > serving.run_limit_s((1, 16, 64), 3)
    assert serving.run_limit_s((1,), 9) > serving.run_limit_s((1,), 3)


class FakeVllm:
    """As much of vLLM as the child calls: a step takes 4 ms, and each prompt 1 ms."""

    SamplingParams = SimpleNamespace

    class LLM:
        def __init__(self, folder: str, **options: Any) -> None:
            compilation = SimpleNamespace(**options)
            self.llm_engine = SimpleNamespace(
                vllm_config=SimpleNamespace(compilation_config=compilation)
            )

        def generate(self, prompts: Any, sampling: Any, *, use_tqdm: bool) -> list[Any]:
            time.sleep((len(prompts) + 4 * sampling.max_tokens) / 1e3)
            output = SimpleNamespace(token_ids=[0] * sampling.max_tokens)
            return [SimpleNamespace(outputs=[output]) for _ in prompts]


def engine(**options: Any) -> serving_child._Engine:
    told = {"folder": "x", "options": options, "vocabulary": 99}
    return serving_child._Engine(told | {"prompt": 4, "tokens": 9, "repeats": 3}, FakeVllm)


def test_a_step_is_timed_without_the_prefill() -> None:
    row = engine().timed(32)
    assert row["batch"] == 32
    assert 3.9 < row["ms"] < 8
    assert row["tokens_per_s"] == pytest.approx(32e3 / row["ms"], rel=0.01)
    assert row["prefill_ms"] > 32 + 4


def test_the_graph_of_a_batch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine(cudagraph_capture_sizes=[8])._graph(8) == {}  # nothing on a CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    made = engine(cudagraph_capture_sizes=[1, 8, 16])
    assert [made._graph(batch)["graph"] for batch in (1, 7, 16, 17)] == [1, 8, 16, None]
    assert engine()._graph(8) == {}  # a version of vLLM that does not say


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
    shown = tmp_path / "page.md"
    done = invoke("--read", str(path), "--markdown", str(shown))
    assert done.exit_code == 1  # gristmill's own row failed
    assert (
        "nvfp4_gristmill was not timed on llama-8b batch 1, batch 16: out of memory" in done.output
    )
    assert "| 16 | 6.00 | failed |" in shown.read_text()
    assert "Method of vllm" in shown.read_text()
    marlin = load(path)
    marlin.rows = rows_of("bf16", answer(choices={})) + rows_of("nvfp4_marlin", {"error": "no"})
    marlin.path = path
    marlin.save()
    assert invoke("--read", str(path)).exit_code == 0  # a peer's did


def test_the_committed_run_is_shown() -> None:
    path = FOLDER / "h200-2026-11-16" / "vllm" / "engines.json"
    done = invoke("--read", str(path))
    assert done.exit_code == 0
    assert "vLLM, llama-8b: tokens/s" in done.output
    assert "15,341" in done.output
    assert "Goals met at 3 batches" in done.output
