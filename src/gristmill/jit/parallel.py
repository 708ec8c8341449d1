"""Compiling many programs at once, in worker processes that fill the cache on disk.

NVRTC's front end, Triton and the CuTe DSL run one compile at a time in a process, so cores are used
by processes. Workers are started as programs of their own, not by `multiprocessing`: that would
run the caller's main module again. A worker is told a program on one line, compiles it into the
cache folder and answers on one line. Where that cannot be (one core, no folder that can be trusted
or written to, few programs) everything is compiled in this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass

from gristmill.errors import CompilerUnavailable
from gristmill.jit import cache, child, counters
from gristmill.jit.compilers import Compilable, from_text, to_text
from gristmill.jit.program import Program
from gristmill.jit.python_sources import PythonProgram
from gristmill.settings import settings

# A worker takes 0.3 s to start, a compile 0.1 s to 1 s: fewer programs than this for each worker
# are not worth one.
_PROGRAMS_PER_WORKER = 4
_MOST_WORKERS = 32
_SCRIPT = f"""
{child.MODULES_ONLY}
from gristmill.jit.parallel import work
work()
"""


@dataclass(frozen=True)
class Compiled:
    """What became of one program; `how` is "compiled", "cached" (it was there) or "failed"."""

    program: Compilable
    how: str
    seconds: float
    error: str = ""


Progress = Callable[[Compiled, int, int], None]


def compile_all(
    programs: Iterable[Compilable],
    arch: str,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> list[Compiled]:
    """Bring `programs` into the cache for `arch`, in any order; an error is a result like others.

    `workers`: how many processes (default: by the cores and the number of programs); with one,
    everything happens in this process. `progress` is called after each program with the result,
    its number and the total.
    """
    wanted = list(dict.fromkeys(programs))
    done: list[Compiled] = []

    def tell(result: Compiled) -> None:
        done.append(result)
        if progress is not None:
            progress(result, len(done), len(wanted))

    missing: list[Compilable] = []
    for program in wanted:
        if cache.is_cached(program, arch):
            tell(Compiled(program, "cached", 0.0))
        else:
            missing.append(program)
    count = worker_count(len(missing)) if workers is None else min(workers, len(missing))
    if count > 1 and settings().jit and cache.is_writable():
        with contextlib.closing(_in_workers(missing, arch, count)) as results:
            for result in results:
                # A worker may have been unable to write, or to import the compiler.
                if result.how == "failed" or cache.is_in_folder(result.program, arch):
                    missing.remove(result.program)
                    if result.how == "compiled":
                        cache.note_compile(result.program, arch, result.seconds, cache.folder())
                    tell(result)
    for program in missing:
        tell(_compiled_here(program, arch))
    return done


def worker_count(programs: int) -> int:
    """How many processes are worth starting for so many programs; 1: none."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min(cores, _MOST_WORKERS, programs // _PROGRAMS_PER_WORKER))


def work() -> None:
    """The loop of a worker: programs come on stdin, one a line, and results go to stdout.

    `how` is also "unable": the compiler is not importable here, but may be in the parent.
    """
    # What compilers print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        arch, _, text = line.partition(" ")
        result = _compiled_here(from_text(text, anywhere=True), arch)
        unable = result.error.startswith(CompilerUnavailable.__name__)
        how = "unable" if unable else result.how
        answers.write(json.dumps([how, result.seconds, result.error]) + "\n")
        answers.flush()


def _compiled_here(program: Compilable, arch: str) -> Compiled:
    before, begin = counters.snapshot()["compiles"], time.perf_counter()
    try:
        cache.load_or_compile(program, arch)
    except Exception as error:
        # Whatever a compiler raises: it is met again, and told, where the kernel is needed.
        return Compiled(program, "failed", time.perf_counter() - begin, _words(error))
    how = "compiled" if counters.snapshot()["compiles"] > before else "cached"
    return Compiled(program, how, time.perf_counter() - begin)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class _Worker:
    """One process that compiles."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            child.command(_SCRIPT),
            cwd=os.sep,  # compilers and the dynamic loader may read files of the current folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def is_ready(self) -> bool:
        """Wait until it has started; False if it could not."""
        return self._line() == b"ready\n"

    def compiled(self, program: Compilable, arch: str) -> Compiled | None:
        """What became of `program`; None if the process died meanwhile."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{arch} {to_text(_absolute(program))}\n".encode())
            self._process.stdin.flush()
        except OSError:
            return None
        answer = self._line()
        if not answer.endswith(b"\n"):
            return None
        how, seconds, error = json.loads(answer)
        return Compiled(program, how, seconds, error)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def _absolute(program: Compilable) -> Compilable:
    """`program` with an absolute root: workers are in another folder."""
    assert isinstance(program, Program | PythonProgram)
    if program.root is None:
        return program
    return dataclasses.replace(program, root=program.root.absolute())


def _in_workers(
    programs: Sequence[Compilable], arch: str, count: int
) -> Generator[Compiled, None, None]:
    """Results as they come; programs for which no worker could be started have none."""
    waiting: queue.SimpleQueue[Compilable] = queue.SimpleQueue()
    for program in programs:
        waiting.put(program)
    # None: one of the threads has no more to do.
    results: queue.SimpleQueue[Compiled | None] = queue.SimpleQueue()
    over = threading.Event()

    def serve() -> None:
        worker = None
        try:
            while not over.is_set():
                program = waiting.get_nowait()
                if worker is None:
                    worker = _Worker()
                    if not worker.is_ready():
                        break
                result = worker.compiled(program, arch)
                if result is None:
                    worker.end()
                    worker = None
                    result = Compiled(program, "failed", 0.0, "the process that compiled it died")
                results.put(result)
        except (OSError, queue.Empty):
            pass
        finally:
            results.put(None)
            if worker is not None:
                worker.end()

    serving = 0
    for _ in range(count):
        try:
            threading.Thread(target=serve, daemon=True).start()
        except RuntimeError:  # the interpreter is shutting down: no thread may be started any more
            break
        serving += 1
    try:
        while serving:
            result = results.get()
            if result is None:
                serving -= 1
            else:
                yield result
    finally:
        # Each thread ends its worker after what it is at; none begins anything new.
        over.set()
