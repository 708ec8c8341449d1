"""Many programs at once, in worker processes that fill the cache folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from jit_helpers import ARCH, SOURCES, TINY

from gristmill.errors import CompilerUnavailable
from gristmill.jit import TritonProgram, cache, counters, parallel
from gristmill.jit.parallel import Compiled, compile_all, worker_count
from gristmill.jit.program import Program

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")


@pytest.fixture
def programs(make_program) -> list[Program]:
    root = make_program(a__cu=TINY).root
    return [Program("a.cu", (f"twice<{number}>",), root=root) for number in range(6)]


@pytest.fixture
def broken(make_program) -> Program:
    return make_program(("twice<3>",), b__cu=TINY.replace("p.out", "q.out"))


def test_workers_fill_the_cache(programs, home) -> None:
    seen: list[tuple[Compiled, int, int]] = []
    done = compile_all(programs * 2, ARCH, workers=2, progress=lambda *event: seen.append(event))
    assert {one.program for one in done} == set(programs)
    assert [one.how for one in done] == ["compiled"] * 6
    assert all(one.seconds > 0 for one in done)
    assert [event[0] for event in seen] == done
    assert [event[1:] for event in seen] == [(number, 6) for number in range(1, 7)]
    assert len(home.files()) == 6
    assert counters.snapshot()["compiles"] == 6  # by others, for this process
    for program in programs:
        cache.load_or_compile(program, ARCH)
    assert counters.snapshot()["compiles"] == 6
    assert counters.snapshot()["disk_hits"] == 6


def test_what_is_there_starts_nobody(programs, home, monkeypatch) -> None:
    for program in programs:
        cache.load_or_compile(program, ARCH)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    done = compile_all(programs, ARCH, workers=2)
    assert [one.how for one in done] == ["cached"] * 6


def test_what_another_compiler_made_is_made_again(programs, home, monkeypatch) -> None:
    for program in programs:
        cache.load_or_compile(program, ARCH)
    cache.forget()
    monkeypatch.setattr("gristmill.jit.nvrtc.installed_version", lambda: "nvrtc 99.0")
    monkeypatch.setattr("gristmill.jit.nvrtc.compiler_version", lambda: "nvrtc 99.0")
    done = compile_all(programs, ARCH, workers=1)
    assert [one.how for one in done] == ["compiled"] * 6


def test_an_error_is_a_result(programs, broken, home) -> None:
    done = {one.program: one for one in compile_all([broken, *programs], ARCH, workers=2)}
    assert done[broken].how == "failed"
    assert "CompileError" in done[broken].error
    assert "b.cu" in done[broken].error
    assert {done[program].how for program in programs} == {"compiled"}
    assert len(home.files()) == 6


def test_one_worker_is_this_process(programs, broken, monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    done = compile_all([broken, *programs], ARCH, workers=1)
    assert [one.how for one in done] == ["failed", *["compiled"] * 6]
    assert counters.snapshot()["compiles"] == 6


def test_where_no_process_can_be_started_it_is_done_here(programs, monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    done = compile_all(programs, ARCH, workers=2)
    assert {one.how for one in done} == {"compiled"}
    assert counters.snapshot()["compiles"] == 6


@pytest.mark.parametrize("executable", ["", None])
def test_where_python_is_not_known_it_is_done_here(programs, monkeypatch, executable) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    assert {one.how for one in compile_all(programs, ARCH, workers=2)} == {"compiled"}
    assert counters.snapshot()["compiles"] == 6


def in_workers(monkeypatch: pytest.MonkeyPatch, lines: str) -> None:
    """Let workers run `lines` before they begin."""
    script = parallel._SCRIPT.replace("\nwork()\n", f"\n{lines}\nwork()\n")
    monkeypatch.setattr(parallel, "_SCRIPT", script)


def test_what_workers_have_no_compiler_for_is_done_here(
    programs, broken, home, monkeypatch
) -> None:
    """They may not import from everywhere that this process may."""
    in_workers(monkeypatch, 'sys.modules["cuda"] = None')
    done = {one.program: one for one in compile_all([broken, *programs], ARCH, workers=2)}
    assert {done[program].how for program in programs} == {"compiled"}
    assert done[broken].how == "failed"
    assert "CompileError" in done[broken].error
    assert counters.snapshot()["compiles"] == 6
    assert len(home.files()) == 6


def test_without_any_compiler_each_failure_is_told_once(programs, monkeypatch) -> None:
    in_workers(monkeypatch, 'sys.modules["cuda"] = None')

    def missing() -> str:
        raise CompilerUnavailable("nothing is installed")

    monkeypatch.setattr("gristmill.jit.nvrtc.compiler_version", missing)
    done = compile_all(programs, ARCH, workers=2)
    assert [one.how for one in done] == ["failed"] * 6
    assert {one.error for one in done} == {"CompilerUnavailable: nothing is installed"}


def test_relative_paths_mean_to_workers_what_they_mean_here(
    make_program, home, monkeypatch, tmp_path: Path
) -> None:
    """Workers are in another folder, and so may this process be by now."""
    home.path = tmp_path / "start" / "cache"
    (tmp_path / "start").mkdir()
    monkeypatch.chdir(tmp_path / "start")
    home.set(GRISTMILL_CACHE_DIR="cache")
    root = make_program(a__cu=TINY).root
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "folder"
    in_workers(monkeypatch, f"open({str(folder)!r}, 'w').write(os.getcwd())")
    programs = [
        Program("a.cu", (f"twice<{number}>",), root=root.relative_to(tmp_path))
        for number in range(4)
    ]
    monkeypatch.setattr(parallel, "_compiled_here", None)  # only workers compile
    done = compile_all(programs, ARCH, workers=2)
    assert [(one.how, one.error) for one in done] == [("compiled", "")] * 4
    assert {one.program for one in done} == set(programs)
    assert len(home.files()) == 4
    assert folder.read_text() == Path.cwd().anchor


def test_where_workers_cannot_begin_it_is_done_here(programs, monkeypatch) -> None:
    monkeypatch.setattr(parallel, "_SCRIPT", "raise SystemExit(3)")
    done = compile_all(programs, ARCH, workers=2)
    assert {one.how for one in done} == {"compiled"}
    assert counters.snapshot()["compiles"] == 6


def test_a_worker_that_dies_is_replaced(programs, home, monkeypatch, tmp_path: Path) -> None:
    """It takes one program with it: what kills a compiler must not come here."""
    mark = tmp_path / "died"
    dying = f"""
import os, pathlib
from gristmill.jit import cache
load = cache.load_or_compile
def once(program, arch):
    if "<3>" in program.names[0]:
        pathlib.Path({str(mark)!r}).touch()
        os._exit(11)
    return load(program, arch)
cache.load_or_compile = once
"""
    in_workers(monkeypatch, dying)
    done = {one.program.names[0]: one for one in compile_all(programs, ARCH, workers=2)}
    assert mark.exists()
    assert done["twice<3>"].how == "failed"
    assert "died" in done["twice<3>"].error
    assert [one.how for name, one in done.items() if name != "twice<3>"] == ["compiled"] * 5
    assert len(home.files()) == 5


def test_a_folder_that_cannot_be_shared_means_this_process(programs, home, monkeypatch) -> None:
    (home.path / "kernels").mkdir(parents=True)
    (home.path / "kernels").chmod(0o777)  # others could write to it: not trusted
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    done = compile_all(programs, ARCH, workers=2)
    assert {one.how for one in done} == {"compiled"}
    assert home.files() == []
    # And they are kept in memory.
    assert {one.how for one in compile_all(programs, ARCH, workers=2)} == {"cached"}


def test_without_leave_to_compile_all_fail(programs, home) -> None:
    home.set(GRISTMILL_JIT="off")
    done = compile_all(programs, ARCH, workers=2)
    assert {one.how for one in done} == {"failed"}
    assert "KernelNotCached" in done[0].error


def test_workers_import_no_torch(programs, monkeypatch, tmp_path: Path) -> None:
    """The package would import it, and that takes longer than most of what they do."""
    mark = tmp_path / "modules"
    tell = f"import pathlib; pathlib.Path({str(mark)!r}).write_text(str('torch' in sys.modules))"
    in_workers(monkeypatch, tell)
    compile_all(programs, ARCH, workers=2)
    assert mark.read_text() == "False"


def test_how_many_workers_are_worth_it(monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert [worker_count(programs) for programs in (0, 1, 7, 8, 31, 1000)] == [1, 1, 1, 2, 7, 8]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    assert worker_count(1000) == 1


def test_programs_of_triton_go_the_same_way(programs, home) -> None:
    pytest.importorskip("triton", reason="needs Triton")
    signature = (("x", "*fp32"), ("count", "i32"), ("factor", "fp32"), ("y", "*fp32"))
    scales = [
        TritonProgram(
            "scale.py",
            "scale",
            (*signature, ("stride", "i64")),
            (("absent", None), ("BLOCK", block)),
            root=SOURCES,
        )
        for block in (64, 128)
    ]
    done = compile_all([*scales, *programs], ARCH, workers=2)
    assert [(one.how, one.error) for one in done] == [("compiled", "")] * 8
    cache.load_or_compile(scales[1], ARCH)
    assert counters.snapshot()["disk_hits"] == 1
    assert len(home.files()) == 8
