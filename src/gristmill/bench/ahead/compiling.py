"""Compiling ahead: what peers make at a first call, made by several processes before any timing.

Inductor, Triton and QuACK keep what they compile on disk. Each process builds the peers of some
tasks and calls them once; the process that times finds the code there. What chooses its launches by
timing is left out (`Peer.tunes`): beside others it would choose badly. A process that dies or hangs
costs the task that it was at, and no more: what was not made ahead is made when it is timed.
"""

from __future__ import annotations

import json
import math
import os
import queue
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gristmill.bench.inputs import dtype_of
from gristmill.bench.peers import Peer
from gristmill.bench.results import first_line
from gristmill.bench.suites import Task, written
from gristmill.errors import GristmillError
from gristmill.jit import child
from gristmill.jit.compilers import Compilable
from gristmill.ops.registry import OPS
from gristmill.select.chooser import ranked
from gristmill.select.device import device_of

# Importing torch and all peers from a cold disk takes minutes; a task of four compilers seconds.
START_LIMIT_S, TASK_LIMIT_S = 300.0, 180.0
# Of one tensor. Larger problems are left to a quarter of the processes, so that all fit in memory
# at once: a tensor of 2^31 elements in 16 bits is 4.3 GB; of 16 processes on 140 GB four get 24 GB
# each, and the others 3.5.
LARGE_BYTES = 1 << 28
_LARGE_PART = 4
# Of the GPU's memory: for those that have the large problems together, and for all others.
_LARGE_SHARE, _SMALL_SHARE = 0.68, 0.3
_MOST_STARTS = 4
# Of what a process wrote, the end is looked at when it has died; how long its end may take.
_SAID_BYTES, _ENDING_S = 1 << 16, 10.0
_CHILD = "gristmill.bench.ahead.child"
_SCRIPT = """
import importlib, sys
importlib.import_module(sys.argv[1]).main(sys.argv[2])
"""


def worth(tasks: Sequence[Task], peers: Sequence[Peer]) -> list[Task]:
    """The tasks of which some peer's code can be made ahead."""
    return [task for task in tasks if any(peer.is_ahead(task.name) for peer in peers)]


def own_programs(tasks: Sequence[Task], device: torch.device) -> list[Compilable]:
    """What gristmill's own choices for the tasks are compiled from, each once; on a CPU nothing."""
    here = device_of(device)
    found: dict[Compilable, None] = {}
    for task in tasks:
        op, dtype = OPS[task.op], dtype_of(task.dtype)
        try:
            args = op.example_with(task.kind.options, task.shape, dtype, "meta", here)
            problem = op.problem(*args, device=here)
            choice = ranked(op.name, op.variants, problem)[0]
            found.update(dict.fromkeys(choice.variant.programs(problem, choice.config)))
        except (GristmillError, RuntimeError):  # it is met again, and told, where it is timed
            continue
    return list(found)


def compile_ahead(
    tasks: Sequence[Task],
    peers: Sequence[Peer],
    device: torch.device,
    jobs: int,
    advance: Callable[[str], None],
) -> list[str]:
    """Build and call once what `peers` run for `tasks`; what did not go well, a line each.

    `advance` is told about each task when it is done.
    """
    done: queue.SimpleQueue[tuple[Task | None, str]] = queue.SimpleQueue()
    small, large = _queues(tasks)
    over = threading.Event()
    told = {"device": str(device), "peers": [peer.name for peer in peers], "parent": os.getpid()}
    count = min(jobs, len(tasks))
    for_large = max(1, count // _LARGE_PART)
    for index in range(count):
        if index < for_large:
            share, waiting = _LARGE_SHARE / for_large, [large, small]
        else:
            share, waiting = _SMALL_SHARE / (count - for_large), [small]
        server = _Server({**told, "share": share}, waiting, done, over)
        threading.Thread(target=server.serve, daemon=True).start()
    notes = []
    try:
        while count:
            task, wrong = done.get()
            if wrong:
                notes.append(wrong)
            if task is None:
                count -= 1
            else:
                advance(str(task))
    finally:
        over.set()
    return notes


def _queues(tasks: Sequence[Task]) -> tuple[queue.SimpleQueue[Task], queue.SimpleQueue[Task]]:
    small: queue.SimpleQueue[Task] = queue.SimpleQueue()
    large: queue.SimpleQueue[Task] = queue.SimpleQueue()
    for task in tasks:
        nbytes = math.prod(task.shape) * dtype_of(task.dtype).itemsize
        (large if nbytes > LARGE_BYTES else small).put(task)
    return small, large


class _Server:
    """Gives tasks to one process at a time, a new one where the one before died."""

    def __init__(
        self,
        told: dict[str, Any],
        waiting: Sequence[queue.SimpleQueue[Task]],
        done: queue.SimpleQueue[tuple[Task | None, str]],
        over: threading.Event,
    ) -> None:
        self._told, self._waiting, self._done, self._over = told, waiting, done, over
        self._worker: _Worker | None = None

    def serve(self) -> None:
        last = ""
        try:
            starts = 0
            while not self._over.is_set() and (task := self._next()) is not None:
                if self._worker is None:
                    if starts == _MOST_STARTS:
                        last = f"compiling ahead: a process died {starts} times, and was given up"
                        break
                    starts += 1
                    self._worker = _Worker(self._told, self._over)
                self._done.put((task, self._made(self._worker, task)))
        except OSError as error:
            last = f"compiling ahead: no process could be started: {error}"
        finally:
            self._end()
            self._done.put((None, last))

    def _next(self) -> Task | None:
        for waiting in self._waiting:
            try:
                return waiting.get_nowait()
            except queue.Empty:
                continue
        return None

    def _made(self, worker: _Worker, task: Task) -> str:
        """Empty, or what went wrong with the process; what peers say is told when timed."""
        why = worker.make(task)
        if why:
            self._end()
            return f"{task}: not compiled ahead, its process {why}"
        return ""

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None


class _Worker:
    """One process; it is told a task a line, and answers with a line."""

    def __init__(self, told: dict[str, Any], over: threading.Event) -> None:
        self._over = over
        # A file, because a pipe would fill up; `end` closes it.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                child.command(_SCRIPT, _CHILD, json.dumps(told)),
                cwd=os.sep,  # torch starts Pythons of its own, which import from there
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                start_new_session=True,  # so that it can be ended with its own children
            )
        except OSError:
            self._said.close()
            raise
        self._limit = START_LIMIT_S + TASK_LIMIT_S

    def make(self, task: Task) -> str:
        """Empty, or what became of the process."""
        assert self._process.stdin is not None
        words = [task.name, written(task.shape), task.dtype]
        try:
            self._process.stdin.write(f"{json.dumps(words)}\n".encode())
            self._process.stdin.flush()
        except OSError:
            return self._died()
        limit_s, self._limit = self._limit, TASK_LIMIT_S
        return self._answered(limit_s)

    def _answered(self, limit_s: float) -> str:
        """Wait for a line; what became of the process, if none comes."""
        assert self._process.stdout is not None
        end, pipe = time.monotonic() + limit_s, self._process.stdout.fileno()
        while time.monotonic() < end and not self._over.is_set():
            if select.select([pipe], [], [], 0.5)[0]:
                return "" if os.read(pipe, 1 << 16).endswith(b"\n") else self._died()
        return f"took longer than {limit_s:.0f} s"

    def _died(self) -> str:
        try:
            code = self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            return "has closed its pipe"
        self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - _SAID_BYTES))
        said = last_error(self._said.read().decode(errors="replace"))
        return f"died: {said}" if said else f"died with exit code {code}"

    def end(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._said.close()


def last_error(text: str) -> str:
    """Of what a process wrote before it died, the error: its first line, or else the last line."""
    lines = [line for line in text.splitlines() if line.strip()]
    begins = [index for index, line in enumerate(lines) if line.startswith("Traceback (most")]
    after = lines[begins[-1] + 1 :] if begins else []
    # The frames are indented; what follows them is the error, of as many lines as it likes.
    told = next((line for line in after if not line[0].isspace()), lines[-1] if lines else "")
    return first_line(told) if told else ""
