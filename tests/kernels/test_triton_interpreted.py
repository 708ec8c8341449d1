"""The Triton kernels against fp64, run by Triton's interpreter in a Python of its own.

Whether functions are compiled or interpreted is settled when they are imported, for the whole
process; see triton_interpreted.py for what is checked.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton")

CHILD = Path(__file__).parent / "triton_interpreted.py"
CHECKS = ("tiles", "activations", "split_k", "persistent", "matmul", "wide", "rows_alone")


def _run(*checks: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(CHILD), *checks],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_every_kernel_is_within_rounding_of_fp64() -> None:
    done = _run(*CHECKS)
    assert done.returncode == 0, done.stderr[-4000:]
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(CHECKS)


def test_the_comparison_sees_one_bit() -> None:
    done = _run("one_bit")
    assert done.returncode == 0, done.stderr[-4000:]
