"""Processes that end, or are ended, while they compile: quietly, at once, with a whole cache."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_helpers import ARCH, fresh, is_right, program, use_fake_compiler, write_source

from gristmill.jit import cache, nvrtc

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")

# Who is started in the background by a shell ignores interrupts, and so would all that he starts.
ALONE = """
import signal, sys, types
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.modules["gristmill"] = types.ModuleType("gristmill")
sys.modules["gristmill"].__path__ = {package!r}
from process_shutdown import {function}
{function}(*{arguments!r})
"""


def started(home: Path, function: str, *arguments: object) -> subprocess.Popen[str]:
    import gristmill

    code = ALONE.format(package=list(gristmill.__path__), function=function, arguments=arguments)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={
            "PATH": os.environ.get("PATH", ""),
            "PYTHONPATH": ":".join(filter(None, sys.path)),
            "GRISTMILL_CACHE_DIR": str(home),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that a signal to its group reaches no one else
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_source(tmp_path / "sources")


def check_cache(home: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The next process finds or makes each kernel, at once; how many there are before it does."""
    for name in ("compile_program", "compiler_version", "installed_version"):
        monkeypatch.setattr(nvrtc, name, getattr(nvrtc, name))  # to be as they were afterwards
    use_fake_compiler()
    fresh(home)
    whole = len(cache.entries())
    start = time.monotonic()
    for number in range(3):
        one = program(root, number)
        assert is_right(cache.load_or_compile(one, ARCH), one)
    assert time.monotonic() - start < 10
    assert len(cache.entries()) >= 3
    return whole


ENDS = [("thread that is waited for", 0, 1), ("daemon", 0, 0), ("exit status", 3, 0)]


@pytest.mark.parametrize(("how", "status", "kept"), ENDS, ids=[one for one, _, _ in ENDS])
def test_the_interpreter_ends_while_a_thread_compiles(
    how: str, status: int, kept: int, home: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whom Python waits for is Python's business; nobody else is, and nothing is said."""
    process = started(home, "end", str(root), how)
    out, errors = process.communicate(timeout=50)  # less than the compile that nobody waits for
    assert (process.returncode, errors) == (status, "")
    assert out == "begun\n"
    assert check_cache(home, root, monkeypatch) == kept


@pytest.mark.parametrize("how", ["at exit", "many at exit"])
def test_kernels_can_be_compiled_at_exit(
    how: str, home: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = started(home, "end", str(root), how)
    _, errors = process.communicate(timeout=50)
    assert (process.returncode, errors) == (0, "")
    assert check_cache(home, root, monkeypatch) >= 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_interpreter_ends_at_once_by_a_signal(
    number: signal.Signals, home: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = started(home, "end", str(root), "main thread")
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=50)
    assert process.returncode == -number
    # Python's own account of an interrupt, and no other error on top of it.
    assert errors.count("Traceback") == (number == signal.SIGINT)
    assert "During handling" not in errors
    assert errors.strip().endswith("KeyboardInterrupt" if number == signal.SIGINT else "")
    assert check_cache(home, root, monkeypatch) == 0


def to_process(process: subprocess.Popen[str], number: int) -> None:
    process.send_signal(number)


def to_group(process: subprocess.Popen[str], number: int) -> None:
    """As a terminal does."""
    os.killpg(process.pid, number)


INTERRUPTS: dict[str, tuple[Callable[..., None], int]] = {
    "interrupted": (to_process, signal.SIGINT),
    "interrupted at a terminal": (to_group, signal.SIGINT),
    "terminated": (to_process, signal.SIGTERM),
    "killed": (to_process, signal.SIGKILL),
}


def workers(log: Path, count: int) -> list[int]:
    """The processes that have begun to compile, once there are so many."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        found = {int(line) for line in log.read_text().split()} if log.exists() else set()
        if len(found) >= count:
            return sorted(found)
        time.sleep(0.02)
    raise AssertionError(f"of {count} workers not all have begun")


def gone(processes: list[int], patience_s: float) -> bool:
    end = time.monotonic() + patience_s
    while any(is_running(one) for one in processes):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # dead, and waiting for init to notice


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
@pytest.mark.parametrize("how", INTERRUPTS)
def test_no_worker_outlives_who_started_it(
    how: str, home: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, number = INTERRUPTS[how]
    log = tmp_path / "log"
    process = started(home, "compile_many", str(root), str(log), 1.5, False)
    found = workers(log, 2)
    assert process.pid not in found
    send(process, number)
    _, errors = process.communicate(timeout=50)
    assert process.returncode == -number
    assert errors.count("Traceback") == (number == signal.SIGINT)
    assert gone(found, 20.0)
    assert len(workers(log, 2)) <= 3  # none began anew
    check_cache(home, root, monkeypatch)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
def test_workers_end_where_the_interrupt_is_caught(
    home: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    process = started(home, "compile_many", str(root), str(log), 1.5, True)
    try:
        found = workers(log, 2)
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.readline() == "caught\n"
        assert gone(found, 20.0)
        begun = log.read_text()
        time.sleep(0.5)
        assert log.read_text() == begun
    finally:
        process.kill()
        process.communicate()
    check_cache(home, root, monkeypatch)
