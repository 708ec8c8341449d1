"""What the threat model promises of the source itself: docs/threat-model.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import gristmill

PACKAGE = Path(gristmill.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# Formats that run code when they are read, and ways to a shell or the network.
FORBIDDEN_MODULES = {
    "cloudpickle",
    "dill",
    "ftplib",
    "http",
    "joblib",
    "marshal",
    "pickle",
    "requests",
    "shelve",
    "smtplib",
    "socket",
    "urllib",
    "xmlrpc",
}
FORBIDDEN_CALLS = {
    "os.popen",
    "os.system",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "torch.hub.load",
    "torch.load",
    "yaml.load",
}
# Processes are started here and nowhere else, each from a list of words.
STARTS_PROCESSES = {
    *("jit/parallel.py", "bench/fresh.py", "bench/environment.py", "bench/serving/processes.py"),
    "bench/ahead/compiling.py",
}
# The one place that starts a Python: isolated, and with an import path that it is given.
STARTS_PYTHON = "jit/child.py"
# Functions written out from the names of arguments, because a loop over them would cost time.
EVALUATES = {"ops/overlap.py", "ops/plan_key.py", "multikernel/routes.py"}


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{_dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def _modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_runs_what_it_reads(path: Path) -> None:
    name = path.relative_to(PACKAGE).as_posix()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not FORBIDDEN_MODULES & set(_modules(tree))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = _dotted(node.func)
        assert called not in FORBIDDEN_CALLS, f"{name}:{node.lineno} calls {called}"
        if called in ("eval", "exec", "compile", "__import__"):
            assert name in EVALUATES, f"{name}:{node.lineno} calls {called}"
        if called.startswith("subprocess."):
            assert name in STARTS_PROCESSES, f"{name}:{node.lineno} starts a process"
            assert not isinstance(node.args[0], (ast.Constant, ast.JoinedStr))
        shell = [word.value for word in node.keywords if word.arg == "shell"]
        assert not shell, f"{name}:{node.lineno} names a shell"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_pythons_are_started_in_one_place(path: Path) -> None:
    name = path.relative_to(PACKAGE).as_posix()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    named = {_dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert ("sys.executable" in named) == (name == STARTS_PYTHON)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _dotted(node.func) == "child.command":
            # What is run is a constant: data goes into it as words.
            assert isinstance(node.args[0], ast.Name)
            assert node.args[0].id == "_SCRIPT"


def test_the_lists_above_are_of_files_that_need_them() -> None:
    for name in EVALUATES:
        assert "eval(" in (PACKAGE / name).read_text(encoding="utf-8")
    for name in STARTS_PROCESSES:
        assert "import subprocess" in (PACKAGE / name).read_text(encoding="utf-8")
