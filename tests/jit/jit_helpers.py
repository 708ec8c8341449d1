"""What the tests of the jit share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gristmill

SOURCES = Path(__file__).parent / "sources"
ARCH = "sm_90a"

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
