"""Activations rounded to FP8 or NVFP4 in one kernel, each token with a scale of its own.

With x one token (a row), in fp32:

    FP8    scale = max(max |x| / 448, 2^-126), x8 = e4m3(x * (1 / scale))
    NVFP4  what gristmill.nvfp4.quantize makes of the token alone, bit by bit

A scale for each token costs nothing where sums are scaled in fp32 anyway, keeps tokens independent
of each other, and needs no second pass over x. On a CPU the same in torch ops.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from gristmill.formats.nvfp4 import quantize, swizzle, tiles
from gristmill.formats.nvfp4.tensor import BLOCK, E4M3
from gristmill.jit import Launch, Program
from gristmill.ops import launch
from gristmill.ops.norm_fp8.reference import quantised
from gristmill.select.device import Device

TYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "float"}
FP8_PARAMS = struct.Struct("<QqQQI")
NVFP4_PARAMS = struct.Struct("<QqQQQII")
THREADS = 256
SHARED = 256  # bytes in which the warps of a block agree on the largest value

KINDS = ("fp8", "nvfp4")


class Fp8Tokens(NamedTuple):
    """`values` E4M3 ``(M, K)``, `scale` fp32 ``(M, 1)``: x is nearly their product."""

    values: torch.Tensor
    scale: torch.Tensor


class Nvfp4Tokens(NamedTuple):
    """`codes` uint8 ``(M, K / 2)``, `scales` E4M3 in tiles, `scale` fp32 ``(M, 1)``."""

    codes: torch.Tensor
    scales: torch.Tensor
    scale: torch.Tensor


def quantizer_program(kind: str, dtype: torch.dtype) -> Program:
    return Program("quantize_tokens.cu", (f"quantize_{kind}<{TYPES[dtype]}>",))


def fp8_quantizer(
    device: Device, dtype: torch.dtype, counts: Iterable[int]
) -> Callable[[torch.Tensor], Fp8Tokens]:
    """What quantises matrices of `dtype` on `device`, of as many rows as one of `counts`.

    Rows have a multiple of 16 columns, and contiguous ones; they begin at multiples of 16 bytes.
    """
    if device.kind != "cuda":
        return fp8_tokens
    starts = _starts("fp8", device, dtype, FP8_PARAMS, {count: count for count in counts})
    stream = launch.current_stream

    def run(x: torch.Tensor) -> Fp8Tokens:
        rows, columns = x.shape
        values = torch.empty((rows, columns), dtype=E4M3, device=x.device)
        scale = x.new_empty((rows, 1), dtype=torch.float32)
        starts[rows](
            stream(device.index),
            x.data_ptr(),
            x.stride(0),
            values.data_ptr(),
            scale.data_ptr(),
            columns,
        )
        return Fp8Tokens(values, scale)

    return run


def nvfp4_quantizer(
    device: Device, dtype: torch.dtype, counts: Iterable[int]
) -> Callable[[torch.Tensor], Nvfp4Tokens]:
    """As `fp8_quantizer`. The padding of the tiles is zeros."""
    if device.kind != "cuda":
        return nvfp4_tokens
    tall = {count: tiles.padded(count, 0)[0] for count in counts}
    starts = _starts("nvfp4", device, dtype, NVFP4_PARAMS, tall)
    stream = launch.current_stream

    def run(x: torch.Tensor) -> Nvfp4Tokens:
        rows, columns = x.shape
        codes = torch.empty((rows, columns // 2), dtype=torch.uint8, device=x.device)
        high, wide = tiles.padded(rows, columns // BLOCK)
        scales = torch.empty(high * wide, dtype=torch.uint8, device=x.device)
        scale = x.new_empty((rows, 1), dtype=torch.float32)
        starts[rows](
            stream(device.index),
            x.data_ptr(),
            x.stride(0),
            codes.data_ptr(),
            scales.data_ptr(),
            scale.data_ptr(),
            rows,
            columns,
        )
        return Nvfp4Tokens(codes, scales.view(E4M3), scale)

    return run


def fp8_tokens(x: torch.Tensor) -> Fp8Tokens:
    """In torch ops."""
    values, scale, _ = quantised(x.float(), None, amax=False)
    return Fp8Tokens(values, scale)


def nvfp4_tokens(x: torch.Tensor) -> Nvfp4Tokens:
    """In torch ops; raises where x is not finite, which the kernel gives a scale of NaN."""
    found = quantize(x.unsqueeze(-2))
    scales = swizzle(found.scales.squeeze(-2))
    return Nvfp4Tokens(found.codes.squeeze(-2), scales, found.global_scale.unsqueeze(-1))


def _starts(
    kind: str,
    device: Device,
    dtype: torch.dtype,
    params: struct.Struct,
    grids: dict[int, int],
) -> dict[int, Launch]:
    """Launches by the number of rows; a block for each of `grids`."""
    program = quantizer_program(kind, dtype)
    dependent = device.capability >= (9, 0)
    return {
        rows: launch.prepare(
            launch.KernelCall(
                program, program.names[0], grid, THREADS, SHARED, params, dependent=dependent
            ),
            device.index,
        )
        for rows, grid in grids.items()
    }
