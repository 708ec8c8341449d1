"""Results as pictures: SVG written here, light and dark, for a page and for a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gristmill.bench.charts.chart import Chart, made_with, stem
from gristmill.bench.charts.headline import NOTE as HEADLINE_NOTE
from gristmill.bench.charts.headline import TITLE, draw_headline, families
from gristmill.bench.charts.products import NOTE as PRODUCT_NOTE
from gristmill.bench.charts.products import draw_products
from gristmill.bench.charts.regret import MATRIX_NOTE, REGRET_NOTE, draw_matrix, draw_regret
from gristmill.bench.charts.rows import NOTE, RATIO_NOTE, draw_rows
from gristmill.bench.charts.starts import (
    COLD_NOTE,
    END_NOTE,
    HOST_NOTE,
    draw_cold_start,
    draw_end_to_end,
    draw_host_cost,
)
from gristmill.bench.charts.theme import CSS, DARK, LIGHT, Styles
from gristmill.bench.problems import Problem, by_op, peer_of, problems_of
from gristmill.bench.regret.report import families as regret_families
from gristmill.bench.regret.report import matrices, measured, unjudged
from gristmill.bench.results import Results

__all__ = ["CSS", "DARK", "LIGHT", "Chart", "draw", "write_charts"]


def draw(results: Results) -> dict[str, Chart]:
    """Every chart that there are rows for, by the stem of its file."""
    rows = [row for row in results.rows if row.get("impl")]
    names = {str(row["impl"]) for row in rows} | {peer_of(row) for row in rows}
    styles = Styles(names)
    problems = problems_of(results)
    return {
        **dict(_headline(results, problems, styles)),
        **dict(_ops(results, problems, styles)),
        **dict(_end_to_end(results, styles)),
        **dict(_regret(results, styles)),
        **dict(_starts(results, styles)),
    }


Charts = Iterator[tuple[str, Chart]]


def _headline(results: Results, problems: list[Problem], styles: Styles) -> Charts:
    found = families(problems)
    if found:
        paint = draw_headline(found, styles)
        yield "headline", Chart(TITLE, HEADLINE_NOTE, made_with(results.meta), paint)


def _ops(results: Results, problems: list[Problem], styles: Styles) -> Charts:
    made = made_with(results.meta)
    # A CPU's copy is no roof: caches and page faults decide it, not the width of a bus.
    roof = results.meta.get("device") != "cpu"
    for (op, dtype), some in by_op(problems).items():
        title = f"{op}, {dtype}"
        if roof and any("tflop_per_s" in row for one in some for row in one.row_of.values()):
            yield stem(op, dtype), Chart(title, PRODUCT_NOTE, made, draw_products(some, styles))
        else:
            note = NOTE if roof else RATIO_NOTE
            yield stem(op, dtype), Chart(title, note, made, draw_rows(some, styles, roof=roof))


def _regret(results: Results, styles: Styles) -> Charts:
    made = made_with(results.meta)
    rows = [*measured(results), *unjudged(results)]
    for op, dtype in dict.fromkeys((row["op"], row["dtype"]) for row in measured(results)):
        mine = [row for row in rows if (row["op"], row["dtype"]) == (op, dtype)]
        lines = {
            f"N × K = {dims.replace('x', ' × ')}" if "x" in dims else f"N = {dims}": of_size
            for (_, dims, _), of_size in regret_families(mine).items()
        }
        title = f"{op}, {dtype}: regret"
        yield (
            f"regret_{stem(op, dtype)}",
            Chart(title, REGRET_NOTE, made, draw_regret(lines, styles)),
        )
    for cells in matrices(results):
        title = f"{cells.title}: tuned at one size, run at another"
        name = f"matrix_{stem(f'{cells.op}_{cells.dims}', cells.dtype)}"
        yield name, Chart(title, MATRIX_NOTE, made, draw_matrix(cells))


def _starts(results: Results, styles: Styles) -> Charts:
    made = made_with(results.meta)
    starts = [row for row in results.rows if "cache" in row and "beyond_s" in row]
    if starts:
        yield "cold_start", Chart("Cold start", COLD_NOTE, made, draw_cold_start(starts))
    host = [row for row in results.rows if "mode" in row and row.get("host_us") is not None]
    if host:
        yield (
            "host_cost",
            Chart("Host time of a call", HOST_NOTE, made, draw_host_cost(host, styles)),
        )


def _end_to_end(results: Results, styles: Styles) -> Charts:
    rows = [row for row in results.rows if row.get("suite") == "end_to_end"]
    if rows:
        paint = draw_end_to_end(rows, styles)
        yield "end_to_end", Chart("End to end", END_NOTE, made_with(results.meta), paint)


def write_charts(results: Results, folder: Path) -> list[Path]:
    """`<stem>.svg` for each chart, and the layout for a phone under `narrow/`; their paths."""
    paths = []
    for name, chart in draw(results).items():
        for narrow in (False, True):
            path = folder / "narrow" / f"{name}.svg" if narrow else folder / f"{name}.svg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(chart.svg(standalone=True, narrow=narrow), encoding="utf-8")
            paths.append(path)
    return paths
