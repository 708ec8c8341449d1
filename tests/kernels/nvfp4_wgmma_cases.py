"""Instantiations of nvfp4_wgmma.cu that are compiled, and run on the CPU: one of each kind."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gristmill.jit import Program

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NAMES = {BF16: "bf16", F16: "f16", F32: "float"}


@dataclass(frozen=True)
class Kernel:
    """The template's parameters."""

    tokens: int
    row_groups: int
    k_groups: int = 1
    depth: int = 1
    stages: int = 2
    split: int = 1
    shared_by: int = 1
    x: torch.dtype = BF16
    out: torch.dtype = BF16

    def __str__(self) -> str:
        cut = f"{self.tokens}x{64 * self.row_groups} k{self.k_groups} {self.depth}x{self.stages}"
        return f"{cut} /{self.split} *{self.shared_by} {NAMES[self.x]} {NAMES[self.out]}"

    @property
    def name(self) -> str:
        cut = (self.tokens, self.row_groups, self.k_groups, self.depth, self.stages)
        numbers = ",".join(str(n) for n in (*cut, self.split, self.shared_by, 1))
        return f"nvfp4_wgmma<{NAMES[self.x]},{NAMES[self.out]},{numbers}>"

    @property
    def program(self) -> Program:
        return Program("nvfp4_wgmma.cu", (self.name,))

    @property
    def cluster(self) -> int:
        return self.split * self.shared_by

    @property
    def groups(self) -> int:
        return self.row_groups * self.k_groups

    @property
    def raised(self) -> bool:
        """Whether the producer is a warpgroup that gives registers to the others."""
        return self.tokens > 128 or (self.tokens == 128 and self.groups > 3)

    @property
    def threads(self) -> int:
        return 128 * self.groups + (128 if self.raised else 32)

    @property
    def shared(self) -> int:
        rows = 64 * self.row_groups
        piece = self.tokens if self.tokens < 64 else 48 if self.tokens % 64 else 64
        ring = self.stages * self.depth * (self.tokens * 128 + self.row_groups * 2304)
        sums = self.k_groups * piece * (rows + 4) * 4
        return ring + sums + 2 * rows * 4 + 2 * 8 * self.stages


KERNELS = (
    Kernel(8, 1, k_groups=4, depth=4, stages=3),
    Kernel(8, 1, k_groups=2, depth=8, out=F32),  # four pieces to a group at once
    Kernel(16, 2, k_groups=2, depth=4),
    Kernel(16, 1, k_groups=4, depth=8, x=F16, out=F16),
    Kernel(32, 2, depth=2, stages=4, out=F16),
    Kernel(64, 2, depth=3, stages=3),  # an odd number of pieces
    Kernel(96, 1, depth=2),
    Kernel(128, 2, stages=3, x=F16, out=F32),
    Kernel(128, 4),  # the producer gives registers away
    Kernel(192, 1),
    Kernel(256, 2),
)
SPLITS = (
    Kernel(8, 1, k_groups=2, depth=2, split=2),
    Kernel(16, 2, depth=2, split=3, out=F32),
    Kernel(64, 1, split=4, x=F16, out=F16),
    Kernel(128, 1, split=2, out=F32),  # written in two pieces
    Kernel(8, 1, k_groups=2, depth=4, split=8),
)
SHARERS = (
    Kernel(16, 1, depth=2, shared_by=2, stages=3),
    Kernel(64, 2, shared_by=4, x=F16, out=F32),
    Kernel(256, 1, shared_by=2),
)
EVERY = (*KERNELS, *SPLITS, *SHARERS)
