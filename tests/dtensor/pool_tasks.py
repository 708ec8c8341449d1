"""Tasks that show how the ranks' harness behaves."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def add_ranks(value: float) -> tuple[int, torch.Tensor]:
    total = torch.tensor(value + dist.get_rank(), dtype=torch.float64)
    dist.all_reduce(total)
    return os.getpid(), total


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} has had enough")
    dist.barrier()


def end_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)
