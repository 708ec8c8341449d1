"""NVIDIA's CuTe DSL as a compiler: from a function of ours in that language to a cubin.

Only the compiler is used, in this process and without a GPU. The DSL's launcher and caches are not:
the cubin goes into gristmill's cache and is launched as every other kernel is, so with a warm cache
the DSL is not even imported. It is an extra, and nothing else needs it.

A program's function is a `cute.jit` function that launches one kernel. What it says of the grid is
of no consequence; its block has `threads` threads, and the kernel takes no dynamic shared memory.
The kernel takes its parameters one by one, in the order of the function's arguments that are no
constants: raw pointers, integers and floats, each at the offset that C would give it in a struct.
That is compared with the loaded kernel before its first launch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, ClassVar

from gristmill.errors import ArgumentError, CompileError, CompilerUnavailable
from gristmill.jit.binary import Binary
from gristmill.jit.optional import check_release, required
from gristmill.jit.optional import installed_version as installed
from gristmill.jit.python_sources import PythonProgram
from gristmill.jit.resources import resource_usage
from gristmill.locks import Lock

DISTRIBUTION = "nvidia-cutlass-dsl"
EXTRA = 'pip install "gristmill[cutedsl]"'
_INSTALL = f"install it with: {EXTRA}"

_LEAST = (4, 7)
_ARCH = re.compile(r"sm_\d+[af]?")
_SCALARS = {"i32": "Int32", "i64": "Int64", "fp32": "Float32"}
_ELEMENTS = {"bf16": "BFloat16", "fp16": "Float16", "fp32": "Float32"}
# The DSL's messages: in colours, "error: ..." and below it "--> file:44".
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"^error: (.+)$", re.MULTILINE)
_PLACE = re.compile(r"--> (\S+):(\d+)")

# The DSL keeps state of its own while it compiles, and most of it holds Python's lock anyway.
_compiling = Lock()
_importing = Lock()


@dataclass(frozen=True)
class CuteProgram(PythonProgram):
    """One function in the CuTe DSL with its types and constants: one kernel.

    `constants` leaves out `threads`, which is an argument of every function. `aligned` gives the
    bytes that pointers are multiples of, where that is more than an element.
    """

    aligned: tuple[tuple[str, int], ...] = ()
    threads: int = 128

    package: ClassVar[str] = "gristmill.kernels.cutedsl"
    prefix: ClassVar[str] = "cutedsl_"

    def options(self) -> dict[str, Any]:
        return {"aligned": sorted(self.aligned), "threads": self.threads}


def compile_program(program: CuteProgram, arch: str, *, verbose: bool = False) -> Binary:
    """Compile `program` for `arch` ("sm_90a"). `verbose` is of no consequence here."""
    if _ARCH.fullmatch(arch) is None:
        raise ArgumentError(f"the CuTe DSL compiles for targets such as sm_90a, not for {arch!r}")
    version = compiler_version()
    with _compiling, _hook_kept():
        try:
            function = program.imported()
            cubin, _ = compiled(function, _arguments(program, function), arch)
        except Exception as error:  # of many kinds, most of them the DSL's own
            raise _compile_error(program, arch, error) from error
    symbols = list(resource_usage(Binary(cubin, {}, "", version)))
    if len(symbols) != 1:
        raise CompileError(
            f"{program.source} ({program.function}) must launch one kernel, not {len(symbols)}",
            program=program.source,
        )
    facts = {"shared": 0, "threads": program.threads}
    return Binary(cubin, {program.function: symbols[0]}, "", version, facts=facts)


def compiled(function: Any, arguments: list[Any], arch: str) -> tuple[bytes, str]:
    """The cubin of the kernel that `function` launches, and its PTX."""
    from cutlass import cute

    with tempfile.TemporaryDirectory(prefix="gristmill-cutedsl-") as folder:
        options = f"--gpu-arch {arch} --keep-cubin --keep-ptx --dump-dir={shlex.quote(folder)}"
        made = cute.compile(function, *arguments, options=options)
        cubin, ptx = made.__cubin__, made.__ptx__
    if not isinstance(cubin, bytes):
        raise RuntimeError("it launches no kernel, or the CuTe DSL gave none")
    return cubin, str(ptx)


def compiler_version() -> str:
    """ "cutedsl 4.8.1", or CompilerUnavailable. The DSL is imported, the GPU is not asked."""
    return f"cutedsl {_dsl().__version__}"


def installed_version() -> str:
    """As `compiler_version`, by what is said to be installed; "" if nothing is.

    Importing the DSL to ask it takes 0.8 s.
    """
    if why_missing() is not None:
        return ""
    found = installed(DISTRIBUTION)
    return f"cutedsl {found}" if found else ""


def headers_version(program: CuteProgram) -> str:
    """No header takes part."""
    return ""


def why_missing() -> str | None:
    """Why nothing can be compiled, in a few words, if the DSL is not installed. Imports nothing."""
    # None there means that nobody shall import it.
    there = sys.modules.get("cutlass", "not yet") is not None and _is_installed()
    return None if there else f"needs {DISTRIBUTION}: {EXTRA}"


@functools.lru_cache(maxsize=1)
def _is_installed() -> bool:
    # To look for a version of what is not there takes 8 ms, and a first call, all of it, 30.
    if "cutlass" not in sys.modules and importlib.util.find_spec("cutlass") is None:
        return False
    return installed(DISTRIBUTION) != ""  # else another package of this name


def _arguments(program: CuteProgram, function: Any) -> list[Any]:
    """What stands for the arguments of the function; ArgumentError where they differ."""
    kinds = dict(program.signature)
    constants = {**dict(program.constants), "threads": program.threads}
    names = list(inspect.signature(function).parameters)
    program.check_arguments(names, list(constants))
    aligned = dict(program.aligned)
    return [
        _stand_in(kinds[name], aligned.get(name)) if name in kinds else constants[name]
        for name in names
    ]


def _stand_in(kind: str, alignment: int | None) -> Any:
    """A value of the type: compiling reads none."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_ptr

    if not kind.startswith("*"):
        return getattr(cutlass, _SCALARS[kind])(0)
    element = getattr(cutlass, _ELEMENTS[kind.removeprefix("*")])
    space = cute.AddressSpace.gmem
    return make_ptr(element, 0, space, assumed_align=alignment or element.width // 8)


@functools.cache
def _dsl() -> Any:
    """The package, imported; CompilerUnavailable is not remembered."""
    if why_missing() is not None:  # then what has the name, if anything, is not imported either
        raise CompilerUnavailable(f"the CuTe DSL is not installed; {_INSTALL}")
    # Only one thread: another would take the DSL's hook for the user's, and put that back.
    with _importing, _hook_kept():
        cutlass = required("cutlass", "the CuTe DSL", _INSTALL)
        required("cutlass.cute", "the CuTe DSL", _INSTALL)
    check_release(cutlass, "the CuTe DSL", _LEAST, _INSTALL)
    return cutlass


@contextlib.contextmanager
def _hook_kept() -> Iterator[None]:
    """The DSL puts a hook of its own before the user's for errors that nobody catches."""
    hook = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = hook


def _compile_error(program: CuteProgram, arch: str, error: Exception) -> CompileError:
    if isinstance(error, ArgumentError):
        raise error
    log = _COLOUR.sub("", f"{type(error).__name__}: {error}")
    told = _ERROR.search(log)
    what = told[1] if told else next((line for line in log.splitlines() if line.strip()), "")
    return program.compile_error(arch, what.strip(), log, _source_line(program, log))


def _source_line(program: CuteProgram, log: str) -> str:
    """Where in the source, if the DSL names a place in it."""
    for match in _PLACE.finditer(log):
        name, number = PurePosixPath(match[1]).name, int(match[2])
        lines = program.texts().get(name, "").splitlines()
        if 0 < number <= len(lines):
            return f"{name}:{number}: {lines[number - 1].strip()}"
    return ""
