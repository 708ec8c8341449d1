"""Four processes that form a gloo group and wait for tasks: what every DTensor test runs on.

Starting four interpreters that import torch takes longer than most tests, so they are started once
for a test run. A test names a function that all ranks call at the same time:

    results = mesh_pool.run("my_tasks:train", 3, dtype=torch.float64)   # one result for each rank

with `my_tasks.py` beside this file. In there `device_mesh(2, 2)` gives the mesh. A rank that fails
fails the test, with the traceback of every rank that has one; ranks that do not answer in time are
stopped, and the next test starts new ones.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "src"
START_TIMEOUT = 120.0
TASK_TIMEOUT = 120.0
# How long the others may take once a rank has failed: those that failed alike answer at once, those
# that wait for the failed one never do.
GRACE = 10.0
KEY = b"mesh"


class RankFailedError(AssertionError):
    """A task raised on a rank, or a rank did not answer."""


class MeshPool:
    """The ranks, started by the first task that needs them."""

    def __init__(self, ranks: int = 4) -> None:
        self.ranks = ranks
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, task: str, *args: Any, timeout: float = TASK_TIMEOUT, **kwargs: Any) -> list[Any]:
        """What `module:function` returns on each rank, called with these arguments on all of them.

        Arguments and results are pickled; results must not be DTensors (return `full_tensor()` or
        `to_local()`).
        """
        if not self._connections:
            self._start()
        message = pickle.dumps((task, args, kwargs))
        for connection in self._connections:
            connection.send_bytes(message)
        answers = self._answers(timeout)
        missing = [rank for rank in range(self.ranks) if rank not in answers]
        failed = {rank: text for rank, (good, text) in sorted(answers.items()) if not good}
        if missing:
            self.close()
        if missing or failed:
            raise RankFailedError(_report(task, failed, missing, timeout))
        return [answers[rank][1] for rank in range(self.ranks)]

    def close(self) -> None:
        """End the processes; a later task starts new ones."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._connections, self._processes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mesh_pool")
        folder = Path(self._folder.name)
        paths = [str(SOURCE), str(HERE), str(HERE.parent)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        with Listener(str(folder / "socket"), backlog=self.ranks, authkey=KEY) as listener:
            for rank in range(self.ranks):
                words = ["import mesh_pool; mesh_pool.serve()", str(rank), str(self.ranks)]
                command = [sys.executable, "-c", *words, str(folder)]
                self._processes.append(subprocess.Popen(command, env=environment))
            connections = self._accept(listener)
        self._connections = [connections[rank] for rank in range(self.ranks)]

    def _accept(self, listener: Listener) -> dict[int, Connection]:
        """The connection of each rank; a rank that ends before it has one ends the waiting."""
        listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
        deadline = time.monotonic() + START_TIMEOUT
        connections: dict[int, Connection] = {}
        while len(connections) < self.ranks:
            with contextlib.suppress(TimeoutError):
                connection = listener.accept()
                connections[connection.recv()] = connection
                continue
            ended = [process.poll() for process in self._processes]
            if time.monotonic() > deadline or any(code is not None for code in ended):
                self.close()
                raise RankFailedError(f"the ranks did not start; their exit codes: {ended}")
        return connections

    def _answers(self, timeout: float) -> dict[int, tuple[bool, Any]]:
        """By rank: whether it went well, and the result or the traceback."""
        deadline = time.monotonic() + timeout
        answers: dict[int, tuple[bool, Any]] = {}
        waiting = dict(zip(self._connections, range(self.ranks), strict=True))
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), left):
                assert isinstance(ready, Connection)
                rank = waiting.pop(ready)
                try:
                    answers[rank] = pickle.loads(ready.recv_bytes())
                    failed = not answers[rank][0]
                except (EOFError, OSError):
                    failed = True  # the process has ended, without an answer
                if failed:
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers


def _report(task: str, failed: dict[int, str], missing: list[int], timeout: float) -> str:
    """Every traceback once, with the ranks that have it."""
    alike: dict[str, list[int]] = {}
    for rank, text in failed.items():
        alike.setdefault(text, []).append(rank)
    parts = [f"{task} failed"]
    parts += [f"on rank {', '.join(map(str, ranks))}:\n{text}" for text, ranks in alike.items()]
    if missing:
        late = f"within {timeout:g} s, or {GRACE:g} s after another had failed"
        parts.append(f"no answer from rank {', '.join(map(str, missing))} {late}")
    return "\n".join(parts)


@cache
def device_mesh(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    """The mesh of this shape over all ranks; in a task. Making one is a collective."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def serve() -> None:
    """A rank: joins the group, then runs what it is told until the connection closes."""
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=TASK_TIMEOUT),
    )
    with Client(str(folder / "socket"), authkey=KEY) as connection:
        connection.send(rank)
        while True:
            try:
                task, args, kwargs = pickle.loads(connection.recv_bytes())
            except EOFError:
                break
            connection.send_bytes(_answer(task, args, kwargs))
    os._exit(0)  # the group is not taken apart: other ranks may be gone


def _answer(task: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    module, _, name = task.partition(":")
    try:
        return pickle.dumps((True, getattr(importlib.import_module(module), name)(*args, **kwargs)))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))
