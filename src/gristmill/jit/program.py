"""What is compiled: a source file of ours, the instantiations wanted from it, the options.

A `Program` is plain data. Its cache key is derived from everything a compile depends on, with the
text of every header of ours that the source reaches, so no list of dependencies is kept by hand.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path, PurePosixPath
from types import MappingProxyType

# Given to every compile. --no-cache: where a driver is present NVRTC would keep results in the
# driver's own cache as well, outside the folder that the user has chosen and can clear.
BASE_OPTIONS = ("--std=c++17", "--no-cache")

_OUR_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_CUDA_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<", re.MULTILINE)


def arch_of(capability: tuple[int, int]) -> str:
    """The compile target of a compute capability: from Hopper on the architecture-specific one.

    Only the `a` targets have all instructions, and cubins never travel between capabilities anyway.
    """
    major, minor = capability
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


@dataclass(frozen=True)
class Program:
    """One source and the kernels wanted from it, compiled together into one cubin.

    `source` is a file name under `root` (default: gristmill/kernels/cuda), `names` are NVRTC name
    expressions such as `"norm_gradient<Tensor<bf16,2>,Absent>"`, `options` go to NVRTC as they
    are.
    """

    source: str
    names: tuple[str, ...]
    options: tuple[str, ...] = ()
    root: Path | None = None

    def texts(self) -> Mapping[str, str]:
        """File name -> text: the source first, then every header of ours that it reaches.

        A quoted include is always a name relative to `root`, in headers too. One that does not
        exist there is left to the compiler to judge, which also sees the `#if` around it.
        """
        return _texts(self.root, self.source)

    def digest(self) -> str:
        """A hash over texts, names and options; where the files lie is not in it."""
        return _digest(self)

    def source_digest(self) -> str:
        """A hash over the texts alone, whatever is instantiated from them."""
        return _source_digest(self.root, self.source)

    def key(self, arch: str) -> str:
        """The cache key: readable, and a file name."""
        return _key(self, arch)

    def compiler_options(self, arch: str) -> tuple[str, ...]:
        """All options of a compile for `arch` but the folder of the CUDA headers."""
        return (f"--gpu-architecture={arch}", *BASE_OPTIONS, *self.options)

    def includes_cuda_headers(self) -> bool:
        """Whether any of the texts includes a header in angle brackets."""
        return any(_CUDA_INCLUDE.search(text) for text in self.texts().values())


@functools.cache
def _texts(root: Path | None, source: str) -> Mapping[str, str]:
    folder = root or resources.files("gristmill") / "kernels" / "cuda"
    found = {source: folder.joinpath(source).read_text(encoding="utf-8")}
    waiting = [source]
    while waiting:
        for name in _OUR_INCLUDE.findall(found[waiting.pop()]):
            if name not in found and (file := folder.joinpath(name)).is_file():
                found[name] = file.read_text(encoding="utf-8")
                waiting.append(name)
    return MappingProxyType(found)


@functools.cache
def _source_digest(root: Path | None, source: str) -> str:
    texts = json.dumps(sorted(_texts(root, source).items()))
    return hashlib.sha256(texts.encode()).hexdigest()


@functools.cache
def _digest(program: Program) -> str:
    parts = {
        "source": program.source,
        "texts": sorted(program.texts().items()),
        "names": program.names,
        "options": (*BASE_OPTIONS, *program.options),
    }
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@functools.cache
def _key(program: Program, arch: str) -> str:
    return key_of(PurePosixPath(program.source).stem, program.digest(), arch)


def key_of(stem: str, digest: str, arch: str) -> str:
    """The cache key of what `digest` stands for, readable by its `stem`."""
    both = hashlib.sha256(f"{digest} {arch}".encode()).hexdigest()
    readable = re.sub(r"[^A-Za-z0-9_]", "_", stem)
    # 128 bits of it: nobody attacks the cache through its keys, its folder is the user's own.
    return f"{readable}-{arch}-{both[:32]}"
