"""Results as tables: for a terminal (rich) and for a page (Markdown). Losses look like wins do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from rich.console import Console, JustifyMethod
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from gristmill.bench import explained, product_report
from gristmill.bench.cold_start import report as cold_start_report
from gristmill.bench.end_to_end import report as end_to_end_report
from gristmill.bench.experts import report as expert_report
from gristmill.bench.hugging_face import report as hugging_face_report
from gristmill.bench.product_report import TIE, Grid, against, count_of, percent
from gristmill.bench.regret.report import remarks, sections
from gristmill.bench.results import (
    OURS,
    Results,
    Row,
    by_problem,
    fastest_peer,
    implementations,
    label,
    microseconds,
)
from gristmill.bench.runs import UNMEASURED, unmeasured
from gristmill.bench.serving import report as serving_report
from gristmill.bench.suites import KINDS

# Columns of words; those of numbers are flush on the right.
LEFT = {
    *("variant", "cache", "problem", "worst problem", "source", "picked", "best", "what"),
    *explained.HEADER,
    serving_report.VARIANTS,
}
# As many notes that say the same are told one by one.
_FEW_NOTES = 3
CPU_NOTE = (
    "No GPU took part, so no kernel of gristmill ran: what was timed stands in for them on a CPU, "
    "torch's own ops and plain formulas. Neither times nor ratios say anything about a GPU."
)


def print_results(results: Results, console: Console) -> None:
    """Every suite's tables, then one line per op, then everything that needs a word."""
    kernels = results.kernels()
    for op in dict.fromkeys(row["op"] for row in kernels):
        rows = [row for row in kernels if row["op"] == op]
        table = _kernel_table(rows, roof=_has_roof(results))
        console.print(_whole(_rich(table, f"{op}: µs per call", ours=1), console))
    for title, table in product_report.tables(kernels):
        console.print(_whole(_rich(table, title, ours=-1), console))
    if kernels:
        for line in summary(kernels):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    for title, table in _other_tables(results.rows):
        console.print(_whole(_rich(table, title, ours=-1), console))
    for part in serving_report.parts(results.rows):
        console.print(_whole(_rich(part.grid, part.title, ours=-1), console))
        for line in part.lines:
            style = "bold red" if serving_report.is_alarm(line) else ""
            console.print(Text(line, style=style), soft_wrap=True)
    for section in sections(results):
        if not section.page_only:
            console.print(_whole(_rich(section.grid, section.title, ours=-1), console))
        for line in section.lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    for line in notes(results):
        console.print(Text(line, style="yellow"), soft_wrap=True)


def markdown(results: Results) -> str:
    """The same tables as a page, with what they were made with."""
    meta = results.meta
    versions = {
        "torch": meta.get("torch"),
        "CUDA": meta.get("cuda"),
        "driver": meta.get("driver"),
        "Triton": meta.get("triton"),
        "gristmill": " ".join(filter(None, (meta.get("gristmill"), meta.get("revision")))),
        **meta.get("peers", {}),
    }
    known = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    parts = [f"# {meta.get('gpu', 'unknown device')}, {meta.get('date', '')}", known]
    if meta.get("method"):
        parts.append(f"Method: {meta['method']}.")
    for suite, method in meta.get("methods", {}).items():
        parts.append(f"Method of {suite}: {method}.")
    if meta.get("copy_tb_per_s"):
        parts.append(f"Largest copy measured in this run: {meta['copy_tb_per_s']:#.3g} TB/s.")
    if _has_roof(results):
        for dtype, rate in meta.get("mm_tflop_per_s", {}).items():
            parts.append(f"Fastest product of torch's in this run, {dtype}: {rate:.0f} TFLOP/s.")
    kernels = results.kernels()
    for op in dict.fromkeys(row["op"] for row in kernels):
        rows = [row for row in kernels if row["op"] == op]
        table = _kernel_table(rows, roof=_has_roof(results))
        parts += [f"## {op}, µs per call", _markdown_table(table)]
        for title, grid in product_report.tables(rows):
            parts += [f"### {title}", _markdown_table(grid)]
        parts += summary(rows)
    parts += causal_gains(kernels)
    for title, table in _other_tables(results.rows):
        parts += [f"## {title}", _markdown_table(table)]
    for part in serving_report.parts(results.rows):
        parts += [f"## {part.title}", _markdown_table(part.grid), *part.lines]
    for section in sections(results):
        parts += [f"## {section.title}", _markdown_table(section.grid), *section.lines]
    lines = notes(results)
    if lines:
        parts.append("\n".join(f"- {line}" for line in lines))
    return "\n\n".join(parts) + "\n"


def summary(rows: Sequence[Row]) -> list[str]:
    """Per op the mean against the fastest peer and how many are behind; then the other costs."""
    ratios: dict[str, list[float]] = {}
    for (op, *_), row_of in by_problem(rows).items():
        ratio = _ratio(row_of)
        if ratio is not None:
            ratios.setdefault(op, []).append(ratio)
    lines = [f"{op}: {against(values, 'the fastest peer')}" for op, values in ratios.items()]
    lines += product_report.peer_lines(rows)
    lines += expert_report.lines(rows)
    lines += causal_gains(rows)
    lines += _medians(rows, "first_call_s", "first call", lambda seconds: f"{seconds:.3f} s")
    host = "host time of a small call"
    lines += _medians(rows, "host_us", host, lambda us: f"{microseconds(us)} µs")
    return lines


def causal_gains(rows: Sequence[Row]) -> list[str]:
    """What it saves not to read what is masked: our causal times beside our plain ones."""
    times = {(row["op"], row["dtype"], label(row)): row for row in rows if row["impl"] == OURS}
    lines = []
    for (op, dtype, shape), row in times.items():
        plain = times.get((op.replace("_causal", ""), dtype, shape), {})
        if "_causal" in op and "us" in row and "us" in plain:
            gain = plain["us"] / row["us"]
            lines.append(f"{op} {shape}: {gain:.2f}x as fast as without the mask")
    return lines


def _medians(rows: Sequence[Row], key: str, what: str, write: Callable[[float], str]) -> list[str]:
    """One line with each implementation's median of a column, if anyone has it."""
    parts = []
    for name in implementations(list(rows)):
        values = [row[key] for row in rows if row["impl"] == name and row.get(key) is not None]
        if values:
            parts.append(f"{name} {write(median(values))}")
    return [f"{what} (median): {', '.join(parts)}"] if parts else []


def notes(results: Results) -> list[str]:
    """What a reader must know beside the numbers: who is missing, who was wrong, what they mean."""
    lines = []
    if cut := cut_short(results):
        lines.append(cut)
    if results.meta.get("device") == "cpu":
        lines.append(CPU_NOTE)
    if several := results.meta.get("runs"):
        told = [f"{one['file']} ({one.get('date')}, {one['rows']} rows)" for one in several]
        lines.append(f"Rows are from {len(several)} runs: {', '.join(told)}.")
    lines += _together(results.meta.get("notes", []))
    for name, reason in results.meta.get("missing_peers", {}).items():
        lines.append(f"{name} took no part: {reason}")
    lines += remarks(results)
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for row in results.failures():
        what = " ".join(filter(None, (label(row), row.get("mode"), row.get("cache"))))
        reasons.setdefault((row["impl"], row["op"], row["error"]), []).append(what)
    for (impl, op, reason), places in reasons.items():
        about = f"{op} {', '.join(places)}".strip()
        lines.append(f"{impl} was not timed on {about}: {reason}")
    return lines


def cut_short(results: Results) -> str | None:
    """That something is missing, and what, as far as the run says it; None where all is there."""
    meta = results.meta
    cut = [one for one in meta.get("runs") or [meta] if one.get("finished") is False]
    if not cut:
        return None
    names = ", ".join(str(one["file"]) for one in cut if one.get("file"))
    told = f"Cut short: {names}" if names else "This run was cut short"
    left: dict[str, list[str]] = {}
    for one in unmeasured(results):
        op = one.split()[0]
        left.setdefault(KINDS[op].suite if op in KINDS else one, []).append(one)
    if left:
        parts = (f"{s} ({count_of(some)})" if some != [s] else s for s, some in left.items())
        return f"{told}. Not measured: {', '.join(parts)}."
    if all(UNMEASURED in one for one in cut):  # another run has what this one lacks
        return None
    if not names and meta.get("commands"):
        last = meta["commands"][-1]
        return f"{told}, and something may be missing: its last command did not end ({last})."
    return f"{told}, and something may be missing."


def _together(notes: Sequence[str]) -> list[str]:
    """Many notes that say the same of different things as one, with their number."""
    by_text: dict[str, list[str]] = {}
    for note in notes:
        by_text.setdefault(note.partition(": ")[2] or note, []).append(note)
    lines = []
    for text, same in by_text.items():
        if len(same) <= _FEW_NOTES:
            lines += same
        else:
            first = same[0].partition(": ")[0]
            lines.append(f"{first} and {len(same) - 1} others: {text}")
    return lines


def _ratio(row_of: dict[str, Row]) -> float | None:
    peer, ours = fastest_peer(row_of), row_of.get(OURS, {})
    if peer is None or "us" not in ours:
        return None
    return float(peer["us"]) / float(ours["us"])


def _has_roof(results: Results) -> bool:
    # A CPU's copy is no roof: caches and page faults decide it, not the width of a bus.
    return results.meta.get("device") != "cpu"


def _kernel_table(rows: list[Row], *, roof: bool) -> Grid:
    """One line per problem, ending with fastest peer over ours, share of the roof, variant."""
    names = implementations(rows)
    several = len({row["dtype"] for row in rows}) > 1
    product = roof and any("tflop_per_s" in row for row in rows)
    errors = any("fp64_error" in row for row in rows)
    beside = any("pipeline_fp64_error" in row for row in rows)
    header = [
        "problem",
        *names,
        "vs best peer",
        *(["TFLOP/s"] if product else []),
        *(["of roof"] if roof else []),
        *(["error"] if errors else []),
        *(["16-bit error"] if beside else []),
        "variant",
    ]
    body = []
    for (_, dtype, shape), row_of in by_problem(rows).items():
        ours, ratio = row_of.get(OURS, {}), _ratio(row_of)
        share = f"{ours['roof_share']:.0%}" if "roof_share" in ours else ""
        body.append(
            [
                shape + (f" {dtype}" if several else ""),
                *(_time(row_of.get(name)) for name in names),
                "" if ratio is None else f"{ratio:.2f}x",
                *([microseconds(ours["tflop_per_s"]) if "us" in ours else ""] if product else []),
                *([share] if roof else []),
                *([_percent(ours, "fp64_error")] if errors else []),
                *([_percent(ours, "pipeline_fp64_error")] if beside else []),
                str(ours.get("variant", "")),
            ]
        )
    return header, body


def _percent(row: Row, name: str) -> str:
    return percent(row[name]) if name in row else ""


def _time(row: Row | None) -> str:
    if row is None:
        return "–"
    return microseconds(row["us"]) if "us" in row else "failed"


def _other_tables(rows: list[Row]) -> list[tuple[str, Grid]]:
    tables = []
    host = [row for row in rows if "mode" in row and "host_us" in row]  # others failed: a note
    if host:
        names = implementations(host)
        calls: dict[tuple[str, str, str], dict[str, Any]] = {}
        for row in host:
            call = (row["op"], row["mode"], label(row))
            calls.setdefault(call, {})[row["impl"]] = row["host_us"]
        body = []
        for (op, mode, shape), us in calls.items():
            ratio = f"{us[OURS] / us['eager']:.2f}x" if {OURS, "eager"} <= set(us) else ""
            times = [microseconds(us[name]) if name in us else "–" for name in names]
            body.append([f"{op} {mode}", shape, *times, ratio])
        header = ["call", "problem", *names, "over eager"]
        tables.append(("host_cost: µs of host time per eager call", (header, body)))
    for found in (cold_start_report.table(rows), explained.table(rows)):
        if found is not None:
            tables.append(found)
    tables += end_to_end_report.tables(rows)
    return tables + hugging_face_report.tables(rows)


def _rich(grid: Grid, title: str, *, ours: int) -> Table:
    header, body = grid
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for index, name in enumerate(header):
        right = index > 0 and name not in LEFT
        style = "bold" if index == ours else None
        folds = name in (*explained.HEADER[2:], serving_report.VARIANTS)  # sentences and lists
        justify: JustifyMethod = "right" if right else "left"
        table.add_column(name, justify=justify, style=style, no_wrap=not folds)
    for line in body:
        table.add_row(*(_cell(header[index], text) for index, text in enumerate(line)))
    return table


def _whole(table: Table, console: Console) -> Table:
    """In a terminal that is too narrow for its words and numbers they are folded, and not cut."""
    endless = console.options.update_width(10_000)
    if Measurement.get(console, endless, table).minimum > console.width:
        for column in table.columns:
            column.no_wrap, column.overflow = False, "fold"
    return table


def _cell(column: str, text: str) -> Text:
    if text == "failed":
        return Text(text, style="red")
    if column == "vs best peer" and text:
        ratio = float(text.removesuffix("x"))
        return Text(text, style="red" if ratio < TIE else "green" if ratio > 1 / TIE else "")
    return Text(text)


def _markdown_table(grid: Grid) -> str:
    header, body = grid
    rule = [":--" if index == 0 else "--:" for index in range(len(header))]
    lines = [header, rule, *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
