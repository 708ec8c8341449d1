"""What the tests of the jit share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gristmill
from gristmill.jit import TritonProgram
from gristmill.jit.cutedsl import CuteProgram

SOURCES = Path(__file__).parent / "sources"
ARCH = "sm_90a"

# One kernel, y = factor * x, in both languages inside Python.
SIGNATURE = (
    ("x", "*fp32"),
    ("count", "i32"),
    ("factor", "fp32"),
    ("y", "*fp32"),
    ("stride", "i64"),
)
TRITON_SCALE = TritonProgram(
    "scale.py",
    "scale",
    SIGNATURE,
    (("absent", None), ("BLOCK", 128)),
    (("x", 16), ("y", 16)),
    warps=2,
    root=SOURCES,
)
CUTE_SCALE = CuteProgram(
    "cute_scale.py", "scale", SIGNATURE, (("absent", None),), (("x", 16),), 64, root=SOURCES
)

# The head of a script that imports modules of the package, and no torch.
ALONE = f"""
import sys, types
sys.modules["gristmill"] = types.ModuleType("gristmill")
sys.modules["gristmill"].__path__ = {list(gristmill.__path__)!r}
"""

# The head of a script that is given a program's text.
WITH_PROGRAM = """
import os, sys
from gristmill.errors import CompilerUnavailable
from gristmill.jit.cache import load_or_compile
from gristmill.jit.compilers import from_text
program = from_text(sys.argv[1], anywhere=True)
"""

# The head of a script that runs with the `fake_driver` as its libcuda.so.1.
WITH_FAKE_DRIVER = """
import ctypes, struct, sys, threading
import pytest
from gristmill.errors import ArgumentError, CompileError, DriverError
from gristmill.jit.kernel import kernel

fake = ctypes.CDLL("libcuda.so.1")

class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16)]

class Last(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_uint32) for name in ("grid", "block", "shared", "count")]
        + [(name, ctypes.c_uint64) for name in ("stream", "function", "context")]
        + [("attributes", Attribute * 4), ("params", ctypes.c_ubyte * 64)]
    )

last = Last.in_dll(fake, "last")

def number(name):
    return ctypes.c_int.in_dll(fake, name)

def attributes():
    return {item.id: list(item.value[:3]) for item in last.attributes[: last.count]}
"""

TINY = """
struct Params { float* out; };
template <int N> __global__ void twice(const Params p) { p.out[threadIdx.x] = 2 * N; }
"""

# The layers above the jit are left out: it must not need them, and a test of it need not wait for
# torch to be imported.
_PREAMBLE = f"""
import sys, types
sys.modules["gristmill"] = types.ModuleType("gristmill")
sys.modules["gristmill"].__path__ = {list(gristmill.__path__)!r}
"""


def start_python(code: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """A fresh Python that can import the jit, with only the environment given."""
    return subprocess.Popen(
        [sys.executable, "-c", _PREAMBLE + code, *map(str, arguments)],
        env={"PYTHONPATH": ":".join(filter(None, sys.path)), "HOME": "/nonexistent", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_python(code: str, *arguments: object, **environment: str) -> str:
    """What a fresh Python prints; an error of it is one of the test."""
    process = start_python(code, *arguments, **environment)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return out
