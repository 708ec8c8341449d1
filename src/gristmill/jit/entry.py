"""The file format of a cached kernel.

    magic | sha256 of all that follows | length of the header | header (JSON) | cubin

The header says what the cubin is and who made it. Whatever does not read back exactly is None: a
damaged file is a kernel that is not there, never an error.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.jit.binary import Binary
from gristmill.jit.compilers import Compilable

SUFFIX = ".kernel"

_MAGIC = b"gristmill kernel 1\n"
_LENGTH = struct.Struct("<I")
_HASH_BYTES = 32


@dataclass(frozen=True)
class Entry:
    """One file of the cache, as `gristmill cache ls` shows it."""

    path: Path
    size: int
    modified: float
    key: str
    source: str
    names: tuple[str, ...]
    arch: str
    compiler: str


def encode(program: Compilable, arch: str, binary: Binary) -> bytes:
    """The content of the file for `binary`."""
    header = json.dumps(
        {
            "key": program.key(arch),
            "source": program.source,
            "names": program.names,
            "arch": arch,
            "lowered": dict(binary.lowered),
            "compiler": binary.compiler,
            "headers": binary.headers,
            "log": binary.log,
            "facts": dict(binary.facts),
        }
    ).encode()
    body = _LENGTH.pack(len(header)) + header + binary.cubin
    return _MAGIC + hashlib.sha256(body).digest() + body


def read_binary(path: Path, program: Compilable, arch: str) -> Binary | None:
    """The binary kept at `path`, if it is whole and is the one of `program` for `arch`."""
    found = _read(path)
    if found is None or found[0]["key"] != program.key(arch):
        return None
    header, cubin = found
    return Binary(
        cubin,
        header["lowered"],
        header["log"],
        header["compiler"],
        header["headers"],
        header.get("facts", {}),  # files written before there were any have none
    )


def read_entry(path: Path) -> Entry | None:
    """What `path` holds, for a listing; None if it is not a whole cached kernel."""
    found = _read(path)
    if found is None:
        return None
    header = found[0]
    status = path.stat()
    return Entry(
        path=path,
        size=status.st_size,
        modified=status.st_mtime,
        key=header["key"],
        source=header["source"],
        names=tuple(header["names"]),
        arch=header["arch"],
        compiler=header["compiler"],
    )


def _read(path: Path) -> tuple[dict[str, Any], bytes] | None:
    """Header and cubin of a whole file of this format."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    hash_at, body_at = len(_MAGIC), len(_MAGIC) + _HASH_BYTES
    body = content[body_at:]
    if not content.startswith(_MAGIC) or hashlib.sha256(body).digest() != content[hash_at:body_at]:
        return None
    # The hash held, so what follows is what `encode` of this format's version wrote.
    (length,) = _LENGTH.unpack_from(body)
    return json.loads(body[_LENGTH.size :][:length]), body[_LENGTH.size + length :]
