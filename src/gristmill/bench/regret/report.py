"""Tables of the suites `regret` and `choice`: what was picked, and what that and choosing cost.

Everything is computed from rows, so that a stored run shows what it showed when it was made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gristmill.bench.commands import command_of
from gristmill.bench.regret.families import KINDS, goals_of
from gristmill.bench.regret.goals import (
    MEAN,
    OVER_RULE,
    RULE_GOAL,
    Outcome,
    group_name,
    groups,
    is_tabled,
    outcome,
    over_rule,
)
from gristmill.bench.regret.matrix import CHOSEN
from gristmill.bench.results import Results, Row, label, microseconds

Grid = tuple[list[str], list[list[str]]]

# So many of the worst problems are listed one by one; of each group of a sampled op fewer.
_LISTED, _LISTED_OF_GROUP = 12, 8
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
        *_regret(results),
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
    )


def outcomes(results: Results) -> list[Outcome]:
    """What each goal has come to, op by op, of the ops that have rows."""
    rows = measured(results)
    return [
        outcome(op, goal, [row for row in rows if row["op"] == op])
        for op in dict.fromkeys(row["op"] for row in [*rows, *unjudged(results)])
        for goal in goals_of(op)
    ]


def failed_goals(results: Results) -> list[str]:
    """Why a run does not pass: goals that are not met, ops none of whose goals has problems,
    problems without a regret, no rows at all.

    Rows of failed problems are among the failures of any suite.
    """
    found = outcomes(results)
    reasons = [told(one) for one in found if not one.met]
    judged = {one.op for one in found if one.count}
    reasons += [
        f"{op}: no goal has problems"
        for op in dict.fromkeys(one.op for one in found)
        if op not in judged
    ]
    if left := unjudged(results):
        reasons.append(not_judged(left))
    if not measured(results):
        reasons.append("regret: nothing was measured")
    return reasons


def told(one: Outcome) -> str:
    """One goal in a line, with the problem that is worst by it."""
    name = f"{one.op}{group_name(one.goal.tabled)}: {one.goal.what}"
    if one.reached is None or one.worst is None:
        return f"{name}: no problems"
    held = "met" if one.met else "NOT met"
    at = label(one.worst)
    if one.goal.what == MEAN:
        at = f"worst {percent(one.goal.value(one.worst))} at {at}"
    return (
        f"{name} {percent(one.reached)} over {_problems(one.count)}, goal "
        f"{percent(one.goal.limit)}: {held} ({at})"
    )


def not_judged(left: Sequence[Row]) -> str:
    """One line on the problems where a rival's result is not that of the pick."""
    names = ", ".join(
        f"{row['op']} {label(row)} (at least {percent(row['regret_at_least'])})"
        for row in left[:_LISTED]
    )
    more = f" and {len(left) - _LISTED} more" if len(left) > _LISTED else ""
    return (
        f"{_problems(len(left))} NOT judged, as a rival's result is not that of the pick: "
        f"{names}{more}"
    )


def _problems(count: int) -> str:
    return "1 problem" if count == 1 else f"{count} problems"


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


def _regret(results: Results) -> list[Section]:
    rows, left = measured(results), unjudged(results)
    every = [*rows, *left]
    if not every:
        return []
    device = results.meta.get("device")
    return [
        _summary(results, rows, left),
        _goals(results, left),
        *_largest(rows, device),
        *_slower_than_rule(rows, device),
        *_every_problem(every),
        *_by_rows([row for row in every if not _is_sampled(row)]),
    ]


def _summary(results: Results, rows: Sequence[Row], left: Sequence[Row]) -> Section:
    every = [*rows, *left]
    ruled = any(over_rule(row) is not None for row in rows)
    beside = ["rule: mean", "rule: worst", "pick over rule: mean", "worst"] if ruled else []
    header = ["op", "problems", "mean", "p95", "worst", *beside, "worst problem"]
    body = []
    for op in dict.fromkeys(row["op"] for row in every):
        for tabled in groups(goals_of(op)):
            name = f"{op}{group_name(tabled)}"
            in_group = [
                row for row in every if row["op"] == op and tabled in (None, is_tabled(row))
            ]
            known = [row for row in in_group if "regret" in row]
            if known:
                summary = summarised(known)
                times = map(percent, (summary.mean, summary.p95, summary.worst["regret"]))
                rule = _beside_rule(known) if ruled else []
                body.append([name, str(summary.count), *times, *rule, label(summary.worst)])
            elif in_group:
                body.append([name, "0", *["–"] * (3 + len(beside)), "NOT judged"])
    sources: dict[str, int] = {}
    for row in every:
        sources[row["source"]] = sources.get(row["source"], 0) + 1
    picks = ", ".join(f"{source} {count}" for source, count in sources.items())
    title = "regret: how much longer what is picked takes than the best there is"
    return Section(title, (header, body), [f"picked by: {picks}", *_drawn(results)])


def _beside_rule(rows: Sequence[Row]) -> list[str]:
    """The regret of the rule, and the pick's time over the rule's: mean and worst of each."""
    ruled = [row for row in rows if over_rule(row) is not None]
    if not ruled:
        return ["–"] * 4
    cells = []
    for values in (
        [float(row["rule_us"]) / float(row["best_us"]) - 1 for row in ruled],
        [over_rule(row) or 0.0 for row in ruled],
    ):
        cells += [percent(sum(values) / len(values)), percent(max(values))]
    return cells


def _drawn(results: Results) -> list[str]:
    """How the problems of sampled kinds were drawn, and how everything was timed."""
    about = results.meta.get("regret")
    if not about:
        return []
    launches = "every launch that is enumerated" if about["all_launches"] else "the usual ones"
    lines = [
        f"candidates: {launches}, {about['first_samples']} samples each; then the "
        f"{about['finalists']} fastest, the pick and the rule, {about['samples']} samples each"
    ]
    if "seeds" in about:
        seeds = ", ".join(map(str, about["seeds"]))
        grid = ", and those of the grid" if about["grid"] else ""
        lines.append(
            f"NVFP4 problems drawn with seed {seeds}: {about['sizes']} row counts for each weight"
            f"{grid}, and {about['weights']} weights beside the named ones"
        )
    return lines


def _goals(results: Results, left: Sequence[Row]) -> Section:
    header = ["what", "goal", "reached", "met", "problems", "worst problem"]
    body, found = [], outcomes(results)
    for one in found:
        name = f"{one.op}: {one.goal}"
        if one.reached is None or one.worst is None:
            body.append([name, percent(one.goal.limit), "–", "no problems", "0", ""])
        else:
            held = "yes" if one.met else "NO"
            reached = [percent(one.goal.limit), percent(one.reached), held]
            body.append([name, *reached, str(one.count), label(one.worst)])
    judged = [one for one in found if one.reached is not None]
    failed = [one for one in judged if not one.met]
    lines = [f"goals of regret: {len(judged) - len(failed)} of {len(judged)} met"] * bool(judged)
    lines += [told(one) for one in failed]
    lines += [not_judged(left)] if left else []
    return Section("regret: goals", (header, body), lines)


def _largest(rows: Sequence[Row], device: str | None) -> list[Section]:
    """The largest regrets: of each group of a sampled op, and of all other ops together."""
    title = "the largest regrets"
    found = []
    for op in dict.fromkeys(row["op"] for row in rows if _is_sampled(row)):
        for tabled in groups(goals_of(op)):
            some = [row for row in rows if row["op"] == op and tabled in (None, is_tabled(row))]
            found += _worst(f"{title}: {op}{group_name(tabled)}", some, device, _LISTED_OF_GROUP)
    return [*found, *_worst(title, [row for row in rows if not _is_sampled(row)], device)]


def _worst(
    title: str, rows: Sequence[Row], device: str | None, count: int = _LISTED
) -> list[Section]:
    worst = [row for row in rows if row["regret"] > 0]
    worst = sorted(worst, key=lambda row: -float(row["regret"]))[:count]
    ruled = any(over_rule(row) is not None for row in worst)
    times = ["picked µs", *(["rule µs"] if ruled else []), "best µs"]
    header = ["problem", "regret", *times, "spreads", "source", "picked", "best"]
    body = [
        [
            f"{row['op']} {label(row)}",
            percent(row["regret"]),
            microseconds(row["picked_us"]),
            *([_time(row, "rule_us")] if ruled else []),
            microseconds(row["best_us"]),
            f"{row['picked_spread_us']:.2f}, {row['best_spread_us']:.2f}",
            row["source"],
            *told_apart(row["picked"], row["best"]),
        ]
        for row in worst
    ]
    return [Section(title, (header, body), _commands(worst, device))] if body else []


def _time(row: Row, key: str) -> str:
    return "–" if row.get(key) is None else microseconds(row[key])


def _slower_than_rule(rows: Sequence[Row], device: str | None) -> list[Section]:
    """The picks that take longer than the rule's launch by more than their op's goal."""
    found = []
    for row in rows:
        goals = [goal.limit for goal in goals_of(row["op"]) if goal.what == OVER_RULE]
        if (over_rule(row) or 0.0) > min(goals, default=RULE_GOAL):
            found.append(row)
    if not found:
        return []
    found = sorted(found, key=lambda row: -(over_rule(row) or 0.0))
    header = ["problem", "pick over rule", "picked µs", "rule µs", "source", "picked", "rule"]
    body = [
        [
            f"{row['op']} {label(row)}",
            percent(over_rule(row) or 0.0),
            microseconds(row["picked_us"]),
            microseconds(row["rule_us"]),
            row["source"],
            *told_apart(row["picked"], row["rule"]),
        ]
        for row in found[:_LISTED]
    ]
    title = f"picks slower than the rule: {_problems(len(found))}"
    return [Section(title, (header, body), _commands(found[:_LISTED], device))]


def _commands(rows: Sequence[Row], device: str | None) -> list[str]:
    """For each problem the command that measures it again."""
    return [command_of(row, device=device) for row in rows]


def _is_sampled(row: Row) -> bool:
    return row["op"] in KINDS and KINDS[row["op"]].sampled


def _every_problem(rows: Sequence[Row]) -> list[Section]:
    """Every number of the kinds whose problems are drawn: pick, rule and best side by side."""
    header = ["problem", "in the table", "picked µs", "rule µs", "best µs", "regret"]
    header += ["regret of the rule", "pick over rule", "source"]
    found = []
    for op in dict.fromkeys(row["op"] for row in rows if _is_sampled(row)):
        of_op = [row for row in rows if row["op"] == op]
        body = []
        for row in sorted(
            of_op, key=lambda row: (not is_tabled(row), row["N"], row["K"] or 0, row["M"])
        ):
            ruled = over_rule(row)
            rule = ["–"] * 3
            if ruled is not None:
                regret = float(row["rule_us"]) / float(row["best_us"]) - 1
                rule = [microseconds(row["rule_us"]), percent(regret), percent(ruled)]
            body.append(
                [
                    f"{label(row)} {row['dtype']}",
                    "yes" if is_tabled(row) else "no",
                    microseconds(row["picked_us"]),
                    rule[0],
                    microseconds(row["best_us"]),
                    _shown(row),
                    *rule[1:],
                    row["source"],
                ]
            )
        title = f"{op}: pick, rule and best launch of every problem"
        found.append(Section(title, (header, body), page_only=True))
    return found


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
