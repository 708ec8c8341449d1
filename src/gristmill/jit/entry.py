"""The file format of a cached kernel.

    magic | sha256 of all that follows | length of the header | header (JSON) | cubin

The header says what the cubin is and who made it. Whatever does not read back exactly is None: a
damaged file is a kernel that is not there, never an error.
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from dataclasses import dataclass
from typing import Any

from gristmill.jit.binary import Binary
from gristmill.jit.compilers import Compilable

SUFFIX = ".kernel"

_MAGIC = b"gristmill kernel 1\n"
_LENGTH = struct.Struct("<I")
_HASH_BYTES = 32


@dataclass(frozen=True)
class Entry:
    """What one file of the cache holds, as `gristmill cache ls` shows it."""

    key: str
    source: str
    names: tuple[str, ...]
    arch: str
    compiler: str


def file_name(key: str, compiler: str, headers: str) -> str:
    """The name of the file for a program and the compiler that made it.

    The compiler and this format are in it, so that two environments, or two versions of gristmill,
    share a folder without overwriting each other's files.
    """
    return f"{key}.{_tag(compiler, headers)}{SUFFIX}"


def key_in(name: str) -> str:
    """The key in the name of a file."""
    return name.removesuffix(SUFFIX).rpartition(".")[0]


@functools.cache
def _tag(compiler: str, headers: str) -> str:
    made = "\n".join((compiler, headers)).encode() + _MAGIC
    return hashlib.sha256(made).hexdigest()[:8]


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


def decode(content: bytes, program: Compilable, arch: str) -> Binary | None:
    """The binary in `content`, if it is whole and is the one of `program` for `arch`."""
    found = _parsed(content)
    if found is None:
        return None
    header, cubin = found
    try:
        if header["key"] != program.key(arch) or set(header["lowered"]) != set(program.names):
            return None
        return Binary(
            cubin,
            header["lowered"],
            header["log"],
            header["compiler"],
            header["headers"],
            header["facts"],
        )
    except (KeyError, TypeError):
        return None


def describe(content: bytes) -> Entry | None:
    """What `content` is, for a listing; None if it is not a whole cached kernel."""
    found = _parsed(content)
    if found is None:
        return None
    header = found[0]
    try:
        return Entry(
            key=header["key"],
            source=header["source"],
            names=tuple(header["names"]),
            arch=header["arch"],
            compiler=header["compiler"],
        )
    except (KeyError, TypeError):
        return None


def _parsed(content: bytes) -> tuple[dict[str, Any], bytes] | None:
    """Header and cubin of whole content of this format."""
    hash_at, body_at = len(_MAGIC), len(_MAGIC) + _HASH_BYTES
    body = content[body_at:]
    if not content.startswith(_MAGIC) or hashlib.sha256(body).digest() != content[hash_at:body_at]:
        return None
    try:
        (length,) = _LENGTH.unpack_from(body)
        header = json.loads(body[_LENGTH.size :][:length])
    except (struct.error, ValueError, RecursionError):
        return None
    return (header, body[_LENGTH.size + length :]) if isinstance(header, dict) else None
