"""The variant for Hopper: the warpgroup's matrix instruction, for any number of tokens."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gristmill.errors import DriverError
from gristmill.jit import Program
from gristmill.jit.tensor_map import maps_of_rows
from gristmill.ops import launch
from gristmill.ops.nvfp4_linear.fused import BIAS_KINDS, TYPES, cannot_fuse
from gristmill.ops.nvfp4_linear.problem import Details
from gristmill.ops.nvfp4_linear.wgmma_configs import (
    CHUNK,
    WgmmaConfig,
    all_of,
    candidates_of,
    cut_of,
    why_rejected,
)
from gristmill.ops.ready import at_hand
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

SOURCE = "nvfp4_wgmma.cu"

# WgmmaParams: the map of x; codes, scales, row_scale, bias, y; and what is the same for all calls
# of a plan, packed once: bias_kind; tokens, rows, slabs, chunks; share; token_tiles, row_units,
# group; up to a multiple of the struct's alignment.
PARAMS = struct.Struct("<128s5Q88s")
CONSTANTS = struct.Struct("<i8I52x")


class Wgmma(Variant):
    """See kernels/cuda/nvfp4_wgmma.cu."""

    name = "cuda_wgmma"
    summary = "weights decoded into registers, multiplied by warpgroups (sm_90)"
    config_type = WgmmaConfig

    def supports(self, problem: Problem) -> str | None:
        device = problem.device
        if device.kind == "cuda" and device.capability != (9, 0):
            return f"uses instructions of sm_90a alone, not {device.arch}"
        return cannot_fuse(problem)

    def config(self, problem: Problem) -> WgmmaConfig:
        return at_hand(self, problem, all_of(problem))

    def configs(self, problem: Problem) -> Sequence[WgmmaConfig]:
        return candidates_of(problem)

    def all_configs(self, problem: Problem) -> Sequence[WgmmaConfig]:
        return all_of(problem)

    def rejects(self, problem: Problem, config: WgmmaConfig) -> str | None:
        return why_rejected(problem, config)

    def varies_with_batch(self, problem: Problem) -> str | None:
        """Nothing: a token is a column of the product, and columns are summed alike.

        In which order is given by the config's groups, depth and split, and by K. How many tokens
        a tile has, which does depend on their number, is in none of the sums.
        """
        return None

    def programs(self, problem: Problem, config: WgmmaConfig) -> tuple[Program, ...]:
        return (self.program(problem, config),)

    def program(self, problem: Problem, config: WgmmaConfig) -> Program:
        whole = cut_of(problem, config)
        types = (TYPES[str(problem.dtype("x"))], TYPES[str(problem.dtype("out"))])
        sizes = (
            *(whole.tokens, config.row_groups, config.k_groups, whole.depth, whole.stages),
            *(config.split, whole.blocks),
        )
        return Program(SOURCE, (f"nvfp4_wgmma<{','.join(map(str, (*types, *sizes)))}>",))

    def bind(self, problem: Problem, config: WgmmaConfig) -> Callable[..., Any]:
        details: Details = problem.layout
        device, tokens, rows = problem.device, problem.rows, problem.dim("N")
        index, columns = device.index, problem.dim("K")
        whole = cut_of(problem, config)
        if whole.reason is not None:
            raise DriverError(f"{self.name}: no launch by {config}: {whole.reason}")
        program = self.program(problem, config)
        tiles = whole.units
        # The producer of a split takes no part in the meetings of its cluster: one tile each.
        if config.persistent and config.split == 1:
            per_sm = launch.resident_blocks(program, index, whole.threads, whole.shared)
            tiles = min(tiles, per_sm * device.multiprocessors)
        start = launch.prepare(
            launch.KernelCall(
                program,
                program.names[0],
                grid=tiles * config.split,
                block=whole.threads,
                shared=whole.shared,
                params=PARAMS,
                cluster=config.split,
                dependent=True,
            ),
            index,
        )
        dtype = str(problem.dtype("x"))
        box = (whole.tokens, CHUNK)
        map_at = maps_of_rows(index, dtype, 2, columns, tokens, details.x_stride, box)
        constants = CONSTANTS.pack(
            *(BIAS_KINDS[details.bias], tokens, rows, whole.slabs, whole.chunks),
            *(whole.share, whole.token_tiles, whole.row_units, config.group),
        )
        out = getattr(torch, str(problem.dtype("out")))
        copied, x_of = details.copied, details.x_of
        stream, empty = launch.current_stream, torch.empty

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
            start(
                stream(index),
                map_at(x.data_ptr()),
                codes.data_ptr(),
                scales.data_ptr(),
                row_scale.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                y.data_ptr(),
                constants,
            )
            return y

        return launch.on_device(index, plan)
