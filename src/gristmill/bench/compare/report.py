"""A comparison as tables for a terminal: what is slower first, then all else that a reader asks."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

from gristmill.bench.compare.comparison import (
    FAILS,
    FASTER,
    GONE,
    NEW,
    SLOWER,
    STEADY,
    UNCLEAR,
    WORKS,
    Change,
    Comparison,
)
from gristmill.bench.compare.rows import MEASURES
from gristmill.bench.results import microseconds

_STYLES = {SLOWER: "red", FAILS: "red", FASTER: "green", WORKS: "green", UNCLEAR: "yellow"}
_VERDICTS = (SLOWER, FAILS, UNCLEAR, STEADY, FASTER, WORKS, NEW, GONE)

# Before each value of a config; there are blanks within values, too.
_VALUES = re.compile(r" (?=\w+=)")


def tables(comparison: Comparison, *, all_rows: bool = False) -> list[Table]:
    """Regressions and gains one by one (with `all_rows` everything), sums by op, the machine."""
    shown = [
        one
        for one in comparison.changes
        if all_rows or one.verdict in (SLOWER, FAILS, FASTER, WORKS)
    ]
    shown.sort(key=lambda one: (_VERDICTS.index(one.verdict), -(one.ratio or 0.0)))
    found = [_changes(shown)] if shown else []
    found.append(_summaries(comparison))
    if comparison.drifts:
        found.append(_machine(comparison))
    if comparison.peers:
        found.append(_peers(comparison))
    return found


def changed(old: str, new: str) -> str:
    """What else runs: "cuda_warp -> cuda_block", or "cuda_block: threads 128 -> 256"."""
    if old == new or not old or not new:
        return ""
    if ":" in old:  # the calls of a whole model
        before, after = set(old.split()), set(new.split())
        return " ".join([*(f"-{one}" for one in sorted(before - after)), *sorted(after - before)])
    (was, *old_values), (now, *new_values) = _VALUES.split(old), _VALUES.split(new)
    if was != now:
        return f"{was} -> {now}"
    values = [dict(one.partition("=")[::2] for one in side) for side in (old_values, new_values)]
    pairs = {name: [side.get(name, "none") for side in values] for name in values[0] | values[1]}
    moved = (f"{name} {one} -> {other}" for name, (one, other) in pairs.items() if one != other)
    return f"{was}: {', '.join(moved)}"


def _changes(changes: Sequence[Change]) -> Table:
    columns = ("problem", "of", "old", "new", "change", "noise", "machine", "verdict", "what runs")
    table = _table("what changed; the machine's drift is taken out of `change`", columns)
    for one in changes:
        drift = "" if one.raw is None or one.ratio is None else _percent(one.raw / one.ratio)
        if one.raw is not None and not one.witnesses:
            drift = f"{drift} (no witness)".strip()
        table.add_row(
            Text(f"{one.key.op} {one.key.problem}"),
            one.key.impl,
            _value(one, one.old),
            _value(one, one.new),
            "" if one.ratio is None else _percent(one.ratio),
            "" if one.noise is None else f"±{one.noise:.1%}",
            drift,
            Text(one.verdict, style=_STYLES.get(one.verdict, "")),
            Text(one.reason or changed(one.old_choice, one.new_choice)),
        )
    return table


def _summaries(comparison: Comparison) -> Table:
    columns = ("op", "measure", "mean change", *_VERDICTS)
    table = _table(f"ours, by op: threshold {comparison.threshold:.1%}", columns)
    for one in comparison.summaries:
        counts = [one.counts.get(verdict, 0) for verdict in _VERDICTS]
        mean = "" if one.ratio is None else _percent(one.ratio)
        cells = (
            Text(str(count) if count else "", style=_STYLES.get(verdict, ""))
            for verdict, count in zip(_VERDICTS, counts, strict=True)
        )
        table.add_row(one.op, one.measure, mean, *cells)
    return table


def _machine(comparison: Comparison) -> Table:
    columns = ("op", "measure", "drift", "scatter", "witnesses")
    table = _table("the machine: what did not change moved by", columns)
    for one in comparison.drifts:
        scatter = f"±{one.scatter:.1%}"
        table.add_row(one.op, one.measure, _percent(one.factor), scatter, str(one.witnesses))
    return table


def _peers(comparison: Comparison) -> Table:
    columns = ("op", "measure", "peer", "mean change", "problems", "version")
    table = _table("others, the drift left in (for orientation)", columns)
    for one in comparison.peers:
        version = one.new_version or ""
        if one.old_version != one.new_version:
            version = f"{one.old_version or 'unknown'} -> {one.new_version or 'unknown'}"
        count = str(one.count)
        table.add_row(one.op, one.measure, one.peer, _percent(one.ratio), count, version)
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    words = {"problem", "of", "op", "measure", "verdict", "what runs", "peer", "version"}
    for name in columns:
        side: JustifyMethod = "left" if name in words else "right"
        table.add_column(name, justify=side, overflow="fold")
    return table


def _value(change: Change, value: float | None) -> str:
    unit = MEASURES[change.key.measure].unit
    return "" if value is None else f"{microseconds(value)} {unit}"


def _percent(ratio: float) -> str:
    return f"{ratio - 1:+.1%}"
