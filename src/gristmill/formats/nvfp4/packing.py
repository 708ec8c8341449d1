"""Weights into fragments and back: on a GPU by a kernel, elsewhere by torch.

What is made on the way is bounded: torch takes a weight piece by piece, and a weight that is packed
in place goes through a scratch buffer. Slabs of 64 whole rows take the same bytes in both orders,
so what was copied to the scratch buffer can be packed over where it came from. In pairs a slab has
rows of both halves, and only a whole matrix takes the place of itself.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator

import torch

from gristmill.errors import CompileError, CompilerUnavailable, DriverError, KernelNotCached
from gristmill.formats.nvfp4 import fragments, tiles
from gristmill.jit import Kernel, Program, kernel
from gristmill.log import warn_once

# Bytes of codes and scales that are packed in place at a time; in pairs at least one matrix.
SCRATCH = 16 << 20
_PIECE = 1 << 22  # bytes of codes that torch packs at a time: it needs several times as much
_ALIGNED = 16  # bytes: what kernels ask of packed tensors

# As nvfp4_pack.cu has them.
SOURCE = "nvfp4_pack.cu"
PARAMS = struct.Struct("<QQQQqqqqIIIIII")
THREADS = 256
CHUNKS = 8  # of a slab, that a block takes
SHARED = fragments.ROWS * (CHUNKS * 32 + 16 + (CHUNKS + 1) * 4)

_CANNOT = (CompilerUnavailable, CompileError, DriverError, KernelNotCached)


def pack(
    codes: torch.Tensor, scales: torch.Tensor, *, in_place: bool = False, pairs: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `fragments.pack`; `in_place`: over the bytes of `codes` and `scales` where they fit."""
    if pairs:
        fragments.check_pairs("prepare", codes.shape[-2])
    if not is_real(codes):
        return fragments.pack(codes, scales, pairs=pairs)
    if in_place and can_share(codes, scales):
        return _pack_in_place(codes, scales, pairs)
    *stack, rows, half = codes.shape
    whole = (*stack, *fragments.padded(rows, 2 * half))
    packed = codes.new_empty((*whole, fragments.CODES))
    packed_scales = codes.new_empty((*whole, fragments.SCALES))
    parts = (_by_rows(codes), _by_rows(scales).view(torch.uint8), packed, packed_scales)
    _pack_stack(*(_as_stack(part, len(stack)) for part in parts), pairs=pairs)
    return packed, packed_scales


def unpack(
    codes: torch.Tensor, scales: torch.Tensor, rows: int, columns: int, *, pairs: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `fragments.unpack`."""
    if not is_real(codes):
        return fragments.unpack(codes, scales, rows, columns, pairs=pairs)
    stack = codes.shape[:-3]
    found = codes.new_empty((*stack, rows, columns // 2))
    found_scales = codes.new_empty((*stack, rows, columns // fragments.BLOCK))
    parts = (found, found_scales, _as_vectors(codes), _as_vectors(scales))
    _unpack_stack(*(_as_stack(part, len(stack)) for part in parts), pairs=pairs)
    return found, found_scales.view(torch.float8_e4m3fn)


def to_tiles(scales: torch.Tensor, *, in_place: bool = False) -> torch.Tensor:
    """As `tiles.swizzle`; `in_place`: over the bytes of `scales` where they fit."""
    rows, columns = scales.shape[-2:]
    fits = rows % tiles.ROWS == 0 and columns % tiles.COLUMNS == 0 and scales.is_contiguous()
    if not (in_place and fits and scales.numel() and is_real(scales)):
        return tiles.swizzle(scales)
    if scales.data_ptr() % _ALIGNED:
        return tiles.swizzle(scales)
    with torch.inference_mode(scales.is_inference()), torch.no_grad():
        # A tile's rows take the same bytes in both orders.
        flat = scales.view(torch.uint8).view(-1, tiles.ROWS, columns)
        for part in _pieces(len(flat), SCRATCH, 2 * tiles.ROWS * columns):
            flat[part] = tiles.swizzle(flat[part]).view_as(flat[part])
        return scales.view(*scales.shape[:-2], rows * columns)


def can_share(codes: torch.Tensor, scales: torch.Tensor) -> bool:
    """Whether the fragments of a weight fit exactly where its rows lie."""
    rows, columns = codes.shape[-2], 2 * codes.shape[-1]
    if rows % fragments.ROWS or columns % fragments.COLUMNS:
        return False
    return all(part.is_contiguous() and part.data_ptr() % _ALIGNED == 0 for part in (codes, scales))


def _pack_in_place(
    codes: torch.Tensor, scales: torch.Tensor, pairs: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    *stack, rows, half = codes.shape
    slabs, chunks = fragments.padded(rows, 2 * half)
    as_inference = codes.is_inference() or scales.is_inference()
    with torch.inference_mode(as_inference), torch.no_grad():
        raw = scales.view(torch.uint8)
        packed = codes.view(*stack, slabs, chunks, fragments.CODES)
        packed_scales = raw.view(*stack, slabs, chunks, fragments.SCALES)
        if codes.numel() == 0:
            return packed, packed_scales
        # By matrices in pairs; else by slabs, for those of a stack lie one behind the other, as
        # those of one matrix do.
        height = rows if pairs else fragments.ROWS
        sources = codes.view(-1, height, half), raw.view(-1, height, half // 8)
        whole = (-1, height // fragments.ROWS, chunks)
        places = packed.view(*whole, fragments.CODES), packed_scales.view(*whole, fragments.SCALES)
        scratch: list[torch.Tensor] = []
        for some in _pieces(len(sources[0]), SCRATCH, height * (half + half // 8)):
            parts = [source[some] for source in sources]
            scratch = scratch or [torch.empty_like(part) for part in parts]
            copies = [
                room[: len(part)].copy_(part) for room, part in zip(scratch, parts, strict=True)
            ]
            moved = (*copies, *(place[some] for place in places))
            if not pairs:
                moved = tuple(part.flatten(0, 1).unsqueeze(0) for part in moved)
            _pack_stack(*moved, pairs=pairs)
        for part in () if as_inference else (codes, scales):
            torch.autograd.graph.increment_version(part)  # kernels do not, and graphs go by it
    return packed, packed_scales


def _pack_stack(
    codes: torch.Tensor,
    scales: torch.Tensor,
    packed: torch.Tensor,
    packed_scales: torch.Tensor,
    *,
    pairs: bool,
) -> None:
    """Matrices ``(E, N, K / 2)``, the bytes of their scales, and the places of their pieces."""
    if packed.numel() == 0 or _by_kernel("pack", codes, scales, packed, packed_scales, pairs):
        return
    experts, rows, half = codes.shape
    for one in range(experts):
        for slab in _pieces(packed.shape[1], _PIECE, fragments.ROWS * half):
            taken = [
                torch.cat([part[one, row] for row in _rows_in(slab, rows, pairs)])
                for part in (codes, scales)
            ]
            packed[one, slab], packed_scales[one, slab] = fragments.pack(*taken, pairs=pairs)


def _unpack_stack(
    codes: torch.Tensor,
    scales: torch.Tensor,
    packed: torch.Tensor,
    packed_scales: torch.Tensor,
    *,
    pairs: bool,
) -> None:
    """The other way, into `codes` and `scales`."""
    if codes.numel() == 0 or _by_kernel("unpack", codes, scales, packed, packed_scales, pairs):
        return
    experts, rows, half = codes.shape
    for one in range(experts):
        for slab in _pieces(packed.shape[1], _PIECE, fragments.ROWS * half):
            there = _rows_in(slab, rows, pairs)
            counts = [row.stop - row.start for row in there]
            found, found_scales = fragments.unpack(
                packed[one, slab], packed_scales[one, slab], sum(counts), 2 * half, pairs=pairs
            )
            split = found.split(counts), found_scales.view(torch.uint8).split(counts)
            for row, part, part_scales in zip(there, *split, strict=True):
                codes[one, row], scales[one, row] = part, part_scales


def _rows_in(slabs: slice, rows: int, pairs: bool) -> tuple[slice, ...]:
    """The rows of a checkpoint's matrix that lie in some slabs; in pairs a part of each half."""
    first, last = slabs.start * fragments.ROWS, min(slabs.stop * fragments.ROWS, rows)
    if not pairs:
        return (slice(first, last),)
    first, last, half = first // 2, last // 2, rows // 2
    return slice(first, last), slice(half + first, half + last)


def _by_kernel(
    function: str,
    codes: torch.Tensor,
    scales: torch.Tensor,
    packed: torch.Tensor,
    packed_scales: torch.Tensor,
    pairs: bool,
) -> bool:
    """Have a kernel do it; False where torch has to."""
    if not on_gpu(codes):
        return False
    name = kernel_name(function, codes, scales)
    try:
        found = load(name, codes.device)
    except _CANNOT as error:
        warn_once(
            "nvfp4 packing",
            f"NVFP4 weights are packed by torch, slowly, for lack of a kernel: {error}",
        )
        return False
    experts, slabs, chunks, _ = packed.shape
    groups, rows = -(-chunks // CHUNKS), codes.shape[1]
    values = (
        *(part.data_ptr() for part in (codes, scales, packed, packed_scales)),
        *(part.stride(1) for part in (codes, scales)),
        *(part.stride(0) for part in (codes, scales)),
        rows,
        scales.shape[-1],
        chunks,
        groups,
        slabs,
        rows // 2 if pairs else 0,
    )
    launch(found, experts * slabs * groups, codes.device, values)
    return True


def kernel_name(function: str, codes: torch.Tensor, scales: torch.Tensor) -> str:
    """By the widest accesses, in bytes, that the rows allow."""
    wide = next(size for size in (16, 8, 1) if _is_aligned(codes, size))
    return f"{function}<{wide},{4 if _is_aligned(scales, 4) else 1}>"


def programs(every: bool) -> tuple[Program, ...]:
    """What packs and unpacks weights of aligned rows, or `every` one; for warm-ups.

    They belong to no op.
    """
    widths = itertools.product((16, 8, 1), (4, 1)) if every else ((16, 4),)
    return tuple(
        Program(SOURCE, (f"{function}<{wide},{scale}>",))
        for wide, scale in widths
        for function in ("pack", "unpack")
    )


def on_gpu(codes: torch.Tensor) -> bool:
    return codes.is_cuda


def load(name: str, device: torch.device) -> Kernel:
    """The kernel on a device, compiled at first use."""
    return kernel(Program(SOURCE, (name,)), name, device.index)


def launch(found: Kernel, grid: int, device: torch.device, values: tuple[int, ...]) -> None:
    with torch.cuda.device(device):
        start = found.prepare(grid=grid, block=THREADS, shared=SHARED, params=PARAMS)
        start(torch.cuda.current_stream(device).cuda_stream, *values)


def is_real(codes: torch.Tensor) -> bool:
    """Whether there are bytes to read and write: nothing traces, and no mode is active."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    is_plain = type(codes).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return is_plain and codes.device.type in ("cpu", "cuda")


def _is_aligned(part: torch.Tensor, size: int) -> bool:
    """Whether every row begins at a multiple of `size` bytes."""
    steps = zip(part.shape[:-1], part.stride(), strict=False)
    return part.data_ptr() % size == 0 and all(n < 2 or step % size == 0 for n, step in steps)


def _by_rows(part: torch.Tensor) -> torch.Tensor:
    """With rows that are contiguous, at any distance from each other."""
    return part if part.stride(-1) == 1 else part.contiguous()


def _as_vectors(part: torch.Tensor) -> torch.Tensor:
    """As kernels read packed tensors: contiguous, and aligned."""
    part = part.contiguous()
    return part.clone() if part.data_ptr() % _ALIGNED else part


def _as_stack(part: torch.Tensor, dims: int) -> torch.Tensor:
    """With the first `dims` as one; a view, but where many of them lie in no order."""
    return part.flatten(0, dims - 1) if dims else part.unsqueeze(0)


def _pieces(total: int, most_bytes: int, bytes_each: int) -> Iterator[slice]:
    """Slices of at least one and else at most so many bytes."""
    step = max(1, most_bytes // bytes_each)
    for first in range(0, total, step):
        yield slice(first, min(first + step, total))
