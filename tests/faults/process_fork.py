"""Processes that fork while their threads are busy; each function runs in a process of its own.

See fault_helpers.start_child; torch computes on one thread, because OpenMP's own pool does not live
through a fork, whoever forks.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fault_helpers import ARCH, program, use_fake_compiler, write_source

import gristmill
from gristmill import locks
from gristmill.jit import cache, file_lock, nvrtc
from gristmill.log import forget_warnings, warn_once
from gristmill.multikernel import MultiKernel
from gristmill.runners import register_runner
from gristmill.select import chooser, reset_counters, reset_tables, sight
from gristmill.select.record import forget_recorded

# A child that takes longer has stopped: it then says where, and is killed.
PATIENCE_S = 60


class Doubling:
    """A runner."""

    def _run_impl(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def norm(rows: int, columns: int = 64) -> None:
    torch.testing.assert_close(
        gristmill.rms_norm(torch.ones(rows, columns)), torch.ones(rows, columns)
    )


def everything(root: str, number: int) -> None:
    """What a process may want of the library, without a GPU; new kernels, shapes and words."""
    norm(1 + number % 997, 8 + number % 1009)
    # Not random: torch's generator has a lock of its own, which a fork may copy held.
    gristmill.softmax(torch.ones(3, 8 + number % 991))
    warn_once(f"warning {number}", "is written to a log")
    gristmill.counters()
    cache.load_or_compile(program(root, number), ARCH)
    gristmill.explain("rms_norm", torch.ones(2, 8 + number % 983))
    runner = Doubling()
    register_runner(runner)
    double = MultiKernel(f"double_{number}", {"add": lambda x: x + x, "mul": lambda x: 2 * x})
    assert double(torch.ones(3)).eq(2).all()


def rarely(number: int) -> None:
    """The rest, which is slow or takes from the others what they need."""
    gristmill.tune(norm, 200 + number)
    reset_counters()
    reset_tables()
    forget_recorded()
    forget_warnings()
    chooser.forget_failures()
    norm(300 + number)


def forked(work: Callable[[], None]) -> int:
    """The exit status of a forked child that does `work`; negative: the signal that ended it."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)
    code = 1
    try:
        signal.alarm(PATIENCE_S)
        faulthandler.register(signal.SIGALRM, file=2, chain=True)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def begin(folder: str) -> str:
    torch.set_num_threads(1)
    use_fake_compiler()
    return str(write_source(Path(folder) / "sources"))


def all_locks_held(folder: str) -> tuple[int, int]:
    """Fork while another thread holds every lock there is; the child's status, and how many."""
    root = begin(folder)
    everything(root, 0)  # and nothing is left to be imported in the child
    rarely(0)
    held, over = threading.Event(), threading.Event()
    known = list(locks._instances)

    def hold() -> None:
        for lock in known:
            lock._lock.acquire()
        held.set()
        over.wait()
        for lock in known:
            lock._lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()

    def work() -> None:
        everything(root, 1)
        rarely(1)

    status = forked(work)
    over.set()
    thread.join()
    return status, len(known)


def kernel_being_made(folder: str) -> int:
    """Fork while another thread compiles a kernel, which the child wants as well."""
    root = begin(folder)
    begun, over = threading.Event(), threading.Event()
    quick = nvrtc.compile_program

    def slow(*args: Any, **options: Any) -> Any:
        begun.set()
        over.wait(2.0)
        return quick(*args, **options)

    nvrtc.compile_program = slow  # type: ignore[assignment]
    thread = threading.Thread(target=cache.load_or_compile, args=(program(root, 0), ARCH))
    thread.start()
    begun.wait()
    status = forked(lambda: check(cache.load_or_compile(program(root, 0), ARCH)))
    over.set()
    thread.join()
    nvrtc.compile_program = quick  # type: ignore[assignment]
    return status


def check(found: Any) -> None:
    assert found


def busy(folder: str, rounds: int) -> list[int]:
    """Fork again and again while threads compile, log, count, choose and record."""
    root = begin(folder)
    everything(root, 0)
    over = threading.Event()

    def loop(first: int) -> None:
        number = first
        while not over.is_set():
            number += 8
            everything(root, number)

    threads = [threading.Thread(target=loop, args=(1 + at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    statuses = []
    for number in range(rounds):
        time.sleep(0.01)
        statuses.append(forked(lambda number=number: everything(root, 10**6 + number)))
    over.set()
    for thread in threads:
        thread.join()
    return statuses


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((64,), float(index + 1))


def collated(rows: list[torch.Tensor]) -> torch.Tensor:
    return gristmill.rms_norm(torch.stack(rows))


def data_loader(folder: str) -> list[float]:
    """Workers of a data loader that normalise, forked while threads of the parent are busy."""
    root = begin(folder)
    everything(root, 0)
    over = threading.Event()

    def loop() -> None:
        number = 1
        while not over.is_set():
            number += 1
            everything(root, number)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        loader = torch.utils.data.DataLoader(
            Rows(),
            batch_size=4,
            num_workers=2,
            collate_fn=collated,
            multiprocessing_context="fork",
            timeout=PATIENCE_S,
        )
        return [float(batch.mean()) for batch in loader]
    finally:
        over.set()
        thread.join()


def file_lock_across_a_fork(folder: str) -> float:
    """How long a lock on a file cannot be had after it was given back, but forked before."""
    path = Path(folder) / "a.lock"
    go, told = os.pipe()
    with file_lock.locked_file(path, 5.0):
        child = os.fork()
        if child == 0:
            os.close(told)
            os.read(go, 1)  # lives on, with a copy of all handles, until the parent ends
            os._exit(0)
    start = time.perf_counter()
    with file_lock.locked_file(path, 5.0):
        waited = time.perf_counter() - start
    os.close(told)
    os.waitpid(child, 0)
    return waited


def turns_at_a_fork(folder: str) -> int:
    """A tuning that another thread was at when the process forked is nobody's in the child."""
    begin(folder)
    begun, over = threading.Event(), threading.Event()

    def tuning() -> None:
        with sight._TUNING.turn():
            begun.set()
            over.wait()

    thread = threading.Thread(target=tuning)
    thread.start()
    begun.wait()

    def work() -> None:
        start = time.perf_counter()
        report = gristmill.tune(norm, 20)
        assert len(report.outcomes) == 1, report
        assert time.perf_counter() - start < 20

    status = forked(work)
    over.set()
    thread.join()
    return status


def one_after_another(folder: str) -> dict[str, Any]:
    """All of the above in one process: what each gave."""
    found: dict[str, Any] = {}
    for work in (
        kernel_being_made,
        all_locks_held,
        turns_at_a_fork,
        file_lock_across_a_fork,
        data_loader,
    ):
        own = Path(folder) / work.__name__
        own.mkdir()
        found[work.__name__] = work(str(own))
    own = Path(folder) / "busy"
    own.mkdir()
    found["busy"] = busy(str(own), 10)
    return found
