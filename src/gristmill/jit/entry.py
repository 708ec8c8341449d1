"""The file format of a cached kernel.

    magic | sha256 of all that follows | length of the header | header (JSON) | cubin

The header says what the cubin is and which compiler made it. Content that does not have this
format, or has a header field of another type, is None: a damaged file counts as missing and is
never an error.
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
from gristmill.jit.python_sources import PythonProgram

SUFFIX = ".kernel"

_MAGIC = b"gristmill kernel 1\n"
_LENGTH = struct.Struct("<I")
_HASH_BYTES = 32
# Headers have 1 KB. Parsed, JSON takes up to 50 times its size in memory.
_MOST_HEADER = 4 * 1024 * 1024
_WORDS = ("key", "source", "arch", "compiler", "headers")
_MOST_FACT = 2**31  # facts are numbers of bytes or threads of a block


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
    facts = program.facts if isinstance(program, PythonProgram) else ()
    if (
        header["key"] != program.key(arch)
        or set(header["lowered"]) != set(program.names)
        or not header["facts"].keys() >= set(facts)
    ):
        return None
    return Binary(
        cubin,
        header["lowered"],
        header["log"],
        header["compiler"],
        header["headers"],
        header["facts"],
    )


def describe(content: bytes) -> Entry | None:
    """What `content` is, for a listing; None if it is not a whole cached kernel."""
    found = _parsed(content)
    if found is None:
        return None
    header = found[0]
    return Entry(
        key=header["key"],
        source=header["source"],
        names=tuple(header["names"]),
        arch=header["arch"],
        compiler=header["compiler"],
    )


def _parsed(content: bytes) -> tuple[dict[str, Any], bytes] | None:
    """Header and cubin of whole content of this format."""
    hash_at, body_at = len(_MAGIC), len(_MAGIC) + _HASH_BYTES
    body = memoryview(content)[body_at:]
    if not content.startswith(_MAGIC) or hashlib.sha256(body).digest() != content[hash_at:body_at]:
        return None
    try:
        (length,) = _LENGTH.unpack_from(body)
        if length > min(_MOST_HEADER, len(body) - _LENGTH.size):
            return None
        header = json.loads(bytes(body[_LENGTH.size :][:length]))
    except (struct.error, ValueError, RecursionError):
        return None
    return (header, bytes(body[_LENGTH.size + length :])) if _is_header(header) else None


def _is_header(found: Any) -> bool:
    """Whether every field that `encode` writes is there and has the type that it writes."""
    if not isinstance(found, dict) or not all(_is_word(found.get(one)) for one in _WORDS):
        return False
    names, lowered, facts = found.get("names"), found.get("lowered"), found.get("facts")
    return (
        isinstance(found.get("log"), str)
        and isinstance(names, list)
        and all(map(_is_word, names))
        and isinstance(lowered, dict)
        and all(map(_is_word, lowered.values()))
        and isinstance(facts, dict)
        and all(type(one) is int and 0 <= one < _MOST_FACT for one in facts.values())
    )


def _is_word(found: Any) -> bool:
    # A text that is not printable may not be encodable, or may control a terminal.
    return isinstance(found, str) and found.isprintable()
