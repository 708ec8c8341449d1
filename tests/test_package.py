"""The shape of the package: one-way imports, a quiet and quick import, the files of a wheel."""

from __future__ import annotations

import ast
import compileall
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "gristmill"

# Each module may import from its own row and those above it: docs/design.md.
LAYERS = (
    ("version", "errors", "names"),
    ("locks",),
    ("settings", "log"),
    ("nvtx",),
    ("jit",),
    ("select",),
    ("formats",),
    ("kernels",),
    ("ops",),
    ("multikernel", "nvfp4", "runners", "checkpoints"),
    ("nn",),
    ("distributed",),
    ("integrations",),
    ("explain", "warmup", "tune"),
    ("bench",),
    ("cli",),
    ("", "__main__"),
)
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}
# The package itself gathers the public names; only the top may import it, others would go round.
TOP = ("bench", "cli", "__main__")
MODULES = sorted(PACKAGE.rglob("*.py"))


def layer(module: str) -> str:
    """ "gristmill.jit.cache" -> "jit"; "gristmill" -> ""."""
    return module.split(".")[1] if "." in module else ""


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.level == 1 and path.parent == PACKAGE / "kernels" / "triton":
                continue  # that is how a program finds the texts that its cache key covers
            assert node.level == 0, f"{path}: a relative import"
            if node.module == "gristmill":
                for alias in node.names:
                    inside = (PACKAGE / alias.name).exists() or (
                        PACKAGE / f"{alias.name}.py"
                    ).exists()
                    yield f"gristmill.{alias.name}" if inside else "gristmill"
            else:
                yield node.module


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    name = path.relative_to(PACKAGE).with_suffix("").parts[0].replace("__init__", "")
    assert name in LAYER_OF, f"{name} is in no layer"
    for module in imported(path):
        if module.split(".")[0] != "gristmill":
            continue
        other = layer(module)
        if other == "":
            assert name in TOP, f"{path.name} imports the package itself"
        else:
            assert LAYER_OF[other] <= LAYER_OF[name], f"{path.name} imports {module}"


def test_import_is_quick_and_touches_nothing(tmp_path: Path) -> None:
    """Torch is imported first: what is measured is what gristmill adds, installed as pip does it.

    That is with its bytecode, which a checkout need not have.
    """
    home, installed = tmp_path / "home", tmp_path / "installed"
    home.mkdir()
    shutil.copytree(PACKAGE, installed / "gristmill", ignore=shutil.ignore_patterns("__pycache__"))
    assert compileall.compile_dir(installed, quiet=1)
    script = (
        "import json, sys, time\n"
        "start = time.process_time()\n"
        "import torch\n"
        "own = time.process_time() - start\n"
        "before = set(sys.modules)\n"
        "start = time.process_time()\n"
        "import gristmill\n"
        "share = (time.process_time() - start) / own\n"
        "new = sorted({name.split('.')[0] for name in set(sys.modules) - before})\n"
        "print(json.dumps([share, new, torch.cuda.is_initialized(), gristmill.__file__]))"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GRISTMILL_")}
    shares = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={
                **kept,
                "PYTHONPATH": str(installed),
                "HOME": str(home),
                "GRISTMILL_JIT": "bad",
            },
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        share, new, initialized, file = json.loads(done.stdout)
        assert Path(file).is_relative_to(installed)
        shares.append(share)
    # Of torch's own import, and the least: seconds would be those of whatever else runs.
    assert min(shares) < 0.3
    assert not {"cuda", "cutlass", "regex", "rich", "triton", "typer"} & set(new)
    assert not initialized
    assert not list(home.rglob("*"))


# Python reports to audit hooks what is done with files, processes and the network.
WATCHED = """
import os, sys
sys.dont_write_bytecode = True
import torch

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
OUTSIDE = ("ctypes.dlopen", "mmap.", "os.", "shutil.", "socket.", "subprocess.", "tempfile.")
events = []

def hook(event, arguments):
    if event == "open":
        path, _, flags = arguments
        is_module = isinstance(path, str) and path.endswith((".py", ".pyc"))
        if flags & WRITES or not is_module:
            events.append((event, arguments))
    elif event.startswith(OUTSIDE) and event not in ("os.listdir", "os.scandir"):
        events.append((event, arguments))

def drivers():
    try:
        with open("/proc/self/maps") as file:
            return {line.split("/", 1)[1] for line in file if "libcuda.so" in line}
    except FileNotFoundError:
        return set()

before = drivers()
sys.addaudithook(hook)
import gristmill
found = list(events)
assert not found, found
assert not torch.cuda.is_initialized()
assert drivers() == before
events.clear()
with open(sys.argv[1], "w"):  # it would be seen
    assert len(events) == 1
"""


def test_import_reads_modules_and_does_nothing_else(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(tmp_path / "written")],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent), "HOME": str(home)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not list(home.rglob("*"))


def test_every_file_of_the_package_is_of_a_kind_that_belongs_there() -> None:
    """A wheel takes the whole folder, so nothing may lie in it by accident."""
    kinds = {path.suffix for path in PACKAGE.rglob("*") if path.is_file()} - {".pyc"}
    assert kinds <= {".py", ".cu", ".cuh", ".json", ".css", ".js", ".typed"}
    assert (PACKAGE / "py.typed").is_file()


def test_gpu_tests_are_not_lost_where_nothing_else_is_asked_for() -> None:
    """Beside others they are left out without a GPU; alone they are there, to be skipped."""
    files = ["tests/kernels/test_cutedsl_gpu.py", "tests/test_settings.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", *files],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "test_cutedsl_gpu.py::" in done.stdout
    assert "test_settings.py::" not in done.stdout
