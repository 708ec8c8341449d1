"""Compiling ahead: who is built, and what becomes of processes that die or hang."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.bench.ahead import child as ahead_child
from gristmill.bench.ahead import compiling as ahead
from gristmill.bench.peers import GRISTMILL, PEERS, Peer
from gristmill.bench.suites import KINDS, Task

CPU = torch.device("cpu")
TASKS = [Task("rms_norm", (rows, 64), "float32") for rows in range(1, 7)]

# Answers like the real one, but dies at M = 3, and hangs at M = 5.
CHILD = """
import json, os, sys, time
def main(text):
    told = json.loads(text)
    assert told["peers"] == ["inductor"] and told["parent"] == os.getppid()
    for line in sys.stdin:
        name, shape, dtype = json.loads(line)
        with open({log!r}, "a") as log:
            log.write(f"{{os.getpid()}} {{told['share']}} {{shape}}\\n")
        if shape == "3x64":
            raise ValueError("no such device\\nand more of it")
        if shape == "7x64":
            os._exit(3)
        if shape == "5x64":
            time.sleep(100)
        sys.stdout.write("{{}}\\n")
        sys.stdout.flush()
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "fake_ahead_child.py").write_text(CHILD.format(log=str(tmp_path / "log")))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(ahead, "_CHILD", "fake_ahead_child")
    monkeypatch.setattr(ahead, "START_LIMIT_S", 10.0)
    monkeypatch.setattr(ahead, "TASK_LIMIT_S", 2.0)
    return tmp_path / "log"


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_process_that_dies_or_hangs_costs_its_task(log: Path, jobs: int) -> None:
    told: list[str] = []
    begin = time.monotonic()
    notes = ahead.compile_ahead(TASKS, [PEERS["inductor"]], CPU, jobs, told.append)
    assert sorted(told) == [str(task) for task in TASKS]
    died, hung = sorted(notes)
    assert died == f"{TASKS[2]}: not compiled ahead, its process died: ValueError: no such device"
    # 2 s a task, and 10 more for the first of a process.
    says = f"{TASKS[4]}: not compiled ahead, its process took longer than"
    assert hung in (f"{says} 2 s", f"{says} 12 s")
    lines = [line.split() for line in log.read_text().splitlines()]
    assert sorted(line[2] for line in lines) == [f"{rows}x64" for rows in range(1, 7)]
    # Nothing is left running, the one that hangs included.
    for pid in {int(line[0]) for line in lines}:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert time.monotonic() - begin < 60


def test_large_problems_are_left_to_processes_with_much_memory(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "LARGE_BYTES", 4 * 64 * 4)
    tasks = [Task("rms_norm", (rows, 64), "float32") for rows in (1, 2, 4, 6, 7, 8, 9, 10)]
    ahead.compile_ahead(tasks, [PEERS["inductor"]], CPU, 2, lambda text: None)
    lines = [line.split() for line in log.read_text().splitlines()]
    by_share: dict[str, set[int]] = {}
    for _, share, shape in lines:
        by_share.setdefault(share, set()).add(int(shape.split("x")[0]))
    assert set(by_share) <= {"0.68", "0.3"}
    assert by_share["0.68"] >= {6, 7, 8, 9, 10}


def test_a_process_that_says_nothing_has_an_exit_code(log: Path) -> None:
    task = Task("rms_norm", (7, 64), "float32")
    (note,) = ahead.compile_ahead([task], [PEERS["inductor"]], CPU, 1, lambda text: None)
    assert note == f"{task}: not compiled ahead, its process died with exit code 3"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", ""),
        ("warning: one\nSegmentation fault\n\n", "Segmentation fault"),
        (
            "Traceback (most recent call last):\n  File x\nKeyError: 1\n\nDuring handling\n"
            "Traceback (most recent call last):\n  File y\n    main()\n"
            "\x1b[1mRuntimeError\x1b[0m: CUDA error: an illegal access\nFor debugging consider\n",
            "RuntimeError: CUDA error: an illegal access",
        ),
        ("Traceback (most recent call last):\n  File x\n", "File x"),
    ],
)
def test_why_a_process_died(text: str, says: str) -> None:
    assert ahead.last_error(text) == says


def test_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    told: list[str] = []
    notes = ahead.compile_ahead(TASKS, [PEERS["inductor"]], CPU, 2, told.append)
    assert told == []
    assert all("no process could be started" in note for note in notes)
    assert len(notes) == 2


def test_who_is_compiled_ahead() -> None:
    """Not who compiles nothing, and not who tunes itself by timing."""
    assert {name for name, peer in PEERS.items() if peer.is_ahead("rms_norm")} == {
        *("inductor", "quack", "liger", "flashinfer")
    }
    for task in ("linear", "linear_silu", "nvfp4_linear", "nvfp4_moe", "moe"):
        assert not any(peer.is_ahead(task) for peer in PEERS.values()), task
    assert all(GRISTMILL.is_ahead(task) for task in KINDS)
    tasks = [Task("linear", (4, 64, 64), "float32"), Task("softmax", (4, 64), "float32")]
    assert ahead.worth(tasks, list(PEERS.values())) == tasks[1:]
    assert ahead.worth(tasks, [PEERS["eager"]]) == []


def test_each_is_built_and_called_once_as_the_runner_will() -> None:
    calls: list[Any] = []

    def builder(sets: Any) -> Any:
        assert len(sets) == 1
        return lambda *args: calls.append(args)

    def broken(sets: Any) -> Any:
        raise ImportError("half an install")

    good = Peer("good", "torch", "torch", {"rms_norm_bwd": builder}, compiles=True)
    bad = Peer("bad", "torch", "torch", {"rms_norm_bwd": {"way": broken}}, compiles=True)
    idle = Peer("idle", "torch", "torch", {"rms_norm_bwd": broken})
    task = Task("rms_norm_bwd", (4, 64), "float32")
    assert ahead_child.make(task, [bad, good, idle], CPU) == {"bad_way": "ImportError"}
    ((dy, x, weight, *_, rstd),) = calls
    assert (dy.shape, x.shape, weight.shape, rstd.shape) == ((4, 64), (4, 64), (64,), (4,))


def test_gristmills_own_programs_are_those_that_will_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from gristmill.warmup import target_device

    monkeypatch.setattr(ahead, "device_of", lambda device: target_device("sm_90a"))
    cuda = torch.device("cuda")
    every: dict[str, tuple[int, ...]] = dict.fromkeys(KINDS, (256, 4096))
    every |= dict.fromkeys(("softmax_causal", "softmax_causal_bwd"), (4, 256, 256))
    every |= dict.fromkeys(("nvfp4_linear", "nvfp4_linear_fp8"), (16, 4096, 4096))
    every |= dict.fromkeys(("nvfp4_moe", "moe"), (16, 128, 8, 2048, 768))
    every |= dict.fromkeys(("topk_router", "topk_router_grouped"), (256, 256))
    for name, shape in every.items():
        if not name.startswith("linear") and name != "nvfp4_linear_fp8":  # may be the library's
            assert ahead.own_programs([Task(name, shape, "bfloat16")], cuda), name
    tasks = [Task("rms_norm", (256, 4096), "bfloat16")] * 2
    assert len(ahead.own_programs(tasks, cuda)) == len(ahead.own_programs(tasks[:1], cuda))


@pytest.mark.long
def test_inductors_code_is_found_by_whoever_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real process fills the cache on disk, and the compiler here has a hit."""
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    task = Task("softmax", (16, 64), "float32")
    assert ahead.compile_ahead([task], [PEERS["inductor"]], CPU, 1, lambda text: None) == []
    counters.clear()
    assert ahead_child.make(task, [PEERS["inductor"]], CPU) == {}
    found = (
        counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    )
    assert found >= 1
