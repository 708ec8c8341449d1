"""What plots are made of: axes, lines of implementations with gaps, strips of variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from gristmill.bench.charts.canvas import HEAD, SMALL, TEXT, Canvas, Point
from gristmill.bench.charts.chart import MARGIN, Entry, legend
from gristmill.bench.charts.scales import Linear, Log
from gristmill.bench.charts.text import WIDEST, shortened, width, wrapped
from gristmill.bench.charts.theme import VARIANT_TINTS, Styles
from gristmill.bench.problems import Problem
from gristmill.bench.results import OURS, microseconds

GUTTER = 36.0  # for the numbers of the axis, left of a line of panels
STRIP = 13.0
Scale = Linear | Log


_T = TypeVar("_T")
# Small panels side by side, on wide paper and on narrow, and what is between them.
_ACROSS, _ACROSS_NARROW = 3, 2
_GAP = 18.0


@dataclass(frozen=True)
class Area:
    """The rectangle that numbers are drawn in."""

    left: float
    top: float
    right: float
    bottom: float


def section(canvas: Canvas, top: float, what: str, how: str) -> float:
    """The header of panels: what is drawn, and how to read it; returns where it ends."""
    room = canvas.width - 2 * MARGIN
    across = canvas.text(MARGIN, top + HEAD, what, size=HEAD, kind="b")
    if (across + width(how, TEXT)) * WIDEST + 8 <= room:
        canvas.text(MARGIN + across + 8, top + HEAD, how, kind="mu")
        return top + HEAD + 8
    for line in wrapped(how, TEXT, room):
        top += 14
        canvas.text(MARGIN, top + HEAD, line, kind="mu")
    return top + HEAD + 8


def grid(canvas: Canvas, area: Area, scale: Scale, ticks: Sequence[float]) -> None:
    """Faint lines across, and the line that the plot stands on."""
    for tick in ticks:
        y = scale(tick)
        canvas.line((area.left, y), (area.right, y), "grid")
    canvas.line((area.left, area.bottom), (area.right, area.bottom), "axis")


def numbers(
    canvas: Canvas, right: float, scale: Scale, ticks: Sequence[float], told: Callable[[float], str]
) -> None:
    """The numbers of an axis, flush with `right`."""
    for tick in ticks:
        canvas.text(right, scale(tick) + 3.8, told(tick), anchor="end", kind="mu")


@dataclass(frozen=True)
class Look:
    """What small panels have in common: how high they are, what is left free beneath, their axis.

    `scale`: from 0 at the top of a panel to `height` at its foot.
    """

    height: float
    beneath: float
    scale: Scale
    ticks: Sequence[float]
    told: Callable[[float], str]


def side_by_side(
    canvas: Canvas,
    top: float,
    panels: Mapping[str, _T],
    look: Look,
    draw: Callable[[_T, Area], None],
) -> float:
    """Small panels of one size, each under its name; returns where they end."""
    most = _ACROSS if canvas.width > 600 else _ACROSS_NARROW
    across = min(most, max(2, len(panels)))
    room = canvas.width - 2 * MARGIN - GUTTER
    each = (room - _GAP * (across - 1)) / across
    items = list(panels.items())
    for first in range(0, len(items), across):
        start = top + 20
        for place, (name, some) in enumerate(items[first : first + across]):
            left = MARGIN + GUTTER + place * (each + _GAP)
            canvas.text(left, top + TEXT, shortened(name, TEXT, each, bold=True), kind="b mu")
            draw(some, Area(left, start, left + each, start + look.height))
        for tick in look.ticks:
            y = start + look.scale(tick) + 3.8
            canvas.text(MARGIN + GUTTER - 6, y, look.told(tick), anchor="end", kind="mu")
        top = start + look.height + look.beneath + 12
    return top


def pieces(points: Sequence[Point | None]) -> list[list[Point]]:
    """The runs of points between gaps: a line through a gap would invent a number."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if point is None:
            runs.append([])
        else:
            runs[-1].append(point)
    return [run for run in runs if run]


def series(
    canvas: Canvas,
    names: Sequence[str],
    styles: Styles,
    points: Callable[[str], Sequence[Point | None]],
    told: Callable[[str, int], str],
    *,
    joined: bool = True,
    size: float = 4.0,
) -> None:
    """A line with markers for each name, ours last and so on top."""
    drawn = {name: points(name) for name in reversed(names)}
    if joined:
        for name, places in drawn.items():
            kind = f"ln s-{styles[name].colour}" + (" ours" if name == OURS else "")
            for run in pieces(places):
                if len(run) > 1:
                    canvas.path(run, kind, dash=styles[name].dash)
    for name, places in drawn.items():
        for index, place in enumerate(places):
            if place is not None:
                radius = 1.2 * size if name == OURS else size
                canvas.marker(place, styles[name], radius, title=told(name, index))


def misses(
    canvas: Canvas,
    problems: Sequence[Problem],
    places: Sequence[float],
    base: float,
    styles: Styles,
) -> None:
    """A small cross at the foot for each who failed there, with the reason."""
    for problem, x in zip(problems, places, strict=True):
        failed = [name for name, row in problem.row_of.items() if "us" not in row]
        for index, name in enumerate(failed):
            reason = problem.row_of[name].get("error") or "no time"
            at = (x + 7 * (index - (len(failed) - 1) / 2), base - 5)
            canvas.miss(at, styles[name], title=f"{name}, {problem.label}: {reason}")


def slots(area: Area, count: int) -> list[float]:
    """The edges of so many slots of one width: one edge more than there are slots."""
    return [area.left + index * (area.right - area.left) / count for index in range(count + 1)]


def middles(edges: Sequence[float]) -> list[float]:
    return [(left + right) / 2 for left, right in pairwise(edges)]


def losses(canvas: Canvas, problems: Sequence[Problem], edges: Sequence[float], area: Area) -> None:
    """A tinted band behind every problem on which another is faster by more than 3%."""
    for problem, (left, right) in zip(problems, pairwise(edges), strict=True):
        best = problem.best
        if problem.is_loss and best is not None:
            title = f"{best['impl']} takes {problem.ratio:.2f}× our time"
            across, down = right - left, area.bottom - area.top
            canvas.box(left, area.top, across, down, "loss", title=title)


def strip(
    canvas: Canvas,
    edges: Sequence[float],
    top: float,
    variants: Sequence[str],
    tints: Mapping[str, int],
) -> None:
    """Which variant of ours ran: one segment for each run of the same, named where there is room.

    `edges`: one more than there are variants.
    """
    start = 0
    for index in range(1, len(variants) + 1):
        if index < len(variants) and variants[index] == variants[start]:
            continue
        name = variants[start]
        left, right = edges[start], edges[index]
        start = index
        if not name:
            continue
        kind = f"v{tints[name]}"
        text = short(name)
        fits = width(text, SMALL) + 4 <= right - left
        title = "" if fits else name
        canvas.box(left + 0.5, top, right - left - 1, STRIP, kind, radius=2, title=title)
        if fits:
            canvas.text((left + right) / 2, top + 9.8, text, size=SMALL, anchor="middle")


def variant_legend(canvas: Canvas, top: float, tints: Mapping[str, int]) -> float:
    if not tints:
        return top
    text = "variants of ours:"
    canvas.text(MARGIN, top + 12, text, kind="mu")
    entries = [Entry(name, kind=f"v{tint}") for name, tint in tints.items()]
    return legend(canvas, top + 2, entries, left=MARGIN + width(text, TEXT) + 8)


def short(variant: str) -> str:
    return variant.removeprefix("cuda_").removeprefix("triton_")


def tints_of(problems: Sequence[Problem]) -> dict[str, int]:
    """A tint for each variant of ours that ran, in the order of their names."""
    names = sorted({variant_of(problem) for problem in problems} - {""})
    return {name: index % VARIANT_TINTS for index, name in enumerate(names)}


def variant_of(problem: Problem) -> str:
    return str(problem.row_of.get(OURS, {}).get("variant") or "")


def shape_lines(problem: Problem) -> list[str]:
    """32768x4096 as two lines, the columns beneath the rows; a product as three."""
    first, *others = problem.label.replace("×", "x").split("x")
    if len(others) == 2 and "K" not in problem.any:
        first, others = f"{first}×{others[0]}", others[1:]
    return [first, *(f"×{other}" for other in others)]


def told(problem: Problem, name: str) -> str:
    """The tooltip of a point: who and the exact numbers, short, as there are thousands of them."""
    row = problem.row_of[name]
    time = f"{name} {microseconds(row['us'])} µs"
    if "tflop_per_s" in row:
        return f"{time}, {row['roof_share']:.0%}" if "roof_share" in row else time
    return f"{time}, {row['tb_per_s']:.2f} TB/s" if "tb_per_s" in row else time


def percent(value: float) -> str:
    return f"{100 * value:.3g}%"


def times(value: float) -> str:
    return f"{value:.3g}×"
