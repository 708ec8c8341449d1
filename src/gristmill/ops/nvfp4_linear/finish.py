"""From the fp32 sums of a product to a part of the result: scales, bias, rounding in one pass."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import torch

from gristmill.jit import Program
from gristmill.ops import launch
from gristmill.select.device import Device

TYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "float"}
PARAMS = struct.Struct("<QQqQQQIII")  # FinishParams
THREADS, COLUMNS, ROWS = 128, 8, 16  # as in the kernel


def finish_program(dtype: torch.dtype, *, token: bool, shift: bool) -> Program:
    flags = f"{str(token).lower()},{str(shift).lower()}"
    return Program("nvfp4_finish.cu", (f"nvfp4_finish<{TYPES[dtype]},{flags}>",))


def finish_by_kernel(dtype: torch.dtype, columns: int) -> bool:
    """Whether results of `dtype` with so many columns have rows that the kernel can write."""
    return dtype in TYPES and columns % COLUMNS == 0


class Finish:
    """``out = total * token * scale + shift`` for parts of a result of `columns` columns.

    `shapes` are those of the parts: some rows, and some columns from a multiple of 8 on. Where rows
    are not aligned, or of a dtype that the kernel does not have, torch ops do the same.
    """

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        columns: int,
        shapes: Iterable[tuple[int, int]],
        *,
        token: bool = False,
        shift: bool = False,
    ) -> None:
        self._stream, self._index = launch.current_stream, device.index
        self._starts = {}
        if not finish_by_kernel(dtype, columns):
            return
        program = finish_program(dtype, token=token, shift=shift)
        dependent = device.capability >= (9, 0)
        for rows, width in set(shapes):
            grid = -(-rows // ROWS) * _across(width)
            call = launch.KernelCall(
                program, program.names[0], grid, THREADS, 0, PARAMS, dependent=dependent
            )
            self._starts[rows, width] = launch.prepare(call, device.index)

    def __call__(
        self,
        total: torch.Tensor,
        scale: torch.Tensor,
        out: torch.Tensor,
        *,
        at: tuple[int, int],
        token: torch.Tensor | None = None,
        shift: torch.Tensor | None = None,
    ) -> None:
        """The part of `out` that begins `at` a row and a column; `scale` and `shift` are whole.

        `total` is dense and may be overwritten, as many rows have a `token`; all but `out` are fp32
        and contiguous.
        """
        (rows, columns), (row, column) = total.shape, at
        if not self._starts:
            here = slice(column, column + columns)
            shift = None if shift is None else shift[here]
            _by_torch(total, scale[here], out[row : row + rows, here], token, shift)
            return
        stride = out.stride(0)
        self._starts[rows, columns](
            self._stream(self._index),
            total.data_ptr(),
            out.data_ptr() + (row * stride + column) * out.element_size(),
            stride,
            0 if token is None else token.data_ptr(),
            scale.data_ptr() + 4 * column,
            0 if shift is None else shift.data_ptr() + 4 * column,
            rows,
            columns,
            _across(columns),
        )


def _across(columns: int) -> int:
    return -(-columns // (THREADS * COLUMNS))


def _by_torch(
    total: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
    token: torch.Tensor | None,
    shift: torch.Tensor | None,
) -> None:
    if token is not None:
        total.mul_(token)
    # Written with the rounding to out's dtype, in one kernel.
    if shift is None:
        torch.mul(total, scale, out=out)
    else:
        torch.addcmul(shift, total, scale, out=out)
