"""From a Program to a cubin, through NVRTC.

`compile_program` is a pure function of its arguments and the installed compiler: headers of ours
are handed over from memory, nothing is read from or written to a cache, and no GPU is needed.
NVRTC runs without Python's lock, so other threads go on meanwhile.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from typing import Any

from gristmill.errors import CompileError, CompilerUnavailable
from gristmill.jit.binary import Binary
from gristmill.jit.optional import imported, required
from gristmill.jit.optional import installed_version as installed
from gristmill.jit.program import Program

_INSTALL = 'install it with: pip install "gristmill[nvrtc]"'

_RELEASE = re.compile(r"\d+\.\d+")
# "norm.cu(12): error: ..." and, in some messages, "norm.cu(12): catastrophic error: ..."
_ERROR_LINE = re.compile(r"^(?P<file>[^\s(][^(\n]*)\((?P<line>\d+)\): .*?error.*$", re.MULTILINE)


def compile_program(program: Program, arch: str, *, verbose: bool = False) -> Binary:
    """Compile `program` for `arch` ("sm_90a").

    With `verbose` the log also tells registers and spills of each kernel (ptxas -v).
    """
    nvrtc = _nvrtc()
    texts = dict(program.texts())
    source = texts.pop(program.source)
    options = list(program.compiler_options(arch))
    if program.includes_cuda_headers() and (folder := include_dir()) is not None:
        options.append(f"--include-path={folder}")
    if verbose:
        options.append("--ptxas-options=-v")
    handle = _checked(
        nvrtc,
        nvrtc.nvrtcCreateProgram(
            source.encode(),
            program.source.encode(),
            len(texts),
            [text.encode() for text in texts.values()],
            [name.encode() for name in texts],
        ),
    )
    try:
        for name in program.names:
            _checked(nvrtc, nvrtc.nvrtcAddNameExpression(handle, name.encode()))
        (status,) = nvrtc.nvrtcCompileProgram(
            handle, len(options), [option.encode() for option in options]
        )
        log = _log(nvrtc, handle)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise _compile_error(program, arch, status.name, log)
        lowered = {
            name: bytes(_checked(nvrtc, nvrtc.nvrtcGetLoweredName(handle, name.encode()))).decode()
            for name in program.names
        }
        cubin = bytes(_checked(nvrtc, nvrtc.nvrtcGetCUBINSize(handle)))
        _checked(nvrtc, nvrtc.nvrtcGetCUBIN(handle, cubin))
    finally:
        nvrtc.nvrtcDestroyProgram(handle)
    return Binary(cubin, lowered, log, compiler_version(), headers_version(program))


def compiler_version() -> str:
    """ "nvrtc 13.0", or CompilerUnavailable."""
    return _loaded()[1]


def installed_version() -> str:
    """As `compiler_version`, by what is said to be installed; "" if nothing is.

    Loading NVRTC to ask it takes 30 ms, most of what a first call with a warm cache may take.
    """
    return _installed("nvidia-cuda-nvrtc")


@functools.lru_cache(maxsize=1)
def _installed(package: str) -> str:
    match = _RELEASE.match(installed(package))
    return f"nvrtc {match[0]}" if match else ""


def headers_version(program: Program) -> str:
    """ "cuda 13.0" for a program that includes headers of the toolkit found here, else ""."""
    if not program.includes_cuda_headers() or (folder := include_dir()) is None:
        return ""
    return _headers_in(folder)


@functools.cache
def _headers_in(folder: Path) -> str:
    text = (folder / "cuda_runtime_api.h").read_text(encoding="utf-8", errors="replace")
    match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    number = int(match[1]) if match else 0
    return f"cuda {number // 1000}.{number % 1000 // 10}"


@functools.cache
def include_dir() -> Path | None:
    """The folder of the CUDA headers (cuda_fp8.h and its like), or None."""
    for folder in _include_dirs():
        if (folder / "cuda_runtime_api.h").is_file() and (folder / "cuda_fp8.h").is_file():
            return folder
    return None


def _include_dirs() -> list[Path]:
    # The wheels first: they are what came with the NVRTC that is loaded.
    spec = importlib.util.find_spec("nvidia")
    wheels = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    folders = [place / "cu13" / "include" for place in wheels]
    try:
        # Knows conda's layout, CUDA_HOME and the usual system folders.
        found = imported("cuda.pathfinder").find_nvidia_header_directory("cudart")
    except Exception:  # an optional helper: whatever it says, its answer is "not found"
        found = None
    return [*folders, Path(found)] if found else folders


@functools.cache
def _loaded() -> tuple[Any, str]:
    """The binding module and the compiler's version; CompilerUnavailable is not remembered."""
    nvrtc = required("cuda.bindings.nvrtc", "cuda-bindings", _INSTALL)
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # the bindings have no common error for a library that is not there
        reason = " ".join(str(error).split())
        raise CompilerUnavailable(f"NVRTC cannot be loaded ({reason}); {_INSTALL}") from error
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompilerUnavailable(f"NVRTC does not tell its version ({status.name}); {_INSTALL}")
    if major < 13:
        raise CompilerUnavailable(
            f"NVRTC {major}.{minor} is older than 13.0, the first that gristmill's kernels are "
            f"compiled with; {_INSTALL}"
        )
    return nvrtc, f"nvrtc {major}.{minor}"


def _nvrtc() -> Any:
    return _loaded()[0]


def _checked(nvrtc: Any, result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC: {status.name}")
    return values[0] if values else None


def _log(nvrtc: Any, handle: Any) -> str:
    buffer = bytes(_checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(handle)))
    _checked(nvrtc, nvrtc.nvrtcGetProgramLog(handle, buffer))
    return buffer.rstrip(b"\0").decode(errors="replace").strip()


def _compile_error(
    program: Program, arch: str, status: str, log: str
) -> CompileError | CompilerUnavailable:
    missing = program.includes_cuda_headers() and include_dir() is None
    if missing and "open source file" in log:
        return CompilerUnavailable(
            f"{program.source} includes headers of CUDA, which were not found; {_INSTALL}"
        )
    match = _ERROR_LINE.search(log)
    what = match[0] if match else log or status
    source_line = _source_line(program, match, log) if match else ""
    message = f"{program.source} does not compile for {arch} ({status}): {what}"
    if source_line:
        message += f"\n    {source_line}"
    return CompileError(message, log=log, source_line=source_line, program=program.source)


def _source_line(program: Program, match: re.Match[str], log: str) -> str:
    lines = program.texts().get(match["file"], "").splitlines()
    number = int(match["line"])
    if 0 < number <= len(lines):
        text = lines[number - 1]
    else:
        # Not a file of ours: a header of CUDA, or the compiler's own list of name expressions.
        # NVRTC quotes the line below its message.
        text = log[match.end() :].lstrip("\n").partition("\n")[0]
    return f"{match['file']}:{number}: {text.strip()}"
