"""Processes that end while kernels are compiled. Each function here runs in a process of its own.

The compiler is a slow one that compiles nothing; it says when it begins.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from fault_helpers import ARCH, note, program, use_fake_compiler

from gristmill.jit import cache, nvrtc, parallel

PROGRAMS = 8


def slow_compiler(seconds: float, log: str | None = None) -> None:
    """As the fake compiler, but it takes a while; `log` gets the process of each that begins."""
    use_fake_compiler()
    quick = nvrtc.compile_program

    def slow(*args: Any, **options: Any) -> Any:
        if log is not None:
            note(Path(log), str(os.getpid()))
        else:
            sys.stdout.write("begun\n")
            sys.stdout.flush()
        time.sleep(seconds)
        return quick(*args, **options)

    nvrtc.compile_program = slow  # type: ignore[assignment]


def slow_workers(seconds: float, log: str) -> None:
    """The slow compiler here and in the processes that `compile_all` starts."""
    slow_compiler(seconds, log)
    begin = f"from process_shutdown import slow_compiler\nslow_compiler({seconds}, {log!r})\n"
    parallel._SCRIPT = parallel._SCRIPT.replace("\nwork()\n", f"\n{begin}work()\n")


def compiling(root: str, number: int, *, daemon: bool) -> threading.Thread:
    """A thread that is in the middle of a compile."""
    thread = threading.Thread(
        target=cache.load_or_compile, args=(program(root, number), ARCH), daemon=daemon
    )
    thread.start()
    while not cache._memory._making:
        time.sleep(0.01)
    time.sleep(0.1)
    return thread


def end(root: str, how: str) -> None:
    """End in some way while a kernel is being compiled."""
    if how == "main thread":
        slow_compiler(60.0)
        cache.load_or_compile(program(root, 0), ARCH)
    elif how == "thread that is waited for":
        slow_compiler(1.0)
        compiling(root, 0, daemon=False)
    elif how == "daemon":
        slow_compiler(60.0)
        compiling(root, 0, daemon=True)
    elif how == "exit status":
        slow_compiler(60.0)
        compiling(root, 0, daemon=True)
        sys.exit(3)
    elif how == "at exit":
        slow_compiler(0.5)
        atexit.register(cache.load_or_compile, program(root, 1), ARCH)
        compiling(root, 0, daemon=True)
    elif how == "many at exit":
        slow_workers(0.1, os.devnull)
        atexit.register(_check_many, root)
    else:
        raise ValueError(how)


def _check_many(root: str) -> None:
    results = parallel.compile_all([program(root, number) for number in range(8)], ARCH, workers=2)
    assert len(results) == 8


def compile_many(root: str, log: str, seconds: float, caught: bool) -> None:
    """`compile_all` by two workers with the slow compiler."""
    slow_workers(seconds, log)
    programs = [program(root, number) for number in range(PROGRAMS)]
    try:
        parallel.compile_all(programs, ARCH, workers=2)
    except KeyboardInterrupt:
        if not caught:
            raise
        sys.stdout.write("caught\n")
        sys.stdout.flush()
        time.sleep(60)
