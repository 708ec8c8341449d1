"""The variants that dequantise a piece of the weight at a time and leave the product to cuBLAS.

Elements times block scales are exact in 16 bits, so a piece holds those in x's dtype; the row
scale, which is not, is applied to the fp32 products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gristmill.ops import nvfp4_common as common
from gristmill.ops.nvfp4_common import Weight, arithmetic, decoding_bytes, pieces, product
from gristmill.ops.nvfp4_linear import semantics
from gristmill.ops.nvfp4_linear.problem import nothing_to_compute
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant


class Library(Variant):
    """Both directions: what is computed is the problem's op."""

    name = "library"
    summary = "the weight dequantised in pieces of at most 32 MB, torch's mm for each"

    def supports(self, problem: Problem) -> str | None:
        if problem.device.kind not in ("cuda", "cpu"):
            return f"takes a CUDA device or a CPU, not {problem.device.kind}"
        if problem.dtype("x") == "float64" or problem.dtype("dy") == "float64":
            return "products are taken in fp32 at most"
        return nothing_to_compute(problem)

    def bind(self, problem: Problem, config: None) -> Callable[..., Any]:
        return _backward if problem.op == "nvfp4_linear_backward" else _forward


def _forward(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    layout: str,
    out_dtype: torch.dtype | None,
    act: str | None,
) -> torch.Tensor:
    weight = Weight(codes, scales, row_scale, layout, x.shape[-1])
    y = semantics.outputs_forward(x, codes, scales, row_scale, bias, layout, out_dtype, act)
    rows, out = x.reshape(-1, weight.columns), y.view(-1, weight.rows)
    shift = None if bias is None else bias.float()
    least, _ = weight.least
    some, many = _sizes(x, weight.columns, weight.rows, least)
    for part in pieces(weight.rows, some, least):
        here = slice(part.start, part.stop)
        block = weight.blocks(arithmetic(x), rows=part).t()
        for lines in pieces(len(rows), many):
            there = slice(lines.start, lines.stop)
            total = product(rows[there], block)
            # Written with the rounding to y's dtype, in one kernel.
            if shift is None:
                torch.mul(total, row_scale[here], out=out[there, here])
            else:
                torch.addcmul(shift[here], total, row_scale[here], out=out[there, here])
            del total  # before the next one is made
        del block
    return y


def _backward(
    dy: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    layout: str,
    columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    weight = Weight(codes, scales, row_scale, layout, columns)
    dx = semantics.outputs_backward(dy, codes, scales, row_scale, layout, columns, dtype)
    rows, out = dy.reshape(-1, weight.rows), dx.view(-1, weight.columns)
    part_of_top, top = weight.levelled()
    _, least = weight.least
    some, many = _sizes(dy, weight.rows, weight.columns, least)
    for part in pieces(weight.columns, some, least):
        # The row scale runs along the sum here, so it goes into the piece.
        block = weight.blocks(arithmetic(dy), columns=part).mul_(part_of_top.unsqueeze(-1))
        for lines in pieces(len(rows), many):
            there = slice(lines.start, lines.stop)
            total = product(rows[there], block)
            torch.mul(total, top, out=out[there, part.start : part.stop])
            del total
        del block
    return dx


def _sizes(x: torch.Tensor, inner: int, outer: int, least: int) -> tuple[int, int]:
    """How many columns of the result, `least` or more, and how many rows are computed at a time.

    Half of what a piece may take is for the weight; the rest for the rows' products, and for the
    rows themselves where they have to be converted.
    """
    dtype = arithmetic(x)
    each = inner * decoding_bytes(dtype)
    some = min(outer, max(least, common.PIECE_BYTES // 2 // each))
    row = some * 4 + (inner * dtype.itemsize if dtype != x.dtype else 0)
    return some, max(1, (common.PIECE_BYTES - some * each) // row)
