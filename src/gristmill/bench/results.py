"""The rows of a benchmark run and the file they are kept in.

    {"meta": {"gpu", "date", ..., "copy_tb_per_s", "copy_tb_per_s_by_mb", "method"},
     "rows": [{"op", "dtype", "M", "N", "shape", "impl", "us", "tb_per_s", ...}, ...]}

One row per problem and implementation; M rows of N columns, whatever their shape, and K of a
product of matrices. Mixtures of experts have "model", "routing", "E", "topk", "H" and "I" in the
place of N and K. A row without "us" was not timed, and its "error" says why.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gristmill.errors import ArgumentError

Row = dict[str, Any]
OURS = "gristmill"


@dataclass
class Results:
    """What has been measured so far; written after every problem, so that a crash loses nothing."""

    meta: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    path: Path | None = None

    def add(self, rows: list[Row]) -> None:
        self.rows.extend(rows)
        self.save()

    def save(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # One row per line: two runs can be compared with diff.
        rows = ",\n  ".join(json.dumps(row) for row in self.rows)
        meta = json.dumps(self.meta, indent=1).replace("\n", "\n ")
        text = f'{{\n "meta": {meta},\n "rows": [\n  {rows}\n ]\n}}\n'
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text(text)
        os.replace(partial, self.path)

    def timed(self) -> list[Row]:
        """Rows of kernel time; those of other suites have no "us", or name their suite."""
        return [row for row in self.rows if "us" in row and "suite" not in row]

    def failures(self) -> list[Row]:
        return [row for row in self.rows if isinstance(row.get("error"), str)]


def load(path: Path) -> Results:
    try:
        data = json.loads(path.read_text())
        return Results(data["meta"], data["rows"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"{path} is not a file of benchmark results: {error}") from error


def microseconds(us: float) -> str:
    """Three digits that count: 1.65, 15.1, 260; of other units as well."""
    digits = 2 if us < 10 else 1 if us < 100 else 0
    return f"{us:,.{digits}f}"


def label(row: Row) -> str:
    if row.get("model"):
        return f"{row['model']} M={row['M']} {row['routing']}"
    return str(row["shape"]) if "shape" in row else f"{row['M']}x{row['N']}"


def problems(rows: list[Row]) -> dict[tuple[Any, ...], dict[str, Row]]:
    """Rows of one problem together, in the order measured.

    (op, dtype, M, N, shape as it is written) -> impl -> row.
    """
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        key = (row["op"], row["dtype"], row["M"], row.get("N"), label(row))
        found.setdefault(key, {})[row["impl"]] = row
    return found


def implementations(rows: list[Row]) -> list[str]:
    """Every implementation that has a row, ours first."""
    names = dict.fromkeys(row["impl"] for row in rows)
    return [OURS] * (OURS in names) + [name for name in names if name != OURS]


def fastest_peer(row_of: dict[str, Row]) -> Row | None:
    peers = [row for name, row in row_of.items() if name != OURS and "us" in row]
    return min(peers, key=lambda row: float(row["us"]), default=None)
