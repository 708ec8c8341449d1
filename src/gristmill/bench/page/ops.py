"""A part for each op: what it comes to, its chart, and every row with the command to repeat it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.bench.commands import command_of
from gristmill.bench.page.headline import against, times
from gristmill.bench.page.html import Html, cell, command, element, join, row, table
from gristmill.bench.problems import Problem, by_op, losses
from gristmill.bench.product_report import count_of, percent
from gristmill.bench.results import OURS, Row, microseconds

# So many of the losses are in plain sight.
_SHOWN_LOSSES = 40
_HEADER = ("implementation", "µs", "± µs", "over ours", "of roof", "TB/s", "error", "choice")


def op_parts(problems: Sequence[Problem], charts: Mapping[str, Html], device: str) -> list[Html]:
    """`charts`: by the stem that an op and its dtype have."""
    return [
        _part(op, dtype, some, charts.get(stem_of(op, dtype)), device)
        for (op, dtype), some in by_op(problems).items()
    ]


def anchor_of(problem: Problem) -> str:
    """Where the rows of a problem are: letters, digits and dashes alone."""
    words = f"{problem.op} {problem.dtype} {problem.label}"
    return "p-" + re.sub(r"[^a-zA-Z0-9]+", "-", words)


def stem_of(op: str, dtype: str) -> str:
    return op if dtype == "bfloat16" else f"{op}_{dtype}"


def _part(op: str, dtype: str, some: Sequence[Problem], chart: Html | None, device: str) -> Html:
    stem = stem_of(op, dtype)
    ratios = [problem.ratio for problem in some if problem.ratio is not None]
    told = "No peer was timed beside it."
    if ratios:
        mean = against(ratios)
        told = (
            f"{times(mean.ratio)} as fast as the best peer (geometric mean over "
            f"{count_of(ratios)}), behind by more than 3% on {mean.behind}."
        )
    rows = sum(len(problem.row_of) for problem in some)
    return element(
        "section",
        element("h3", op, element("small", dtype), id=f"op-{stem}"),
        element("p", told),
        chart or "",
        element(
            "details",
            element("summary", f"All {rows} rows of {count_of(some)}, with their commands"),
            rows_table(op, some, device),
        ),
        class_="op",
    )


def rows_table(op: str, some: Sequence[Problem], device: str) -> Html:
    header = list(_HEADER)
    if any("tflop_per_s" in one for problem in some for one in problem.row_of.values()):
        header[5] = "TFLOP/s"
    lines: list[str] = []
    for problem in some:
        line = command(command_of(problem.any, device=device))
        title = join([element("b", problem.label), line], " ")
        head = f"th scope=rowgroup id={anchor_of(problem)}"
        lines.append(row([cell(title, name=head, span=len(header))], "p"))
        names = sorted(problem.row_of, key=lambda name: (name != OURS, _us(problem.row_of[name])))
        lines += [_line(problem, problem.row_of[name], roof=device != "cpu") for name in names]
    caption = f"{op}: every implementation of every problem"
    return table(caption, header, lines, class_="rows", words=(0, 7), shown=False)


def _us(one: Row) -> float:
    return float(one.get("us", float("inf")))


def _line(problem: Problem, one: Row, *, roof: bool) -> Html:
    head = cell(one["impl"], "o" if one["impl"] == OURS else "", name="th scope=row")
    if "us" not in one:
        return row([head, cell(f"not timed: {one.get('error')}", "l f", span=len(_HEADER) - 1)])
    ours = problem.ours
    ratio = "" if ours is None or one is ours else times(one["us"] / ours["us"])
    rate = one.get("tflop_per_s", one.get("tb_per_s"))
    cells = [
        microseconds(one["us"]),
        f"{one['spread_us']:.2g}" if "spread_us" in one else "",
        ratio,
        f"{one['roof_share']:.0%}" if roof and "roof_share" in one else "",
        microseconds(rate) if roof and rate is not None else "",
        error_of(one),
    ]
    chosen = choice_of(one)
    return row([head, *map(cell, cells), *([cell(chosen, "l")] if chosen else [])])


def error_of(one: Row) -> str:
    """Against fp64 where that was looked at, else against the reference."""
    if one.get("fp64_error") is not None:
        return percent(one["fp64_error"])
    return f"{one['error']:.1e}" if isinstance(one.get("error"), float) else ""


def choice_of(one: Row) -> str:
    """What ran, how it was launched, and who said so; of gristmill's rows alone."""
    if not one.get("variant"):
        return ""
    config = " ".join(f"{key}={_value(value)}" for key, value in (one.get("config") or {}).items())
    return " ".join(filter(None, (one["variant"], config))) + (
        f" · {one['source']}" if one.get("source") else ""
    )


def _value(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def losses_table(problems: Sequence[Problem]) -> Html:
    """The worst first, and all of them; where they are very many, most are under a fold."""
    behind = losses(problems)
    compared = sum(problem.ratio is not None for problem in problems)
    if not compared:
        return element("p", "Nothing was measured beside a peer.", class_="none")
    if not behind:
        return element("p", f"None: on none of {compared} problems is a peer faster by over 3%.")
    caption = (
        f"Behind the best peer by more than 3% on {len(behind)} of {compared} problems; "
        "the worst first"
    )
    first, rest = behind[:_SHOWN_LOSSES], behind[_SHOWN_LOSSES:]
    shown = _losses(caption, first)
    if not rest:
        return shown
    more = f"The other {len(rest)}, each behind by less"
    fold = element("details", element("summary", more), _losses(more, rest, shown=False))
    return join([shown, fold])


def _losses(caption: str, behind: Sequence[Problem], *, shown: bool = True) -> Html:
    header = ["op", "problem", "ratio", "ours µs", "peer µs", "peer", "ours is"]
    lines = []
    for problem in behind:
        ours, best = problem.ours, problem.best
        if ours is None or best is None or problem.ratio is None:
            continue
        name = problem.op if problem.dtype == "bfloat16" else f"{problem.op} {problem.dtype}"
        told = [
            cell(name, name="th scope=row"),
            cell(element("a", problem.label, href=f"#{anchor_of(problem)}"), "l"),
            cell(times(problem.ratio), "h"),
            cell(microseconds(ours["us"])),
            cell(microseconds(best["us"])),
            cell(best["impl"], "l"),
            cell(ours.get("variant", ""), "l"),
        ]
        lines.append(row(told))
    return table(caption, header, lines, class_="losses", words=(0, 1, 5, 6), shown=shown)
