"""Builds kernels for the CPU with g++ and launches them on CPU tensors.

The same text that NVRTC compiles is compiled with `-DGRISTMILL_EMULATION`, against emulation.h. A
driver of a few lines per instantiation turns each kernel into a C function, which is loaded by
ctypes. Libraries are kept in a folder, found again by the hash of everything that went into them;
`pytest --cache-clear` empties it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import filelock
import pytest
import torch

from gristmill.jit.program import Program

HERE = Path(__file__).parent
RUNTIME_SOURCES = ("scheduler.cpp", "machine.cpp", "tensor_copies.cpp", "matrices.cpp", "votes.cpp")

# Contraction is off so that every machine computes the same: kernels say fmaf where they mean it.
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-fno-gnu-unique", "-w")

# A driver costs about half a second before its first instantiation, and both cores should be busy.
NAMES_PER_LIBRARY = 12

_running = threading.Lock()  # the runtime's state is global, and ctypes lets other threads run


class EmulationError(RuntimeError):
    """A launch that the emulation ended: the message names the block, the thread and the reason."""


class BuildError(RuntimeError):
    """g++ refused a kernel; the message is its own."""


@dataclass(frozen=True)
class Buffer:
    """Bytes that a launch may read, and write if `writable`.

    `fresh`: the previous launch wrote them, so they may not be read before that is done.
    """

    pointer: int
    bytes: int
    writable: bool
    fresh: bool = False


def readable(tensor: torch.Tensor) -> Buffer:
    """From a tensor's first to its last element; gaps between strided rows are within."""
    if tensor.numel() == 0:
        return Buffer(tensor.data_ptr(), 0, writable=False)
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return Buffer(tensor.data_ptr(), (last + 1) * tensor.element_size(), writable=False)


def writable(tensor: torch.Tensor) -> Buffer:
    buffer = readable(tensor)
    return Buffer(buffer.pointer, buffer.bytes, writable=True)


_MAP = struct.Struct("@QQQQQIIII72x")
_MAP_TAG = 0x7E4502A9


def tensor_map(
    tensor: torch.Tensor, box_rows: int, box_columns: int, *, swizzle: bool = True
) -> bytes:
    """The 128 bytes that stand for a TensorMap of a matrix, with boxes of so many rows and columns.

    `swizzle`: boxes lie in shared memory in the order that tensor maps call 128-byte swizzle.
    """
    rows, columns = tensor.shape
    size, box = tensor.element_size(), (box_rows, box_columns)
    map_at = maps_of_rows(0, "", size, columns, rows, tensor.stride(0), box, swizzle=swizzle)
    return map_at(tensor.data_ptr())


def maps_of_rows(
    device_index: int,
    dtype: str,
    itemsize: int,
    columns: int,
    rows: int,
    stride: int,
    box: tuple[int, int],
    *,
    swizzle: bool = True,
) -> Callable[[int], bytes]:
    """In place of `gristmill.jit.tensor_map.maps_of_rows`, which asks the driver."""
    shape = (columns, rows, stride * itemsize, box[1], box[0], itemsize, 128 if swizzle else 0)
    return lambda address: _MAP.pack(_MAP_TAG, address, *shape)


@dataclass(frozen=True)
class Traffic:
    """Bytes moved: by loads and each thread's copies, by stores, in bulk; fiber switches."""

    loaded: int
    stored: int
    bulk: int
    switches: int


class _Range(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_ulonglong),
        ("end", ctypes.c_ulonglong),
        ("writable", ctypes.c_ulonglong),
        ("fresh", ctypes.c_ulonglong),
    )


class _Traffic(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_ulonglong) for name in Traffic.__dataclass_fields__)


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid", "block", "cluster")),
        *((name, ctypes.c_uint) for name in ("cooperative", "dependent", "order")),
        ("shared_bytes", ctypes.c_ulonglong),
        ("ranges", ctypes.POINTER(_Range)),
        ("range_count", ctypes.c_ulonglong),
        ("traffic", ctypes.POINTER(_Traffic)),
    )


class Emulator:
    """Kernels by name, built into `folder` when they are not there yet."""

    def __init__(self, folder: Path, compiler: str, defines: Sequence[str] = ()) -> None:
        self.folder = folder
        self.compiler = compiler
        self.flags = (*FLAGS, "-DGRISTMILL_EMULATION", *(f"-D{name}" for name in defines))
        files = sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp")])
        self._base = _digest(
            [_version(compiler), *self.flags, *(file.name + file.read_text() for file in files)]
        )
        self._functions: dict[str, ctypes._CFuncPtr] = {}

    def prepare(self, programs: Iterable[Program]) -> None:
        """Builds whatever instantiation of `programs` is not in the folder, several at once."""
        wanted = {self._key(p, name): (p, name) for p in programs for name in p.names}
        if all(self._marker(key).is_file() for key in wanted):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(self.folder / "lock"):
            by_source: dict[tuple[object, ...], list[tuple[str, Program, str]]] = {}
            for key, (program, name) in sorted(wanted.items(), key=lambda item: item[1][1]):
                if not self._marker(key).is_file():
                    source = (program.root, program.source, program.options)
                    by_source.setdefault(source, []).append((key, program, name))
            if by_source:
                self._build_runtime()
            chunks = [
                missing[first : first + NAMES_PER_LIBRARY]
                for missing in by_source.values()
                for first in range(0, len(missing), NAMES_PER_LIBRARY)
            ]
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(self._build_library, chunks))

    def launch(
        self,
        program: Program,
        name: str,
        params: bytes,
        *,
        grid: int,
        block: int,
        shared: int = 0,
        cluster: int = 1,
        cooperative: bool = False,
        dependent: bool = False,
        buffers: Sequence[Buffer] = (),
        order: int = 0,
    ) -> Traffic:
        """Runs one grid to its end.

        `order` is that of the threads, and of blocks that run one after another: 0 first come
        first served, 1 last come first served, else the seed of a random one. A kernel whose
        result depends on it lacks a barrier.
        """
        function = self._function(program, name)
        ranges = (_Range * max(1, len(buffers)))(
            *(_Range(b.pointer, b.pointer + b.bytes, b.writable, b.fresh) for b in buffers)
        )
        traffic = _Traffic()
        shape = _Shape(
            grid=grid,
            block=block,
            cluster=cluster,
            cooperative=cooperative,
            dependent=dependent,
            order=order,
            shared_bytes=shared,
            ranges=ranges,
            range_count=len(buffers),
            traffic=ctypes.pointer(traffic),
        )
        with _running:
            message = function(ctypes.byref(shape), params, len(params))
        if message is not None:
            raise EmulationError(f"{name}: {message.decode()}")
        return Traffic(*(getattr(traffic, field) for field in Traffic.__dataclass_fields__))

    def _function(self, program: Program, name: str) -> ctypes._CFuncPtr:
        key = self._key(program, name)
        if key not in self._functions:
            if not self._marker(key).is_file():
                self.prepare([Program(program.source, (name,), program.options, program.root)])
            library, symbol = json.loads(self._marker(key).read_text())
            function = getattr(ctypes.CDLL(str(self.folder / library)), symbol)
            function.argtypes = (ctypes.POINTER(_Shape), ctypes.c_char_p, ctypes.c_ulonglong)
            function.restype = ctypes.c_char_p
            self._functions[key] = function
        return self._functions[key]

    def _key(self, program: Program, name: str) -> str:
        texts = [part for item in sorted(program.texts().items()) for part in item]
        return _digest([self._base, program.source, *program.options, *texts, name])

    def _marker(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    @property
    def _runtime(self) -> str:
        return f"emulation-{self._base}.so"

    def _build_runtime(self) -> None:
        if not (self.folder / self._runtime).is_file():
            self._compile(self._runtime, *(str(HERE / name) for name in RUNTIME_SOURCES), "-O2")

    def _build_library(self, chunk: list[tuple[str, Program, str]]) -> None:
        program = chunk[0][1]
        library = f"kernels-{_digest([key for key, _, _ in chunk])}.so"
        driver = self.folder / f"{library}.cpp"
        driver.write_text(_driver(program.source, [name for _, _, name in chunk]))
        root = program.root or Path(str(resources.files("gristmill"))) / "kernels" / "cuda"
        self._compile(
            library,
            str(driver),
            "-fvisibility=hidden",
            *(option for option in program.options if option.startswith("-D")),
            f"-I{HERE}",
            f"-I{root}",
            f"-L{self.folder}",
            f"-l:{self._runtime}",
            "-Wl,-rpath,$ORIGIN",
        )
        for index, (key, _, _) in enumerate(chunk):
            self._marker(key).write_text(json.dumps([library, f"launch_{index}"]))

    def _compile(self, output: str, *arguments: str) -> None:
        unfinished = self.folder / f"{output}.unfinished"
        command = [self.compiler, *self.flags, *arguments, "-o", str(unfinished)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(f"{' '.join(command)}\n{done.stderr[:4000]}")
        os.replace(unfinished, self.folder / output)


def emulator_for(config: pytest.Config, defines: Sequence[str] = ()) -> Emulator:
    """The emulator of a test run. Without g++ its tests are skipped, but in CI they must not be."""
    compiler = shutil.which("g++")
    if compiler is None:
        message = "the CUDA kernels run on the CPU only where g++ is installed"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    cache = getattr(config, "cache", None)  # none with -p no:cacheprovider
    folder = cache.mkdir("emulation") if cache is not None else _own_folder()
    return Emulator(Path(folder), compiler, defines)


@functools.cache
def _own_folder() -> str:
    return tempfile.mkdtemp(prefix="gristmill-emulation-")


def _driver(source: str, names: Sequence[str]) -> str:
    functions = [
        f'extern "C" __attribute__((visibility("default")))\n'
        f"const char* launch_{index}(const emulation::Shape* shape, const void* params,"
        f" unsigned long long bytes) {{\n"
        f"  return emulation::launch(&{name}, shape, params, bytes, EMULATION_SHARED_ALIGNMENT);\n"
        f"}}\n"
        for index, name in enumerate(names)
    ]
    alignment = (
        "#ifndef EMULATION_SHARED_ALIGNMENT\n#define EMULATION_SHARED_ALIGNMENT 16\n#endif\n"
    )
    start = f'#include "emulation.h"\n#include "{source}"\n{alignment}\n'
    return start + "\n".join(functions)


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()[:32]


@functools.cache
def _version(compiler: str) -> str:
    return subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=True
    ).stdout
