"""Processes that share a cache: what each of them does."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from fault_helpers import (
    ARCH,
    VERSION,
    fresh,
    heard_warnings,
    is_right,
    note,
    program,
    say,
    use_fake_compiler,
)

from gristmill.jit import cache, counters, nvrtc


def race(
    home: str, sources: str, log: str, go: str, numbers: int, seed: int, real: bool
) -> dict[str, Any]:
    """Load all kernels, in an order of its own, once all processes are ready."""
    fresh(home)
    if real:
        compile_now = nvrtc.compile_program

        def compile_program(program: Any, arch: str, *, verbose: bool = False) -> Any:
            note(Path(log), program.key(arch))
            return compile_now(program, arch, verbose=verbose)

        nvrtc.compile_program = compile_program
        nvrtc.compiler_version()
    else:
        use_fake_compiler(Path(log), seconds=0.02)
    order = list(range(numbers))
    random.Random(seed).shuffle(order)
    say("ready")
    while not Path(go).exists():
        time.sleep(0.002)
    with heard_warnings() as heard:
        found = {number: cache.load_or_compile(program(sources, number), ARCH) for number in order}
    values = counters.snapshot()
    wrong = [
        number
        for number, binary in found.items()
        if not (real or is_right(binary, program(sources, number)))
    ]
    return {
        "compiles": values["compiles"],
        "hits": values["disk_hits"],
        "cubins": {number: found[number].cubin.hex()[-64:] for number in range(numbers)},
        "wrong": wrong,
        "warnings": heard,
    }


def compile_and_hang(home: str, sources: str) -> None:
    """Say so when the compile has begun, and never end it."""
    fresh(home)
    use_fake_compiler()

    def compile_program(*_: Any, **__: Any) -> Any:
        say("compiling")
        time.sleep(600)

    nvrtc.compile_program = compile_program
    cache.load_or_compile(program(sources), ARCH)


def load_while_another_hangs(home: str, sources: str, patience: float) -> dict[str, Any]:
    """The kernel that a stopped process is at, and others."""
    fresh(home)
    use_fake_compiler()
    cache.LOCK_SECONDS = patience
    seconds = []
    with heard_warnings() as heard:
        for number in (1, 0, 2):
            begin = time.monotonic()
            one = program(sources, number)
            assert is_right(cache.load_or_compile(one, ARCH), one)
            seconds.append(time.monotonic() - begin)
    return {"seconds": seconds, "warnings": heard, "kept": len(cache.entries())}


def load_numbers(
    home: str, sources: str, log: str, numbers: int, arch: str, version: str = VERSION
) -> dict[str, Any]:
    """Load some kernels as this gristmill and a compiler of that version would."""
    fresh(home)
    use_fake_compiler(Path(log), version)
    wrong = []
    with heard_warnings() as heard:
        for number in range(numbers):
            one = program(sources, number)
            if not is_right(cache.load_or_compile(one, arch), one, arch, version):
                wrong.append(number)
    values = counters.snapshot()
    return {
        "compiles": values["compiles"],
        "hits": values["disk_hits"],
        "rejected": values["rejected"],
        "wrong": wrong,
        "warnings": heard,
    }
