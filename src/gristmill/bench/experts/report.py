"""What a table of mixtures of experts does not show at a glance: what skew costs, and errors."""

from __future__ import annotations

from collections.abc import Sequence

from gristmill.bench.product_report import count_of, geometric_mean
from gristmill.bench.results import OURS, Row


def lines(rows: Sequence[Row]) -> list[str]:
    """For each op with a routing: our error beside the pipeline's, our times under skew."""
    found = []
    for op in dict.fromkeys(row["op"] for row in rows if "routing" in row):
        ours = [row for row in rows if row["op"] == op and row["impl"] == OURS]
        found += _errors(op, ours) + _skew(op, ours)
    return found


def _errors(op: str, ours: Sequence[Row]) -> list[str]:
    told = [
        (row["fp64_error"] / row["pipeline_fp64_error"], row)
        for row in ours
        if row.get("fp64_error") is not None and row.get("pipeline_fp64_error")
    ]
    if not told:
        return []
    worst, row = max(told, key=lambda one: one[0])
    larger = sum(ratio > 1 for ratio, _ in told)
    return [
        f"{op}: errors against fp64 are at most {worst:.2f}x those of a pipeline in 16 bits "
        f"({_place(row)}), larger on {larger} of {count_of(told)}"
    ]


def _skew(op: str, ours: Sequence[Row]) -> list[str]:
    times = {
        (row["dtype"], row["model"], row["M"], row["routing"]): row for row in ours if "us" in row
    }
    ratios = []
    for (dtype, model, tokens, routing), row in times.items():
        even = times.get((dtype, model, tokens, "uniform"))
        if routing == "skewed" and even is not None:
            ratios.append((row["us"] / even["us"], row))
    if not ratios:
        return []
    worst, row = max(ratios, key=lambda one: one[0])
    mean = geometric_mean([ratio for ratio, _ in ratios])
    return [
        f"{op}: skewed routing takes at most {worst:.2f}x the time of uniform ({_place(row)}), "
        f"{mean:.2f}x over {count_of(ratios)} (geometric mean)"
    ]


def _place(row: Row) -> str:
    return f"{row['model']} M={row['M']}"
