"""What a table of many products does not show at a glance: means by peer, by M, and errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from statistics import median

from gristmill.bench.results import OURS, Row, by_problem, fastest_peer, implementations

Grid = tuple[list[str], list[list[str]]]
# Within 3% of a peer counts as level with it.
TIE = 0.97


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def count_of(values: Sequence[object]) -> str:
    return "1 problem" if len(values) == 1 else f"{len(values)} problems"


def against(ratios: Sequence[float], whom: str) -> str:
    """How ours does against somebody: the mean, over how many, and on how many it is behind."""
    behind = sum(ratio < TIE for ratio in ratios)
    return (
        f"{geometric_mean(ratios):.2f}x {whom} over {count_of(ratios)} (geometric mean), "
        f"behind by more than 3% on {behind}"
    )


def peer_lines(rows: Sequence[Row]) -> list[str]:
    """For each op of products a line for each peer."""
    lines = []
    for op in dict.fromkeys(row["op"] for row in rows if "tflop_per_s" in row):
        found = _ratios([row for row in rows if row["op"] == op])
        if len(found) > 1:  # of a single one the line about the fastest says it all
            lines += [
                f"{op}: {against([ratio for _, ratio in one], name)}" for name, one in found.items()
            ]
    return lines


def tables(rows: Sequence[Row]) -> list[tuple[str, Grid]]:
    """For each op of products of several M: means by M. For each with errors: these."""
    found = []
    for op in dict.fromkeys(row["op"] for row in rows):
        of_op = [row for row in rows if row["op"] == op]
        for what, key in (("M", _tokens), ("model", _model)):
            means = _means_by(of_op, what, key)
            if means is not None:
                found.append((f"{op}: times of others over ours, geometric means by {what}", means))
        if any("fp64_error" in row for row in of_op):
            found.append((f"{op}: errors against fp64", _errors(of_op)))
    return found


def _tokens(row: Row) -> Hashable:
    return int(row["M"])


def _model(row: Row) -> Hashable:
    """Of mixtures of experts the model and the routing; nothing of other rows."""
    return f"{row['model']} {row['routing']}" if "model" in row else None


def _ratios(
    rows: Sequence[Row], key: Callable[[Row], Hashable] = _tokens
) -> dict[str, list[tuple[Hashable, float]]]:
    """For each peer, M and its time over ours for every problem that both were timed on.

    Or instead of M what `key` gives for a row.
    """
    found: dict[str, list[tuple[Hashable, float]]] = {}
    for row_of in by_problem(rows).values():
        ours = row_of.get(OURS, {})
        for name, row in row_of.items():
            if name != OURS and "us" in row and "us" in ours:
                found.setdefault(name, []).append((key(row), row["us"] / ours["us"]))
    return found


def _means_by(rows: Sequence[Row], what: str, key: Callable[[Row], Hashable]) -> Grid | None:
    keys = dict.fromkeys(key(row) for row in rows if "tflop_per_s" in row)
    # Numbers by their size, names as they came.
    sizes = sorted(keys, key=lambda one: one if isinstance(one, int) else 0)
    by_peer = _ratios(rows, key)
    if len(sizes) < 2 or not by_peer:
        return None
    best: dict[Hashable, list[float]] = {}
    for row_of in by_problem(rows).values():
        peer, ours = fastest_peer(row_of), row_of.get(OURS, {})
        if peer is not None and "us" in ours:
            best.setdefault(key(ours), []).append(peer["us"] / ours["us"])
    body = []
    for size in sizes:
        cells = [_mean([ratio for m, ratio in found if m == size]) for found in by_peer.values()]
        ratios = best.get(size, [])
        behind = str(sum(ratio < TIE for ratio in ratios)) if ratios else ""
        body.append([str(size), *cells, _mean(ratios), str(len(ratios)), behind])
    return [what, *by_peer, "vs best peer", "problems", "behind by >3%"], body


def _mean(ratios: Sequence[float]) -> str:
    return f"{geometric_mean(ratios):.2f}x" if ratios else ""


def _errors(rows: Sequence[Row]) -> Grid:
    body = []
    for name in implementations(list(rows)):
        told = [row for row in rows if row["impl"] == name and "fp64_error" in row]
        errors = [row["fp64_error"] for row in told if row["fp64_error"] is not None]
        if not told:
            continue
        numbers = ["", "", ""]
        if errors:
            largest = max(row["fp64_roundings"] for row in told if row["fp64_error"] is not None)
            numbers = [percent(median(errors)), percent(max(errors)), f"{largest:.3g}"]
        none = len(told) - len(errors)
        body.append([name, str(len(told)), *numbers, str(none) if none else ""])
    header = ["implementation", "problems", "median", "worst", "most roundings", "not a number"]
    return header, body


def percent(error: float | None) -> str:
    """An error relative to the result's size: 0.166%."""
    return "NaN" if error is None else f"{100 * error:.3g}%"
