"""The variant for ``act="nvfp4"``: Blackwell's tensor cores multiply NVFP4 by NVFP4.

Tokens are rounded to NVFP4, each with an fp32 scale of its own (quantizers.py); the weight is taken
as it is. Block scales are applied by the tensor cores; the scales above those, of a token and of a
row of the weight, to the fp32 sums, so that rows of a weight may have different ones. One rounding,
after the bias. What it costs is the rounding of the tokens: an rms error of about 9.5 % of the
result's, as that of a weight that is rounded in this way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gristmill.formats.nvfp4 import tiles
from gristmill.formats.nvfp4.tensor import BLOCK, TILES
from gristmill.jit import Program
from gristmill.ops import launch
from gristmill.ops import nvfp4_common as common
from gristmill.ops.nvfp4_linear import semantics
from gristmill.ops.nvfp4_linear.dequantized import even, ranges
from gristmill.ops.nvfp4_linear.finish import Finish, finish_program
from gristmill.ops.nvfp4_linear.problem import Details, nothing_to_compute
from gristmill.ops.nvfp4_linear.quantizers import (
    TYPES,
    Nvfp4Tokens,
    nvfp4_quantizer,
    quantizer_program,
)
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

# Columns of the result at a time: as many as fit, and at least so many, for the sake of all SMs.
LEAST = 2048
# Below so many rows a product that rounds no tokens takes no longer, because both wait for the
# weight: on a B200 (by its data sheet 8 TB/s, 2.25 PFLOP/s in bf16) the 9/16 of a byte of a value
# take as long as its products with 79 rows. Not measured.
LEAST_ROWS = 64


class ScaledMM(Variant):
    """Forward only: a gradient is rounded to nothing."""

    name = "scaled_mm"
    summary = "tokens rounded to NVFP4, torch's scaled product of NVFP4 by NVFP4"

    def supports(self, problem: Problem) -> str | None:
        device = problem.device
        if device.kind != "cuda":
            return f"needs a CUDA device, not {device.kind}"
        if device.capability < (10, 0):
            return f"needs tensor cores for NVFP4 (compute capability 10.0), not {device.arch}"
        if "act_nvfp4" not in problem.flags:
            return "rounds activations to NVFP4, which only act='nvfp4' allows"
        if TILES not in problem.flags:
            return f"takes weights in layout {TILES!r}"
        if not hasattr(torch.nn.functional, "scaled_mm"):
            return "this torch has no torch.nn.functional.scaled_mm"
        if not problem.layout.weight_packed:
            return "the parts of the weight are not contiguous and aligned to 16 bytes"
        for name in ("x", "out"):
            if _dtype(problem, name) not in TYPES:
                return f"sums are taken in fp32: {problem.dtype(name)} needs more"
        if (reason := nothing_to_compute(problem)) is not None:
            return reason
        if problem.dim("N") % 16 or problem.dim("K") % 32:
            return "torch's scaled product takes N in multiples of 16 and K in multiples of 32"
        return None

    def declines(self, problem: Problem) -> str | None:
        if problem.rows < LEAST_ROWS:
            return f"below {LEAST_ROWS} rows reading the weight takes longer than exact products"
        return None

    def varies_with_batch(self, problem: Problem) -> str | None:
        return "how cuBLAS cuts a sum depends on the number of rows"

    def programs(self, problem: Problem, config: None) -> tuple[Program, ...]:
        finish = finish_program(_dtype(problem, "out"), token=True, shift="bias" in problem.flags)
        return quantizer_program("nvfp4", _dtype(problem, "x")), finish

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
            shift = None if bias is None else bias.float()
            lines = details.x_of(x).view(-1, columns)
            run(lines, codes, scales, row_scale, shift, y.view(-1, rows))
            return y

        return plan


def _run(problem: Problem) -> Callable[..., None]:
    """`run(x, codes, scales, row_scale, shift, out)`."""
    rows, columns, lines = problem.dim("N"), problem.dim("K"), problem.rows
    parts = ranges(rows, even(rows, max(LEAST, common.PIECE_BYTES // (4 * lines)), tiles.ROWS))
    most = common.PIECE_BYTES // (4 * len(parts[0]))
    some = ranges(lines, max(tiles.ROWS, most - most % tiles.ROWS))
    quantize = nvfp4_quantizer(problem.device, _dtype(problem, "x"), {len(part) for part in some})
    wide = tiles.padded(0, columns // BLOCK)[1]
    shapes = [(len(line), len(part)) for line in some for part in parts]
    finish = Finish(
        problem.device,
        _dtype(problem, "out"),
        rows,
        shapes,
        token=True,
        shift="bias" in problem.flags,
    )

    def run(
        x: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        row_scale: torch.Tensor,
        shift: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        for line in some:
            tokens = quantize(x[line.start : line.stop])
            for part in parts:
                # Rows of whole tiles lie side by side.
                tall = tiles.padded(part.stop, 0)[0]
                levels = scales[part.start * wide : tall * wide]
                total = multiply(tokens, codes[part.start : part.stop], levels)
                at = (line.start, part.start)
                finish(total, row_scale, out, at=at, token=tokens.scale, shift=shift)
                del total  # before the next one is made

    return run


def multiply(tokens: Nvfp4Tokens, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``tokens @ weight.T`` in fp32, without the scales that stand above the blocks'.

    `codes` ``(n, K / 2)`` and `scales`, in tiles, are those of a weight.
    """
    functional, fp4 = torch.nn.functional, torch.float4_e2m1fn_x2
    recipe, order = functional.ScalingType.BlockWise1x16, functional.SwizzleType.SWIZZLE_32_4_4
    result: torch.Tensor = functional.scaled_mm(
        tokens.codes.view(fp4),
        codes.view(fp4).t(),
        scale_a=[tokens.scales],
        scale_recipe_a=[recipe],
        scale_b=[scales],
        scale_recipe_b=[recipe],
        swizzle_a=[order],
        swizzle_b=[order],
        output_dtype=torch.float32,
    )
    return result


def _dtype(problem: Problem, name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, str(problem.dtype(name)))
    return found
