"""Instantiations of nvfp4_wgmma.cu, one of each kind, problems for them, and how to run them."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import torch
from emulation.harness import Emulator, Traffic, readable, tensor_map, writable
from exact import UNIT

from gristmill.formats.nvfp4 import e2m1, fragments
from gristmill.jit import Program
from gristmill.ops.nvfp4_linear.wgmma_configs import WgmmaConfig

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NAMES = {BF16: "bf16", F16: "f16", F32: "float"}
BIAS_KINDS = {None: 0, F32: 1, BF16: 2, F16: 3}
PARAMS = struct.Struct("@128sQQQQQiIIIIIIII")
ORDERS = (0, 1, 2)


@dataclass(frozen=True)
class Kernel:
    """The template's parameters."""

    tokens: int
    row_groups: int
    k_groups: int = 1
    depth: int = 1
    stages: int = 2
    split: int = 1
    x: torch.dtype = BF16
    out: torch.dtype = BF16

    def __str__(self) -> str:
        cut = f"{self.tokens}x{64 * self.row_groups} k{self.k_groups} {self.depth}x{self.stages}"
        return f"{cut} /{self.split} {NAMES[self.x]} {NAMES[self.out]}"

    @property
    def name(self) -> str:
        cut = (self.tokens, self.row_groups, self.k_groups, self.depth, self.stages)
        numbers = ",".join(str(n) for n in (*cut, self.split, 1))
        return f"nvfp4_wgmma<{NAMES[self.x]},{NAMES[self.out]},{numbers}>"

    @property
    def program(self) -> Program:
        return Program("nvfp4_wgmma.cu", (self.name,))

    @property
    def config(self) -> WgmmaConfig:
        cut = (self.tokens, self.row_groups, self.k_groups, self.depth, self.stages)
        return WgmmaConfig(*cut, self.split)

    @property
    def groups(self) -> int:
        return self.row_groups * self.k_groups

    @property
    def raised(self) -> bool:
        """Whether the producer is a warpgroup that gives registers to the others."""
        return self.tokens > 128

    @property
    def threads(self) -> int:
        return 128 * self.groups + (128 if self.raised else 32)

    @property
    def shared(self) -> int:
        rows = 64 * self.row_groups
        piece = self.tokens if self.tokens < 64 else 48 if self.tokens % 64 else 64
        ring = self.stages * self.depth * (self.tokens * 128 + self.row_groups * 2304)
        # Sums that are a thread's own are rounded first, and turned.
        whole = self.k_groups == 1 and self.split == 1
        sums = piece * (self.row_groups * 144 if whole else self.k_groups * (rows + 4) * 4)
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
    Kernel(96, 3),
    Kernel(192, 3),  # the producer gives registers away
    Kernel(192, 1),
    Kernel(256, 1),
    Kernel(256, 2),
)
SPLITS = (
    Kernel(8, 1, k_groups=2, depth=2, split=2),
    Kernel(16, 2, depth=2, split=3, out=F32),
    Kernel(64, 1, split=4, x=F16, out=F16),
    Kernel(128, 1, split=2, out=F32),  # written in two pieces
    Kernel(8, 1, k_groups=2, depth=4, split=8),
)
EVERY = (*KERNELS, *SPLITS)


@dataclass
class Problem:
    """A weight, what it is multiplied by, and the exact result."""

    x: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor
    row_scale: torch.Tensor
    bias: torch.Tensor | None
    exact: torch.Tensor = field(init=False)
    slack: torch.Tensor = field(init=False)  # how far fp32 sums may be off, in any order

    def __post_init__(self) -> None:
        columns = self.x.shape[1]
        values = e2m1.decode(e2m1.unpack(self.codes)).double()
        weight = values * self.scales.double().repeat_interleave(16, -1)
        weight = weight * self.row_scale.double()[:, None]
        shift = 0.0 if self.bias is None else self.bias.double()
        self.exact = self.x.double() @ weight.T + shift
        size = self.x.double().abs() @ weight.abs().T
        self.slack = 2 * UNIT * ((columns + 8) * size + self.exact.abs())


def problem_of(
    tokens: int,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    *,
    whole: bool = False,
    bias: torch.dtype | None = None,
    seed: int = 0,
) -> Problem:
    """`whole`: sums are exact in fp32, in any order. x has NaN around it, which nobody may read."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    around = torch.full((tokens + 3, columns + 24), float("nan"), dtype=dtype)
    x = around[:tokens, :columns]
    if whole:
        x.copy_(torch.randint(-3, 4, x.shape, generator=generator))
        raw = torch.tensor([0.5, 1.0, 2.0])[
            torch.randint(0, 3, (rows, columns // 16), generator=generator)
        ]
        scales = raw.to(torch.float8_e4m3fn)
        row_scale = 2.0 ** torch.randint(-2, 3, (rows,), generator=generator).float()
        shift = torch.randint(-100, 101, (rows,), generator=generator).float()
    else:
        x.copy_(torch.randn(x.shape, generator=generator))
        # All scales that are not negative: subnormal, zero, the largest.
        every = torch.randint(0, 127, (rows, columns // 16), generator=generator)
        scales = every.to(torch.uint8).view(torch.float8_e4m3fn)
        row_scale = torch.rand(rows, generator=generator) * 2 - 1
        shift = torch.randn(rows, generator=generator) * 100
    return Problem(x, codes, scales, row_scale, None if bias is None else shift.to(bias))


def fitting(kernel: Kernel, size: tuple[int, int, int]) -> tuple[int, int, int]:
    """As it is, or with as many columns as every block of a split needs."""
    tokens, rows, columns = size
    chunks = -(-columns // 64)
    while (kernel.split - 1) * -(-chunks // kernel.split) >= chunks:
        chunks += 1
    return tokens, rows, max(columns, 64 * chunks - 48)


@dataclass
class Lab:
    """Launches the kernel in the emulation."""

    emulator: Emulator

    def run(
        self,
        kernel: Kernel,
        problem: Problem,
        *,
        clusters: int | None = None,
        group: int = 2,
        order: int = 0,
        dependent: bool = True,
        short: int = 0,
    ) -> tuple[torch.Tensor, Traffic]:
        """y; `clusters` do all tiles in turn, `short` bytes of shared memory are missing."""
        tokens, _ = problem.x.shape
        codes, scales = fragments.pack(problem.codes, problem.scales)
        rows = problem.row_scale.numel()
        slabs, chunks, _ = codes.shape
        share = -(-chunks // kernel.split)
        assert (kernel.split - 1) * share < chunks, "a block of the cluster would have nothing"
        token_tiles = -(-tokens // kernel.tokens)
        row_units = -(-slabs // kernel.row_groups)
        y = torch.full((tokens, rows), float("nan"), dtype=kernel.out)
        bias = problem.bias
        given = [problem.x, codes, scales, problem.row_scale]
        params = PARAMS.pack(
            tensor_map(problem.x, kernel.tokens, 64),
            codes.data_ptr(),
            scales.data_ptr(),
            problem.row_scale.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            y.data_ptr(),
            BIAS_KINDS[None if bias is None else bias.dtype],
            *(tokens, rows, slabs, chunks, share, token_tiles, row_units, group),
        )
        traffic = self.emulator.launch(
            kernel.program,
            kernel.name,
            params,
            grid=kernel.split * min(clusters or 1 << 30, token_tiles * row_units),
            block=kernel.threads,
            shared=kernel.shared - short,
            cluster=kernel.split,
            dependent=dependent,
            buffers=[
                *(readable(tensor) for tensor in (*given, *([] if bias is None else [bias]))),
                writable(y),
            ],
            order=order,
        )
        return y, traffic
