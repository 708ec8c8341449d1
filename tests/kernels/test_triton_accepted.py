"""Each config that a Triton kernel accepts gives correct results, in Triton's interpreter.

See triton_accepted.py, which is run in a Python of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton")
pytest.importorskip("hypothesis")

CHILD = Path(__file__).parent / "triton_accepted.py"
# How many configs of each are drawn.
QUICK = {"tiles": 20, "split_k": 20, "persistent": 25, "rows": 20, "mixture": 15}
LONG = {"tiles": 600, "split_k": 600, "persistent": 600, "rows": 500, "mixture": 400}


def _run(counts: dict[str, int], seconds: int) -> None:
    done = subprocess.run(
        [sys.executable, str(CHILD), *(f"{name}={count}" for name, count in counts.items())],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(counts)


def test_any_config_that_is_accepted_is_right() -> None:
    _run(QUICK, 300)


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_many_configs_that_are_accepted_are_right(name: str) -> None:
    _run({name: LONG[name]}, 1800)
