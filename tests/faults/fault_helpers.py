"""What the tests of faults share, in the test's process and in those that it starts.

A child is a function of a module in this folder: it is given JSON and gives JSON back. The layers
above the jit are left out of it unless it asks for them, as they are in tests/jit.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gristmill.jit import cache, counters, nvrtc
from gristmill.jit.binary import Binary
from gristmill.jit.program import Program
from gristmill.log import forget_warnings, logger
from gristmill.settings import reload_settings

ARCH = "sm_90a"
VERSION = "nvrtc 13.0"
SOURCE = """
struct Params { float* out; };
template <int N> __global__ void twice(const Params p) { p.out[threadIdx.x] = 2 * N; }
"""

_PREAMBLE = """
import json, sys, types
if {alone}:
    sys.modules["gristmill"] = types.ModuleType("gristmill")
    sys.modules["gristmill"].__path__ = {package!r}
from {module} import {function}
print("\\n" + json.dumps({function}(*json.loads({arguments!r}))))
"""


def start_child(
    function: Callable[..., Any],
    *arguments: Any,
    alone: bool = True,
    package: Path | None = None,
    **environment: str,
) -> subprocess.Popen[str]:
    """Run `function(*arguments)` in a fresh Python; with `alone` the jit is all of gristmill.

    `package`: the folder of another gristmill than this one.
    """
    import gristmill

    code = _PREAMBLE.format(
        alone=alone,
        package=list(gristmill.__path__) if package is None else [str(package)],
        module=function.__module__,
        function=function.__name__,
        arguments=json.dumps(arguments),
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={
            "PATH": os.environ.get("PATH", ""),
            "PYTHONPATH": ":".join(filter(None, sys.path)),
            "HOME": "/nonexistent",
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result_of(child: subprocess.Popen[str], timeout: float = 300) -> Any:
    """What a child's function gave; an error of it is one of the test."""
    out, errors = child.communicate(timeout=timeout)
    assert child.returncode == 0, f"exit status {child.returncode}\n{out}\n{errors}"
    return json.loads(out.splitlines()[-1])


def run_child(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return result_of(start_child(function, *arguments, **options))


def write_source(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.cu").write_text(SOURCE)
    return folder


def program(root: Path | str, number: int = 0) -> Program:
    return Program("a.cu", (f"twice<{number}>",), root=Path(root))


def right_cubin(key: str, compiler: str = VERSION) -> bytes:
    """What the compiler below makes of a key: several pages, no two the same."""
    return b"".join(b"%d %s %s\n" % (line, key.encode(), compiler.encode()) for line in range(200))


def use_fake_compiler(
    log: Path | None = None,
    version: str = VERSION,
    seconds: float = 0.0,
    put: Callable[[Any, str, Any], None] = setattr,
) -> None:
    """Replace NVRTC by a compiler that takes `seconds` and appends a line to `log` at each call.

    `put`: how to replace a name in a module, for a test that must take it back.
    """

    def compile_program(program: Program, arch: str, *, verbose: bool = False) -> Binary:
        if log is not None:
            note(log, program.key(arch))
        time.sleep(seconds)
        lowered = {name: f"_Z{name}" for name in program.names}
        return Binary(right_cubin(program.key(arch), version), lowered, "a log", version)

    put(nvrtc, "compile_program", compile_program)
    put(nvrtc, "compiler_version", lambda: version)
    put(nvrtc, "installed_version", lambda: version)


def say(line: str) -> None:
    """A line that the test waits for, before a child's result."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def note(log: Path, line: str) -> None:
    """Append one line in one write: many processes share the file."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(handle, f"{line}\n".encode())
    finally:
        os.close(handle)


def fresh(folder: Path | str, **variables: str) -> None:
    """As a new process that keeps its kernels in `folder` would begin."""
    for name in [name for name in os.environ if name.startswith("GRISTMILL_")]:
        del os.environ[name]
    os.environ.update(GRISTMILL_CACHE_DIR=str(folder), **variables)
    reload_settings()
    cache.forget()
    counters.reset()
    forget_warnings()


def is_right(found: Binary, wanted: Program, arch: str = ARCH, compiler: str = VERSION) -> bool:
    return (
        found.cubin == right_cubin(wanted.key(arch), compiler)
        and dict(found.lowered) == {name: f"_Z{name}" for name in wanted.names}
        and found.compiler == compiler
    )


@contextmanager
def heard_warnings() -> Iterator[list[str]]:
    """The warnings that gristmill gives meanwhile."""
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                heard.append(record.getMessage())

    ear = Ear()
    logger.addHandler(ear)
    try:
        yield heard
    finally:
        logger.removeHandler(ear)
