"""The results that are committed, one file or all of them merged: what reports are tried on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gristmill.bench.results import Results

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def committed_files() -> list[Path]:
    """Files that `gristmill bench` wrote; others there are of other makers."""
    found = sorted(FOLDER.glob("*/*/*.json"))
    return [path for path in found if {"meta", "rows"} <= set(json.loads(path.read_text()))]


def committed() -> Results:
    """All runs as one, each row with the number of its run."""
    meta: dict[str, Any] = {"runs": []}
    rows = []
    for index, path in enumerate(committed_files()):
        data = json.loads(path.read_text())
        told = {"file": str(path.relative_to(FOLDER)), "rows": len(data["rows"]), **data["meta"]}
        meta["runs"].append(told)
        rows += [{**row, "run": index} for row in data["rows"]]
        for key, value in data["meta"].items():
            if isinstance(value, dict):
                meta.setdefault(key, {}).update(value)
            elif value is not None:
                meta[key] = value
    return Results(meta, rows)
