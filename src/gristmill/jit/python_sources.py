"""Kernels that are written in Python: the files of one, and how they are imported.

A source may import from files beside it (`from .epilogue import activate`); those belong to it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import re
import sys
import types
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from gristmill.errors import ArgumentError

_OUR_IMPORT = re.compile(r"^from \.(\w+) import ", re.MULTILINE)


@functools.cache
def texts(package: str, root: Path | None, source: str) -> Mapping[str, str]:
    """File name -> text: the source first, then every file of ours that it imports from.

    `root` is their folder; None: that of `package` ("gristmill.kernels.triton").
    """
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
def source_digest(package: str, root: Path | None, source: str) -> str:
    """A hash over the texts, wherever they lie."""
    joined = json.dumps(sorted(texts(package, root, source).items()))
    return hashlib.sha256(joined.encode()).hexdigest()


def function_of(package: str, root: Path | None, source: str, function: str) -> Any:
    """The function in the imported source; ArgumentError if it has none of this name."""
    name = f"{_name(package, root)}.{PurePosixPath(source).stem}"
    found = getattr(importlib.import_module(name), function, None)
    if found is None:
        raise ArgumentError(f"{source} has no function {function!r}")
    return found


def check_arguments(
    source: str, function: str, names: Sequence[str], given: Sequence[str], constants: Sequence[str]
) -> None:
    """ArgumentError unless a function takes what is given, in this order, and the constants."""
    in_order = [name for name in names if name in given] == list(given)
    if not in_order or sorted(names) != sorted([*given, *constants]):
        raise ArgumentError(
            f"{source}: {function} takes {', '.join(names)}; the program gives "
            f"{', '.join(given)} as parameters and {', '.join(constants)} as constants"
        )


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
