"""Tables of the suites `regret` and `choice`: what was picked, and what that and choosing cost.

Everything is computed from rows, so that a stored run shows what it showed when it was made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gristmill.bench.regret.matrix import CHOSEN
from gristmill.bench.regret.suite import MEAN_GOAL, WORST_GOAL
from gristmill.bench.results import Results, Row, label, microseconds

Grid = tuple[list[str], list[list[str]]]

# So many of the worst problems are listed one by one.
_LISTED = 12
# More columns than this do not fit a terminal.
_MOST_SHOWN = 20


@dataclass(frozen=True)
class Section:
    """A table with its title and the lines beneath it; `page_only`: too wide for a terminal."""

    title: str
    grid: Grid
    lines: list[str] = field(default_factory=list)
    page_only: bool = False


@dataclass(frozen=True)
class Summary:
    """The regret of several problems: `worst` is the row of the largest."""

    count: int
    mean: float
    p95: float
    worst: Row
    above_mean_goal: int
    above_worst_goal: int

    @property
    def good(self) -> bool:
        return self.mean <= MEAN_GOAL and self.worst["regret"] <= WORST_GOAL


@dataclass(frozen=True)
class Cells:
    """A hint by runtime matrix: `us[hint][size]`, where that launch runs at that size."""

    title: str
    op: str
    dims: str
    dtype: str
    sizes: tuple[int, ...]
    hints: tuple[int, ...]
    us: Mapping[int | str, Mapping[int, float]]

    @property
    def lines(self) -> tuple[int | str, ...]:
        return (*self.hints, CHOSEN)

    def over_best(self, hint: int | str, size: int) -> float | None:
        """The time of a cell over the least in its column."""
        if size not in self.us[hint]:
            return None
        best = min(times[size] for times in self.us.values() if size in times)
        return self.us[hint][size] / best

    def over_chosen(self, hint: int) -> dict[int, float]:
        """What each size takes at one hint's launch, over what is chosen there."""
        chosen = self.us[CHOSEN]
        return {size: us / chosen[size] for size, us in self.us[hint].items() if size in chosen}


def sections(results: Results) -> list[Section]:
    """The tables of these suites, as far as there are rows of them."""
    return [
        *_regret(measured(results), unjudged(results)),
        *(_matrix(cells) for cells in matrices(results)),
        *_choice([row for row in results.rows if row.get("suite") == "choice"]),
    ]


def remarks(results: Results) -> list[str]:
    """Candidates that took no part, each once, with the reason and how often."""
    counts: dict[tuple[str, str, str], int] = {}
    for row in [*measured(results), *unjudged(results)]:
        for name, reason in row.get("failures", {}).items():
            key = (row["op"], name.split()[0], reason)
            counts[key] = counts.get(key, 0) + 1
    return [
        f"{op}: {count} candidates of {variant} took no part: {reason}"
        for (op, variant, reason), count in counts.items()
    ]


def measured(results: Results) -> list[Row]:
    """The rows that have a regret."""
    return [row for row in results.rows if row.get("suite") == "regret" and "regret" in row]


def unjudged(results: Results) -> list[Row]:
    """The rows where a rival was left out because its result is not that of the pick."""
    return [row for row in results.rows if row.get("suite") == "regret" and row.get("differing")]


def summarised(rows: Sequence[Row]) -> Summary:
    """Mean, 95th percentile (nearest rank) and the worst of one or more rows."""
    regrets = sorted(row["regret"] for row in rows)
    return Summary(
        count=len(regrets),
        mean=sum(regrets) / len(regrets),
        p95=regrets[math.ceil(0.95 * len(regrets)) - 1],
        worst=max(rows, key=lambda row: float(row["regret"])),
        above_mean_goal=sum(regret > MEAN_GOAL for regret in regrets),
        above_worst_goal=sum(regret > WORST_GOAL for regret in regrets),
    )


def verdict(what: str, rows: Sequence[Row], left: Sequence[Row] = ()) -> str:
    """One line on the problems in `rows`, if there are any, and on those that are not judged."""
    parts = []
    if rows:
        summary = summarised(rows)
        worst = f"{summary.worst['op']} {label(summary.worst)}"
        held = "within" if summary.good else "NOT within"
        parts.append(
            f"regret of {_problems(rows)}: mean {percent(summary.mean)}, worst "
            f"{percent(summary.worst['regret'])} ({worst}): {held} {MEAN_GOAL:.0%} on average and "
            f"{WORST_GOAL:.0%} at worst"
        )
    if left:
        names = ", ".join(
            f"{row['op']} {label(row)} (at least {percent(row['regret_at_least'])})"
            for row in left[:_LISTED]
        )
        more = f" and {len(left) - _LISTED} more" if len(left) > _LISTED else ""
        parts.append(
            f"{_problems(left)} NOT judged, as a rival's result is not that of the pick: "
            f"{names}{more}"
        )
    return f"{what}: {'; '.join(parts)}"


def _problems(rows: Sequence[Row]) -> str:
    return "1 problem" if len(rows) == 1 else f"{len(rows)} problems"


def percent(part: float) -> str:
    return f"{100 * part:.1f}%"


def families(rows: Sequence[Row]) -> dict[tuple[str, str, str], dict[int, Row]]:
    """(op, dims as 4096 or 4096x4096, dtype) -> M -> row."""
    found: dict[tuple[str, str, str], dict[int, Row]] = {}
    for row in rows:
        found.setdefault((row["op"], _dims(row), row["dtype"]), {})[row["M"]] = row
    return found


def matrices(results: Results) -> list[Cells]:
    """The hint by runtime matrices of a run; one without a chosen row is not shown."""
    cells = [row for row in results.rows if row.get("suite") == "matrix"]
    found = []
    for op, dims, dtype in dict.fromkeys((row["op"], _dims(row), row["dtype"]) for row in cells):
        rows = [row for row in cells if (row["op"], _dims(row), row["dtype"]) == (op, dims, dtype)]
        us: dict[int | str, dict[int, float]] = {row["hint"]: {} for row in rows}
        for row in rows:
            if "us" in row:
                us[row["hint"]][row["M"]] = row["us"]
        if us.get(CHOSEN):
            sizes = tuple(sorted({row["M"] for row in rows}))
            hints = tuple(hint for hint in us if isinstance(hint, int))
            found.append(Cells(f"{op} {dims} {dtype}", op, dims, dtype, sizes, hints, us))
    return found


def gains(cells: Cells) -> list[str]:
    """What it costs to have tuned at one hint only, against choosing at every size."""
    lines: list[str] = []
    every: list[float] = []
    for hint in cells.hints:
        ratios = cells.over_chosen(hint)
        if not ratios:
            lines.append(f"tuned at {hint} only: runs at none of these sizes")
            continue
        every += ratios.values()
        size = max(ratios, key=lambda size: ratios[size])
        missing = len(cells.sizes) - len(ratios)
        more = _geometric(ratios.values()) - 1
        lines.append(
            f"tuned at {hint} only: {percent(abs(more))} {'more' if more >= 0 else 'less'} time "
            f"than choosing (geometric mean), at worst {ratios[size]:.2f} times as much, at {size} "
            "rows" + (f"; does not run at {missing} of {len(cells.sizes)} sizes" if missing else "")
        )
    if every:
        lines.append(
            f"choosing over a single hint: the worst hint costs up to {max(every):.2f} times, "
            f"the mean gain over all of them is {percent(_geometric(every) - 1)}"
        )
    return lines


def _geometric(ratios: Any) -> float:
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs))


def _regret(rows: list[Row], left: list[Row]) -> list[Section]:
    every = [*rows, *left]
    if not every:
        return []
    header = ["op", "problems", "mean", "p95", "worst", "above 3%", "above 10%", "worst problem"]
    body = []
    for op in dict.fromkeys(row["op"] for row in every):
        of_op = [row for row in rows if row["op"] == op]
        if not of_op:
            body.append([op, "0", *["–"] * 5, "NOT judged"])
            continue
        summary = summarised(of_op)
        worst = summary.worst["regret"]
        body.append(
            [
                op,
                str(summary.count),
                *map(percent, (summary.mean, summary.p95, worst)),
                str(summary.above_mean_goal),
                str(summary.above_worst_goal),
                label(summary.worst),
            ]
        )
    lines = []
    for what, is_product in (("products", True), ("row ops", False)):
        judged, not_judged = (
            [row for row in those if (row["K"] is not None) == is_product] for those in (rows, left)
        )
        if judged or not_judged:
            lines.append(verdict(what, judged, not_judged))
    title = "regret: how much longer what is picked takes than the best there is"
    sources: dict[str, int] = {}
    for row in every:
        sources[row["source"]] = sources.get(row["source"], 0) + 1
    picks = ", ".join(f"{source} {count}" for source, count in sources.items())
    lines.append(f"picked by: {picks}")
    return [
        Section(title, (header, body), lines),
        *_largest(rows),
        *_by_rows(every),
    ]


def _largest(rows: Sequence[Row]) -> list[Section]:
    header = ["problem", "regret", "picked µs", "best µs", "spreads", "source", "picked", "best"]
    worst = [row for row in rows if row["regret"] > 0]
    worst = sorted(worst, key=lambda row: -float(row["regret"]))[:_LISTED]
    body = [
        [
            f"{row['op']} {label(row)}",
            percent(row["regret"]),
            microseconds(row["picked_us"]),
            microseconds(row["best_us"]),
            f"{row['picked_spread_us']:.2f}, {row['best_spread_us']:.2f}",
            row["source"],
            *told_apart(row["picked"], row["best"]),
        ]
        for row in worst
    ]
    return [Section("the largest regrets", (header, body))] if body else []


def told_apart(picked: str, best: str) -> tuple[str, str]:
    """Two launches by their variants, and where these are the same by what differs."""
    (left, *lefts), (right, *rights) = picked.split(), best.split()
    if picked == best or left != right:
        return left, right
    return (
        " ".join([left, *(word for word in lefts if word not in rights)]),
        " ".join([right, *(word for word in rights if word not in lefts)]),
    )


def _by_rows(rows: Sequence[Row]) -> list[Section]:
    """Every number: a table for each op, a line for each family, a column for each M."""
    found = []
    for op in dict.fromkeys(row["op"] for row in rows):
        of_op = families([row for row in rows if row["op"] == op])
        sizes = sorted({size for row_of in of_op.values() for size in row_of})
        body = [
            [
                f"{dims} {dtype}",
                *(_shown(row_of[size]) if size in row_of else "–" for size in sizes),
            ]
            for (_, dims, dtype), row_of in of_op.items()
        ]
        grid = (["N by M" if "x" not in body[0][0] else "NxK by M", *map(str, sizes)], body)
        found.append(Section(f"{op}: regret by rows", grid, page_only=True))
    return found


def _shown(row: Row) -> str:
    return "not judged" if row.get("differing") else percent(row["regret"])


def _matrix(cells: Cells) -> Section:
    """Times of one column over the least in it, and the time of what is chosen."""
    header = ["tuned at", *map(str, cells.sizes)]
    body = []
    for hint in cells.lines:
        ratios = [cells.over_best(hint, size) for size in cells.sizes]
        body.append([str(hint), *("–" if one is None else f"{one:.2f}" for one in ratios)])
    chosen = cells.us[CHOSEN]
    times = [microseconds(chosen[size]) if size in chosen else "–" for size in cells.sizes]
    body.append([f"{CHOSEN}, µs", *times])
    lines = [f"{cells.title}: tuned at one size, run at another, over the least in the column"]
    wide = len(cells.sizes) > _MOST_SHOWN
    title = f"{cells.title}: hint by runtime"
    return Section(title, (header, body), lines + gains(cells), page_only=wide)


def _choice(rows: list[Row]) -> list[Section]:
    if not rows:
        return []
    header = ["op", "what", "host time", "limit", "held", "candidates", "compiles"]
    body = []
    for row in rows:
        unit = "µs" if "choice_us" in row else "s"
        value = row.get("choice_us", row.get("choice_s"))
        limit = row["limit"]
        told = value is not None and limit is not None
        body.append(
            [
                f"{row['op']} {label(row)}",
                row["what"],
                "failed" if value is None else f"{value:.2f} {unit}",
                "" if limit is None else f"{limit:g} {unit}",
                ("yes" if value <= limit else "NO") if told else "",
                str(row.get("candidates", "")),
                str(row.get("compiles", "")),
            ]
        )
    return [Section("choice: what choosing costs the host", (header, body))]


def _dims(row: Row) -> str:
    return str(row["N"]) if row["K"] is None else f"{row['N']}x{row['K']}"
