"""The rows of a benchmark run and the file they are kept in.

    {"meta": {"gpu", "date", ..., "commands", "finished", "copy_tb_per_s", "method"},
     "rows": [{"op", "dtype", "M", "N", "shape", "impl", "us", "tb_per_s", ...}, ...]}

One row per problem and implementation; M rows of N columns, whatever their shape, and K of a
product of matrices. Mixtures of experts have "model", "routing", "E", "topk", "H" and "I" in the
place of N and K. "peer" is the library of an implementation, "sets" the named sets of shapes that
the problem belongs to. A row without "us" was not timed, and its "error" says why. Rows of suites
other than those of kernel time name their "suite".
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gristmill.errors import ArgumentError

Row = dict[str, Any]
OURS = "gristmill"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# What makes two rows of one file about the same thing; a key that a suite has no use for is absent.
_PROBLEM = (
    *("suite", "op", "dtype", "M", "N", "K", "shape", "model", "routing"),
    *("mode", "cache", "what", "hint", "batch", "length"),
)


@dataclass
class Results:
    """What has been measured so far; written after every problem, so that a crash loses nothing."""

    meta: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    path: Path | None = None

    def add(self, rows: list[Row]) -> None:
        """Keep rows and write the file; they take the place of rows about the same, if any."""
        new = {identity(row) for row in rows}
        if any(identity(row) in new for row in self.rows):
            self.rows = [row for row in self.rows if identity(row) not in new]
        self.rows.extend(rows)
        self.save()

    def has(self, **about: Any) -> bool:
        """Whether there is a row that says all this: it need not be measured again."""
        return any(all(row.get(key) == value for key, value in about.items()) for row in self.rows)

    def note(self, text: str) -> None:
        """Something that a reader must know; once, however often a run was continued."""
        notes = self.meta.setdefault("notes", [])
        if text not in notes:
            notes.append(text)

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

    def kernels(self) -> list[Row]:
        """The rows of kernel time, also those of what could not be timed."""
        # Files of before 0.2 have rows of host time and first calls that do not name their suite.
        others = {"mode", "cache", "suite"}
        return [row for row in self.rows if not others & set(row)]

    def timed(self) -> list[Row]:
        """Those of them that were."""
        return [row for row in self.kernels() if "us" in row]

    def failures(self) -> list[Row]:
        return [row for row in self.rows if isinstance(row.get("error"), str)]


def load(path: Path) -> Results:
    try:
        data = json.loads(path.read_text())
        meta, rows = data["meta"], data["rows"]
        if not isinstance(meta, dict) or not all(isinstance(row, dict) for row in rows):
            raise TypeError("meta is an object and rows are a list of objects")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"{path} is not a file of benchmark results: {error}") from error
    return Results(meta, rows)


def problem_of(row: Row) -> tuple[Any, ...]:
    """Which problem a row is about, of whatever suite."""
    return tuple(row.get(key) for key in _PROBLEM)


def identity(row: Row) -> tuple[Any, ...]:
    """Which problem and whose."""
    return (*problem_of(row), row.get("impl"))


def first_line(error: BaseException) -> str:
    """What a row says of an error: the first line of its message, without a terminal's colours."""
    text = _COLOUR.sub("", str(error)).strip() or "no message"
    return text.splitlines()[0][:300]


def microseconds(us: float) -> str:
    """Three digits that count: 1.65, 15.1, 260; of other units as well."""
    digits = 2 if us < 10 else 1 if us < 100 else 0
    return f"{us:,.{digits}f}"


def label(row: Row) -> str:
    if row.get("routing"):
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
