"""Kernels that are written in a language inside Python: their programs, and how files are imported.

A source may import from files beside it (`from .epilogue import activate`); those belong to it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import re
import struct
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

from gristmill.errors import ArgumentError, CompileError
from gristmill.jit.program import key_of

_OUR_IMPORT = re.compile(r"^from \.(\w+) import ", re.MULTILINE)
_FORMATS = {"i32": "i", "i64": "q", "fp32": "f"}

Constant: TypeAlias = "int | bool | str | None"


@dataclass(frozen=True)
class PythonProgram:
    """One function with its types and constants: one kernel. Each language has a class of its own.

    `source` is a file name under `root` (default: the folder of `package`), which may import from
    files beside it. `signature` gives the parameters in the order of the function's arguments with
    their types ("*bf16", "i32", "i64", "fp32"); `constants` all other arguments.
    """

    source: str
    function: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Constant], ...] = ()
    root: Path | None = field(default=None, kw_only=True)

    package: ClassVar[str]
    prefix: ClassVar[str] = ""  # of keys
    last_parameters: ClassVar[str] = ""  # that the compiler adds, as struct has them
    facts: ClassVar[tuple[str, ...]] = ("shared", "threads")  # that its binaries have

    @property
    def names(self) -> tuple[str, ...]:
        """The kernels of the program: that of its function."""
        return (self.function,)

    def texts(self) -> Mapping[str, str]:
        """File name -> text: the source first, then every file of ours that it imports from."""
        return _texts(self.package, self.root, self.source)

    def digest(self) -> str:
        """A hash over texts, function, types, constants and options; not over where files lie."""
        return _digest(self)

    def source_digest(self) -> str:
        """A hash over the texts alone, whatever is compiled from them."""
        return _source_digest(self.package, self.root, self.source)

    def key(self, arch: str) -> str:
        """The cache key: readable, and a file name."""
        stem = f"{self.prefix}{PurePosixPath(self.source).stem}_{self.function}"
        return key_of(stem, self.digest(), arch)

    def parameters(self) -> struct.Struct:
        """Packs the kernel's parameters."""
        forms = ["Q" if kind.startswith("*") else _FORMATS[kind] for _, kind in self.signature]
        return struct.Struct("".join(forms) + self.last_parameters)

    def options(self) -> dict[str, Any]:
        """What else a compile in this language depends on, by name."""
        return {}

    def imported(self) -> Any:
        """The function in the imported source; ArgumentError if it has none of this name."""
        name = f"{_name(self.package, self.root)}.{PurePosixPath(self.source).stem}"
        found = getattr(importlib.import_module(name), self.function, None)
        if found is None:
            raise ArgumentError(f"{self.source} has no function {self.function!r}")
        return found

    def check_arguments(self, names: Sequence[str], constants: Sequence[str]) -> None:
        """ArgumentError unless the function's arguments are the signature's, in order, and these.

        `names` are the function's arguments.
        """
        given = [name for name, _ in self.signature]
        in_order = [name for name in names if name in given] == given
        if not in_order or sorted(names) != sorted([*given, *constants]):
            raise ArgumentError(
                f"{self.source}: {self.function} takes {', '.join(names)}; the program gives "
                f"{', '.join(given)} as parameters and {', '.join(constants)} as constants"
            )

    def compile_error(self, arch: str, what: str, log: str, source_line: str) -> CompileError:
        """The error for a compile that failed; `source_line` is "" where the place is not known."""
        message = f"{self.source} ({self.function}) does not compile for {arch}: {what}"
        if source_line:
            message += f"\n    {source_line}"
        return CompileError(message, log=log, source_line=source_line, program=self.source)


@functools.cache
def _texts(package: str, root: Path | None, source: str) -> Mapping[str, str]:
    """`root` is the files' folder; None: that of `package` ("gristmill.kernels.triton")."""
    top, *below = package.split(".")
    folder = root or resources.files(top).joinpath(*below)
    found = {source: folder.joinpath(source).read_text(encoding="utf-8")}
    waiting = [source]
    while waiting:
        for stem in _OUR_IMPORT.findall(found[waiting.pop()]):
            name = f"{stem}.py"
            if name not in found and (file := folder.joinpath(name)).is_file():
                found[name] = file.read_text(encoding="utf-8")
                waiting.append(name)
    return MappingProxyType(found)


@functools.cache
def _source_digest(package: str, root: Path | None, source: str) -> str:
    joined = json.dumps(sorted(_texts(package, root, source).items()))
    return hashlib.sha256(joined.encode()).hexdigest()


@functools.cache
def _digest(program: PythonProgram) -> str:
    parts = {
        "source": program.source,
        "texts": sorted(program.texts().items()),
        "function": program.function,
        "signature": program.signature,
        "constants": sorted(program.constants),
        **program.options(),
    }
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _name(package: str, root: Path | None) -> str:
    """The package of the files under `root`, so that they can import from each other."""
    if root is None:
        return package
    name = f"{package.replace('.', '_')}_{hashlib.sha256(str(root).encode()).hexdigest()[:16]}"
    if name not in sys.modules:
        module = types.ModuleType(name)
        module.__path__ = [str(root)]
        sys.modules[name] = module
    return name
