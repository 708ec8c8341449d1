"""Graphs that vLLM compiles in one process and loads in another find their runners there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_helpers import HERE, run


def compiled(folder: Path, which: str) -> dict[str, Any]:
    done = run([str(HERE / "vllm_compile_run.py"), which], folder)
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def test_a_graph_from_the_cache_of_another_process(tmp_path: Path) -> None:
    """Four calls: two layers, two batches. Each process checks what the graph computes."""
    assert compiled(tmp_path, "first") == {"compiled": 1, "loaded": 0, "calls": 4}
    assert compiled(tmp_path, "first") == {"compiled": 0, "loaded": 1, "calls": 4}
    # The second of two equal models has ids of its own, so it must not get the graph of the first.
    assert compiled(tmp_path, "second") == {"compiled": 1, "loaded": 0, "calls": 4}
    assert compiled(tmp_path, "first") == {"compiled": 0, "loaded": 1, "calls": 4}
