"""The suite `cold_start` as a table: by part, beyond torch's own start."""

from __future__ import annotations

from gristmill.bench.product_report import Grid
from gristmill.bench.results import Row


def table(rows: list[Row]) -> tuple[str, Grid] | None:
    """One line per start and cache; rows of results from before this suite have fewer cells."""
    found = [row for row in rows if "cache" in row]
    if not found:
        return None
    header = [
        *("start", "cache", "import", "weights", "warm-up", "first call or step"),
        *("together", "least to most", "goal", "torch's own", "compiles"),
    ]
    return "cold start: seconds beyond torch's own start", (header, [_line(row) for row in found])


def _line(row: Row) -> list[str]:
    first = next((row[key] for key in ("first_call_s", "first_step_s") if key in row), None)
    together = _seconds(row.get("beyond_s"))
    if "import_s" not in row:
        together = "failed"
    between = f"{row['least_s']:.3f} to {row['most_s']:.3f}" if "least_s" in row else ""
    where = f" for {row['target']}" if "target" in row else ""
    return [
        f"{row['op']} {_problem(row)}".strip() + where,
        row["cache"],
        _seconds(row.get("import_s")),
        _seconds(row.get("prepare_s")),
        _seconds(row.get("warmup_s")),
        _seconds(first),
        together,
        between,
        f"{row['goal_s']:g}" if "goal_s" in row else "",
        _seconds(row.get("torch_s")),
        str(row.get("compiles", "")),
    ]


def _problem(row: Row) -> str:
    return str(row.get("shape", f"{row.get('M', '')}x{row.get('N', '')}"))


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
