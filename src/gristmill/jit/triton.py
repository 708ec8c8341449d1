"""Triton as a compiler: from a function of ours in Triton's language to a cubin.

Only Triton's compiler is used. Its launcher (tens of us a call, and a C compiler on the user's
machine) and its cache are not: the cubin goes into gristmill's cache and is launched as every other
kernel is, so with a warm cache Triton is not even imported. No GPU is needed to compile.

A kernel of Triton's takes its parameters one by one, in the order of the function's arguments that
are not constants, and after them two pointers: global scratch memory (of `Binary.facts`:
scratch_bytes for each block of the grid) and a profiler's, which is never there. That holds for
Triton 3.6 and 3.7, and is compared with the loaded kernel before its first launch.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from gristmill.errors import ArgumentError, CompileError, CompilerUnavailable
from gristmill.jit.binary import Binary
from gristmill.jit.optional import check_release, required
from gristmill.jit.optional import installed_version as installed
from gristmill.jit.python_sources import PythonProgram
from gristmill.locks import Lock

# Given to every compile. enable_fp_fusion: Triton's default changes in 3.10, and results with it.
BASE_OPTIONS: Mapping[str, Any] = MappingProxyType({"enable_fp_fusion": True})

_INSTALL = 'install it with: pip install "gristmill[triton]"'
_ARCH = re.compile(r"sm_(\d+)[af]?")
# What compiling imports of Triton. Triton imports all of it itself, so this takes no time.
_PARTS = (
    "triton._C.libtriton",
    "triton.backends.compiler",
    "triton.compiler",
    "triton.runtime.jit",
)

# Triton keeps state of its own while it compiles (knobs, the interpreter of its language), and most
# of a compile holds Python's lock anyway.
_compiling = Lock()


@dataclass(frozen=True)
class TritonProgram(PythonProgram):
    """One function in Triton's language with its types and constants: one kernel.

    `divisible` gives powers of two, up to 16, that parameters are multiples of (pointers: in
    bytes), which is what allows wide accesses. After its own parameters a kernel takes the two
    pointers that are told of above.
    """

    divisible: tuple[tuple[str, int], ...] = ()
    warps: int = 4
    stages: int = 3

    package: ClassVar[str] = "gristmill.kernels.triton"
    last_parameters: ClassVar[str] = "QQ"
    facts: ClassVar[tuple[str, ...]] = ("shared", "threads", "scratch_bytes")

    def options(self) -> dict[str, Any]:
        return {
            "divisible": sorted(self.divisible),
            "options": [sorted(BASE_OPTIONS.items()), self.warps, self.stages],
        }


def compile_program(program: TritonProgram, arch: str, *, verbose: bool = False) -> Binary:
    """Compile `program` for `arch` ("sm_90a"). `verbose` is of no consequence here."""
    version = compiler_version()
    with _compiling:
        try:
            cubin, metadata = _compile(program, _function(program), arch)
        except Exception as error:  # Triton raises errors of many kinds, RuntimeError among them
            raise _compile_error(program, arch, error) from error
    facts = {
        "shared": int(metadata["shared"]),
        "threads": 32 * int(metadata["num_warps"]),
        "scratch_bytes": int(metadata.get("global_scratch_size") or 0),
        "scratch_align": int(metadata.get("global_scratch_align") or 1),
        "profile_bytes": int(metadata.get("profile_scratch_size") or 0),
    }
    return Binary(cubin, {program.function: metadata["name"]}, "", version, facts=facts)


def compiler_version() -> str:
    """ "triton 3.6.0", or CompilerUnavailable. Triton is imported, the GPU is not asked."""
    return f"triton {_triton().__version__}"


def installed_version() -> str:
    """As `compiler_version`, by what is said to be installed; "" if nothing is.

    Importing Triton to ask it takes 0.2 s and more.
    """
    found = installed("triton")
    return f"triton {found}" if found else ""


def headers_version(program: TritonProgram) -> str:
    """No header but Triton's own takes part."""
    return ""


def _compile(program: TritonProgram, function: Any, arch: str) -> tuple[bytes, dict[str, Any]]:
    """What triton.compile does but for its cache: the stages of the backend, one after another.

    triton.compile would first hash all of Triton (0.5 s in each process), then write every stage
    into a folder of its own; whether it may is a setting of the whole process, not of a call.
    """
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    source = ASTSource(
        function,
        signature=_full_signature(program, function.arg_names),
        constexprs=dict(program.constants),
        attrs={
            (function.arg_names.index(name),): [["tt.divisibility", divisor]]
            for name, divisor in program.divisible
        },
    )
    target = GPUTarget("cuda", _capability(arch), 32)
    backend = make_backend(target)
    options = backend.parse_options(
        {**BASE_OPTIONS, "num_warps": program.warps, "num_stages": program.stages}
    )
    metadata: dict[str, Any] = {"target": target, **options.__dict__}
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(
        target,
        options,
        backend.get_codegen_implementation(options),
        backend.get_module_map(),
        context,
    )
    for stage in stages.values():
        module = stage(module, metadata)
    return bytes(module), metadata


def _full_signature(program: TritonProgram, arguments: list[str]) -> dict[str, str]:
    """Every argument of the function with its type, in order; ArgumentError where they differ."""
    kinds = dict(program.signature)
    program.check_arguments(arguments, list(dict(program.constants)))
    return {name: kinds.get(name, "constexpr") for name in arguments}


def _capability(arch: str) -> int:
    match = _ARCH.fullmatch(arch)
    if match is None:
        raise ArgumentError(f"Triton compiles for targets such as sm_90a, not for {arch!r}")
    return int(match[1])


@functools.cache
def _triton() -> Any:
    """The package, imported with the parts that compile; CompilerUnavailable is not remembered."""
    triton = required("triton", "Triton", _INSTALL)
    check_release(triton, "Triton", (3, 6), _INSTALL)
    for part in _PARTS:
        required(part, "Triton", _INSTALL)
    return triton


def _function(program: TritonProgram) -> Any:
    """The function as Triton sees it."""
    from triton.runtime.jit import JITFunction

    found = program.imported()
    if not isinstance(found, JITFunction):
        raise CompilerUnavailable(
            "Triton's interpreter is on in this process and its compiler therefore off; "
            "unset TRITON_INTERPRET to compile kernels"
        )
    return found


def _compile_error(
    program: TritonProgram, arch: str, error: Exception
) -> CompileError | CompilerUnavailable:
    if isinstance(error, (ArgumentError, CompilerUnavailable)):
        raise error
    log = f"{type(error).__name__}: {error}"
    if (cause := error.__cause__) is not None:
        log += f"\n{type(cause).__name__}: {cause}"
    last = next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "")
    return program.compile_error(arch, last, log, _source_line(program, error))


def _source_line(program: TritonProgram, error: Exception) -> str:
    """Where in the source, if it is an error of the language that knows its place."""
    text, line = getattr(error, "src", None), getattr(getattr(error, "node", None), "lineno", 0)
    if not isinstance(text, str) or not 0 < line <= len(text.splitlines()):
        return ""
    for name, whole in program.texts().items():
        before, found, _ = whole.partition(text.splitlines()[0])
        if found:  # line 1 of the error's text is the function's first
            number = before.count("\n") + line
            return f"{name}:{number}: {text.splitlines()[line - 1].strip()}"
    return ""
