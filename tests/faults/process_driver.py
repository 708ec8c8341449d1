"""Scripts that run against a driver without a GPU (tests/jit/fake_driver.c)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gristmill

JIT = Path(__file__).parent.parent / "jit"
SOURCES = JIT / "sources"

# The jit alone: nobody waits for torch to be imported.
_PREAMBLE = f"""
import sys, types
sys.modules["gristmill"] = types.ModuleType("gristmill")
sys.modules["gristmill"].__path__ = {list(gristmill.__path__)!r}
"""


def run_with_fake_driver(folder: Path, code: str) -> str:
    """What `code` prints, with the folder of the probe's source as its argument."""
    pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = folder / "libcuda.so.1"
    subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "-o", library, JIT / "fake_driver.c"], check=True
    )
    found = subprocess.run(
        [sys.executable, "-c", _PREAMBLE + code, SOURCES],
        env={
            "PATH": os.environ.get("PATH", ""),
            "PYTHONPATH": ":".join(filter(None, sys.path)),
            "GRISTMILL_CACHE_DIR": str(folder / "cache"),
            "LD_LIBRARY_PATH": str(folder),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout
