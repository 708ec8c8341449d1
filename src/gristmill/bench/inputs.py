"""Arguments for a task: made once, copied often enough that no call finds them in the L2 cache."""

from __future__ import annotations

from typing import Any

import torch

from gristmill.bench.suites import Task
from gristmill.ops.registry import OPS
from gristmill.select.device import device_of
from gristmill.select.timing import rotate, rotation_count

Arguments = tuple[Any, ...]


def dtype_of(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def arguments(task: Task, device: torch.device) -> Arguments:
    """The op's positional arguments for this task; the same numbers on every run."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(20)
        return tuple(OPS[task.op].example((task.rows, task.columns), dtype_of(task.dtype), device))


def saved(task: Task, args: Arguments) -> torch.Tensor | None:
    """What a peer's backward expects its forward to have saved: 1/rms of each row in fp32.

    Gristmill recomputes it from x, which it must read anyway.
    """
    if task.name != "rms_norm_bwd":
        return None
    x, eps = args[1], args[4]
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    # A chunk of rows at a time: a whole fp32 copy of x would be twice x.
    step = max(1, (1 << 26) // x.shape[-1])
    chunks = [part.float().square().mean(-1) for part in x.split(step)]
    return torch.rsqrt(torch.cat(chunks) + eps)


def argument_sets(args: Arguments, device: torch.device) -> list[Arguments]:
    """Copies of `args`, enough to keep the L2 cold; on a CPU two, as its times are for ratios only.

    Only what is read counts: outputs are allocated by each call and may well land in one place.
    """
    if device.type != "cuda":
        return rotate(args, 2)
    read = sum(value.nbytes for value in args if isinstance(value, torch.Tensor))
    return rotate(args, rotation_count(read, device_of(device).l2_bytes))
