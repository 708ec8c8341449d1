"""Several processes, one cache folder."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from jit_helpers import ARCH, start_python

from gristmill.jit import cache
from gristmill.jit.once import Once

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")

WORKER = """
import hashlib, pathlib, sys, time
from gristmill.jit import cache, counters, nvrtc
from gristmill.jit.program import Program

root, arch, go = pathlib.Path(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
compile_now = nvrtc.compile_program

def slowly(program, arch):
    time.sleep(0.5)  # so that all the others come while this one compiles
    return compile_now(program, arch)

nvrtc.compile_program = slowly
nvrtc.compiler_version()
print("ready", flush=True)
while not go.exists():
    time.sleep(0.005)
binary = cache.load_or_compile(Program("a.cu", ("twice<3>",), root=root), arch)
values = counters.snapshot()
print(values["compiles"], values["disk_hits"], hashlib.sha256(binary.cubin).hexdigest())
"""


def test_processes_that_race_compile_once(tiny, home, tmp_path) -> None:
    go = tmp_path / "go"
    workers = [
        start_python(WORKER, tiny.root, ARCH, go, GRISTMILL_CACHE_DIR=str(home.path))
        for _ in range(5)
    ]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    go.touch()
    results = []
    for worker in workers:
        out, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0, errors
        results.append(out.split())
    assert sum(int(compiles) for compiles, _, _ in results) == 1
    assert sum(int(hits) for _, hits, _ in results) == 4
    assert len({cubin for _, _, cubin in results}) == 1
    (kept,) = cache.entries()
    assert kept.entry.key == tiny.key(ARCH)
    assert home.files("*") == [kept.path]


def test_a_process_that_dies_while_compiling_leaves_no_lock(tiny, home, tmp_path) -> None:
    dying = WORKER.replace("time.sleep(0.5)", "print('compiling', flush=True); time.sleep(60)")
    go = tmp_path / "go"
    go.touch()
    worker = start_python(dying, tiny.root, ARCH, go, GRISTMILL_CACHE_DIR=str(home.path))
    assert worker.stdout is not None
    while worker.stdout.readline() != "compiling\n":
        assert worker.poll() is None
    worker.send_signal(signal.SIGKILL)
    worker.communicate()
    begin = time.monotonic()
    cache.load_or_compile(tiny, ARCH)
    assert time.monotonic() - begin < cache.LOCK_SECONDS / 2
    assert len(home.files()) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_a_thread_it_does_not_have() -> None:
    once: Once[str, int] = Once()
    inside, go = threading.Event(), threading.Event()

    def slow() -> int:
        inside.set()
        go.wait(30)
        return 1

    thread = threading.Thread(target=once.get, args=("key", slow))
    thread.start()
    assert inside.wait(10)
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # a child that waits is killed, and its status is then not 2
        os._exit(once.get("key", lambda: 2))
    _, status = os.waitpid(child, 0)
    go.set()
    thread.join(10)
    assert os.waitstatus_to_exitcode(status) == 2
    assert once.get("key", lambda: 3) == 1


def test_an_interrupted_thread_hands_the_work_on() -> None:
    once: Once[str, int] = Once()
    inside, go = threading.Event(), threading.Event()
    results: list[object] = []

    def interrupted() -> int:
        inside.set()
        assert go.wait(10)
        raise KeyboardInterrupt

    def first() -> None:
        try:
            once.get("key", interrupted)
        except KeyboardInterrupt:
            results.append("interrupted")

    one = threading.Thread(target=first)
    one.start()
    assert inside.wait(10)
    two = threading.Thread(target=lambda: results.append(once.get("key", lambda: 2)))
    two.start()
    while not any(future._condition._waiters for future in once._making.values()):
        time.sleep(0.001)
    go.set()
    one.join(10)
    two.join(10)
    assert set(results) == {"interrupted", 2}
