"""The variant for few tokens: weights streamed through the matrix instructions of warps."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gristmill.jit import Program
from gristmill.ops import launch
from gristmill.ops.nvfp4_linear.fused import BIAS_KINDS, TYPES, cannot_fuse
from gristmill.ops.nvfp4_linear.mma_configs import (
    MmaConfig,
    Shares,
    Slots,
    candidates,
    partial_floats,
    why_rejected,
)
from gristmill.ops.nvfp4_linear.problem import Details
from gristmill.ops.ready import at_hand
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

SOURCE = "nvfp4_mma.cu"
MOST_TOKENS = 128
MOST_TOKENS_ON_HOPPER = 16

# MmaParams: codes, scales, row_scale, x, bias, y, partials; and what is the same for all calls of
# a plan, packed once: x_stride; bias_kind; tokens, rows, columns; slabs, chunks; tiles, workers;
# shares, share, rounds; slot_rounds, slots.
PARAMS = struct.Struct("<7Q64s")
CONSTANTS = struct.Struct("<qi3I2I2I3I2I4x")
ADD_THREADS = 256


class Mma(Variant):
    """See kernels/cuda/nvfp4_mma.cu."""

    name = "cuda_mma"
    summary = "weights streamed through registers into warps' matrix instructions, for few tokens"
    config_type = MmaConfig

    def supports(self, problem: Problem) -> str | None:
        device = problem.device
        if device.kind == "cuda" and device.capability < (8, 0):
            return f"needs compute capability 8.0 or later, not {device.arch}"
        return cannot_fuse(problem)

    def declines(self, problem: Problem) -> str | None:
        if problem.rows > MOST_TOKENS:
            return f"decodes the weight anew for every 64 tokens; for up to {MOST_TOKENS}"
        return None

    def config(self, problem: Problem) -> MmaConfig:
        return at_hand(self, problem, candidates(problem))

    def configs(self, problem: Problem) -> Sequence[MmaConfig]:
        found = candidates(problem)
        return found if self._competes(problem) else found[:1]

    def _competes(self, problem: Problem) -> bool:
        """Whether it can be the fastest.

        On an H200 ten of 22 weights were, at 1 row by up to 6%, and one at 16 rows. At 32 to 128
        rows it took at least 1.6 times as long as `cuda_wgmma` in all of 27 problems.
        """
        if problem.device.capability == (9, 0) and problem.rows > MOST_TOKENS_ON_HOPPER:
            return False
        return self.declines(problem) is None

    def rejects(self, problem: Problem, config: MmaConfig) -> str | None:
        return why_rejected(problem, config)

    def varies_with_batch(self, problem: Problem) -> str | None:
        """Nothing: a token is a column of the product, and columns are summed alike.

        In which order is given by the config, N and K. How many tiles a block does one after
        another, which does depend on the number of tokens, is in none of the sums.
        """
        return None

    def programs(self, problem: Problem, config: MmaConfig) -> tuple[Program, ...]:
        return (self.program(problem, config),)

    def program(self, problem: Problem, config: MmaConfig) -> Program:
        """The kernel and, where it leaves partial sums, the one that adds them."""
        types = f"{TYPES[str(problem.dtype('x'))]},{TYPES[str(problem.dtype('out'))]}"
        cluster = 1 if config.partial else config.shares
        shape = f"{config.tokens},{config.slabs},{config.groups},{config.depth},{cluster}"
        names = [f"nvfp4_mma<{types},{shape},{str(config.partial).lower()}>"]
        if config.partial:
            names.append(f"nvfp4_mma_add<{types}>")
        return Program(SOURCE, tuple(names))

    def bind(self, problem: Problem, config: MmaConfig) -> Callable[..., Any]:
        details: Details = problem.layout
        index = problem.device.index
        tokens, rows, columns = problem.rows, problem.dim("N"), problem.dim("K")
        shares = Shares.of(rows, columns, config)
        program = self.program(problem, config)
        token_tiles = math.ceil(tokens / config.tokens)
        workers, slots = self._workers(problem, config, program, shares, token_tiles)
        dependent = problem.device.capability >= (9, 0)
        start = launch.prepare(
            launch.KernelCall(
                program,
                program.names[0],
                grid=token_tiles * workers * config.shares,
                block=config.threads,
                shared=slots.bytes(config),
                params=PARAMS,
                cluster=1 if config.partial else config.shares,
                dependent=dependent,
            ),
            index,
        )
        add = None
        quads = math.ceil(rows / 4)
        if config.partial:
            grid = math.ceil(tokens * quads / ADD_THREADS)
            call = launch.KernelCall(
                program, program.names[1], grid, ADD_THREADS, 0, PARAMS, dependent=dependent
            )
            add = launch.prepare(call, index)
        stream = launch.current_stream
        constants = CONSTANTS.pack(
            *(details.x_stride, BIAS_KINDS[details.bias], tokens, rows, columns),
            *(shares.slabs, shares.chunks, shares.tiles, workers),
            *(config.shares, shares.share, shares.rounds, slots.rounds, slots.count),
        )
        partials_size = partial_floats(problem, config)
        out = getattr(torch, str(problem.dtype("out")))
        copied, x_of, empty = details.copied, details.x_of, torch.empty

        def plan(
            x: torch.Tensor,
            codes: torch.Tensor,
            scales: torch.Tensor,
            row_scale: torch.Tensor,
            bias: torch.Tensor | None,
            layout: str,
            out_dtype: torch.dtype | None,
            act: str | None,
        ) -> torch.Tensor:
            y = empty((*x.shape[:-1], rows), dtype=out, device=x.device)
            if copied:
                x = x_of(x)
            partials = x.new_empty(partials_size, dtype=torch.float32) if add else None
            values = (
                codes.data_ptr(),
                scales.data_ptr(),
                row_scale.data_ptr(),
                x.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                y.data_ptr(),
                0 if partials is None else partials.data_ptr(),
                constants,
            )
            start(stream(index), *values)
            if add is not None:
                add(stream(index), *values)
            return y

        return launch.on_device(index, plan)

    def _workers(
        self,
        problem: Problem,
        config: MmaConfig,
        program: Program,
        shares: Shares,
        token_tiles: int,
    ) -> tuple[int, Slots]:
        """How many tiles of rows are done at a time, and where tokens lie meanwhile.

        As many as the device runs at once, evened out over the passes that take: what is dealt in
        seven passes to 132 blocks is done as soon by 128.
        """
        slots = Slots.of(shares, config, 1, problem.device)
        for _ in range(2):
            resident = self._resident(problem, config, program, slots.bytes(config))
            passes = math.ceil(shares.tiles / max(1, resident // token_tiles))
            staying = Slots.of(shares, config, passes, problem.device)
            if staying == slots:
                break
            slots = staying
        return math.ceil(shares.tiles / passes), slots

    def _resident(self, problem: Problem, config: MmaConfig, program: Program, shared: int) -> int:
        """Tiles that the device works on at once: of as many blocks as share one."""
        index = problem.device.index
        if config.shares > 1 and not config.partial:
            return launch.resident_clusters(program, index, config.threads, shared, config.shares)
        per_sm = launch.resident_blocks(program, index, config.threads, shared)
        return max(1, per_sm * problem.device.multiprocessors // config.shares)
