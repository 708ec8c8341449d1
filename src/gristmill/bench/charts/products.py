"""The chart of products of matrices: the share of the roof over M, a panel for each weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gristmill.bench.charts.canvas import TEXT, Canvas, Point
from gristmill.bench.charts.chart import Entry, entries_of, legend
from gristmill.bench.charts.plot import (
    STRIP,
    Area,
    Look,
    grid,
    losses,
    middles,
    misses,
    percent,
    section,
    series,
    side_by_side,
    slots,
    strip,
    tints_of,
    told,
    variant_legend,
    variant_of,
)
from gristmill.bench.charts.scales import Linear
from gristmill.bench.charts.text import apart
from gristmill.bench.charts.theme import Styles
from gristmill.bench.problems import Problem
from gristmill.bench.results import implementations

_HEIGHT = 118.0
NOTE = (
    "Share of the roof: the time of a copy of the bytes that must move, or of the operations at "
    "the rate of torch's fastest product if that is longer, over the time taken. "
    "Tinted: the best peer is faster by more than 3%. "
    "A gap or a small cross at the foot: no time there."
)


def draw_products(problems: Sequence[Problem], styles: Styles) -> Callable[[Canvas, float], float]:
    """How to paint the chart of these problems."""
    names = implementations([row for one in problems for row in one.row_of.values()])
    panels = by_weight(problems)
    tints = tints_of(problems)
    rows = [row for one in problems for row in one.row_of.values()]
    shares = [row["roof_share"] for row in rows if "roof_share" in row]
    highest = 1.06 * max([1.0, *shares])

    def paint(canvas: Canvas, top: float) -> float:
        top = legend(canvas, top, [*entries_of(names, styles), Entry("roof", kind="roof")])
        how = "higher is better; tinted: a peer is faster by more than 3%"
        top = section(canvas, top, "Share of the roof over M", how)
        scale = Linear(0.0, highest, _HEIGHT, 0.0)
        ticks = _ticks(highest)
        top = side_by_side(
            canvas,
            top,
            panels,
            Look(_HEIGHT, STRIP + 16, scale, ticks, percent),
            lambda some, area: _panel(canvas, area, some, names, styles, tints, highest),
        )
        return variant_legend(canvas, top, tints)

    return paint


def _ticks(highest: float) -> list[float]:
    return [share for share in (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0) if share <= highest]


def _panel(
    canvas: Canvas,
    area: Area,
    problems: Sequence[Problem],
    names: Sequence[str],
    styles: Styles,
    tints: dict[str, int],
    highest: float,
) -> None:
    scale = Linear(0.0, highest, area.bottom, area.top)
    edges = slots(area, len(problems))
    places = middles(edges)
    losses(canvas, problems, edges, area)
    grid(canvas, area, scale, [tick for tick in _ticks(highest) if tick not in (0.0, 1.0)])
    canvas.line((area.left, scale(1.0)), (area.right, scale(1.0)), "roof")

    def points(name: str) -> list[Point | None]:
        rows = [one.row_of.get(name, {}) for one in problems]
        return [
            (x, scale(row["roof_share"])) if "roof_share" in row else None
            for x, row in zip(places, rows, strict=True)
        ]

    series(canvas, names, styles, points, lambda name, index: told(problems[index], name))
    misses(canvas, problems, places, area.bottom, styles)
    strip(canvas, edges, area.bottom + 3, [variant_of(one) for one in problems], tints)
    texts = [str(one.any["M"]) for one in problems]
    for index in apart(places, texts, TEXT, 6.0):
        y = area.bottom + STRIP + 3 + 13
        canvas.text(places[index], y, texts[index], anchor="middle")


def by_weight(problems: Sequence[Problem]) -> dict[str, list[Problem]]:
    """The problems of each weight, or of each model and routing, as they came; in each by M."""
    panels: dict[str, list[Problem]] = {}
    for one in problems:
        row = one.any
        name = f"{row['model']}, {row['routing']}" if row.get("routing") else _weight(one)
        panels.setdefault(name, []).append(one)
    return {name: sorted(some, key=lambda one: int(one.any["M"])) for name, some in panels.items()}


def _weight(one: Problem) -> str:
    return f"N × K = {one.any['N']} × {one.any['K']}"
