"""A Python that gristmill starts imports nothing from the current folder."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import torch
from jit_helpers import ALONE, ARCH, CUTE_SCALE, TINY, TRITON_SCALE

import gristmill
from gristmill.bench import fresh
from gristmill.bench.ahead import compiling as ahead
from gristmill.bench.peers import PEERS
from gristmill.bench.serving import processes
from gristmill.bench.suites import Task
from gristmill.jit import child, cutedsl
from gristmill.jit.compilers import to_text

# What a Python imports as it starts, what gristmill imports, and the rest of the standard library.
AT_START = {"encodings", "__init__", "__main__", "site", "sitecustomize", "usercustomize"}
PACKAGES = {"gristmill", "numpy", "torch", "triton", "cuda", "nvidia", "cutlass"}
EVERYTHING = {*AT_START, *PACKAGES, *sys.stdlib_module_names, "typing_extensions", "planted"}
# What a parent that imports from its folder has imported before the modules are there.
IMPORTED_BEFORE = {
    *AT_START,
    *PACKAGES,
    *("warnings", "json", "os", "re", "subprocess", "linecache", "importlib", "dataclasses"),
    *("collections", "logging", "typing_extensions", "planted"),
}
# Imports the jit and no torch, plants modules in its folder if it is told to, and compiles.
PARENT = """
import json, os
told = json.load(open({told!r}))
from gristmill.jit import parallel
from gristmill.jit.compilers import from_text
for path, text in told["plant"].items():
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)
if told["go"]:
    from gristmill.settings import settings
    settings()
    os.chdir(told["go"])
parallel._compiled_here = None  # only workers compile
programs = [from_text(text, anywhere=True) for text in told["programs"]]
done = parallel.compile_all(programs, told["arch"], workers=2)
print(os.getpid(), json.dumps([(one.how, one.error) for one in done]))
"""


def planted(folder: Path, marks: Path, names: set[str] = EVERYTHING) -> dict[str, str]:
    """Files and packages that write the process that imports them into `marks`: path and text."""
    text = (
        "import posix\n"
        f"mark = posix.open({str(marks)!r}, posix.O_WRONLY | posix.O_CREAT | posix.O_APPEND)\n"
        "posix.write(mark, f'{posix.getpid()} {__name__}\\n'.encode())\n"
        "raise ImportError('planted')\n"
    )
    paths = [folder / f"{name}.py" for name in names]
    paths += [folder / name / "__init__.py" for name in names]
    return {str(path): text for path in paths}


def plant(folder: Path, marks: Path, names: set[str] = EVERYTHING) -> None:
    for path, text in planted(folder, marks, names).items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)


HOSTILE = {
    "PYTHONHOME": ".",
    "PYTHONPATH": ".",
    "PYTHONSTARTUP": "planted.py",
    "PYTHONWARNINGS": "ignore::planted.Category",
    "PYTHONINSPECT": "1",
    "PYTHONPYCACHEPREFIX": ".",
    "PYTHONBREAKPOINT": "planted.stop",
}


SAFE_PATH = pytest.mark.skipif(sys.version_info < (3, 11), reason="new in Python 3.11")


@pytest.mark.parametrize(
    ("command", "environment", "first", "goes"),
    [
        pytest.param("{place}/parent.py", {}, True, False, id="script"),
        pytest.param("-I {place}/parent.py", {}, True, False, id="isolated"),
        pytest.param("-I {place}/parent.py", HOSTILE, True, False, id="hostile"),
        pytest.param("-P {place}/parent.py", {}, True, False, id="safe path", marks=SAFE_PATH),
        pytest.param(
            "-m parent",
            {"PYTHONSAFEPATH": "1", "PYTHONPATH": "{place}"},
            *(True, False),
            id="PYTHONSAFEPATH",
            marks=SAFE_PATH,
        ),
        pytest.param("-c exec(open('{place}/parent.py').read())", {}, False, False, id="c"),
        pytest.param("-m parent", {}, False, False, id="m"),
        pytest.param("-m parent", {}, False, True, id="m, goes elsewhere"),
        pytest.param("parent.py", {}, False, False, id="here"),
        pytest.param("{place}/parent.py", {"PYTHONPATH": ":.:"}, False, False, id="PYTHONPATH"),
    ],
)
def test_workers_import_nothing_from_the_current_folder(
    command: str, environment: dict[str, str], first: bool, goes: bool, tmp_path: Path
) -> None:
    """`first`: the modules are there when the parent starts, which does not import from there.

    `goes`: the parent changes its folder before it compiles.
    """
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")
    # A name that no quoting may trip over.
    here, marks = tmp_path / 'it\'s {the} "current" folder', tmp_path / "marks"
    for folder in (here, tmp_path / "elsewhere", tmp_path / "sources"):
        folder.mkdir()
    (tmp_path / "sources" / "a.cu").write_text(TINY)
    root = str(tmp_path / "sources")
    programs = [
        json.dumps({"source": "a.cu", "names": [f"twice<{number}>"], "root": root})
        for number in range(3)
    ]
    programs += [to_text(TRITON_SCALE)] if _has("triton") else []
    programs += [to_text(CUTE_SCALE)] if cutedsl.why_missing() is None else []
    told = {
        "plant": {} if first else planted(here, marks, IMPORTED_BEFORE),
        "programs": programs,
        "arch": ARCH,
        "go": str(tmp_path) if goes else "",
    }
    (tmp_path / "told").write_text(json.dumps(told))
    text = ALONE + PARENT.format(told=str(tmp_path / "told"))
    place = tmp_path / "elsewhere"
    (place / "parent.py").write_text(text)
    (here / "parent.py").write_text(text)
    if first:
        plant(here, marks)
    # Relative: the parent's folder is meant, and not that of a worker.
    settings = {"GRISTMILL_CACHE_DIR": "cache", "GRISTMILL_JITT": "on"}
    environment = {**settings, "HOME": "/nonexistent", **environment}
    done = subprocess.run(
        [sys.executable, *(word.format(place=place) for word in command.split(" ", 1))],
        env={name: value.format(place=place) for name, value in environment.items()},
        cwd=here,
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = marks.read_text().splitlines() if marks.exists() else []
    assert done.returncode == 0, (done.stderr, found)
    process, _, results = done.stdout.partition(" ")
    assert json.loads(results) == [["compiled", ""]] * len(programs)
    assert [line for line in found if line.split()[0] != process] == []
    assert len(list((here / "cache" / "kernels").glob("*.kernel"))) == len(programs)
    assert done.stderr.count("'GRISTMILL_JITT' is not a setting") == 1  # not in workers


def _has(module: str) -> bool:
    try:
        __import__(module)
    except ImportError:
        return False
    return True


# ---- processes of the benchmarks ----

# Serves as a child of each kind: what it is told, and what it says.
BENCH_CHILD = """
import json, os, sys, pathlib
def main(words, seconds=None):
    if isinstance(words, str):
        assert os.getcwd() == "/"  # so torch's own processes are as safe
        for line in sys.stdin:
            print("{}", flush=True)
        return
    answer = {"gristmill": __import__("gristmill").__file__, "path": sys.path}
    answer["cwd"] = os.getcwd()
    if seconds is not None:
        print(json.dumps(answer | {"seconds": seconds, "word": os.environ["A_WORD"]}))
        return
    place = pathlib.Path(json.loads(words[0])["place"])
    (place / "ready").touch()
    while not (place / "go").exists():
        pass
    (place / "answer.json").write_text(json.dumps(answer))
"""


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A child's module on the import path, and a current folder with modules planted in it."""
    (tmp_path / "modules").mkdir(mode=0o700)
    (tmp_path / "modules" / "bench_child.py").write_text(BENCH_CHILD)
    here, marks = tmp_path / "here", tmp_path / "marks"
    plant(here, marks, IMPORTED_BEFORE)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", ["", ".", *sys.path, str(tmp_path / "modules")])
    return marks


def test_a_fresh_process_imports_nothing_from_the_current_folder(bench: Path) -> None:
    said = fresh.in_fresh_process("bench_child", ["a"], {"A_WORD": "x y"}, "a test")
    assert not bench.exists()
    assert said["gristmill"] == gristmill.__file__
    assert said["word"] == "x y"
    assert set(said["seconds"]) == {"torch_import_s", "import_s"}
    assert str(Path.cwd()) not in said["path"]
    assert said["cwd"] == "/"  # so torch's own processes are as safe


def test_an_engine_imports_nothing_from_the_current_folder(bench: Path, tmp_path: Path) -> None:
    started = processes.start("one", "bench_child", {}, {}, tmp_path / "run")
    ((_, said),) = processes.in_turns([started], lambda name: None, start_limit_s=60, run_limit_s=9)
    assert isinstance(said, dict), said
    assert not bench.exists()
    assert said["gristmill"] == gristmill.__file__
    assert said["cwd"] == str(tmp_path / "run")  # what an engine starts itself is as safe


def test_compiling_ahead_imports_nothing_from_the_current_folder(
    bench: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "_CHILD", "bench_child")
    task, cpu = Task("rms_norm", (1, 64), "float32"), torch.device("cpu")
    assert ahead.compile_ahead([task], [PEERS["inductor"]], cpu, 1, lambda text: None) == []
    assert not bench.exists()


# ---- the import path ----

TELL = "import json; print(json.dumps(sys.path))"


def path_of_a_child() -> list[str]:
    done = subprocess.run(child.command(TELL), capture_output=True, text=True, check=True)
    found: list[str] = json.loads(done.stdout)
    return found


def test_the_order_is_that_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    first = path_of_a_child()
    monkeypatch.setattr(sys, "path", list(reversed(first)))
    assert path_of_a_child() == list(reversed(first))


def test_a_child_imports_from_where_this_process_does_but_for_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("there", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("here")
    (tmp_path / "modules.zip").touch()
    monkeypatch.chdir(tmp_path / "here")
    taken = [str(tmp_path / name) for name in ("there", "missing", "modules.zip")]
    passed_over: list[Any] = ["", ".", "../there", "/proc/self/cwd", tmp_path / "there", b"/bytes"]
    passed_over.append("/nul\0")
    passed_over += [str(tmp_path / name) for name in ("here", "there/../here", "link")]
    monkeypatch.setattr(sys, "path", [*passed_over, *taken, *sys.path])
    found = path_of_a_child()
    assert found[:3] == taken
    assert not set(found) & set(passed_over)


def test_the_folder_that_the_program_was_started_in_is_not_taken_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    assert str(tmp_path) in path_of_a_child()
    monkeypatch.setattr(child, "_STARTED_IN", tmp_path)
    assert str(tmp_path) not in path_of_a_child()


def test_a_current_folder_that_was_deleted(tmp_path: Path) -> None:
    code = (
        "import pathlib, subprocess, sys\n"
        "from gristmill.settings import settings; settings()\n"
        "pathlib.Path().absolute().rmdir()\n"
        "from gristmill.jit import child\n"
        "print(subprocess.run(child.command('print(1)'), cwd='/', check=True).returncode)\n"
    )
    (tmp_path / "gone").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", ALONE + code], capture_output=True, text=True, cwd=tmp_path / "gone"
    )
    assert (done.returncode, done.stdout) == (0, "1\n0\n"), done.stderr


def test_a_virtual_environment_and_what_is_editable_in_it_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even a project that is installed from the current folder, but after the standard library."""
    venv.create(tmp_path / "env", symlinks=True)
    (packages,) = (tmp_path / "env").rglob("site-packages")
    project = tmp_path / "project"
    project.mkdir()
    (project / "a_module.py").touch()
    (packages / "project.pth").write_text(f"{project}\nimport sys; sys.a_hook = True\n")
    packages.chmod(0o775)
    python = tmp_path / "env" / "bin" / "python"
    code = (
        "import subprocess\n"
        "from gristmill.jit import child\n"
        "script = 'import json, a_module; print(json.dumps([sys.path, sys.prefix, sys.a_hook]))'\n"
        "print(subprocess.run(child.command(script), capture_output=True, text=True).stdout)\n"
    )
    (project / "parent.py").write_text(ALONE + code)
    done = subprocess.run(
        [python, "-m", "parent"], cwd=project, capture_output=True, text=True, env={}
    )
    assert done.returncode == 0, done.stderr
    path, prefix, hook = json.loads(done.stdout)
    assert hook
    assert prefix == str(tmp_path / "env")
    assert path[-2:] == [str(packages), str(project)]
    assert path.count(str(project)) == 1


def test_a_child_is_isolated_and_gets_its_words_and_environment() -> None:
    script = "print(json.dumps([sys.argv[1:], os.environ['A'], sys.flags.isolated]))"
    words = ["it's", '"', "{x}\n", "-c"]
    command = child.command(
        f"import json, os, sys\n{script}", *words, environment={"A": "b\n'\udcff"}
    )
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [words, "b\n'\udcff", 1]


def test_bytecode_is_written_where_this_process_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for writes in (True, False):
        monkeypatch.setattr(sys, "dont_write_bytecode", not writes)
        command = child.command("print(sys.dont_write_bytecode)")
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout == f"{not writes}\n"


def test_without_a_python_there_is_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("", None):
        monkeypatch.setattr(sys, "executable", name)
        with pytest.raises(OSError, match=r"sys\.executable is empty"):
            child.command("pass")
