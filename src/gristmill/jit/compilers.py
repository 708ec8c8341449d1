"""Which compiler makes a program: what the rest of the jit knows of either."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

from gristmill.jit import nvrtc, triton
from gristmill.jit.binary import Binary
from gristmill.jit.triton import TritonProgram


class Compilable(Hashable, Protocol):
    """A program of any compiler: `Program` (NVRTC) or `TritonProgram`."""

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
    """The compiler of `program`. Neither is loaded by asking."""
    return triton if isinstance(program, TritonProgram) else nvrtc
