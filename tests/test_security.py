"""What the threat model promises of the source itself: docs/threat-model.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import gristmill

PACKAGE = Path(gristmill.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# Formats that run code when they are read, and ways to the network.
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
# Of these modules: what runs what it reads, starts processes in another way, or downloads.
FORBIDDEN = (
    *("builtins.compile", "builtins.eval", "builtins.exec", "runpy.*"),
    *("os.exec*", "os.fork*", "os.popen", "os.posix_spawn*", "os.spawn*", "os.startfile"),
    *("os.system", "posix.*", "pty.*", "asyncio.create_subprocess*", "asyncio.subprocess*"),
    *("multiprocessing.Pool", "multiprocessing.Process", "multiprocessing.get_context"),
    *("concurrent.futures.ProcessPoolExecutor", "subprocess.getoutput"),
    *("subprocess.getstatusoutput", "numpy.load", "pandas.read_pickle", "yaml.*load*"),
    *("torch.load", "torch.serialization.load", "torch.jit.load", "torch.export.load"),
    *("torch.hub", "torch.hub.*", "torch.package", "torch.package.*", "torch.utils.model_zoo*"),
)
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


def _imported(tree: ast.AST) -> dict[str, str]:
    """What names stand for, by the imports of a file: `sp` for `subprocess`."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name if alias.asname else alias.name.split(".")[0]
                names[alias.asname or first] = first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return names


def _is_forbidden(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in FORBIDDEN)


def _faults(name: str, text: str) -> Iterator[str]:
    """What the file `name` of the package must not do."""
    tree = ast.parse(text)
    names = _imported(tree)

    def full(node: ast.expr) -> str:
        first, dot, rest = _dotted(node).partition(".")
        return f"{names.get(first, first)}{dot}{rest}"

    for module in {*names.values()}:
        if module.split(".")[0] in FORBIDDEN_MODULES or _is_forbidden(module):
            yield f"imports {module}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_forbidden(full(node)):
            yield f"line {node.lineno} names {full(node)}"
        if not isinstance(node, ast.Call):
            continue
        called = full(node.func)
        if called in ("eval", "exec", "compile", "__import__") and name not in EVALUATES:
            yield f"line {node.lineno} calls {called}"
        if called.startswith("subprocess."):
            if name not in STARTS_PROCESSES:
                yield f"line {node.lineno} starts a process"
            if not node.args or isinstance(node.args[0], (ast.Constant, ast.JoinedStr)):
                yield f"line {node.lineno} starts a process from text"
        for word in {word.arg for word in node.keywords} & {"allow_pickle", "shell", None}:
            if word or called.startswith("subprocess."):
                yield f"line {node.lineno} names {word}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_runs_what_it_reads(path: Path) -> None:
    name = path.relative_to(PACKAGE).as_posix()
    assert list(_faults(name, path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "text",
    [
        *("import pickle", "from pickle import loads", "import urllib.request as web"),
        *("import os\nos.system('a')", "from os import system", "import os as o\no.popen('a')"),
        *("import os\nos.execvp('a', ['a'])", "import os\nos.spawnlp(os.P_WAIT, 'a', 'a')"),
        *("import os\nos.posix_spawn('a', ['a'], {})", "import os\nstart = os.posix_spawnp"),
        *("import os\nos.fork()", "import pty\npty.spawn('a')", "from runpy import run_path"),
        *("import multiprocessing as m\nm.Process()", "from multiprocessing import Pool"),
        *("import asyncio\nasyncio.create_subprocess_exec('a')",),
        *("import subprocess\nsubprocess.run(words)", "import subprocess as s\ns.Popen(words)"),
        *("from subprocess import run\nrun(words)", "from subprocess import run as r\nr(words)"),
        *("import torch\ntorch.load(path)", "from torch import load", "import torch as t\nt.load"),
        *("import torch\ntorch.jit.load(path)", "from torch.jit import load as read"),
        *("import torch\ntorch.hub.load_state_dict_from_url(u)", "import torch.hub as h\nh.load"),
        *("import torch\ntorch.hub.download_url_to_file(url, path)", "from torch import hub"),
        *("import numpy as np\nnp.load(a)", "from numpy import load", "import yaml\nyaml.load(a)"),
        *("anything(path, allow_pickle=True)", "anything(shell=True)", "eval(text)", "exec(text)"),
    ],
)
def test_what_runs_code_is_noticed(text: str) -> None:
    assert list(_faults("ops/any.py", text)) != []


@pytest.mark.parametrize("call", ["'ls'", "f'{a}'", "words, shell=True", "words, **more", "args=1"])
def test_processes_are_started_from_lists_of_words(call: str) -> None:
    head = "import subprocess\n"
    (name, *_) = sorted(STARTS_PROCESSES)
    assert list(_faults(name, f"{head}subprocess.run(words, check=True)")) == []
    assert list(_faults(name, f"{head}subprocess.run({call})")) != []


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
