"""What the NVFP4 ops share: a weight by its parts, its checks, and its values piece by piece.

A whole weight in 16 bits is 3.6 times its packed self, so nothing here ever holds one, save the
references: weights are decoded piece by piece, each with all that is made beside it within
`PIECE_BYTES`. A single row (or block of columns, or 64 of either in fragments) is decoded whole,
however long it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from gristmill.errors import ArgumentError, DtypeError
from gristmill.formats.nvfp4 import fragments, packing, tiles
from gristmill.formats.nvfp4.tensor import (
    BLOCK,
    E4M3,
    FRAGMENTS,
    IN_PIECES,
    PAIRS,
    ROWS,
    TILES,
    NVFP4Tensor,
    PackedNVFP4,
    decode_blocks,
)
from gristmill.ops import checks

PIECE_BYTES = 32 << 20
AUTOCAST_KEYS = ("AutocastCUDA", "AutocastCPU")
EVERY = slice(None)
# What the argument `layout` of an op may be. With "fragments" the op over experts has w13 in pairs.
OP_LAYOUTS = (ROWS, TILES, FRAGMENTS)


class Weight(NamedTuple):
    """The parts of a weight ``(N, K)``, or of a stack ``(E, N, K)``, as the ops take them.

    `width` is K. Only the layouts "fragments" and "pairs" need it, whose padding hides K. Whatever
    the layout, rows are counted, taken and given in the order of checkpoints.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    row_scale: torch.Tensor
    layout: str
    width: int | None = None

    @property
    def rows(self) -> int:
        return self.row_scale.shape[-1] if self.layout in IN_PIECES else self.codes.shape[-2]

    @property
    def columns(self) -> int:
        if self.layout not in IN_PIECES:
            return self.codes.shape[-1] * 2
        if self.width is None:
            raise ValueError(f"a weight in {self.layout} does not tell how many columns it has")
        return self.width

    @property
    def least(self) -> tuple[int, int]:
        """How many rows and columns are decoded together, whatever part of them is wanted.

        In pairs so many rows of one half; as many of the other lie between them.
        """
        if self.layout not in IN_PIECES:
            return 1, BLOCK
        halves = 2 if self.layout == PAIRS else 1
        return fragments.ROWS // halves, fragments.COLUMNS

    def whole(self, dtype: torch.dtype) -> torch.Tensor:
        """All values, rounded once."""
        return self.blocks(dtype) * self.row_scale.unsqueeze(-1)

    def expert(self, number: int) -> Weight:
        """One matrix of a stack."""
        return self._replace(
            codes=self.codes[number],
            scales=self.scales[number],
            row_scale=self.row_scale[number],
        )

    def blocks(
        self,
        dtype: torch.dtype,
        rows: range | None = None,
        columns: range | None = None,
        experts: slice | torch.Tensor = EVERY,
    ) -> torch.Tensor:
        """Values without the row scale, exact: of some rows, columns and matrices of a stack.

        Columns come in whole blocks. Matrices are named by a slice or by an index tensor.
        """
        rows = range(self.rows) if rows is None else rows
        columns = range(self.columns) if columns is None else columns
        if self.layout == FRAGMENTS:
            return decode_blocks(*self._unpacked(rows, columns, experts), dtype)
        if self.layout == PAIRS:
            return decode_blocks(*self._unpaired(rows, columns, experts), dtype)
        wide = range(columns.start // BLOCK, columns.stop // BLOCK)
        codes = self.codes[..., rows.start : rows.stop, columns.start // 2 : columns.stop // 2]
        if self.layout == TILES:
            scales = tiles.take(_chosen(self.scales, experts), rows, wide, self.columns // BLOCK)
        else:
            part = self.scales[..., rows.start : rows.stop, wide.start : wide.stop]
            scales = _chosen(part, experts)
        return decode_blocks(_chosen(codes, experts), scales, dtype)

    def _unpacked(
        self, rows: range, columns: range, experts: slice | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales in row order, out of the slabs and chunks in which they lie."""
        slabs = _cover(rows, fragments.ROWS)
        first = slabs.start * fragments.ROWS
        codes, scales = self._out_of(slabs, rows.stop - first, columns, experts)
        return codes[..., rows.start - first :, :], scales[..., rows.start - first :, :]

    def _unpaired(
        self, rows: range, columns: range, experts: slice | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Likewise out of pairs, where a slab has as many rows of gate as of up."""
        half = self.rows // 2
        if len(rows) == self.rows:
            return self._out_of(_cover(rows, fragments.ROWS), self.rows, columns, experts)
        if rows.start < half < rows.stop:
            parts = (range(rows.start, half), range(half, rows.stop))
            found = [self._unpaired(part, columns, experts) for part in parts]
            codes, raw = (
                torch.cat([one[at].view(torch.uint8) for one in found], -2) for at in range(2)
            )
            return codes, raw.view(E4M3)
        in_up = rows.start >= half
        begin, end = (at - half if in_up else at for at in (rows.start, rows.stop))
        slabs = _cover(range(begin, end), fragments.ROWS // 2)
        first = slabs.start * fragments.ROWS // 2
        each = min(slabs.stop * fragments.ROWS // 2, half) - first  # rows of gate, then those of up
        codes, scales = self._out_of(slabs, 2 * each, columns, experts)
        above = begin - first + (each if in_up else 0)
        own = slice(above, above + end - begin)
        return codes[..., own, :], scales[..., own, :]

    def _out_of(
        self, slabs: slice, rows: int, columns: range, experts: slice | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of some columns of the first `rows` rows of some slabs."""
        chunks = _cover(columns, fragments.COLUMNS)
        codes, scales = (
            _chosen(part[..., slabs, chunks, :], experts) for part in (self.codes, self.scales)
        )
        left = chunks.start * fragments.COLUMNS
        pairs = self.layout == PAIRS
        codes, scales = packing.unpack(codes, scales, rows, columns.stop - left, pairs=pairs)
        before = columns.start - left
        return codes[..., before // 2 :], scales[..., before // BLOCK :]

    def levelled(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The row scales as a part of at most one and the largest of each matrix, if it is any.

        Where a matrix has one global scale the parts are exactly one, so that values multiplied by
        them stay exact in 16 bits.
        """
        smallest = torch.finfo(torch.float32).tiny  # instead of zero, of which nothing is a part
        top = self.row_scale.abs().amax(-1, keepdim=True).clamp_(min=smallest)
        return self.row_scale / top, top


def _cover(part: range, size: int) -> slice:
    """The units of `size` that hold a part of a whole."""
    return slice(part.start // size, -(-part.stop // size))


def _chosen(stack: torch.Tensor, experts: slice | torch.Tensor) -> torch.Tensor:
    if isinstance(experts, torch.Tensor):
        # By bytes: not every torch selects fp8.
        raw = stack.view(torch.uint8).index_select(0, experts)
        return raw.view(stack.dtype)
    return stack if experts == EVERY else stack[experts]


def pieces(total: int, most: int, least: int = 1) -> Iterator[range]:
    """`range(total)` in ranges of at most `most` and at least `least`, of whole blocks if of many.

    `least` is one, or what cannot be taken apart: a block, or the rows and columns of a fragment.
    """
    size, step = max(least, most), max(least, BLOCK)
    if step < size < total:
        size -= size % step
    for start in range(0, total, size):
        yield range(start, min(start + size, total))


def decoding_bytes(dtype: torch.dtype) -> int:
    """The most that decoding takes per value: itself, half an int32 index, a part of a scale."""
    return dtype.itemsize + 3


def arithmetic(tensor: torch.Tensor) -> torch.dtype:
    """In which dtype products are taken: on a GPU in the tensor's own, on a CPU in fp32."""
    return tensor.dtype if tensor.is_cuda else torch.float32


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` in fp32 of matrices, or of stacks of them; `b` has the dtype of the arithmetic."""
    a = a.to(b.dtype)
    multiply = torch.mm if b.dim() == 2 else torch.bmm
    if b.dtype == torch.float32:
        return multiply(a, b)
    return multiply(a, b, out_dtype=torch.float32)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and products in the references."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def parts_of(op: str, name: str, weight: Any) -> Weight:
    """The parts of what users hold."""
    if isinstance(weight, NVFP4Tensor):
        return Weight(weight.codes, weight.scales, weight.row_scale, ROWS)
    if isinstance(weight, PackedNVFP4):
        parts = (weight.codes, weight.scales, weight.row_scale)
        return Weight(*parts, weight.layout, weight.columns)
    raise DtypeError(
        f"{op}: {name} must be an NVFP4Tensor or a PackedNVFP4, got {type(weight).__name__}; "
        f"gristmill.nvfp4.quantize makes one of a tensor"
    )


def check_weight(op: str, prefix: str, weight: Weight, dims: int, device: torch.device) -> None:
    """That the parts are tensors of a weight of `dims` dims, and fit together.

    Whether they fit the columns of the input, the ops say; in fragments that is all they can tell.
    """
    if weight.layout == PAIRS and dims == 2:
        raise ArgumentError(
            f"{op}: layout must be 'rows' or 'tiles' or 'fragments', got {PAIRS!r}, which is for "
            f"w13 of nvfp4.moe; prepare the weight without pairs=True"
        )
    if weight.layout != PAIRS:
        checks.one_of(op, "layout", weight.layout, OP_LAYOUTS)
    scales = torch.uint8 if weight.layout in IN_PIECES else E4M3
    dtypes = (torch.uint8, scales, torch.float32)
    for name, value, dtype in zip(weight._fields, weight, dtypes, strict=False):
        _check_part(op, prefix + name, value, dtype, device)
    if weight.layout in IN_PIECES:
        _check_pieces(op, prefix, weight, dims)
    else:
        _check_rows(op, prefix, weight, dims)


def _check_rows(op: str, prefix: str, weight: Weight, dims: int) -> None:
    """Codes in row order, with scales in rows or tiles."""
    codes, scales, row_scale, layout, _ = weight
    shape = "(N, K / 2)" if dims == 2 else "(E, N, K / 2)"
    if codes.dim() != dims:
        hint = "; a stack of weights is for nvfp4.moe" if codes.dim() == 3 else ""
        raise ArgumentError(
            f"{op}: {prefix}codes must have shape {shape}, got {tuple(codes.shape)}{hint}"
        )
    if codes.shape[-1] % (BLOCK // 2):
        raise ArgumentError(
            f"{op}: {prefix}codes must have shape {shape} with K a multiple of {BLOCK}, "
            f"got {tuple(codes.shape)}"
        )
    *stack, rows, columns = *codes.shape[:-1], weight.columns // BLOCK
    wanted = (*stack, rows, columns)
    if layout == TILES:
        tall, wide = tiles.padded(rows, columns)
        wanted = (*stack, tall * wide)
    if tuple(scales.shape) != wanted:
        raise ArgumentError(
            f"{op}: {prefix}scales must have shape {wanted} in layout {layout!r} beside codes "
            f"{tuple(codes.shape)}, got {tuple(scales.shape)}"
        )
    if row_scale.shape != codes.shape[:-1]:
        raise ArgumentError(
            f"{op}: {prefix}row_scale must have shape {tuple(codes.shape[:-1])}, one for each row, "
            f"got {tuple(row_scale.shape)}"
        )


def _check_pieces(op: str, prefix: str, weight: Weight, dims: int) -> None:
    """Pieces as many as the row scales and the columns ask for."""
    codes, scales, row_scale, layout, _ = weight
    shape = "(N,)" if dims == 2 else "(E, N)"
    if row_scale.dim() != dims - 1:
        hint = "; a stack of weights is for nvfp4.moe" if dims == 2 and row_scale.dim() else ""
        raise ArgumentError(
            f"{op}: {prefix}row_scale must have shape {shape}, one for each row, "
            f"got {tuple(row_scale.shape)}{hint}"
        )
    if weight.columns % BLOCK:
        raise ArgumentError(
            f"{op}: {prefix}codes in layout {layout!r} have columns in blocks of {BLOCK}, but the "
            f"call has K = {weight.columns} of them"
        )
    *stack, rows = row_scale.shape
    if layout == PAIRS:
        fragments.check_pairs(f"{op}: {prefix}codes", rows)
    pieces_there = (*stack, *fragments.padded(rows, weight.columns))
    for name, part, size in (
        ("codes", codes, fragments.CODES),
        ("scales", scales, fragments.SCALES),
    ):
        if tuple(part.shape) != (*pieces_there, size):
            raise ArgumentError(
                f"{op}: {prefix}{name} must have shape {(*pieces_there, size)} in layout "
                f"{layout!r} for N = {rows} rows, as row_scale has, and K = {weight.columns} "
                f"columns, as the call has, got {tuple(part.shape)}"
            )


def _check_part(op: str, name: str, value: Any, dtype: torch.dtype, device: torch.device) -> None:
    got = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
    if got != dtype:
        raise DtypeError(f"{op}: {name} must be a tensor of {dtype}, got {got}")
    checks.dense(op, name, value)
    checks.same_device(op, name, value, "the input", device)


def lowered(tensor: Any) -> Any:
    """As torch's linear takes its arguments under autocast; fp64 stays, there as here."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        return tensor
    if tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def as_it_is(*args: Any) -> tuple[Any, ...]:
    """For backward ops: autocast has had its say in the forward pass."""
    return args


def frozen(op: str, ctx: Any, positions: dict[int, str]) -> None:
    """For the parts of a weight, which have no gradient: say so rather than give none."""
    for position, name in positions.items():
        # Of trailing arguments that equal their defaults the dispatcher tells nothing.
        if any(ctx.needs_input_grad[position : position + 1]):
            raise ArgumentError(
                f"{op}: {name} requires a gradient, but NVFP4 weights are frozen and have none; "
                f"pass {name}.detach()"
            )
