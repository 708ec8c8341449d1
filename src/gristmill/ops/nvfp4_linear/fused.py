"""What the kernels have in common that decode a weight in fragments on its way into a product."""

from __future__ import annotations

import torch

from gristmill.formats.nvfp4.tensor import FRAGMENTS
from gristmill.ops.nvfp4_linear.problem import Details, nothing_to_compute
from gristmill.select.problem import Problem

# By dtype: the kernels' word for x and y, and the kind of a bias (BiasKind of nvfp4_results.cuh).
TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "float"}
BIAS_KINDS = {None: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}

_LARGEST = 2**31 - 256  # sizes are 32-bit numbers, and rounded up to tiles
_MOST_RESULTS = 2**40  # whose tiles a grid has room for, the smallest ones, too


def cannot_fuse(problem: Problem) -> str | None:
    """Why none of these kernels can compute `problem` on any of their GPUs, if so."""
    details: Details = problem.layout
    if problem.device.kind != "cuda":
        return f"needs a CUDA device, not {problem.device.kind}"
    if FRAGMENTS not in problem.flags:
        return f"takes weights in layout {FRAGMENTS!r}"
    if problem.dtype("x") not in ("bfloat16", "float16"):
        return f"takes x of bf16 or fp16, not {problem.dtype('x')}"
    if problem.dtype("out") not in TYPES:
        return f"gives fp32, bf16 or fp16, not {problem.dtype('out')}"
    if details.bias not in BIAS_KINDS:
        return f"takes a bias of fp32, bf16 or fp16, not {details.bias}"
    if not details.weight_packed:
        return "takes codes, scales, row scales and bias that are dense and aligned"
    if max(problem.rows, problem.dim("N"), problem.dim("K")) >= _LARGEST:
        return "a dimension has 2**31 elements or more"
    if problem.rows * problem.dim("N") >= _MOST_RESULTS:
        return f"{problem.rows} rows of {problem.dim('N')} are more than a grid has"
    return nothing_to_compute(problem)
