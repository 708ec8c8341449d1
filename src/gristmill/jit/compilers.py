"""Which compiler makes a program, and a program as text: what the jit knows of all compilers."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, Protocol

from gristmill.errors import ArgumentError
from gristmill.jit import cutedsl, nvrtc, triton
from gristmill.jit.binary import Binary
from gristmill.jit.cutedsl import CuteProgram
from gristmill.jit.program import Program
from gristmill.jit.triton import TritonProgram
from gristmill.log import one_line

_SOURCE = re.compile(r"[A-Za-z0-9_]+\.(cu|py)")
# In a text: files in Python are in Triton's language unless it says otherwise.
_LANGUAGE, _CUTEDSL = "language", "cutedsl"


class Compilable(Hashable, Protocol):
    """A program of any compiler: `Program` (NVRTC), `TritonProgram` or `CuteProgram`."""

    @property
    def source(self) -> str: ...

    @property
    def names(self) -> tuple[str, ...]: ...

    def digest(self) -> str: ...

    def source_digest(self) -> str: ...

    def key(self, arch: str) -> str: ...


class Compiler(Protocol):
    """A module that compiles programs of one kind."""

    def compile_program(self, program: Any, arch: str, *, verbose: bool = False) -> Binary: ...

    def compiler_version(self) -> str: ...

    def installed_version(self) -> str: ...

    def headers_version(self, program: Any) -> str: ...


def compiler_of(program: Compilable) -> Compiler:
    """The compiler of `program`. None is loaded by asking."""
    if isinstance(program, CuteProgram):
        return cutedsl
    return triton if isinstance(program, TritonProgram) else nvrtc


def to_text(program: Compilable) -> str:
    """`program` as one line of JSON, for other processes and for people."""
    assert isinstance(program, Program | TritonProgram | CuteProgram)
    given = {
        field.name: getattr(program, field.name)
        for field in dataclasses.fields(program)
        if getattr(program, field.name) != field.default
    }
    if isinstance(program, CuteProgram):
        given[_LANGUAGE] = _CUTEDSL
    return json.dumps(given, default=str)


def from_text(text: str, *, anywhere: bool = False) -> Compilable:
    """The program that `to_text` wrote; ArgumentError, saying why, if it is none.

    Only of sources that belong to gristmill: to compile a file that is Python is to run it.
    `anywhere` allows other folders, too.
    """
    given_text = one_line(repr(text))
    try:
        given = {name: _frozen(value) for name, value in json.loads(text).items()}
        root = given.pop("root", None)
        if root is not None:
            if not anywhere:
                raise ArgumentError("it has a folder of its own (root)")
            given["root"] = Path(root)
        if not _SOURCE.fullmatch(given["source"]):
            raise ArgumentError(f"its source {given['source']!r} is no file name such as norm.cu")
        program: Compilable = _kind(given)(**given)
        program.digest()  # reads the source
    except ArgumentError as error:
        raise ArgumentError(f"{given_text} is not a program of gristmill: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ArgumentError(
            f"{given_text} is not a program of gristmill ({reason}); it is JSON such as "
            f'{{"source": "norm.cu", "names": ["..."]}}, as KernelNotCached shows it'
        ) from error
    return program


def _kind(given: dict[str, Any]) -> Callable[..., Compilable]:
    """The class of a program; takes the word about its language out."""
    language = given.pop(_LANGUAGE, None)
    if language not in (None, _CUTEDSL):
        raise ArgumentError(f"its language {language!r} is none but {_CUTEDSL!r}, or not given")
    if language == _CUTEDSL:
        return CuteProgram
    return Program if given["source"].endswith(".cu") else TritonProgram


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
