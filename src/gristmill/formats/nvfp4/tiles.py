"""The order of block scales that Blackwell's tensor cores read: tiles of 128 rows by 4 scales.

Scales ``(R, C)`` are padded with zeros to a multiple of 128 rows and of 4 columns. A tile holds 512
bytes side by side, and the scale of row r and column c is byte
``(r / 128 * (C / 4) + c / 4) * 512 + r % 32 * 16 + r % 128 / 32 * 4 + c % 4`` (C padded, divisions
rounded down). Torch calls it ``SWIZZLE_32_4_4``.
"""

from __future__ import annotations

from typing import Any

import torch

from gristmill.errors import ArgumentError, DtypeError

ROWS, COLUMNS = 128, 4


def padded(rows: int, columns: int) -> tuple[int, int]:
    """The shape of the scales with whole tiles only."""
    return -(-rows // ROWS) * ROWS, -(-columns // COLUMNS) * COLUMNS


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """Scales ``(..., R, C)`` in row order as ``(..., padded R * padded C)`` in tile order."""
    _check_bytes("swizzle", "scales", scales)
    if scales.dim() < 2:
        raise ArgumentError(
            f"swizzle: scales must have at least two dims, got shape {tuple(scales.shape)}"
        )
    *stack, rows, columns = scales.shape
    tall, wide = padded(rows, columns)
    # By bytes: torch pads and permutes no fp8.
    whole = torch.zeros((*stack, tall, wide), dtype=torch.uint8, device=scales.device)
    whole[..., :rows, :columns] = scales.contiguous().view(torch.uint8)
    tiles = whole.view(*stack, tall // ROWS, 4, 32, wide // COLUMNS, COLUMNS)
    ordered = tiles.movedim(-2, -4).transpose(-3, -2)
    return ordered.flatten(len(stack)).contiguous().view(scales.dtype)


def unswizzle(swizzled: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The inverse of :func:`swizzle`: ``(..., R, C)`` in row order, without the padding."""
    _check_bytes("unswizzle", "swizzled", swizzled)
    tall, wide = padded(rows, columns)
    if swizzled.dim() < 1 or swizzled.shape[-1] != tall * wide:
        raise ArgumentError(
            f"unswizzle: {rows} x {columns} scales take {tall} x {wide} = {tall * wide} bytes in "
            f"tiles, got shape {tuple(swizzled.shape)}"
        )
    stack = swizzled.shape[:-1]
    raw = swizzled.contiguous().view(torch.uint8)
    tiles = raw.view(*stack, tall // ROWS, wide // COLUMNS, 32, 4, COLUMNS)
    whole = tiles.transpose(-3, -2).movedim(-4, -2).reshape(*stack, tall, wide)
    return whole[..., :rows, :columns].contiguous().view(swizzled.dtype)


def _check_bytes(op: str, name: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor) or value.element_size() != 1:
        got = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise DtypeError(f"{op}: {name} must be a tensor of E4M3 or of bytes, got {got}")


def take(swizzled: torch.Tensor, rows: range, columns: range, width: int) -> torch.Tensor:
    """Some rows and columns of scales ``(R, width)`` out of their tiles, in row order."""
    wide = padded(0, width)[1]
    r = torch.arange(rows.start, rows.stop, device=swizzled.device)
    c = torch.arange(columns.start, columns.stop, device=swizzled.device)
    above = r // ROWS * (wide * ROWS) + r % 32 * 16 + r % ROWS // 32 * COLUMNS
    at = above[:, None] + (c // COLUMNS * (ROWS * COLUMNS) + c % COLUMNS)
    found = swizzled.view(torch.uint8).index_select(-1, at.flatten()).view(swizzled.dtype)
    return found.view(*swizzled.shape[:-1], *at.shape)
