"""How the tests for a GPU are run: which need it alone, and that each runs exactly once."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
TESTS = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if path.parent.name != "vllm")

# Names in a test for a GPU after which it judges times, or the memory and the SMs of all processes.
NEEDS_IT_ALONE = {
    *("cooperative", "elapsed_time", "enable_timing", "mem_get_info", "perf_counter"),
    *("set_per_process_memory_fraction", "time_copy", "time_host", "time_interleaved"),
    *(".times", ".us"),
}


def unmarked(source: str) -> Iterator[str]:
    """Tests for a GPU that use one of those names, in whatever they call of their file."""
    tree = ast.parse(source)
    parts = {
        node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    shared = marks_of(
        *(
            node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        )
    )
    for name, part in parts.items():
        if not name.startswith("test_"):
            continue
        marks = shared | marks_of(*part.decorator_list)
        if "alone" in marks and "gpu" not in marks:
            yield f"{name} is marked alone, and not gpu"
        found, seen = names_in(part), {name}
        while new := (found & parts.keys()) - seen:
            seen |= new
            found |= set().union(*(names_in(parts[one]) for one in new))
        used = sorted(found & NEEDS_IT_ALONE)
        if "gpu" in marks and "alone" not in marks and used:
            yield f"{name} uses {', '.join(used)}, and is not marked alone"


def names_in(part: ast.AST) -> set[str]:
    """Names, attributes (with and without their dot) and keywords of its code."""
    found: set[str] = set()
    for node in ast.walk(part):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found |= {node.attr, f".{node.attr}"}
        elif isinstance(node, ast.keyword) and node.arg is not None:
            found.add(node.arg)
    return found


def marks_of(*decorators: ast.AST) -> set[str]:
    """Those that all cases of a test have."""
    text = [ast.unparse(one) for one in decorators]
    return {
        mark for mark in ("alone", "gpu", "long") for one in text if f"pytest.mark.{mark}" in one
    }


def test_what_needs_a_gpu_alone_says_so() -> None:
    files = [path for path in TESTS if "mark.gpu" in path.read_text(encoding="utf-8")]
    assert len(files) > 40
    for path in files:
        assert list(unmarked(path.read_text(encoding="utf-8"))) == [], path


def test_one_that_does_not_is_found() -> None:
    source = """
import pytest, torch
pytestmark = pytest.mark.gpu
def seconds(): return torch.cuda.Event(enable_timing=True)
def test_through_a_helper(): assert seconds()
@pytest.mark.alone
def test_marked(): assert seconds()
def test_other(): assert torch.cuda.memory_allocated()
"""
    assert list(unmarked(source)) == [
        "test_through_a_helper uses enable_timing, and is not marked alone"
    ]
    on_a_cpu = source.replace("pytestmark", "others")
    assert list(unmarked(on_a_cpu)) == ["test_marked is marked alone, and not gpu"]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_tests", ROOT / "tools" / "gpu_tests.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def option(command: list[str], name: str) -> str | None:
    """What an option of pytest's is in the end: the last one counts."""
    words = command[3:]  # after `python -m pytest`
    return words[len(words) - words[::-1].index(name)] if name in words else None


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("workers", [1, 4])
def test_each_test_runs_once(tool: ModuleType, workers: int, long: bool) -> None:
    """By the expressions given to -m, which are Python's; those for vLLM run elsewhere."""
    commands = tool.commands(workers, ["-x"], long=long)
    assert all("-x" in command for command in commands)
    chosen = [option(command, "-m") for command in commands]
    for values in itertools.product((False, True), repeat=4):
        marks = dict(zip(("gpu", "alone", "long", "vllm"), values, strict=True))
        times = sum(bool(eval(one, {}, marks)) for one in chosen)
        wanted = marks["gpu"] and not marks["vllm"] and (long or not marks["long"])
        assert times == wanted, marks
    processes = [option(command, "-n") for command in commands]
    assert processes == (["0"] if workers == 1 else [str(workers), "0"])
    together = [one for one, many in zip(chosen, processes, strict=True) if many != "0"]
    assert all("not alone" in one for one in together)


@pytest.fixture
def ran(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that the tool runs."""
    found: list[list[str]] = []
    monkeypatch.setattr(tool.subprocess, "call", lambda command: found.append(command) or 0)
    return found


def test_without_xdist_one_process_runs_all(
    tool: ModuleType, ran: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool.importlib.util, "find_spec", lambda name: None)
    assert tool.main(["--workers", "4", "-k", "softmax"]) == 0
    assert [command[1:] for command in ran] == [
        ["-m", "pytest", "-m", "gpu and not vllm and not long", "-k", "softmax"]
    ]


@pytest.mark.parametrize("words", [["-n", "3"], ["-n3"], ["--numprocesses=3"], ["--workers", "3"]])
def test_a_number_of_processes_is_for_the_first_call_alone(
    tool: ModuleType, ran: list[list[str]], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In workers of pytest-xdist the tests marked alone would be skipped."""
    monkeypatch.setattr(tool.importlib.util, "find_spec", lambda name: object())
    assert tool.main([*words, "-k", "softmax"]) == 0
    assert [option(command, "-n") for command in ran] == ["3", "0"]
    assert all(option(command, "-k") == "softmax" for command in ran)


@pytest.mark.parametrize("words", [["-n", "auto"], ["-n", "logical"], []])
def test_all_processors_but_one_by_default(
    tool: ModuleType, ran: list[list[str]], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(tool.os, "cpu_count", lambda: 9)
    assert tool.main(words) == 0
    assert [option(command, "-n") for command in ran] == ["8", "0"]


@pytest.mark.parametrize("words", [["-m", "gpu and long"], ["-mlong"], ["tests", "-m", ""]])
def test_marks_are_not_passed_on(
    tool: ModuleType,
    ran: list[list[str]],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They would replace those that each call selects."""
    with pytest.raises(SystemExit) as stopped:
        tool.main(words)
    assert stopped.value.code == 2
    assert "select tests with -k" in capsys.readouterr().err
    assert ran == []


def test_the_last_number_of_processes_counts(tmp_path: Path) -> None:
    """Whatever PYTEST_ADDOPTS says, the second call is one process."""
    pytest.importorskip("xdist")
    others = {name: v for name, v in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    test = tmp_path / "test_one.py"
    test.write_text("import os\ndef test_one(): assert 'PYTEST_XDIST_WORKER' not in os.environ\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(test), "-n", "0"],
        env={**others, "PYTEST_ADDOPTS": "-n 2 --dist loadfile"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("words", "long"), [([], False), (["LONG=0"], False), (["LONG="], False), (["LONG=1"], True)]
)
def test_make_runs_the_long_ones_when_asked(words: list[str], long: bool) -> None:
    command = ["make", "--dry-run", "--no-print-directory", "test-gpu", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "tools/gpu_tests.py" in done.stdout
    assert ("--long" in done.stdout) == long


@pytest.mark.parametrize(
    ("statuses", "status"), [([0, 0], 0), ([1, 0], 1), ([0, 1], 1), ([0, 5], 0), ([5, 5], 5)]
)
def test_a_failure_of_either_part_is_one(
    tool: ModuleType, statuses: list[int], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(statuses)
    monkeypatch.setattr(tool.subprocess, "call", lambda command: next(left))
    monkeypatch.setattr(tool.importlib.util, "find_spec", lambda name: object())
    assert tool.main(["--workers", "2"]) == status


def test_beside_others_those_are_skipped() -> None:
    """Under `make test` on a machine with a GPU, say."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "-rs", "tests/tune/test_tune_gpu.py"],
        env={
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "-1",
            "PYTEST_XDIST_WORKER_COUNT": "2",
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    reason = "needs a GPU that nothing else uses: run by `make test-gpu`"
    lines = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert sum(line.endswith(reason) for line in lines) == 2, done.stdout
    assert len(lines) == 3  # the others for want of a GPU
