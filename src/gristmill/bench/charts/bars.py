"""Lines with a name on the left and something to scale on the right of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gristmill.bench.charts.canvas import HEAD, SMALL, TEXT, Canvas
from gristmill.bench.charts.chart import MARGIN
from gristmill.bench.charts.scales import Linear, Log
from gristmill.bench.charts.text import apart, shortened, width

LINE = 19.0
_NARROW_LINE = 33.0


@dataclass(frozen=True)
class Segment:
    """A part of a bar: how long, its class, its tooltip."""

    length: float
    kind: str
    title: str


@dataclass(frozen=True)
class Bar:
    """A bar of parts, one after another.

    `least` and `most`: the ends of a thin line over it; `value`: what is written at its end,
    in red if `is_loss`.
    """

    name: str
    also: str
    segments: tuple[Segment, ...]
    value: str
    least: float = 0.0
    most: float = 0.0
    is_loss: bool = False

    @property
    def end(self) -> float:
        return max(sum(segment.length for segment in self.segments), self.most)


@dataclass(frozen=True)
class Columns:
    """Where lines have their names and where their scale is.

    On narrow paper names stand above, and the scale has all the width.
    """

    wide: bool
    names: float
    left: float
    right: float
    line: float

    @property
    def middle(self) -> float:
        """From the top of a line to the middle of what is drawn in it."""
        return self.line - LINE / 2


def columns(canvas: Canvas, names: Sequence[tuple[str, str]], value: float) -> Columns:
    """For lines of these names and what stands beside them; `value`: room at the end of a bar."""
    right = canvas.width - MARGIN - value
    if canvas.width <= 600:
        return Columns(False, canvas.width - 2 * MARGIN, MARGIN, right, _NARROW_LINE)
    longest = max(
        width(name, TEXT) + (8 + width(also, SMALL) if also else 0) for name, also in names
    )
    across = min(longest + 14, 0.42 * canvas.width)
    return Columns(True, across - 10, MARGIN + across, right, LINE)


def name_line(canvas: Canvas, place: Columns, top: float, name: str, also: str = "") -> None:
    """The name of a line, and in smaller letters what else is to be said."""
    y = top + place.middle + 4 if place.wide else top + 12
    beside = 8 + width(also, SMALL) if also else 0.0
    text = shortened(name, TEXT, place.names - beside)
    title = name if text != name else ""
    across = canvas.text(MARGIN, y, text, title=title)
    if also and place.wide:
        canvas.text(MARGIN + place.names, y, also, size=SMALL, anchor="end", kind="mu")
    elif also:
        canvas.text(MARGIN + across + 8, y, also, size=SMALL, kind="mu")


def axis(canvas: Canvas, scale: Linear | Log, top: float, bottom: float, unit: str) -> None:
    """Faint lines down, and the numbers beneath."""
    ticks = scale.ticks(7)
    for tick in ticks:
        canvas.line((scale(tick), top), (scale(tick), bottom), "grid")
    texts = [f"{tick:g}" for tick in ticks]
    texts[-1] += f" {unit}"
    for index in apart([scale(tick) for tick in ticks], texts, TEXT, 8):
        canvas.text(scale(ticks[index]), bottom + 13, texts[index], anchor="middle", kind="mu")


def bars(canvas: Canvas, place: Columns, top: float, some: Sequence[Bar], scale: Linear) -> float:
    """Bars one beneath another; returns where they end."""
    for bar in some:
        name_line(canvas, place, top, bar.name, bar.also)
        middle = top + place.middle
        x = scale.start
        for segment in bar.segments:
            across = scale(segment.length) - scale.start
            if across > 0.05:
                canvas.box(x, middle - 6, across, 12, segment.kind, title=segment.title)
            x += across
        if bar.most > bar.least:
            canvas.line((scale(bar.least), middle), (scale(bar.most), middle), "whisker")
        kind = "bad halo" if bar.is_loss else "halo"
        canvas.text(max(x, scale(bar.end)) + 6, middle + 4, bar.value, size=SMALL, kind=kind)
        top += place.line
    return top


def heading(canvas: Canvas, top: float, text: str, also: str = "") -> float:
    """The name of a group of lines; returns where it ends."""
    room = canvas.width - 2 * MARGIN
    shown = shortened(text, HEAD, room, bold=True)
    across = canvas.text(MARGIN, top + HEAD, shown, size=HEAD, kind="b")
    if also and across + 8 + width(also, TEXT) <= room:
        canvas.text(MARGIN + across + 8, top + HEAD, also, kind="mu")
    return top + HEAD + 6
