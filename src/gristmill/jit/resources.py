"""What each kernel of a cubin uses, read from the cubin itself: no GPU, no CUDA tools.

A cubin is an ELF file. Register counts and stack frames stand in its `.nv.info` section as
attribute records; static shared memory is the size of a section named after the kernel. Spilled
bytes are in no section: only the assembler's report has them (`compile_program(verbose=True)`).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from gristmill.errors import ArgumentError
from gristmill.jit.binary import Binary

# A record of .nv.info is a format byte, an attribute byte and a 16-bit number: the value itself, or
# (format 4) the size of the payload that follows.
_WITH_PAYLOAD = 0x04
_FRAME_SIZE = 0x11
_PARAMETER_BYTES = 0x19
_REGISTER_COUNT = 0x2F

_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")

_SPILL = re.compile(
    r"Function properties for (?P<name>\S+)\s*\n[^\n]*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
)


@dataclass(frozen=True)
class Resources:
    """Use of one kernel. `shared_bytes` is static and, on sm_90 and up, has 1,024 reserved bytes.

    `spill_bytes` (stores and loads together) is None unless the program was compiled verbosely.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    parameter_bytes: int
    spill_bytes: int | None


@dataclass(frozen=True)
class _Section:
    offset: int
    size: int


def resource_usage(binary: Binary) -> dict[str, Resources]:
    """Symbol of each kernel (see `Binary.lowered`) -> what it uses."""
    cubin = binary.cubin
    sections = _sections(cubin)
    symbols = _symbols(cubin, sections)
    registers: dict[str, int] = {}
    frames: dict[str, int] = {}
    for attribute, value in _records(cubin, sections.get(".nv.info")):
        if attribute in (_REGISTER_COUNT, _FRAME_SIZE) and isinstance(value, bytes):
            symbol, number = struct.unpack_from("<II", value)
            (registers if attribute == _REGISTER_COUNT else frames)[symbols[symbol]] = number
    spills = {m["name"]: int(m["stores"]) + int(m["loads"]) for m in _SPILL.finditer(binary.log)}

    usage: dict[str, Resources] = {}
    for section_name, section in sections.items():
        # A kernel has such a section of its own; a device function that was not inlined has none.
        name = section_name.removeprefix(".nv.info.")
        if name == section_name:
            continue
        shared = sections.get(f".nv.shared.{name}")
        own = dict(_records(cubin, section))
        parameters = own.get(_PARAMETER_BYTES, 0)
        usage[name] = Resources(
            registers=registers[name],
            stack_bytes=frames.get(name, 0),
            shared_bytes=shared.size if shared else 0,
            parameter_bytes=parameters if isinstance(parameters, int) else 0,
            spill_bytes=spills.get(name),
        )
    return usage


def _sections(cubin: bytes) -> dict[str, _Section]:
    if len(cubin) < 64 or cubin[:5] != b"\x7fELF\x02":
        raise ArgumentError("resource_usage: the binary holds no 64-bit ELF file (a cubin)")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [_SECTION_HEADER.unpack_from(cubin, table + i * entry_bytes) for i in range(count)]
    names_at = headers[names_index][4]
    return {
        _text(cubin, names_at + header[0]): _Section(header[4], header[5]) for header in headers
    }


def _symbols(cubin: bytes, sections: dict[str, _Section]) -> list[str]:
    table = sections[".symtab"]
    names_at = sections[".strtab"].offset
    return [
        _text(cubin, names_at + _SYMBOL.unpack_from(cubin, at)[0])
        for at in range(table.offset, table.offset + table.size, _SYMBOL.size)
    ]


def _records(cubin: bytes, section: _Section | None) -> Iterator[tuple[int, int | bytes]]:
    at, end = (section.offset, section.offset + section.size) if section else (0, 0)
    while at < end:
        form, attribute, number = struct.unpack_from("<BBH", cubin, at)
        at += 4
        if form == _WITH_PAYLOAD:
            yield attribute, cubin[at : at + number]
            at += number
        else:
            yield attribute, number


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()
