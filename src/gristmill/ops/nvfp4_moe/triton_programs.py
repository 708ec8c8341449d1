"""The Triton programs of the two products of experts, and the numbers that they take at run time.

Sizes are arguments at run time: another number of tokens never needs another kernel, unless it has
another config, or is few and was not.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from gristmill.formats.nvfp4.tensor import BLOCK, TILES
from gristmill.jit import TritonProgram
from gristmill.ops.linear.programs import TYPES, divisor, is_dependent, program_of
from gristmill.ops.nvfp4_linear.triton_configs import bytes_at_a_time
from gristmill.ops.nvfp4_moe.problem import Details, WeightFacts
from gristmill.ops.nvfp4_moe.triton_configs import FEW, ExpertsConfig
from gristmill.select.problem import Problem

Which = Literal["up", "down"]
PRODUCTS: tuple[Which, Which] = ("up", "down")  # gate and up in one

X = {"bfloat16": "bf16", "float16": "fp16"}
_INTEGERS = {torch.int32: "i32", torch.int64: "i64"}
_TILE_BLOCKS = 4  # scales of a row in a tile


def product_program(problem: Problem, config: ExpertsConfig, which: Which) -> TritonProgram:
    """`nvfp4_experts` of kernels/triton/nvfp4_moe.py for one of the products."""
    details: Details = problem.layout
    gated, few = which == "up", _is_few(problem)
    weight, bias = _weight(details, which)
    x = X[str(problem.dtype("x"))]
    listed = None if few else "*i32"
    step = "i64" if few else None
    mapped = details.expert_map if few else None
    arguments: dict[str, str | None] = {
        "x": f"*{x}",
        "tiles": listed,
        "tile_count": listed,
        "slot_of": listed,
        "ids": f"*{_INTEGERS[details.ids.dtype]}" if few else None,
        "mapped": None if mapped is None else f"*{_INTEGERS[mapped]}",
        "codes": "*u8",
        "scales": "*i8",
        "row_scale": "*fp32",
        "bias": None if bias is None else f"*{TYPES[bias]}",
        "y": f"*{x}" if gated else "*fp32",
        "most_tiles": "i32",
        "topk": "i32",
        "experts": "i32" if few else None,
        "map_size": None if mapped is None else "i32",
        "map_step": None if mapped is None else "i64",
        "ids_row": step,
        "ids_column": step,
        **dict.fromkeys(("rows", "blocks"), "i32"),
        **dict.fromkeys(("x_row", "code_matrix", "code_row", "scale_matrix", "scale_row"), "i64"),
        **dict.fromkeys(("row_scale_matrix", "row_scale_row"), "i64"),
        "limit": "fp32" if gated else None,
        "slope": "fp32" if gated else None,
    }
    constants = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP": config.group,
        "GATED": gated,
        "SLOTS": FEW if few else 0,
        "TILES": details.layout == TILES,
        "EVEN_K": _depth(problem, which) % config.block_k == 0,
        "BYTES": bytes_at_a_time(config.product(), problem.device),
        "ACTIVATION": details.activation if gated else "none",
        "DEPENDENT": is_dependent(problem.device),
        "EMULATED": False,
    }
    divisors = _divisors(problem, which, weight)
    return program_of(
        "nvfp4_moe.py",
        "nvfp4_experts",
        arguments,
        constants,
        divisors,
        config.warps,
        config.stages,
    )


def numbers(problem: Problem, which: Which, tiles: int) -> tuple[int, ...]:
    """The integers that the kernel takes at run time, where there are so many tiles at most."""
    details: Details = problem.layout
    few, found = _is_few(problem), [tiles, problem.dim("k")]
    if few:
        found.append(problem.dim("E"))
        if details.expert_map is not None:
            found += (details.ids.mapped, details.ids.map_stride)
        found += details.ids.strides
    return (*found, *_sizes(problem, which).values())


def _sizes(problem: Problem, which: Which) -> dict[str, int]:
    """Sizes and strides of the product's matrices, by the names of the kernel's parameters."""
    details: Details = problem.layout
    weight, _ = _weight(details, which)
    blocks = _depth(problem, which) // BLOCK
    if weight.codes_strides is None or weight.scales_strides is None:
        raise ValueError("a weight whose rows have gaps between their bytes is not taken")
    scale_matrix, scale_row = weight.scales_strides
    if details.layout == TILES:
        scale_row = math.ceil(blocks / _TILE_BLOCKS)
    code_matrix, code_row = weight.codes_strides
    row_scale_matrix, row_scale_row = weight.row_scale_strides
    return {
        "rows": problem.dim("H") if which == "down" else 2 * problem.dim("I"),
        "blocks": blocks,
        "x_row": details.x_stride if which == "up" else problem.dim("I"),
        "code_matrix": code_matrix,
        "code_row": code_row,
        "scale_matrix": scale_matrix,
        "scale_row": scale_row,
        "row_scale_matrix": row_scale_matrix,
        "row_scale_row": row_scale_row,
    }


def _divisors(problem: Problem, which: Which, weight: WeightFacts) -> dict[str, int]:
    sizes = _sizes(problem, which)
    divisors = {"x": 16, "y": 16}
    divisors |= {name: divisor(sizes[name]) for name in ("rows", "blocks")}
    # Rows of x lie at multiples of 16 bytes, and no more is said of them: one kernel for all.
    divisors["x_row"] = 8
    if weight.aligned:
        divisors |= {"codes": 16, "scales": 16}
        names = ("code_matrix", "code_row", "scale_matrix", "scale_row")
        divisors |= {name: divisor(sizes[name]) for name in names}
    return divisors


def _weight(details: Details, which: Which) -> tuple[WeightFacts, torch.dtype | None]:
    if which == "up":
        return details.w13, details.w13_bias
    return details.w2, details.w2_bias


def _depth(problem: Problem, which: Which) -> int:
    return problem.dim("H" if which == "up" else "I")


def _is_few(problem: Problem) -> bool:
    return problem.rows * problem.dim("k") <= FEW
