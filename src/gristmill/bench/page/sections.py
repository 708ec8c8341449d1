"""What is not kernel time: whole models, regret, starts, the host, choices; then who failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gristmill.bench import explained
from gristmill.bench.cold_start import report as cold_start_report
from gristmill.bench.commands import command_of, suite_of
from gristmill.bench.end_to_end import report as end_to_end_report
from gristmill.bench.hugging_face import report as hugging_face_report
from gristmill.bench.page.headline import NOT_MEASURED
from gristmill.bench.page.html import Html, cell, command, element, grid_table, join, row, table
from gristmill.bench.product_report import Grid
from gristmill.bench.regret import report as regret_report
from gristmill.bench.regret.report import percent, told_apart
from gristmill.bench.report import notes
from gristmill.bench.results import OURS, Results, Row, label, microseconds
from gristmill.bench.serving import report as serving_report


def rows_of(results: Results, *suites: str) -> list[Row]:
    return [row for row in results.rows if suite_of(row) in suites]


def absent(what: str) -> Html:
    return element("p", element("b", what), f": {NOT_MEASURED}.", class_="none")


def end_to_end(results: Results, charts: Mapping[str, Html]) -> Html:
    parts: list[Html] = []
    for suite, drawn in (
        ("end_to_end", lambda rows: _tables(end_to_end_report.tables(rows))),
        ("vllm", _served),
        ("transformers", lambda rows: _tables(hugging_face_report.tables(rows))),
    ):
        rows = rows_of(results, suite)
        if not rows:
            parts.append(absent(suite))
            continue
        parts += [charts[suite]] if suite in charts else []
        parts += [*drawn(rows), commands(rows, results)]
    return join(parts, "\n")


def _tables(found: Sequence[tuple[str, Grid]]) -> list[Html]:
    return [grid_table(title, grid) for title, grid in found]


def _served(rows: Sequence[Row]) -> list[Html]:
    """Tables with lines beneath them; a missed goal stands out."""
    parts: list[Html] = []
    for part in serving_report.parts(rows):
        parts.append(grid_table(part.title, part.grid))
        for line in part.lines:
            loud = serving_report.is_alarm(line)
            told = element("strong", line) if loud else line
            parts.append(element("p", told, class_="loud" if loud else None))
    return parts


def regret(results: Results, charts: Mapping[str, Html]) -> Html:
    rows = rows_of(results, "regret")
    if not rows:
        return absent("regret")
    parts: list[Html] = []
    every: list[Html] = []
    for section in regret_report.sections(results):
        if section.title.startswith("choice"):
            continue
        shown = grid_table(section.title, section.grid)
        (every if section.page_only else parts).append(shown)
        parts += [element("p", line) for line in section.lines]
    drawn = [chart for stem, chart in charts.items() if stem.startswith(("regret_", "matrix_"))]
    parts += [element("div", *drawn, class_="charts")] if drawn else []
    told = "Every problem: what was picked, what was best, and the command"
    every.append(_regret_rows(rows, results))
    parts.append(element("details", element("summary", told), *every))
    matrices = [one for one in rows if one["suite"] == "matrix"]
    parts += [commands(matrices, results)] if matrices else []
    return join(parts, "\n")


def _regret_rows(rows: Sequence[Row], results: Results) -> Html:
    header = ["problem", "regret", "picked µs", "best µs", "source", "picked", "best", "command"]
    lines = []
    for one in rows:
        if "picked_us" not in one:
            continue
        known = one["regret"] if "regret" in one else one["regret_at_least"]
        least = "" if "regret" in one else "at least "
        picked, best = told_apart(one["picked"], one["best"])
        cells = [
            cell(f"{one['op']} {label(one)} {one['dtype']}", name="th scope=row"),
            cell(least + percent(known)),
            cell(microseconds(one["picked_us"])),
            cell(microseconds(one["best_us"])),
            cell(one.get("source", ""), "l"),
            cell(picked, "l"),
            cell("the same" if one["picked"] == one["best"] else best, "l"),
            cell(command(_command(one, results)), "l"),
        ]
        lines.append(row(cells))
    return table("regret: every problem", header, lines, class_="rows", words=(0, 4, 5, 6, 7))


def starts(results: Results, charts: Mapping[str, Html]) -> Html:
    rows = rows_of(results, "cold_start")
    found = cold_start_report.table(rows)
    if found is None:
        return absent("cold_start")
    chart = [charts["cold_start"]] if "cold_start" in charts else []
    return join([*chart, grid_table(*found), commands(rows, results)], "\n")


def host(results: Results, charts: Mapping[str, Html]) -> Html:
    rows = rows_of(results, "host_cost")
    calls: dict[tuple[str, str, str], dict[str, float]] = {}
    for one in rows:
        if "host_us" not in one:  # it failed, and is told at the end
            continue
        call = (one["op"], one["mode"], label(one))
        calls.setdefault(call, {})[one["impl"]] = one["host_us"]
    if not calls:
        return absent("host_cost")
    body = []
    for (op, mode, shape), us in calls.items():
        both = OURS in us and "eager" in us
        body.append(
            [
                f"{op}, {mode}",
                shape,
                *(microseconds(us[name]) if name in us else "–" for name in (OURS, "eager")),
                f"{us[OURS] / us['eager']:.2f}x" if both else "",
            ]
        )
    header = ["call", "problem", "gristmill µs", "torch µs", "ours over torch's"]
    chart = [charts["host_cost"]] if "host_cost" in charts else []
    drawn = grid_table("host time of an eager call, kernels not waited for", (header, body))
    return join([*chart, drawn, commands(rows, results)], "\n")


def choice(results: Results) -> Html:
    rows = rows_of(results, "choice")
    if not rows:
        return absent("choice")
    found = [one for one in regret_report.sections(results) if one.title.startswith("choice")]
    drawn = [grid_table(section.title, section.grid) for section in found]
    return join([*drawn, commands(rows, results)], "\n")


def reasons(results: Results) -> Html | None:
    """What was picked, and why: told by runs on a CPU, where times say little."""
    found = explained.table(results.kernels())
    return None if found is None else grid_table(*found, class_="told")


def failures(results: Results) -> Html:
    lines = notes(results)
    if not lines:
        return element("p", "Nothing to note: everybody was right and ran everything.")
    return element("ul", *(element("li", line) for line in lines), class_="plain")


def commands(rows: Sequence[Row], results: Results) -> Html:
    """Under a fold: each command once, with what it measures."""
    told: dict[str, dict[str, None]] = {}
    for one in rows:
        about = " ".join(filter(None, (str(one["op"]), str(one.get("shape") or ""))))
        told.setdefault(_command(one, results), {})[about] = None
    lines = [
        row([cell(", ".join(about), name="th scope=row"), cell(command(line), "l")])
        for line, about in told.items()
    ]
    drawn = table("Commands", ["rows", "command"], lines, words=(0, 1), shown=False)
    return element("details", element("summary", "Commands that repeat these rows"), drawn)


def _command(one: Row, results: Results) -> str:
    return command_of(one, device=results.meta.get("device"))
