"""The variant for ``act="fp8"``: FP8 products on tensor cores that have them.

Tokens are rounded to E4M3 with one scale each, the weight's values are rounded to E4M3 too, as an
eighth of themselves (6 * 448 / 8 = 336 is within E4M3's 448; the factor 8 goes into the row scale).
torch's scaled product applies both scales to its sums, adds the bias and rounds, once, to the dtype
of the result. What that costs is an rms error of 3.4 % of the result's over weights quantised from
normal numbers: 2.1 % from the weight, 2.6 % from the tokens. Over weights drawn from all codes and
scales, of which fewer are exact in E4M3, it is 3.6 %. Without `act` it is 0.17 %, one rounding to
bf16.

Sums stay in the tensor cores ("fast accumulation"), which on Hopper costs them a few bits. Beside
the roundings that is not seen: 3.6 % is what an H200 gives, and what exact sums give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gristmill.formats.nvfp4 import fragments
from gristmill.formats.nvfp4.tensor import E4M3, FRAGMENTS
from gristmill.jit import Program
from gristmill.ops import launch
from gristmill.ops import nvfp4_common as common
from gristmill.ops.nvfp4_common import Weight
from gristmill.ops.nvfp4_linear import semantics
from gristmill.ops.nvfp4_linear.dequantized import (
    STEP,
    Decoder,
    Piece,
    cannot_decode,
    dequantize_program,
    even,
    ranges,
)
from gristmill.ops.nvfp4_linear.fused import cannot_fuse
from gristmill.ops.nvfp4_linear.problem import Details, nothing_to_compute
from gristmill.ops.nvfp4_linear.quantizers import TYPES, fp8_quantizer, quantizer_program
from gristmill.ops.nvfp4_linear.wgmma_configs import fastest_us
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

SHRUNK = 8.0  # the weight in E4M3 is so many times smaller than it is
# Below, cuBLAS takes longer over pieces of the weight than the kernels that round nothing, which
# were 1.4 to 1.9 times as fast at 256 rows over four weights (H200).
LEAST_ROWS = 512
# Where those kernels have no model of their time: at so many rows this was 1.09 to 1.47 times as
# fast over the four weights.
LEAST_ROWS_ELSEWHERE = 1024
# Of the time on an H200, fitted to four weights at 512, 1024 and 4096 rows, which it gives within
# 6% (benchmarks/results/h200-2026-11-15/nvfp4_linear-fp8). Microseconds: launches; the weight, read
# in NVFP4 and written in FP8 (bytes per us); the product (operations per us).
_LAUNCHES, _DECODED, _PRODUCT = 7.2, 2.99e6, 1.397e9
_WEIGHT_BYTES = 9 / 16 + 1  # of an element

_NARROW = (torch.bfloat16, torch.float16)


class ScaledMMFp8(Variant):
    """Forward only: a gradient is rounded to nothing."""

    name = "scaled_mm_fp8"
    summary = "tokens and pieces of the weight rounded to FP8, torch's scaled product of both"

    def supports(self, problem: Problem) -> str | None:
        device = problem.device
        if device.kind != "cuda":
            return f"needs a CUDA device, not {device.kind}"
        if device.capability < (8, 9):
            return f"needs compute capability 8.9 or later, not {device.arch}"
        if "act_fp8" not in problem.flags:
            return "rounds activations to FP8, which only act='fp8' allows"
        if FRAGMENTS in problem.flags and (reason := cannot_decode(problem)) is not None:
            return reason
        if _dtype(problem, "x") not in TYPES:
            return f"takes tokens of 16 or 32 bits, not {problem.dtype('x')}"
        if (reason := nothing_to_compute(problem)) is not None:
            return reason
        if problem.dim("N") % 16:
            return f"torch's scaled product takes rows of a multiple of 16, not {problem.dim('N')}"
        out, bias = _dtype(problem, "out"), problem.layout.bias
        if out not in TYPES:
            return f"sums are taken in fp32: {problem.dtype('out')} needs more"
        # Elsewhere than on Hopper it is not cuBLAS that does it, and what does gives bf16 only.
        if device.capability[0] != 9 and (out != torch.bfloat16 or bias not in (None, out)):
            return f"on {device.arch} torch's scaled product gives bfloat16, with a bias of it"
        return None

    def declines(self, problem: Problem) -> str | None:
        if FRAGMENTS not in problem.flags:
            return f"only layout {FRAGMENTS!r} has a kernel that dequantises"
        on_hopper = problem.device.capability == (9, 0) and cannot_fuse(problem) is None
        least = LEAST_ROWS if on_hopper else LEAST_ROWS_ELSEWHERE
        if problem.rows < least:
            return f"below {least} rows it takes longer than a product that rounds nothing"
        if not on_hopper:
            return None
        exact, mine = fastest_us(problem), estimate(problem)
        if exact < mine:
            return f"would take {mine:.3g} us, and cuda_wgmma, which rounds nothing, {exact:.3g}"
        return None

    def varies_with_batch(self, problem: Problem) -> str | None:
        return "how cuBLAS cuts a sum depends on the number of rows"

    def programs(self, problem: Problem, config: None) -> tuple[Program, ...]:
        tokens = quantizer_program("fp8", _dtype(problem, "x"))
        if FRAGMENTS not in problem.flags:
            return (tokens,)
        return tokens, dequantize_program(E4M3)

    def bind(self, problem: Problem, config: None) -> Callable[..., Any]:
        run = launch.on_device(problem.device.index, _run(problem))
        details: Details = problem.layout
        rows, columns = problem.dim("N"), problem.dim("K")

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
            y = semantics.outputs_forward(x, codes, scales, row_scale, bias, layout, out_dtype, act)
            weight = Weight(codes, scales, row_scale, layout, columns)
            run(details.x_of(x).view(-1, columns), weight, bias, y.view(-1, rows))
            return y

        return plan


def estimate(problem: Problem) -> float:
    """About how many microseconds it takes on an H200, from LEAST_ROWS rows on."""
    elements = problem.dim("N") * problem.dim("K")
    decoded = elements * _WEIGHT_BYTES / _DECODED
    return _LAUNCHES + decoded + 2 * elements * problem.rows / _PRODUCT


def _run(problem: Problem) -> Callable[..., None]:
    """`run(x, weight, bias, out)`."""
    device = problem.device
    rows, columns, lines = problem.dim("N"), problem.dim("K"), problem.rows
    # By torch there is more beside a piece than itself.
    size = 1 if FRAGMENTS in problem.flags else 1 + common.decoding_bytes(torch.bfloat16)
    parts = ranges(rows, even(rows, common.PIECE_BYTES // (size * columns), STEP))
    # Tokens first, and the weight again for each piece of them: there is seldom more than one.
    some = ranges(lines, even(lines, common.PIECE_BYTES // columns, STEP))
    out_dtype, bias_dtype = _dtype(problem, "out"), problem.layout.bias
    # A bias of another dtype would be rounded before it is added, and to fp32 none is added.
    apart = bias_dtype is not None and (bias_dtype != out_dtype or out_dtype not in _NARROW)
    # A product can be written where it belongs only by cuBLAS.
    in_place = device.capability[0] == 9 and not apart
    quantize = fp8_quantizer(device, _dtype(problem, "x"), {len(part) for part in some})
    decode = _decoder(problem, parts)
    room = (len(parts[0]), columns) if FRAGMENTS in problem.flags else (0, 0)

    def run(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        workspace = torch.empty(room, dtype=E4M3, device=x.device)
        size = len(parts[0])
        factors = (weight.row_scale * SHRUNK).unsqueeze(0).split(size, 1)
        shifts: Sequence[torch.Tensor | None] = [None] * len(parts)
        if bias is not None:
            # The product reads a bias as if it were dense, and refuses one that is not aligned.
            shifts = (bias.float() if apart else _aligned(bias)).split(size)
        for lines in some:
            there = slice(lines.start, lines.stop)
            tokens = quantize(x[there])
            results = out[there].split(size, 1)
            for part, factor, shift, result in zip(parts, factors, shifts, results, strict=True):
                block = decode(workspace, weight, part)
                operands = (tokens.values, block, tokens.scale, factor)
                if in_place:
                    multiply(*operands, shift, result)
                    continue
                total = result.new_empty(result.shape, dtype=torch.float32 if apart else out_dtype)
                multiply(*operands, None if apart else shift, total)
                if apart and shift is not None:
                    torch.add(total, shift, out=result)
                else:
                    result.copy_(total)

    return run


def multiply(
    tokens: torch.Tensor,
    block: torch.Tensor,
    token_scale: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """``out = (tokens @ block.T) * token_scale * row_scale + bias``, scaled and added in fp32."""
    torch._scaled_mm(
        tokens,
        block.t(),
        scale_a=token_scale,
        scale_b=row_scale,
        bias=bias,
        out_dtype=out.dtype,
        use_fast_accum=True,
        out=out,
    )


def _aligned(bias: torch.Tensor) -> torch.Tensor:
    bias = bias.contiguous()
    return bias.clone() if bias.data_ptr() % 16 else bias


def _decoder(problem: Problem, parts: list[range]) -> Callable[..., torch.Tensor]:
    """`decode(workspace, weight, rows)`: these rows of the weight in E4M3, an eighth of them."""
    columns = range(problem.dim("K"))
    if FRAGMENTS not in problem.flags:
        return _by_torch
    pieces = {part.start: Piece(part, columns) for part in parts}
    chunks = fragments.padded(0, len(columns))[1]
    decoder = Decoder(problem.device, chunks, E4M3, pieces.values())

    def decode(workspace: torch.Tensor, weight: Weight, rows: range) -> torch.Tensor:
        block = workspace if len(rows) == len(workspace) else workspace[: len(rows)]
        decoder(block, weight.codes, weight.scales, pieces[rows.start])
        return block

    return decode


def _by_torch(workspace: torch.Tensor, weight: Weight, rows: range) -> torch.Tensor:
    return weight.blocks(torch.bfloat16, rows=rows).mul_(1 / SHRUNK).to(E4M3)


def _dtype(problem: Problem, name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, str(problem.dtype(name)))
    return found
