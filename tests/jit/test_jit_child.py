"""What a Python that gristmill starts may import: nothing that somebody put into the folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import torch
from jit_helpers import ARCH, CUTE_SCALE, TINY, TRITON_SCALE

import gristmill
from gristmill.bench import fresh
from gristmill.bench.ahead import compiling as ahead
from gristmill.bench.peers import PEERS
from gristmill.bench.serving import processes
from gristmill.bench.suites import Task
from gristmill.jit import child, cutedsl
from gristmill.jit.compilers import to_text

PLANTED_FILES = (
    *("warnings", "json", "os", "re", "subprocess", "linecache", "importlib", "sitecustomize"),
    *("usercustomize", "dataclasses", "typing_extensions", "planted"),
)
PLANTED_PACKAGES = (
    *("encodings", "gristmill", "numpy", "torch", "triton", "cuda", "nvidia", "cutlass"),
    *("collections", "logging"),
)
# Imports the jit and no torch, plants modules in its folder if it is told to, and compiles.
PARENT = """
import json, os, sys, types
sys.modules["gristmill"] = types.ModuleType("gristmill")
sys.modules["gristmill"].__path__ = {package!r}
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


def planted(folder: Path, marks: Path) -> dict[str, str]:
    """Modules that say in which process they were imported: path and text."""
    text = (
        "import posix\n"
        f"mark = posix.open({str(marks)!r}, posix.O_WRONLY | posix.O_CREAT | posix.O_APPEND)\n"
        "posix.write(mark, f'{posix.getpid()} {__name__}\\n'.encode())\n"
        "raise ImportError('planted')\n"
    )
    paths = [folder / f"{name}.py" for name in PLANTED_FILES]
    paths += [folder / name / "__init__.py" for name in PLANTED_PACKAGES]
    return {str(path): text for path in paths}


def plant(folder: Path, marks: Path) -> None:
    for path, text in planted(folder, marks).items():
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


@pytest.mark.parametrize(
    ("command", "environment", "first", "goes"),
    [
        (["{place}/elsewhere/parent.py"], {}, True, False),
        (["-I", "{place}/elsewhere/parent.py"], {}, True, False),
        (["-I", "{place}/elsewhere/parent.py"], HOSTILE, True, False),
        (["-c", "exec(open('{place}/elsewhere/parent.py').read())"], {}, False, False),
        (["-m", "parent"], {}, False, False),
        (["-m", "parent"], {}, False, True),
        (["parent.py"], {}, False, False),
        (["{place}/elsewhere/parent.py"], {"PYTHONPATH": ":.:lib"}, False, False),
        (["-m", "parent"], {"PYTHONPATH": "lib:"}, False, True),
    ],
    ids=[
        *("script", "isolated", "hostile", "c", "m", "m that goes elsewhere", "here"),
        *("PYTHONPATH", "PYTHONPATH that goes elsewhere"),
    ],
)
def test_workers_import_nothing_from_the_current_folder(
    command: list[str], environment: dict[str, str], first: bool, goes: bool, tmp_path: Path
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
    modules = {**planted(here, marks), **planted(here / "lib", marks)}
    told = {
        "plant": {} if first else modules,
        "programs": programs,
        "arch": ARCH,
        "go": str(tmp_path) if goes else "",
    }
    (tmp_path / "told").write_text(json.dumps(told))
    text = PARENT.format(package=list(gristmill.__path__), told=str(tmp_path / "told"))
    (tmp_path / "elsewhere" / "parent.py").write_text(text)
    (here / "parent.py").write_text(text)
    if first:
        plant(here, marks)
        plant(here / "lib", marks)
    done = subprocess.run(
        [sys.executable, *(word.replace("{place}", str(tmp_path)) for word in command)],
        # Relative: the parent's folder is meant, and not that of a worker.
        env={"GRISTMILL_CACHE_DIR": "cache", "HOME": "/nonexistent", **environment},
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
        for line in sys.stdin:
            print("{}", flush=True)
        return
    answer = {"gristmill": __import__("gristmill").__file__, "path": sys.path}
    if seconds is not None:
        print(json.dumps(answer | {"seconds": seconds, "word": os.environ["A_WORD"]}))
        return
    place = pathlib.Path(json.loads(words[0])["place"])
    (place / "ready").touch()
    while not (place / "go").exists():
        pass
    (place / "answer.json").write_text(json.dumps(answer | {"cwd": os.getcwd()}))
"""


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A child's module on the import path, and a current folder with modules planted in it."""
    (tmp_path / "modules").mkdir(mode=0o700)
    (tmp_path / "modules" / "bench_child.py").write_text(BENCH_CHILD)
    here, marks = tmp_path / "here", tmp_path / "marks"
    plant(here, marks)
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


def test_what_a_program_has_added_is_taken_where_only_the_user_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, shared, there = tmp_path / "own", tmp_path / "shared", tmp_path / "there"
    for folder, mode in ((own, 0o755), (shared, 0o777), (there, 0o755)):
        folder.mkdir()
        folder.chmod(mode)
    (tmp_path / "modules.zip").touch()
    given: list[Any] = [str(own), str(shared), "there", "", str(tmp_path / "modules.zip")]
    given += [str(tmp_path / "missing"), own, b"bytes"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*given, *sys.path])
    found = path_of_a_child()
    assert found[0] == str(own)
    assert not set(found) & {str(shared), str(there), *given[2:-2]}


@pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give files away"
)
def test_what_belongs_to_somebody_else_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(tmp_path, 65534, 65534)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert str(tmp_path) not in path_of_a_child()
    # Unless the user has said so.
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert path_of_a_child()[0] == str(tmp_path)


def test_an_absolute_pythonpath_is_the_users_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is the current folder; a relative one in it is not."""
    (tmp_path / "lib").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "lib"), *sys.path])
    before = path_of_a_child()
    assert str(tmp_path) not in before
    assert str(tmp_path / "lib") in before
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), "lib"]))
    after = path_of_a_child()
    assert after[0] == str(tmp_path)
    assert str(tmp_path / "lib") not in after


def test_the_users_own_packages_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the umask of many systems leaves them: the group may write."""
    tmp_path.chmod(0o775)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("site.USER_SITE", str(tmp_path))
    monkeypatch.setattr("site.ENABLE_USER_SITE", False)
    assert str(tmp_path) not in path_of_a_child()
    monkeypatch.setattr("site.ENABLE_USER_SITE", True)
    assert path_of_a_child()[0] == str(tmp_path)


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
        "import sys, types\n"
        'sys.modules["gristmill"] = types.ModuleType("gristmill")\n'
        f'sys.modules["gristmill"].__path__ = {list(gristmill.__path__)!r}\n'
        "import subprocess\n"
        "from gristmill.jit import child\n"
        "script = 'import json, a_module; print(json.dumps([sys.path, sys.prefix, sys.a_hook]))'\n"
        "print(subprocess.run(child.command(script), capture_output=True, text=True).stdout)\n"
    )
    (project / "parent.py").write_text(code)
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
    command = child.command(f"import json, os, sys\n{script}", *words, environment={"A": "b\n'"})
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [words, "b\n'", 1]


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
