"""Reads what a screenshot needs: PNGs of eight bits a channel, not interlaced."""

from __future__ import annotations

import struct
import zlib

Pixel = tuple[int, int, int]


def pixels(data: bytes) -> list[list[Pixel]]:
    """Rows of red, green and blue; an alpha channel is left out."""
    if data[:8] != b"\x89PNG\r\n\x1a\n":
        raise ValueError("this is no PNG")
    parts: dict[bytes, bytes] = {}
    place = 8
    while place < len(data):
        (size,), kind = struct.unpack(">I", data[place : place + 4]), data[place + 4 : place + 8]
        parts[kind] = parts.get(kind, b"") + data[place + 8 : place + 8 + size]
        place += 12 + size
    width, height, depth, colours, _, _, interlaced = struct.unpack(">IIBBBBB", parts[b"IHDR"])
    if depth != 8 or colours not in (2, 6) or interlaced:
        raise ValueError(f"not the kind of PNG that is read here: {depth}, {colours}, {interlaced}")
    channels = 3 if colours == 2 else 4
    raw = zlib.decompress(parts[b"IDAT"])
    stride = width * channels
    before = bytearray(stride)
    rows = []
    for index in range(height):
        start = index * (stride + 1)
        line = bytearray(raw[start + 1 : start + 1 + stride])
        _unfilter(raw[start], line, before, channels)
        rows.append(
            [(line[x], line[x + 1], line[x + 2]) for x in range(0, stride, channels)],
        )
        before = line
    return rows


def _unfilter(kind: int, line: bytearray, above: bytearray, step: int) -> None:
    """Undo the filter of a line, in place: none, left, above, their mean, or Paeth's."""
    for x in range(len(line) if kind else 0):
        left = line[x - step] if x >= step else 0
        up = above[x]
        if kind == 1:
            add = left
        elif kind == 2:
            add = up
        elif kind == 3:
            add = (left + up) // 2
        else:
            corner = above[x - step] if x >= step else 0
            by_left, by_up = abs(up - corner), abs(left - corner)
            by_corner = abs(left + up - 2 * corner)
            if by_left <= by_up and by_left <= by_corner:
                add = left
            else:
                add = up if by_up <= by_corner else corner
        line[x] = (line[x] + add) & 255
