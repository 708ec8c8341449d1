"""The Triton programs of a product, and the numbers that their kernels take at run time.

M, N and K are arguments at run time. What is compiled depends on dtypes, the config, which strides
are 1, what sizes and strides are multiples of, and whether N and K are multiples of their blocks:
another number of rows never needs another kernel, unless it has another config.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from gristmill.jit import TritonProgram
from gristmill.ops.linear.configs import MatmulConfig
from gristmill.ops.linear.problem import Product
from gristmill.select.device import Device

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
ADD_BLOCK = 512  # elements of the result per program of the kernel that adds partial sums
INT32 = 2**31 - 1
SLACK = 1 << 16  # offsets computed beyond the end of a matrix, and never read


def tiles_program(product: Product, config: MatmulConfig, device: Device) -> TritonProgram:
    """`tiles` of kernels/triton/matmul.py for this product."""
    dtype = f"*{TYPES[product.dtype]}"
    whole = config.split_k == 1
    wide = _wide(product, config.split_k)
    step = "i64" if wide else "i32"
    arguments: dict[str, Any] = {
        "a": dtype,
        "b": dtype,
        "bias": dtype if product.bias and whole else None,
        "c": dtype if whole else "*fp32",
        "pre": dtype if product.pre and whole else None,
        "rows": "i32",
        "columns": "i32",
        "depth": "i32",
        **{name: value if value in (0, 1) else step for name, value in _steps(product).items()},
    }
    constants = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP": config.group,
        "SPLIT": config.split_k,
        "BATCHED": product.batch > 1,
        "EVEN_N": product.columns % config.block_n == 0,
        "EVEN_K": product.depth % (config.block_k * config.split_k) == 0,
        "SWAP": config.swap,
        "EARLY": config.early,
        "LINES": _lines(product, config) if is_dependent(device) else 0,
        "WIDE": wide,
        "ACTIVATION": product.activation if whole else "none",
        "DEPENDENT": is_dependent(device),
        "EMULATED": False,
    }
    divisors = {
        "a": 16 if product.a_aligned else 1,
        "b": 16 if product.b_aligned else 1,
        "c": 16,
        "pre": 16,
        # The number of rows takes part only where rows are contiguous: another number of them
        # should need no other kernel.
        "rows": divisor(product.rows) if product.a_strides[1] == 1 else 1,
        "columns": divisor(product.columns),
        "depth": divisor(product.depth),
        **{name: divisor(value) for name, value in _steps(product).items()},
    }
    return program_of(
        "matmul.py", "tiles", arguments, constants, divisors, config.warps, config.stages
    )


def add_program(product: Product, config: MatmulConfig, device: Device) -> TritonProgram:
    """`add_partials` of kernels/triton/matmul.py for this product."""
    dtype = TYPES[product.dtype]
    return adding_program(
        product.columns,
        config.split_k,
        device,
        out=dtype,
        bias=dtype if product.bias else None,
        pre=dtype if product.pre else None,
        activation=product.activation,
        wide=_wide(product, config.split_k),
    )


def adding_program(
    columns: int,
    split: int,
    device: Device,
    *,
    out: str,
    bias: str | None,
    pre: str | None = None,
    activation: str = "none",
    wide: bool,
) -> TritonProgram:
    """`add_partials` of kernels/triton/matmul.py; `wide`: its offsets may not fit 32 bits."""
    arguments = {
        "partials": "*fp32",
        "bias": bias and f"*{bias}",
        "c": f"*{out}",
        "pre": pre and f"*{pre}",
        "count": "i64" if wide else "i32",
        "columns": "i32",
    }
    constants = {
        "BLOCK": ADD_BLOCK,
        "SPLIT": split,
        "WIDE": wide,
        "ACTIVATION": activation,
        "DEPENDENT": is_dependent(device),
        "EMULATED": False,
    }
    each = divisor(columns)
    divisors = {"partials": 16, "c": 16, "pre": 16, "count": each, "columns": each}
    return program_of("matmul.py", "add_partials", arguments, constants, divisors, 4, 1)


def persistent_program(product: Product, config: MatmulConfig, device: Device) -> TritonProgram:
    """`persistent` of kernels/triton/matmul_persistent.py for this product."""
    dtype = f"*{TYPES[product.dtype]}"
    arguments = {
        "a": dtype,
        "b": dtype,
        "bias": dtype if product.bias else None,
        "c": dtype,
        "pre": dtype if product.pre else None,
        "rows": "i32",
        "columns": "i32",
        "depth": "i32",
        "a_row": "i64",
        "b_row": "i64",
    }
    constants = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP": config.group,
        "PARTS": config.parts,
        "B_TRANSPOSED": product.b_strides[1] == 1,
        "ACTIVATION": product.activation,
        "DEPENDENT": is_dependent(device),
        "EMULATED": False,
    }
    # Rows are at multiples of 16 bytes, 8 elements; of more TMA has no use.
    divisors = dict.fromkeys(("a", "b", "c", "pre"), 16)
    divisors |= dict.fromkeys(("columns", "a_row", "b_row"), 8)
    file, warps, stages = "matmul_persistent.py", config.warps, config.stages
    return program_of(file, "persistent", arguments, constants, divisors, warps, stages)


def program_of(
    source: str,
    function: str,
    arguments: dict[str, Any],
    constants: dict[str, Any],
    divisors: dict[str, int],
    warps: int,
    stages: int,
) -> TritonProgram:
    """`arguments` that have no type, such as None or the stride 1, are constants."""
    signature = {name: kind for name, kind in arguments.items() if isinstance(kind, str)}
    fixed = {name: value for name, value in arguments.items() if name not in signature}
    return TritonProgram(
        source=source,
        function=function,
        signature=tuple(signature.items()),
        constants=(*fixed.items(), *constants.items()),
        divisible=tuple((name, divisors[name]) for name in signature if divisors.get(name, 1) > 1),
        warps=warps,
        stages=stages,
    )


def _lines(product: Product, config: MatmulConfig) -> int:
    """Cache lines of a column of B that its first loads will want, as a power of two."""
    if not config.early or product.b_strides[1] != 1:
        return 0
    elements = (config.stages - 1) * config.block_k
    lines = math.ceil(elements * product.dtype.itemsize / 128)
    return 1 << (lines - 1).bit_length()


def tiles_numbers(product: Product) -> tuple[int, ...]:
    """The integers that `tiles` takes at run time."""
    steps = [value for value in _steps(product).values() if value not in (0, 1)]
    return (product.rows, product.columns, product.depth, *steps)


def _steps(product: Product) -> dict[str, int]:
    """Strides under the names of `tiles`; those of a batch of one are 0.

    A single row has no next one: it takes the kernel that more of them would.
    """
    names = ("a_batch", "a_row", "a_column", "b_batch", "b_row", "b_column")
    steps = dict(zip(names, (*product.a_strides, *product.b_strides), strict=True))
    if product.rows == 1 and product.a_strides[2] == 1:
        steps["a_row"] = product.depth
    return steps


def tma_steps(product: Product) -> tuple[int, int]:
    """Elements from row to row of A, and of B as it lies; a single row has no next one."""
    _, b_row, b_column = product.b_strides
    rows_of_b = product.columns if b_row == 1 else product.depth
    b_step = b_column if b_row == 1 else b_row
    dense_b = product.depth if b_row == 1 else product.columns
    return (
        product.a_strides[1] if product.rows > 1 else _round_up(product.depth),
        b_step if rows_of_b > 1 else _round_up(dense_b),
    )


def _round_up(elements: int) -> int:
    return (elements + 7) // 8 * 8


def _wide(product: Product, split: int) -> bool:
    """Whether an offset may not fit 32 bits."""
    sizes = (product.batch, product.rows, product.columns, product.depth)
    batch, rows, columns, depth = (size + (SLACK if size > 1 else 0) for size in sizes)
    furthest = (
        _reach((batch, rows, depth), product.a_strides),
        _reach((batch, depth, columns), product.b_strides),
        split * product.batch * product.rows * product.columns + SLACK,
    )
    return max(furthest) > INT32


def _reach(sizes: tuple[int, int, int], strides: tuple[int, int, int]) -> int:
    return sum(size * step for size, step in zip(sizes, strides, strict=True))


def divisor(value: int) -> int:
    """The largest power of two up to 16 that divides `value`."""
    return math.gcd(value, 16) if value else 16


def tile_count(product: Product, config: MatmulConfig) -> int:
    across = math.ceil(product.columns / config.block_n)
    return product.batch * math.ceil(product.rows / config.block_m) * across


def is_dependent(device: Device) -> bool:
    """Whether kernels may begin while the one before them ends."""
    return device.capability >= (9, 0)
