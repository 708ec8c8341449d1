"""The chart of an op that moves bytes: TB/s over shapes, and of small problems ratios of times."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gristmill.bench.charts.canvas import TEXT, Canvas, Point
from gristmill.bench.charts.chart import MARGIN, Entry, entries_of, legend
from gristmill.bench.charts.plot import (
    GUTTER,
    STRIP,
    Area,
    Scale,
    grid,
    losses,
    middles,
    misses,
    numbers,
    section,
    series,
    shape_lines,
    slots,
    strip,
    times,
    tints_of,
    told,
    variant_legend,
    variant_of,
)
from gristmill.bench.charts.scales import Linear, Log
from gristmill.bench.charts.text import shortened, width
from gristmill.bench.charts.theme import Styles
from gristmill.bench.problems import Problem
from gristmill.bench.results import OURS, implementations, microseconds

# Below this a problem is bound by latency, and its bandwidth says little: it is drawn as a ratio.
SMALL_BYTES = 16_000_000
_HEIGHT, _HEIGHT_NARROW = 168.0, 136.0
_GAP = 16.0
_WIDEST_SLOT = 74.0
_LINE = 13.0
NOTE = (
    "TB/s: the bytes that must move over the time, for every implementation the same bytes. "
    "Dashed: a copy of as many bytes in the same run. "
    "Small problems (up to 16 MB): times of others over ours. "
    "A gap or a small cross at the foot: no time there."
)
RATIO_NOTE = "Times of others over ours. A gap or a small cross at the foot: no time there."


@dataclass(frozen=True)
class Panel:
    """Problems side by side under one header."""

    name: str
    problems: list[Problem]


def draw_rows(
    problems: Sequence[Problem], styles: Styles, *, roof: bool
) -> Callable[[Canvas, float], float]:
    """How to paint the chart of these problems; `roof`: a copy is a roof here, so TB/s count."""
    names = implementations([row for one in problems for row in one.row_of.values()])
    large = [one for one in problems if roof and _bytes(one) > SMALL_BYTES]
    small = [one for one in problems if one not in large]
    tints = tints_of(problems)

    def paint(canvas: Canvas, top: float) -> float:
        entries = entries_of(names, styles) + ([Entry("roof", kind="roof")] if large else [])
        top = legend(canvas, top, entries)
        if large:
            top = _Section(canvas, names, styles, tints, large).bandwidth(top)
        if small:
            top = _Section(canvas, names, styles, tints, small).ratios(top, bool(large))
        return variant_legend(canvas, top, tints)

    return paint


class _Section:
    """Panels that share a scale, in as many lines as they need."""

    def __init__(
        self,
        canvas: Canvas,
        names: Sequence[str],
        styles: Styles,
        tints: dict[str, int],
        problems: Sequence[Problem],
    ):
        self.canvas, self.names, self.styles, self.tints = canvas, names, styles, tints
        self.problems = problems
        self.panels = by_set(problems)

    def bandwidth(self, top: float) -> float:
        rates = [row["tb_per_s"] for one in self.problems for row in _timed(one)]
        roofs = [roof for one in self.problems if (roof := _roof(one)) is not None]
        highest = max([*rates, *roofs])
        how = (
            "higher is better; tinted: a peer is faster by more than 3%; beneath: best peer / ours"
        )
        top = section(self.canvas, top, "TB/s", how)

        def scale(area: Area) -> Scale:
            return Linear(0.0, 1.06 * highest, area.bottom, area.top)

        def lines(one: Problem) -> list[str]:
            return [*shape_lines(one), "–" if one.ratio is None else f"{one.ratio:.2f}×"]

        return self._lines(top, scale, self._draw_rates, lambda tick: f"{tick:g}", lines)

    def ratios(self, top: float, beside: bool) -> float:
        what = "Small problems: times over ours" if beside else "Times over ours"
        how = "above 1 ours is faster, below (tinted) the other; beneath: our time"
        top = section(self.canvas, top, what, how)
        found = [ratio for one in self.problems for ratio in _ratios(one).values()]
        low, high = min([0.8, *found]) / 1.1, max([1.6, *found]) * 1.1

        def scale(area: Area) -> Scale:
            return Log(low, high, area.bottom, area.top)

        def lines(one: Problem) -> list[str]:
            ours = one.ours
            return [*shape_lines(one), "–" if ours is None else f"{microseconds(ours['us'])} µs"]

        return self._lines(top, scale, self._draw_ratios, times, lines)

    def _lines(
        self,
        top: float,
        scale_of: Callable[[Area], Scale],
        draw: Callable[[Sequence[Problem], Sequence[float], Area, Scale], None],
        tell: Callable[[float], str],
        label: Callable[[Problem], list[str]],
    ) -> float:
        room = self.canvas.width - 2 * MARGIN - GUTTER
        texts = [text for one in self.problems for text in label(one)]
        least = max(width(text, TEXT, bold=True) for text in texts) + 7
        height = _HEIGHT if self.canvas.width > 600 else _HEIGHT_NARROW
        named = any(panel.name for panel in self.panels)
        deep = max(len(label(one)) for one in self.problems)
        for line in in_lines(self.panels, room, least):
            slot = widest_slot(line, room, least)
            left = MARGIN + GUTTER
            start = top + (18 if named else 4)
            for panel in line:
                right = left + panel_width(panel, slot)
                area = Area(left, start, left + slot * len(panel.problems), start + height)
                if panel.name:
                    name = shortened(panel.name, TEXT, right - left, bold=True)
                    self.canvas.text(left, top + TEXT, name, kind="b mu")
                self._panel(panel, area, scale_of(area), draw, label, deep)
                left = right + _GAP
            scale = scale_of(Area(0, start, 0, start + height))
            numbers(self.canvas, MARGIN + GUTTER - 6, scale, scale.ticks(), tell)
            top = start + height + (STRIP + 3 if self.tints else 0) + deep * _LINE + 14
        return top

    def _panel(
        self,
        panel: Panel,
        area: Area,
        scale: Scale,
        draw: Callable[[Sequence[Problem], Sequence[float], Area, Scale], None],
        label: Callable[[Problem], list[str]],
        deep: int,
    ) -> None:
        edges = slots(area, len(panel.problems))
        places = middles(edges)
        draw(panel.problems, edges, area, scale)
        misses(self.canvas, panel.problems, places, area.bottom, self.styles)
        base = area.bottom
        if self.tints:
            variants = [variant_of(one) for one in panel.problems]
            strip(self.canvas, edges, base + 3, variants, self.tints)
            base += STRIP + 3
        lines = [label(one) for one in panel.problems]
        for index in range(deep - 1):
            for (*shape, _), x in zip(lines, places, strict=True):
                if index < len(shape):
                    y = base + (index + 1) * _LINE
                    self.canvas.text(x, y, shape[index], anchor="middle")
        for one, (*_, last), x in zip(panel.problems, lines, places, strict=True):
            kind = "bad b" if one.is_loss else "mu"
            # Where ours is a line and not a marker, its tooltip is here.
            title = told(one, OURS) if last.endswith("µs") else ""
            y = base + deep * _LINE
            self.canvas.text(x, y, last, anchor="middle", kind=kind, title=title)

    def _draw_rates(
        self, problems: Sequence[Problem], edges: Sequence[float], area: Area, scale: Scale
    ) -> None:
        places = middles(edges)
        losses(self.canvas, problems, edges, area)
        grid(self.canvas, area, scale, scale.ticks()[1:])
        roofs = [
            (x, scale(roof))
            for x, one in zip(places, problems, strict=True)
            if (roof := _roof(one)) is not None
        ]
        if roofs:
            ends = [(area.left, roofs[0][1]), *roofs, (area.right, roofs[-1][1])]
            self.canvas.path(ends, "roof")

        def points(name: str) -> list[Point | None]:
            rows = [one.row_of.get(name, {}) for one in problems]
            return [
                (x, scale(row["tb_per_s"])) if "tb_per_s" in row else None
                for x, row in zip(places, rows, strict=True)
            ]

        series(self.canvas, self.names, self.styles, points, lambda n, i: told(problems[i], n))

    def _draw_ratios(
        self, problems: Sequence[Problem], edges: Sequence[float], area: Area, scale: Scale
    ) -> None:
        places = middles(edges)
        level = scale(1.0)
        across = area.right - area.left
        self.canvas.box(area.left, level, across, area.bottom - level, "zone")
        grid(self.canvas, area, scale, [tick for tick in scale.ticks() if tick != 1])
        ours = f"ln ours s-{self.styles[OURS].colour}"
        self.canvas.line((area.left, level), (area.right, level), ours)
        found = [_ratios(one) for one in problems]
        # Ours is the line; the others stand beside each other, so that none hides another.
        others = [name for name in self.names if name != OURS]
        step = min(9.0, 0.76 * (edges[1] - edges[0]) / max(1, len(others)))

        def points(name: str) -> list[Point | None]:
            aside = step * (others.index(name) - (len(others) - 1) / 2)
            return [
                (x + aside, scale(ratios[name])) if name in ratios else None
                for x, ratios in zip(places, found, strict=True)
            ]

        def tell(name: str, index: int) -> str:
            us = microseconds(problems[index].row_of[name]["us"])
            return f"{name} {us} µs, {found[index][name]:.2f}×"

        series(self.canvas, others, self.styles, points, tell, joined=False)


def by_set(problems: Sequence[Problem]) -> list[Panel]:
    """A panel for each named set, those without one last; in each by size, short rows first."""
    found: dict[str, list[Problem]] = {}
    for one in problems:
        for name in one.any.get("sets") or [""]:
            found.setdefault(name, []).append(one)
    rest = found.pop("", None)
    groups = [*found.items(), *([("others" if found else "", rest)] if rest else [])]
    return [Panel(name, sorted(some, key=_size)) for name, some in groups]


def in_lines(panels: Sequence[Panel], room: float, slot: float) -> list[list[Panel]]:
    """Each panel in the first line that has room for it, so that few lines stay half empty.

    One longer than a line is cut into parts of about one length.
    """
    most = max(1, math.floor(room / slot))
    lines: list[list[Panel]] = []
    for panel in panels:
        parts = math.ceil(len(panel.problems) / most)
        each = math.ceil(len(panel.problems) / parts)
        for index in range(parts):
            name = f"{panel.name} (continued)" if index and panel.name else panel.name
            part = Panel(name, panel.problems[index * each : (index + 1) * each])
            free = (line for line in lines if _across([*line, part], slot) <= room)
            line = next(free, None)
            if line is None:
                lines.append([part])
            else:
                line.append(part)
    return lines


def widest_slot(line: Sequence[Panel], room: float, least: float) -> float:
    """The width that every problem of a line gets: as much as there is room for."""
    slot = _WIDEST_SLOT
    while slot > least and _across(line, slot) > room:
        slot -= 0.5
    return max(slot, least)


def _across(line: Sequence[Panel], slot: float) -> float:
    return sum(panel_width(panel, slot) + _GAP for panel in line) - _GAP


def panel_width(panel: Panel, slot: float) -> float:
    return max(len(panel.problems) * slot, width(panel.name, TEXT, bold=True) + 4)


def _timed(one: Problem) -> list[dict[str, float]]:
    return [row for row in one.row_of.values() if "tb_per_s" in row]


def _ratios(one: Problem) -> dict[str, float]:
    ours = one.ours
    if ours is None:
        return {}
    return {name: row["us"] / ours["us"] for name, row in one.row_of.items() if "us" in row}


def _bytes(one: Problem) -> int:
    return max((int(row.get("bytes", 0)) for row in one.row_of.values()), default=0)


def _roof(one: Problem) -> float | None:
    """TB/s of the copy, if there was memory for one."""
    row = _timed(one)[0]
    return row["bytes"] / row["roof_us"] / 1e6 if "roof_us" in row else None


def _size(one: Problem) -> tuple[int, int, str]:
    columns = one.any.get("N", 0)  # rows of experts have none
    return one.any["M"] * columns, columns, one.label
