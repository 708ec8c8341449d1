"""The results that are committed, one file or all of them merged: what reports are tried on."""

from __future__ import annotations

import json
from pathlib import Path

from gristmill.bench.results import Results, load
from gristmill.bench.runs import merge

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def committed_files() -> list[Path]:
    """Files that `gristmill bench` wrote; others there are of other makers."""
    return [path for path in sorted(FOLDER.glob("*/*/*.json")) if _is_of_bench(path)]


def _is_of_bench(path: Path) -> bool:
    data = json.loads(path.read_text())
    return isinstance(data, dict) and {"meta", "rows"} <= data.keys()


def committed() -> Results:
    """All runs as one."""
    files = committed_files()
    return merge([load(path) for path in files], [str(path.relative_to(FOLDER)) for path in files])
