"""Which kernels a process runs, in one table: `gristmill.report()`.

Kept where plans are made, one row for each kind of problem and way to run it, never per call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gristmill.locks import Lock
from gristmill.select.configs import config_to_json
from gristmill.select.counters import Counters, counters
from gristmill.select.problem import Problem

# Of too many kinds the oldest go: where a length grows, each is a kind of its own.
_KEPT = 1024


@dataclass(frozen=True)
class ReportRow:
    """One way in which problems of one kind run: those of `rows_least` to `rows_most` rows.

    `source` says what decided; `plans` how often this was decided, once per distinct kind of call.
    """

    op: str
    problem: str
    device: str
    rows_least: int
    rows_most: int
    variant: str
    config: dict[str, Any] | None
    source: str
    plans: int

    @property
    def rows(self) -> str:
        if self.rows_least == self.rows_most:
            return str(self.rows_least)
        return f"{self.rows_least}..{self.rows_most}"


@dataclass(frozen=True)
class Report:
    """What has run so far: `rows`, sorted by op, and the `counters`. Print it for a table."""

    rows: tuple[ReportRow, ...]
    counters: Counters
    forgotten: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "counters": dict(self.counters),
            "forgotten": self.forgotten,
        }

    def __str__(self) -> str:
        done = self.counters
        lines = []
        if self.rows:
            head: tuple[str, ...] = ("op", "rows", "problem", "runs", "by", "plans")
            cells: list[tuple[str, ...]] = [
                (row.op, row.rows, row.problem, row.variant, row.source, str(row.plans))
                for row in self.rows
            ]
            several = len({row.device for row in self.rows}) > 1
            if several:
                head = (*head, "device")
                cells = [(*cell, row.device) for cell, row in zip(cells, self.rows, strict=True)]
            lines += aligned([head, *cells])
            if not several:
                lines.append(f"on {self.rows[0].device}")
        else:
            lines.append("no op has run yet")
        if self.forgotten:
            lines.append(f"and {self.forgotten} older rows that are not kept")
        lines += [f"fallback: {name}, {times} times" for name, times in done["fallbacks"].items()]
        lines.append(
            f"kernels: {done['compiles']} programs compiled in {done['compile_seconds']:.2f} s, "
            f"{done['disk_hits']} read from the cache folder, {done['layer_hits']} from layers, "
            f"{done['loads']} loaded in {done['load_seconds']:.2f} s"
        )
        return "\n".join(lines)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


_ROWS: dict[tuple[str, ...], ReportRow] = {}
_LOCK = Lock()
_forgotten = 0


def note_plan(op_name: str, problem: Problem, variant: str, config: Any, source: str) -> None:
    """A plan was made: problems like this one run by `variant` with `config`."""
    global _forgotten
    if problem.device.kind == "meta":
        return  # nothing runs
    key = _key(op_name, problem, variant, config, source)
    with _LOCK:
        known = _ROWS.pop(key, None)  # what is met again is as good as new
        _ROWS[key] = ReportRow(
            op=op_name,
            problem=key[1],
            device=key[2],
            rows_least=min(problem.rows, known.rows_least) if known else problem.rows,
            rows_most=max(problem.rows, known.rows_most) if known else problem.rows,
            variant=variant,
            config=config_to_json(config),
            source=source,
            plans=known.plans + 1 if known else 1,
        )
        if len(_ROWS) > _KEPT:
            del _ROWS[next(iter(_ROWS))]
            _forgotten += 1


def withdraw_plan(op_name: str, problem: Problem, variant: str, config: Any, source: str) -> None:
    """The plan that was noted last did not run: the next variant does."""
    key = _key(op_name, problem, variant, config, source)
    with _LOCK:
        known = _ROWS.get(key)
        if known is None:
            return
        if known.plans == 1:
            del _ROWS[key]
        else:
            _ROWS[key] = dataclasses.replace(known, plans=known.plans - 1)


def _key(op_name: str, problem: Problem, variant: str, config: Any, source: str) -> tuple[str, ...]:
    words = [word for word in problem.family().split()[1:] if word != "rows=*"]
    words += ["deterministic"] * problem.deterministic
    words += ["batch-invariant"] * problem.batch_invariant
    return op_name, " ".join(words), str(problem.device), variant, str(config), source


def report() -> Report:
    """Which kernels this process runs: for each kind of problem the variant and what decided.

    `print(gristmill.report())` shows a table; `rows` and `as_dict()` have it as data. A row is
    added when a call of a new kind is planned, so nothing is counted per call.
    """
    with _LOCK:
        rows = sorted(_ROWS.values(), key=lambda row: (row.op, row.problem, row.rows_least))
        forgotten = _forgotten
    return Report(tuple(rows), counters(), forgotten)


def forget_history() -> None:
    """Start the report anew (tests call this)."""
    global _forgotten
    with _LOCK:
        _ROWS.clear()
        _forgotten = 0
