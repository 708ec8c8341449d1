"""The rows of a benchmark run and the file they are kept in.

    {"meta": {"gpu", "date", ..., "commands", "finished", "unmeasured", "copy_tb_per_s", "method"},
     "rows": [{"op", "dtype", "M", "N", "shape", "impl", "us", "tb_per_s", ...}, ...]}

One row per problem and implementation; M rows of N columns, whatever their shape, and K of a
product of matrices. Mixtures of experts have "model", "routing", "E", "topk", "H" and "I" in the
place of N and K. "peer" is the library of an implementation, "sets" the named sets of shapes that
the problem belongs to. A row without "us" was not timed, and its "error" says why. Rows of suites
other than those of kernel time name their "suite". "unmeasured" is what was asked for, by any of
the commands, and has not been measured (see runs.py); a run is "finished" when that is nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gristmill.errors import ArgumentError
from gristmill.jit.folder import read_plain, write_whole

Row = dict[str, Any]
OURS = "gristmill"
# Only rows of other suites than those of kernel time have one of these; in files of before
# 2026-11-16 rows of host time and starts do not name their suite.
_OTHERS = {"mode", "cache", "suite"}
_MOST_BYTES = 256 << 20  # of a file of results; the largest committed one has 0.8 MB
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# What makes two rows about the same thing, beside their label; a key that a suite has no use for is
# absent.
_PROBLEM = (
    *("suite", "op", "dtype", "K", "model"),
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
        path = self.path.resolve()  # a link stays one
        path.parent.mkdir(parents=True, exist_ok=True)
        # One row per line: two runs can be compared with diff.
        rows = ",\n  ".join(json.dumps(row) for row in self.rows)
        meta = json.dumps(self.meta, indent=1).replace("\n", "\n ")
        text = f'{{\n "meta": {meta},\n "rows": [\n  {rows}\n ]\n}}\n'
        write_whole(path, text.encode(), mode=0o644)

    def kernels(self) -> list[Row]:
        """The rows of kernel time, also those of what could not be timed."""
        return [row for row in self.rows if not _OTHERS & row.keys()]

    def timed(self) -> list[Row]:
        """Those of them that were."""
        return [row for row in self.kernels() if "us" in row]

    def failures(self) -> list[Row]:
        return [row for row in self.rows if failed(row)]


def load(path: Path) -> Results:
    try:
        data = json.loads(read_plain(path, _MOST_BYTES).decode())
        if not isinstance(data, dict) or not {"meta", "rows"} <= data.keys():
            raise TypeError('it is no object with "meta" and "rows"')
        meta, rows = data["meta"], data["rows"]
        listed = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
        if not isinstance(meta, dict) or not listed:
            raise TypeError("meta is an object and rows are a list of objects")
        if any("op" not in row or "impl" not in row for row in rows):
            raise TypeError("each row names its op and its impl")
        for row in rows:
            _check(row)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ArgumentError(f"{path} is not a file of benchmark results: {error}") from error
    return Results(meta, rows)


def _check(row: Row) -> None:
    """TypeError if a row lacks what readers count on."""
    about = f"{row['op']} of {row['impl']}"
    if not _OTHERS & row.keys() and not {"dtype", "M"} <= row.keys():
        raise TypeError(f"the row {about} has no dtype or no M")
    us = row.get("us", 1.0)
    if not isinstance(us, (int, float)) or not 0 < us < math.inf:
        raise TypeError(f"the row {about} has {us!r} for its us, which is no time")


def problem_of(row: Row) -> tuple[Any, ...]:
    """Which problem a row is about, of whatever suite."""
    return (*(row.get(key) for key in _PROBLEM), label(row))


def identity(row: Row) -> tuple[Any, ...]:
    """Which problem and whose."""
    return (*problem_of(row), row.get("impl"))


def is_ours(row: Row) -> bool:
    """Whether gristmill has a part in what a row is of; rows of whole models say it themselves."""
    return bool(row.get("ours", row["impl"] == OURS))


def failed(row: Row) -> bool:
    """Whether its "error" is a reason, and not how far its result is off."""
    return isinstance(row.get("error"), str)


def first_line(error: BaseException | str) -> str:
    """The first line of an error's message, without a terminal's colours; two, if a colon ends it.

    Compilers' messages go on for pages.
    """
    lines = [line.strip() for line in _COLOUR.sub("", str(error)).splitlines() if line.strip()]
    count = 2 if lines and lines[0].endswith(":") else 1
    return " ".join(lines[:count])[:300] or "no message"


def described(error: BaseException) -> str:
    """What a row says of an error: its kind and its first line."""
    return f"{type(error).__name__}: {first_line(error)}"


def microseconds(us: float) -> str:
    """Three digits that count: 1.65, 15.1, 260; of other units as well."""
    digits = 2 if us < 10 else 1 if us < 100 else 0
    return f"{us:,.{digits}f}"


def label(row: Row) -> str:
    """The problem of a row as tables write it; nothing, where it is about none."""
    if row.get("routing"):
        return f"{row['model']} M={row['M']} {row['routing']}"
    if "shape" in row:
        return str(row["shape"])
    return f"{row['M']}x{row['N']}" if "M" in row else ""


def by_problem(rows: Iterable[Row]) -> dict[tuple[str, str, str], dict[str, Row]]:
    """Rows of kernel time of one problem together: (op, dtype, label) -> impl -> row."""
    found: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["op"], row["dtype"], label(row)), {})[row["impl"]] = row
    return found


def implementations(rows: list[Row]) -> list[str]:
    """Every implementation that has a row, ours first."""
    names = dict.fromkeys(row["impl"] for row in rows)
    return [OURS] * (OURS in names) + [name for name in names if name != OURS]


def fastest_peer(row_of: dict[str, Row]) -> Row | None:
    peers = [row for name, row in row_of.items() if name != OURS and "us" in row]
    return min(peers, key=lambda row: float(row["us"]), default=None)
