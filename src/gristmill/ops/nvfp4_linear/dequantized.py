"""The variant that dequantises a weight in fragments by a kernel, and multiplies by cuBLAS.

Elements times block scales are exact in 16 bits, so the workspace holds those in the dtype of the
products; what is not exact, the row scale, is applied to the fp32 sums. Backward it runs along the
sums: there the workspace holds values times the rows' share of the largest row scale, rounded,
which is one where the weight has a single global scale.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch

from gristmill.formats.nvfp4 import fragments
from gristmill.formats.nvfp4.tensor import FRAGMENTS
from gristmill.jit import Program
from gristmill.ops import launch
from gristmill.ops import nvfp4_common as common
from gristmill.ops.linear_cross_entropy.products import product_into
from gristmill.ops.nvfp4_common import Weight
from gristmill.ops.nvfp4_linear import semantics
from gristmill.ops.nvfp4_linear.finish import Finish, finish_by_kernel, finish_program
from gristmill.ops.nvfp4_linear.problem import Details, nothing_to_compute
from gristmill.select.device import Device
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "float",
    torch.float8_e4m3fn: "f8",
}
PARAMS = struct.Struct("<4Qq4I")  # DequantizeParams
GROUP = 4  # chunks of a block, as in the kernel
THREADS = 128

# A product is worth its launch where its tiles, of so many rows and columns, fill the GPU.
TILE = 128
STEP = 256  # results are cut into multiples of this many columns, where they have as many
WIDE = 2048  # columns for which a sum may be cut, when rows are few
LEAST_LINES = 1024  # rows, if there are as many, that pieces of the result leave room for


class Dequantized(Variant):
    """Both directions: what is computed is the problem's op."""

    name = "dequantized"
    summary = "a kernel dequantises pieces of at most 32 MB, torch's mm multiplies each"

    def supports(self, problem: Problem) -> str | None:
        reason = cannot_decode(problem)
        if reason is not None:
            return reason
        dtype = _multiplied(problem)
        if dtype not in TYPES:
            return f"products are taken in fp32 at most, not in {str(dtype).removeprefix('torch.')}"
        return nothing_to_compute(problem)

    def varies_with_batch(self, problem: Problem) -> str | None:
        return "how cuBLAS cuts a sum depends on the number of rows"

    def programs(self, problem: Problem, config: None) -> tuple[Program, ...]:
        decode = dequantize_program(_multiplied(problem), factor=_is_backward(problem))
        dtype, columns = _result(problem), problem.dim("K" if _is_backward(problem) else "N")
        if not finish_by_kernel(dtype, columns):
            return (decode,)
        return decode, finish_program(dtype, token=False, shift="bias" in problem.flags)

    def bind(self, problem: Problem, config: None) -> Callable[..., Any]:
        return _backward(problem) if _is_backward(problem) else _forward(problem)


def cannot_decode(problem: Problem) -> str | None:
    """Why the kernel that dequantises cannot take the weight of a problem, if so."""
    device, details = problem.device, problem.layout
    if device.kind != "cuda":
        return f"needs a CUDA device, not {device.kind}"
    if device.capability < (8, 0):
        return f"needs compute capability 8.0 or later, not {device.arch}"
    if FRAGMENTS not in problem.flags:
        return f"takes weights in layout {FRAGMENTS!r}"
    if isinstance(details, Details) and not details.weight_packed:
        return "the parts of the weight are not contiguous and aligned to 16 bytes"
    return None


def dequantize_program(dtype: torch.dtype, *, factor: bool = False) -> Program:
    name = f"nvfp4_dequantize<{TYPES[dtype]},{str(factor).lower()}>"
    return Program("nvfp4_dequantize.cu", (name,))


@dataclass(frozen=True)
class Piece:
    """Some rows and columns of a weight; they begin at a slab and at a chunk.

    Made when a plan is, and asked at every call: what it has computed it keeps.
    """

    rows: range
    columns: range

    @cached_property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), len(self.columns)

    @cached_property
    def groups(self) -> int:
        """Blocks of the kernel for one slab."""
        return -(-len(self.columns) // (fragments.COLUMNS * GROUP))

    @cached_property
    def grid(self) -> int:
        return -(-len(self.rows) // fragments.ROWS) * self.groups


class Decoder:
    """Dequantises pieces of one weight into matrices, dense ones of their shape.

    `factor`: each row is multiplied by a number of its own.
    """

    def __init__(
        self,
        device: Device,
        chunks: int,
        dtype: torch.dtype,
        pieces: Iterable[Piece],
        *,
        factor: bool = False,
    ) -> None:
        program = dequantize_program(dtype, factor=factor)
        self._chunks, self._index = chunks, device.index
        self._stream = launch.current_stream
        dependent = device.capability >= (9, 0)
        self._starts = {
            grid: launch.prepare(
                launch.KernelCall(
                    program, program.names[0], grid, THREADS, 0, PARAMS, dependent=dependent
                ),
                device.index,
            )
            for grid in {piece.grid for piece in pieces}
        }

    def __call__(
        self,
        out: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        piece: Piece,
        factor: torch.Tensor | None = None,
    ) -> None:
        rows, columns = piece.shape
        first = piece.rows.start // fragments.ROWS * self._chunks
        first += piece.columns.start // fragments.COLUMNS
        self._starts[piece.grid](
            self._stream(self._index),
            codes.data_ptr() + first * fragments.CODES,
            scales.data_ptr() + first * fragments.SCALES,
            0 if factor is None else factor.data_ptr() + 4 * piece.rows.start,
            out.data_ptr(),
            columns,
            self._chunks,
            rows,
            columns,
            piece.groups,
        )


@dataclass(frozen=True)
class Cut:
    """How a product ``(lines, inner) @ (inner, outer)`` is cut: sizes of a piece of each dim."""

    lines: int
    outer: int
    inner: int


def cut(lines: int, outer: int, inner: int, size: int, multiprocessors: int) -> Cut:
    """Pieces within PIECE_BYTES: of the weight, `size` bytes a value, and of the fp32 sums.

    A sum is cut, too, and its parts added to each other, where whole ones would leave too few
    columns for all multiprocessors.
    """
    values = common.PIECE_BYTES // size
    filling = TILE * max(1, multiprocessors // -(-lines // TILE))
    fitting = min(values // inner, common.PIECE_BYTES // (4 * min(lines, LEAST_LINES)))
    some = even(outer, max(fitting, min(filling, WIDE)), STEP)
    depth = even(inner, values // some, fragments.COLUMNS)
    return Cut(even(lines, common.PIECE_BYTES // (4 * some), TILE), some, depth)


def even(total: int, most: int, step: int) -> int:
    """The size of equal parts of `total`: at most `most`, of whole steps where there are many."""
    if total <= most:
        return total
    small = fragments.COLUMNS
    step = step if most >= step else small
    most = max(small, most - most % step)
    each = -(-total // -(-total // most))
    return min(most, -(-each // step) * step)


def ranges(total: int, step: int) -> list[range]:
    return [range(start, min(start + step, total)) for start in range(0, total, step)]


def _forward(problem: Problem) -> Callable[..., torch.Tensor]:
    rows, columns = problem.dim("N"), problem.dim("K")
    run = _product(problem, rows, columns, backward=False)

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
        run(x.reshape(-1, columns), codes, scales, None, row_scale, shift, y.view(-1, rows))
        return y

    return plan


def _backward(problem: Problem) -> Callable[..., torch.Tensor]:
    rows, width = problem.dim("N"), problem.dim("K")
    run = _product(problem, width, rows, backward=True)

    def plan(
        dy: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        row_scale: torch.Tensor,
        layout: str,
        columns: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        dx = semantics.outputs_backward(dy, codes, scales, row_scale, layout, columns, dtype)
        share, top = Weight(codes, scales, row_scale, layout, columns).levelled()
        scale = top.expand(width).contiguous()
        run(dy.reshape(-1, rows), codes, scales, share, scale, None, dx.view(-1, width))
        return dx

    return plan


def _product(problem: Problem, outer: int, inner: int, *, backward: bool) -> Callable[..., None]:
    """`run(x, codes, scales, factor, scale, shift, out)`.

    ``out = (x @ weight.T) * scale + shift``, or backward ``x @ (factor * weight) * scale``; scale
    and shift have a number for each of the `outer` columns of the result.
    """
    device, dtype = problem.device, _multiplied(problem)
    sizes = cut(problem.rows, outer, inner, dtype.itemsize, device.multiprocessors or 1)
    parts, depths = ranges(outer, sizes.outer), ranges(inner, sizes.inner)
    lines = ranges(problem.rows, sizes.lines)

    def piece(part: range, depth: range) -> Piece:
        return Piece(depth, part) if backward else Piece(part, depth)

    chunks = fragments.padded(0, problem.dim("K"))[1]
    pieces = [[piece(part, depth) for depth in depths] for part in parts]
    decode = Decoder(device, chunks, dtype, chain.from_iterable(pieces), factor=backward)
    shapes = {(len(some), len(part)) for some in lines for part in parts}
    finish = Finish(device, _result(problem), outer, shapes, shift="bias" in problem.flags)
    room = sizes.outer * sizes.inner
    of_block = {one.shape for one in chain.from_iterable(pieces)}

    def run(
        x: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        factor: torch.Tensor | None,
        scale: torch.Tensor,
        shift: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        # Views are made once for all pieces: there are many of these, and each costs the host time.
        blocks = _matrices(x.new_empty(room), of_block)
        right = blocks if backward else {shape: block.t() for shape, block in blocks.items()}
        sums = _matrices(x.new_empty(sizes.lines * sizes.outer, dtype=torch.float32), shapes)
        left = [
            [x[some.start : some.stop, depth.start : depth.stop] for depth in depths]
            for some in lines
        ]
        for part, deep in zip(parts, pieces, strict=True):
            for some, rows in zip(lines, left, strict=True):
                total = sums[len(some), len(part)]
                for one, depth, columns in zip(deep, depths, rows, strict=True):
                    if some.start == 0 or len(deep) > 1:  # else it is there from the lines before
                        decode(blocks[one.shape], codes, scales, one, factor)
                    product_into(total, columns, right[one.shape], add=depth.start > 0)
                finish(total, scale, out, at=(some.start, part.start), shift=shift)

    return launch.on_device(device.index, run)


def _matrices(
    workspace: torch.Tensor, shapes: Iterable[tuple[int, int]]
) -> dict[tuple[int, int], torch.Tensor]:
    """Matrices of these shapes, all of them at the start of a workspace."""
    return {shape: workspace[: shape[0] * shape[1]].view(shape) for shape in shapes}


def _is_backward(problem: Problem) -> bool:
    return problem.op == "nvfp4_linear_backward"


def _multiplied(problem: Problem) -> torch.dtype:
    """The dtype in which products are taken: that of the rows that come."""
    found: torch.dtype = getattr(torch, str(problem.dtype("dy" if _is_backward(problem) else "x")))
    return found


def _result(problem: Problem) -> torch.dtype:
    found: torch.dtype = getattr(torch, str(problem.dtype("x" if _is_backward(problem) else "out")))
    return found
