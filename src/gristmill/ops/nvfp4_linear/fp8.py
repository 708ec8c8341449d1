"""The variant for ``act="fp8"``: FP8 products on tensor cores that have them.

Tokens are rounded to E4M3 with one scale each, the weight's values are rounded to E4M3 too, as an
eighth of themselves (6 * 448 / 8 = 336 is within E4M3's 448; the factor 8 goes into the row scale).
torch's scaled product applies both scales to its sums, adds the bias and rounds, once, to the dtype
of the result. What that costs, relative to the same call without `act`, is an rms error of about
3.4 % of the result's: 2.2 % from the weight, 2.6 % from the tokens.

Sums stay in the tensor cores ("fast accumulation"), which on Hopper costs them a few bits: little
beside the rounding of what is summed.
"""

from __future__ import annotations

from collections.abc import Callable
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
LEAST_ROWS = 256  # below, the weight is read in its four bits sooner than written in eight

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
            return f"below {LEAST_ROWS} rows reading the weight takes longer than its products"
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
    room = len(parts[0]) * columns if FRAGMENTS in problem.flags else 0

    def run(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        workspace = torch.empty(room, dtype=E4M3, device=x.device)
        scale = (weight.row_scale * SHRUNK).unsqueeze(0)
        shift = bias.float() if apart and bias is not None else None
        for there in (slice(part.start, part.stop) for part in some):
            tokens = quantize(x[there])
            for part in parts:
                here = slice(part.start, part.stop)
                block = decode(workspace, weight, part)
                factors = (tokens.scale, scale[:, here])
                if in_place:
                    own = None if bias is None else bias[here]
                    multiply(tokens.values, block, *factors, own, out[there, here])
                    continue
                total = out.new_empty(
                    (len(tokens.values), len(part)), dtype=torch.float32 if apart else out_dtype
                )
                own = None if apart or bias is None else bias[here]
                multiply(tokens.values, block, *factors, own, total)
                if shift is None:
                    out[there, here] = total
                else:
                    torch.add(total, shift[here], out=out[there, here])

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


def _decoder(problem: Problem, parts: list[range]) -> Callable[..., torch.Tensor]:
    """`decode(workspace, weight, rows)`: these rows of the weight in E4M3, an eighth of them."""
    columns = range(problem.dim("K"))
    if FRAGMENTS not in problem.flags:
        return _by_torch
    pieces = {part: Piece(part, columns) for part in parts}
    chunks = fragments.padded(0, len(columns))[1]
    decoder = Decoder(problem.device, chunks, E4M3, pieces.values())

    def decode(workspace: torch.Tensor, weight: Weight, rows: range) -> torch.Tensor:
        return decoder(workspace, weight.codes, weight.scales, pieces[rows])

    return decode


def _by_torch(workspace: torch.Tensor, weight: Weight, rows: range) -> torch.Tensor:
    return weight.blocks(torch.bfloat16, rows=rows).mul_(1 / SHRUNK).to(E4M3)


def _dtype(problem: Problem, name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, str(problem.dtype(name)))
    return found
