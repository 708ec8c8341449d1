"""The Triton variant of `nvfp4_linear`: weights in a checkpoint's order, on any GPU since sm_80.

It takes weights that nobody prepared, and those of Blackwell, whose codes keep that order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gristmill.formats.nvfp4.tensor import BLOCK, ROWS, TILES
from gristmill.jit import TritonProgram
from gristmill.ops import launch
from gristmill.ops.linear.programs import (
    ADD_BLOCK,
    INT32,
    SLACK,
    TYPES,
    adding_program,
    divisor,
    is_dependent,
    program_of,
)
from gristmill.ops.nvfp4_linear import semantics
from gristmill.ops.nvfp4_linear.problem import Details, nothing_to_compute
from gristmill.ops.nvfp4_linear.triton_configs import (
    RowsConfig,
    bytes_at_a_time,
    candidates,
    tile_count,
    why_rejected,
)
from gristmill.ops.ready import at_hand, out_of_reach
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

_X = {"bfloat16": "bf16", "float16": "fp16"}
_OUT = {**_X, "float32": "fp32"}
# Beyond, tiles of rows that each decode the weight anew cost more than to do it once and leave the
# rest to cuBLAS: an estimate from counted instructions and moved bytes, not a measurement.
_MOST_ROWS = 1024
_TILE_BLOCKS = 4  # scales of a row in a tile
_LEAST_ALIGNED = 8  # bytes; every weight that lies alone has such rows


class TritonLinear(Variant):
    """Tiles of the result, one per program, or several programs each, with a share of K.

    The bits of a row do not depend on the other rows: which rows share a tile changes nothing in a
    row's sum, whose order along K is given by the config alone, and a config that is asked for with
    a fixed number of rows does not change with theirs. Rows beyond the end are zeros in the tile,
    and touch no other row. Shares of K are added in their order, so two runs give the same bits.
    """

    name = "triton"
    summary = "one Triton program per tile, weights in a checkpoint's order decoded in registers"
    config_type = RowsConfig

    def supports(self, problem: Problem) -> str | None:
        device = problem.device
        if device.kind != "cuda":
            return f"needs a CUDA device, not {device.kind}"
        if device.capability < (8, 0):
            return f"needs compute capability 8.0 or later, not {device.arch}"
        return nothing_to_compute(problem) or _unable(problem)

    def declines(self, problem: Problem) -> str | None:
        details: Details = problem.layout
        if not details.weight_aligned or (details.codes_stride or 0) % _LEAST_ALIGNED:
            return "a weight whose rows are not aligned is read byte by byte"
        if problem.rows > _MOST_ROWS:
            return (
                f"for more than {_MOST_ROWS} rows it should take less time to dequantise the "
                f"weight once than in every tile"
            )
        return out_of_reach(self, problem)

    def config(self, problem: Problem) -> RowsConfig:
        return at_hand(self, problem, self.configs(problem))

    def configs(self, problem: Problem) -> Sequence[RowsConfig]:
        return candidates(problem.rows, problem.dim("N"), problem.dim("K"), problem.device)

    def rejects(self, problem: Problem, config: RowsConfig) -> str | None:
        sizes = (problem.rows, problem.dim("N"), problem.dim("K"))
        return why_rejected(config, *sizes, problem.device)

    def varies_with_batch(self, problem: Problem) -> str | None:
        return None

    def programs(self, problem: Problem, config: RowsConfig) -> tuple[TritonProgram, ...]:
        first = linear_program(problem, config)
        return (first,) if config.split_k == 1 else (first, add_program(problem, config))

    def bind(self, problem: Problem, config: RowsConfig) -> Callable[..., Any]:
        device, details = problem.device, problem.layout
        rows, columns = problem.rows, problem.dim("N")
        dependent, split, count = is_dependent(device), config.split_k, rows * columns
        programs = self.programs(problem, config)
        grid = tile_count(config, rows, columns) * split
        first = launch.prepare_separate(programs[0], device.index, grid=grid, dependent=dependent)
        numbers = _numbers(problem)
        stream = launch.current_stream

        def whole(weight: tuple[int, ...], bias: tuple[int, ...], y: int) -> None:
            first(stream(device.index), *weight, *bias, y, *numbers, 0, 0)

        def shared(weight: tuple[int, ...], bias: tuple[int, ...], y: int) -> None:
            # Freed when this returns, and used again only by what runs after the kernels.
            partials = launch.empty(split * count, torch.float32, device.index)
            now, at = stream(device.index), partials.data_ptr()
            first(now, *weight, at, *numbers, 0, 0)
            second(now, at, *bias, y, count, columns, 0, 0)

        run = whole
        if split > 1:
            grid = math.ceil(count / ADD_BLOCK)
            second = launch.prepare_separate(
                programs[1], device.index, grid=grid, dependent=dependent
            )
            run = shared
        return _plan(details, launch.on_device(device.index, run))


def _unable(problem: Problem) -> str | None:
    """Why the kernel cannot take this call, wherever it runs."""
    details: Details = problem.layout
    if details.layout not in (ROWS, TILES):
        return f"reads weights in a checkpoint's order, not in layout {details.layout!r}"
    if problem.dtype("x") not in _X:
        return f"multiplies in 16 bits; x is {problem.dtype('x')}"
    if problem.dtype("out") not in _OUT:
        return f"computes in fp32: {problem.dtype('out')} needs more"
    if details.bias not in (None, *TYPES):
        return f"adds a bias of fp32, bf16 or fp16, not {details.bias}"
    if details.layout == TILES and not details.weight_packed:
        return "takes codes and scales in tiles that are contiguous and aligned to 16 bytes"
    if details.codes_stride is None or (details.layout == ROWS and details.scales_stride is None):
        return "the bytes of a row of codes or scales are not side by side"
    if max(problem.rows, problem.dim("N"), problem.dim("K")) > INT32 - SLACK:
        return "a dimension has 2**31 elements or more"
    if problem.rows * problem.dim("N") // 256 > INT32 // 8:
        return "more tiles than a grid has"
    return None


def linear_program(problem: Problem, config: RowsConfig) -> TritonProgram:
    """`nvfp4_linear` of kernels/triton/nvfp4.py for this problem.

    M, N and K are arguments at run time: another number of rows never needs another kernel, unless
    it has another config.
    """
    details: Details = problem.layout
    whole, dependent = config.split_k == 1, is_dependent(problem.device)
    out = _OUT[str(problem.dtype("out"))] if whole else "fp32"
    bias = details.bias if whole else None
    arguments = {
        "x": f"*{_X[str(problem.dtype('x'))]}",
        "codes": "*u8",
        "scales": "*i8",
        "row_scale": "*fp32",
        "bias": None if bias is None else f"*{TYPES[bias]}",
        "y": f"*{out}",
        **dict.fromkeys(("rows", "columns", "blocks"), "i32"),
        **dict.fromkeys(("x_row", "code_row", "scale_row"), "i64"),
    }
    constants = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "SPLIT": config.split_k,
        "TILES": details.layout == TILES,
        "EVEN_K": problem.dim("K") % (config.block_k * config.split_k) == 0,
        "BYTES": bytes_at_a_time(config, problem.device),
        "EARLY": config.early,
        "LINES": _lines(config) if dependent else 0,
        "DEPENDENT": dependent,
        "EMULATED": False,
    }
    _, columns, blocks, _, code_row, scale_row = _numbers(problem)
    divisors = {"x": 16, "y": 16, "columns": divisor(columns), "blocks": divisor(blocks)}
    # Rows of x lie at multiples of 16 bytes, and no more is said of them: one kernel for all.
    divisors["x_row"] = 8
    if details.weight_aligned:
        divisors |= {"codes": 16, "scales": 16}
        divisors |= {"code_row": divisor(code_row), "scale_row": divisor(scale_row)}
    return program_of(
        "nvfp4.py", "nvfp4_linear", arguments, constants, divisors, config.warps, config.stages
    )


def add_program(problem: Problem, config: RowsConfig) -> TritonProgram:
    """`add_partials` of kernels/triton/matmul.py for this problem."""
    details: Details = problem.layout
    columns = problem.dim("N")
    return adding_program(
        columns,
        config.split_k,
        problem.device,
        out=_OUT[str(problem.dtype("out"))],
        bias=None if details.bias is None else TYPES[details.bias],
        wide=config.split_k * problem.rows * columns + SLACK > INT32,
    )


def _numbers(problem: Problem) -> tuple[int, ...]:
    """The integers that the kernel takes at run time: sizes, and strides from row to row.

    A single row of a weight has no next one. Of scales in tiles: how many tiles are side by side.
    """
    details: Details = problem.layout
    blocks = problem.dim("K") // BLOCK
    code_row = details.codes_stride or blocks * BLOCK // 2
    scale_row = details.scales_stride or blocks
    if details.layout == TILES:
        scale_row = math.ceil(blocks / _TILE_BLOCKS)
    return problem.rows, problem.dim("N"), blocks, details.x_stride, code_row, scale_row


def _lines(config: RowsConfig) -> int:
    """Cache lines of a row of codes that its first loads will want, as a power of two."""
    if not config.early:
        return 0
    lines = math.ceil((config.stages - 1) * config.block_k / 2 / 128)
    return 1 << (lines - 1).bit_length()


def _plan(details: Details, run: Callable[..., None]) -> Callable[..., Any]:
    def linear(
        x: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        row_scale: torch.Tensor,
        bias: torch.Tensor | None,
        layout: str,
        out_dtype: torch.dtype | None,
        act: str | None,
    ) -> torch.Tensor:
        y = semantics.outputs_forward(x, codes, scales, row_scale, bias, layout, out_dtype, act)
        # Copies, if any, live until the kernel is in its queue.
        x, row_scale = details.x_of(x), row_scale.contiguous()
        pointers = (x.data_ptr(), codes.data_ptr(), scales.data_ptr(), row_scale.data_ptr())
        if bias is None:
            run(pointers, (), y.data_ptr())
        else:
            bias = bias.contiguous()
            run(pointers, (bias.data_ptr(),), y.data_ptr())
        return y

    return linear
