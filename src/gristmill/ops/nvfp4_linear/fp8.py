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
from gristmill.ops.nvfp4_linear.problem import Details, nothing_to_compute
from gristmill.ops.nvfp4_linear.quantizers import TYPES, fp8_quantizer, quantizer_program
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

SHRUNK = 8.0  # the weight in E4M3 is so many times smaller than it is
# Below, the weight is multiplied in its four bits sooner than rewritten in eight. Speed on an H200
# against the kernels that round nothing, four weights: 0.52 to 0.73 times at 256 rows, 0.87 to 1.12
# at 512, 1.09 to 1.47 at 1024, 1.41 to 1.85 at 4096.
LEAST_ROWS = 1024

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
        if problem.rows < LEAST_ROWS:
            return f"below {LEAST_ROWS} rows it takes longer than a product that rounds nothing"
        if FRAGMENTS not in problem.flags:
            return f"only layout {FRAGMENTS!r} has a kernel that dequantises"
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
