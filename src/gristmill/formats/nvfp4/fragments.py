"""The order in which the tensor cores of Ampere, Ada and Hopper take a weight: layouts "fragments"
and "pairs".

A weight ``(N, K)`` is cut into slabs of 64 rows and those into chunks of 64 columns, padded with
zeros: ``ceil(N / 64) * ceil(K / 64)`` pieces of 2048 bytes of codes and 256 bytes of scales, the
chunks of a slab side by side. A piece is what a warpgroup multiplies at once, and each of its 128
threads finds its own 32 values in 16 bytes.

Codes: thread `lane = 4 * g + t` of warp `w` holds, in 16 bytes at ``512 * w + 16 * lane``, those of
row ``16 * w + g`` in two words and those of row ``16 * w + 8 + g`` in two more. The 16 values of a
row are columns ``16 * j + 8 * h + 2 * t + e`` (j = 0..3, h = 0, 1, e = 0, 1), eight pairs
``p = 2 * j + h``: the operands of four matrix instructions of 16 columns. Which bit of which word
holds which bit of which value is `PLACES`; so spread, a pair takes two instructions to become two
bf16 numbers, and no bit is spent on it.

Scales: row ``16 * w + 8 * r + g`` has its four, one byte each, at ``64 * w + 8 * g + 4 * r``. A
byte is the number with one more bit of exponent and one less of range: ``(exponent + 20) << 3 |
mantissa``, so that subnormal scales are ordinary numbers, and 0 for zero, beside which all values
are zero.

Layout "pairs" is for a weight of two halves, gate and up, whose products meet in an activation: the
same pieces, of rows in another order. Eight rows of gate are followed by the same eight of up:
packed row ``16 * b + i`` is row ``8 * b + i``, and packed row ``16 * b + 8 + i`` is row
``N / 2 + 8 * b + i`` (i < 8). So a thread, which has the rows g and g + 8 of 16, has gate and up of
the same inner row.
"""

from __future__ import annotations

import torch

from gristmill.errors import ArgumentError
from gristmill.formats.nvfp4 import e2m1

ROWS = COLUMNS = 64  # of a piece
CODES, SCALES = 2048, 256  # bytes of a piece
BLOCK = 16
PAIRED = 8  # rows of each half that lie side by side in pairs

_SHARED = 0x60306030  # bits of the first word that belong to the last two pairs


def padded(rows: int, columns: int) -> tuple[int, int]:
    """How many slabs, and how many chunks in each."""
    return -(-rows // ROWS), -(-columns // COLUMNS)


def check_pairs(op: str, rows: int) -> None:
    """That a weight of so many rows has halves that can lie in pairs."""
    if rows % (2 * PAIRED):
        raise ArgumentError(
            f"{op}: pairs are of gate and up, {PAIRED} rows of each at a time, so the number of "
            f"rows must be a multiple of {2 * PAIRED}, got {rows}"
        )


def paired(part: torch.Tensor) -> torch.Tensor:
    """Rows ``(..., N, n)``, gate before up, in the order of pairs."""
    return _reordered(part, 2, part.shape[-2] // (2 * PAIRED))


def apart(part: torch.Tensor) -> torch.Tensor:
    """The inverse of `paired`."""
    return _reordered(part, part.shape[-2] // (2 * PAIRED), 2)


def _reordered(part: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
    """Runs of rows, `outer` times `inner` of them, in the order `inner` times `outer`."""
    runs: torch.Tensor = part.unflatten(-2, (outer, inner, PAIRED))
    return runs.transpose(-4, -3).flatten(-4, -2)


def check_shapes(
    op: str,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    columns: int,
    layout: str,
) -> None:
    """That the parts are those of a weight of so many columns."""
    if columns < 0 or columns % BLOCK or row_scale.dim() < 1:
        raise ArgumentError(
            f"{op}: columns must be a multiple of {BLOCK} and row_scale (..., N), got {columns} "
            f"and {tuple(row_scale.shape)}"
        )
    *stack, rows = row_scale.shape
    whole = (*stack, *padded(rows, columns))
    for name, part, size in (("codes", codes, CODES), ("scales", scales, SCALES)):
        if tuple(part.shape) != (*whole, size):
            raise ArgumentError(
                f"{op}: {name} must have shape {(*whole, size)} in layout {layout!r} for {rows} "
                f"rows and {columns} columns, got {tuple(part.shape)}"
            )


def _place(pair: int, half: int, bit: int) -> tuple[int, int]:
    """The word and bit that hold `bit` (3 is the sign) of value `half` of a pair.

    A pair as bf16 numbers has its bits at 15 and 8 to 6 of each half. Pairs 0 to 2 are the first
    word, rotated right by 4 for pair 1 and shifted left by 6 for pair 2; 3 to 5 are the second
    word likewise. What is left of both, the second word rotated left by 2, makes a third word:
    rotated right by 8 it is pair 6, shifted left by 2 pair 7.
    """
    at = 16 * half + (15 if bit == 3 else 6 + bit)
    if pair < 6:
        return pair // 3, ((at, at + 4, at - 6)[pair % 3]) % 32
    at = (at + 8) % 32 if pair == 6 else at - 2
    return (0, at) if _SHARED >> at & 1 else (1, (at - 2) % 32)


# By pair, half and bit: (word, bit of the word).
PLACES = tuple(
    tuple(tuple(_place(pair, half, bit) for bit in range(4)) for half in range(2))
    for pair in range(8)
)


def _byte(pair: int, half: int, bit: int) -> tuple[int, int]:
    """A place of `PLACES` as a byte of a thread's two words and a bit of that."""
    word, at = PLACES[pair][half][bit]
    return 4 * word + at // 8, at % 8


def encode_scales(raw: torch.Tensor) -> torch.Tensor:
    """The byte here for each byte of E4M3. What no scale is, NaN or less than zero, has 255."""
    # By arithmetic, not by a table: one that comes from the host would have to be waited for.
    small = torch.where(raw < 2, raw * 88, torch.where(raw < 4, raw * 4 + 88, raw * 2 + 96))
    coded = torch.where(raw < 8, small, raw + 104)
    return coded.masked_fill(raw > 126, 255).masked_fill(raw == 128, 0)


def decode_scales(coded: torch.Tensor) -> torch.Tensor:
    """The other way; what no scale has is NaN."""
    small = torch.where(coded < 104, (coded - 88) >> 2, (coded - 96) >> 1)
    small = small.masked_fill(coded < 96, 1).masked_fill(coded == 0, 0)
    raw = torch.where(coded < 112, small, coded - 104)
    return raw.masked_fill((encode_scales(raw) != coded) | (coded > 230), 127)


def pack(
    codes: torch.Tensor, scales: torch.Tensor, *, pairs: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``(..., N, K / 2)`` and E4M3 scales ``(..., N, K / 16)`` of a checkpoint, in fragments.

    Gives uint8 ``(..., slabs, chunks, 2048)`` and ``(..., slabs, chunks, 256)``.
    """
    *stack, rows, half = codes.shape
    slabs, chunks = padded(rows, 2 * half)
    raw = scales.contiguous().view(torch.uint8)
    if pairs:
        codes, raw = paired(codes), paired(raw)
    values = e2m1.unpack(codes)
    values = values * (raw & 127 != 0).repeat_interleave(BLOCK, -1)  # zeros beside a scale of zero
    values = _whole(values, slabs * ROWS, chunks * COLUMNS)
    # (slab, w, r, g), (chunk, j, h, t, e) -> slab, chunk, w, g, t, r, pair, e
    cut = values.view(*stack, slabs, 4, 2, 8, chunks, 8, 4, 2)
    cut = cut.permute(*range(len(stack)), *(len(stack) + at for at in (0, 4, 1, 3, 6, 2, 5, 7)))
    # Byte by byte, for words would have to be aligned; and nothing is written into what is there,
    # which torch.vmap would not have.
    found = [torch.zeros_like(cut[..., 0, 0]) for _ in range(8)]
    for pair in range(8):
        for side in range(2):
            for bit in range(4):
                byte, at = _byte(pair, side, bit)
                found[byte] = found[byte] | (cut[..., pair, side] >> bit & 1) << at
    packed = torch.stack(found, -1).reshape(*stack, slabs, chunks, CODES)

    coded = _whole(encode_scales(raw), slabs * ROWS, chunks * 4)
    groups = coded.view(*stack, slabs, 4, 2, 8, chunks, 4)
    groups = groups.permute(*range(len(stack)), *(len(stack) + at for at in (0, 4, 1, 3, 2, 5)))
    return packed, groups.reshape(*stack, slabs, chunks, SCALES)


def unpack(
    codes: torch.Tensor, scales: torch.Tensor, rows: int, columns: int, *, pairs: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `pack`: codes ``(..., N, K / 2)`` and E4M3 scales ``(..., N, K / 16)``.

    The same values; codes beside a scale of zero come back as zeros.
    """
    *stack, slabs, chunks, _ = codes.shape
    held = codes.reshape(*stack, slabs, chunks, 4, 8, 4, 2, 8)
    found = []
    for pair in range(8):
        for side in range(2):
            value = torch.zeros_like(held[..., 0])
            for bit in range(4):
                byte, at = _byte(pair, side, bit)
                value = value | (held[..., byte] >> at & 1) << bit
            found.append(value)
    cut = torch.stack(found, -1).unflatten(-1, (8, 2))
    # slab, chunk, w, g, t, r, pair, e -> (slab, w, r, g), (chunk, pair, t, e)
    back = cut.permute(*range(len(stack)), *(len(stack) + at for at in (0, 2, 5, 3, 1, 6, 4, 7)))
    values = back.reshape(*stack, slabs * ROWS, chunks * COLUMNS)[..., :rows, :columns]

    groups = scales.view(*stack, slabs, chunks, 4, 8, 2, 4)
    groups = groups.permute(*range(len(stack)), *(len(stack) + at for at in (0, 2, 4, 3, 1, 5)))
    coded = groups.reshape(*stack, slabs * ROWS, chunks * 4)[..., :rows, : columns // BLOCK]
    if pairs:
        values, coded = apart(values), apart(coded)
    return e2m1.pack(values), decode_scales(coded).view(torch.float8_e4m3fn)


def _whole(values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Bytes padded with zeros."""
    below, beside = rows - values.shape[-2], columns - values.shape[-1]
    return torch.nn.functional.pad(values, (0, beside, 0, below))
