"""Weights into fragments and back: on a GPU by a kernel, elsewhere by torch.

What is made on the way is bounded: torch takes a weight piece by piece, and a weight that is packed
in place goes through a scratch buffer. Slabs of 64 whole rows take the same bytes in both orders,
so what was copied to the scratch buffer can be packed over where it came from.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence

import torch

from gristmill.errors import CompileError, CompilerUnavailable, DriverError, KernelNotCached
from gristmill.formats.nvfp4 import fragments, tiles
from gristmill.jit import Kernel, Program, kernel
from gristmill.log import warn_once

SCRATCH = 16 << 20  # bytes of codes and scales that are packed in place at a time
_PIECE = 1 << 22  # bytes of codes that torch packs at a time: it needs several times as much
_ALIGNED = 16  # bytes: what kernels ask of packed tensors

# As nvfp4_pack.cu has them.
SOURCE = "nvfp4_pack.cu"
PARAMS = struct.Struct("<QQQQqqIIII")
THREADS = 256
CHUNKS = 8  # of a slab, that a block takes
SHARED = fragments.ROWS * (CHUNKS * 32 + 16 + (CHUNKS + 1) * 4)

_CANNOT = (CompilerUnavailable, CompileError, DriverError, KernelNotCached)


def pack(
    codes: torch.Tensor, scales: torch.Tensor, *, in_place: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `fragments.pack`; `in_place`: over the bytes of `codes` and `scales` where they fit."""
    if not _is_real(codes):
        return fragments.pack(codes, scales)
    if in_place and can_share(codes, scales):
        return _pack_in_place(codes, scales)
    *stack, rows, half = codes.shape
    whole = (*stack, *fragments.padded(rows, 2 * half))
    packed = codes.new_empty((*whole, fragments.CODES))
    packed_scales = codes.new_empty((*whole, fragments.SCALES))
    codes, raw = _by_rows(codes), _by_rows(scales).view(torch.uint8)
    for one in _matrices(stack):
        _pack_matrix(codes[one], raw[one], packed[one], packed_scales[one])
    return packed, packed_scales


def unpack(
    codes: torch.Tensor, scales: torch.Tensor, rows: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `fragments.unpack`."""
    if not _is_real(codes):
        return fragments.unpack(codes, scales, rows, columns)
    stack = codes.shape[:-3]
    found = codes.new_empty((*stack, rows, columns // 2))
    found_scales = codes.new_empty((*stack, rows, columns // fragments.BLOCK))
    codes, scales = _as_vectors(codes), _as_vectors(scales)
    for one in _matrices(stack):
        _unpack_matrix(codes[one], scales[one], found[one], found_scales[one])
    return found, found_scales.view(torch.float8_e4m3fn)


def to_tiles(scales: torch.Tensor, *, in_place: bool = False) -> torch.Tensor:
    """As `tiles.swizzle`; `in_place`: over the bytes of `scales` where they fit."""
    rows, columns = scales.shape[-2:]
    fits = rows % tiles.ROWS == 0 and columns % tiles.COLUMNS == 0 and scales.is_contiguous()
    if not (in_place and fits and scales.numel() and _is_real(scales)):
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


def _pack_in_place(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    *stack, rows, half = codes.shape
    slabs, chunks = fragments.padded(rows, 2 * half)
    as_inference = codes.is_inference() or scales.is_inference()
    with torch.inference_mode(as_inference), torch.no_grad():
        raw = scales.view(torch.uint8)
        packed = codes.view(*stack, slabs, chunks, fragments.CODES)
        packed_scales = raw.view(*stack, slabs, chunks, fragments.SCALES)
        if codes.numel() == 0:
            return packed, packed_scales
        # The slabs of a stack lie one behind the other, as those of one matrix do.
        places = packed.flatten(0, -3), packed_scales.flatten(0, -3)
        sources = codes.view(-1, half), raw.view(-1, half // 8)
        scratch: list[torch.Tensor] = []
        for slab in _pieces(len(places[0]), SCRATCH, fragments.ROWS * (half + half // 8)):
            row = slice(slab.start * fragments.ROWS, slab.stop * fragments.ROWS)
            parts = [source[row] for source in sources]
            scratch = scratch or [torch.empty_like(part) for part in parts]
            copies = [
                whole[: len(part)].copy_(part) for whole, part in zip(scratch, parts, strict=True)
            ]
            _pack_matrix(*copies, *(place[slab] for place in places))
        for part in () if as_inference else (codes, scales):
            torch.autograd.graph.increment_version(part)  # kernels do not, and graphs go by it
    return packed, packed_scales


def _pack_matrix(
    codes: torch.Tensor, scales: torch.Tensor, packed: torch.Tensor, packed_scales: torch.Tensor
) -> None:
    if packed.numel() == 0:
        return
    if _by_kernel("pack", codes, scales, packed, packed_scales):
        return
    for slab in _pieces(len(packed), _PIECE, fragments.ROWS * codes.shape[-1]):
        row = slice(slab.start * fragments.ROWS, slab.stop * fragments.ROWS)
        part = fragments.pack(codes[row], scales[row])
        packed[slab], packed_scales[slab] = part


def _unpack_matrix(
    packed: torch.Tensor, packed_scales: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> None:
    if codes.numel() == 0:
        return
    if _by_kernel("unpack", codes, scales, packed, packed_scales):
        return
    rows, half = codes.shape
    for slab in _pieces(len(packed), _PIECE, fragments.ROWS * half):
        row = slice(slab.start * fragments.ROWS, min(slab.stop * fragments.ROWS, rows))
        part = fragments.unpack(packed[slab], packed_scales[slab], row.stop - row.start, 2 * half)
        codes[row], scales[row] = part[0], part[1].view(torch.uint8)


def _by_kernel(
    function: str,
    codes: torch.Tensor,
    scales: torch.Tensor,
    packed: torch.Tensor,
    packed_scales: torch.Tensor,
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
    slabs, chunks, _ = packed.shape
    groups = -(-chunks // CHUNKS)
    values = (
        *(part.data_ptr() for part in (codes, scales, packed, packed_scales)),
        codes.stride(0),
        scales.stride(0),
        len(codes),
        scales.shape[-1],
        chunks,
        groups,
    )
    launch(found, slabs * groups, codes.device, values)
    return True


def kernel_name(function: str, codes: torch.Tensor, scales: torch.Tensor) -> str:
    """By the widest accesses, in bytes, that the rows allow."""
    wide = next(size for size in (16, 8, 1) if _is_aligned(codes, size))
    return f"{function}<{wide},{4 if _is_aligned(scales, 4) else 1}>"


def on_gpu(codes: torch.Tensor) -> bool:
    return codes.is_cuda


def load(name: str, device: torch.device) -> Kernel:
    """The kernel on a device, compiled at first use."""
    return kernel(Program(SOURCE, (name,)), name, device.index)


def launch(found: Kernel, grid: int, device: torch.device, values: tuple[int, ...]) -> None:
    with torch.cuda.device(device):
        start = found.prepare(grid=grid, block=THREADS, shared=SHARED, params=PARAMS)
        start(torch.cuda.current_stream(device).cuda_stream, *values)


def _is_real(codes: torch.Tensor) -> bool:
    """Whether there are bytes to read and write: nothing traces, and no mode is active."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    is_plain = type(codes).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return is_plain and codes.device.type in ("cpu", "cuda")


def _is_aligned(part: torch.Tensor, size: int) -> bool:
    """Whether every row begins at a multiple of `size` bytes."""
    rows_are = part.shape[-2] < 2 or part.stride(-2) % size == 0
    return rows_are and part.data_ptr() % size == 0


def _by_rows(part: torch.Tensor) -> torch.Tensor:
    """With rows that are contiguous, at any distance from each other."""
    return part if part.stride(-1) == 1 else part.contiguous()


def _as_vectors(part: torch.Tensor) -> torch.Tensor:
    """As kernels read packed tensors: contiguous, and aligned."""
    part = part.contiguous()
    return part.clone() if part.data_ptr() % _ALIGNED else part


def _matrices(stack: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, stack))


def _pieces(total: int, most_bytes: int, bytes_each: int) -> Iterator[slice]:
    """Slices of at least one and else at most so many bytes."""
    step = max(1, most_bytes // bytes_each)
    for first in range(0, total, step):
        yield slice(first, min(first + step, total))
