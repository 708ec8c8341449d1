"""What a process runs that compiles ahead: tasks come on stdin, a line each, answers go back."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence

import torch
import torch._inductor.config

from gristmill.bench.fresh import end_with
from gristmill.bench.inputs import arguments, saved
from gristmill.bench.peers import PEERS, Peer
from gristmill.bench.suites import Task


def main(text: str) -> None:
    """`text`: JSON with "device", the names of "peers", the "share" of memory, the "parent"."""
    told = json.loads(text)
    end_with(told["parent"])
    # What compilers print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    device = torch.device(told["device"])
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(told["share"], device.index)
    torch._inductor.config.compile_threads = 1  # the others have the other cores
    peers = [PEERS[name] for name in told["peers"]]
    for line in sys.stdin:
        name, shape, dtype = json.loads(line)
        task = Task(name, tuple(map(int, shape.split("x"))), dtype)
        made = make(task, peers, device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # raises, and ends this process, if a kernel broke it
            torch.cuda.empty_cache()
        answers.write(json.dumps(made) + "\n")
        answers.flush()


def make(task: Task, peers: Sequence[Peer], device: torch.device) -> dict[str, str]:
    """Build and call each implementation once, as the runner will; what each said, if it failed."""
    said = {}
    try:
        args = arguments(task, device)
        sets = [(*args, *saved(task, args))]
    except (RuntimeError, torch.OutOfMemoryError) as error:
        return {"": type(error).__name__}
    for peer in peers:
        if not peer.is_ahead(task.name):
            continue
        for impl, builder in peer.implementations(task.name).items():
            try:
                builder(sets)(*sets[0])
            except Exception as error:  # a peer may fail in any way: it is told when it is timed
                said[impl] = type(error).__name__
            gc.collect()
    return said
