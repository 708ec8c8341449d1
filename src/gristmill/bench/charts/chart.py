"""A chart: a title, a note, and a drawing in two layouts, for a page and for a phone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gristmill.bench.charts.canvas import SMALL, TEXT, TITLE, Canvas
from gristmill.bench.charts.text import shortened, width, wrapped
from gristmill.bench.charts.theme import Style, Styles, slug
from gristmill.bench.results import OURS

# Units of a drawing: a page of 1100 pixels shows the wide one at 1.2 times its size or so, a phone
# of 380 the narrow one at 0.9 times, so text of 11 units is read in both.
WIDE, NARROW = 760.0, 400.0
MARGIN = 14.0


@dataclass(frozen=True)
class Chart:
    """`paint` draws onto a canvas from `top` on and returns where it ends.

    `made_with`: the line beneath a drawing that stands alone.
    """

    title: str
    note: str
    made_with: str
    paint: Callable[[Canvas, float], float]

    def svg(self, standalone: bool, *, narrow: bool = False) -> str:
        """A file of its own; or, to be inlined into a page, both layouts in a `div`."""
        if standalone:
            return self._draw(NARROW if narrow else WIDE, standalone=True)
        layouts = (self._draw(width, standalone=False) for width in (WIDE, NARROW))
        return f'<div class="gm-chart">\n{"".join(layouts)}</div>\n'

    def _draw(self, across: float, *, standalone: bool) -> str:
        # What is inlined for a phone has no tooltips: nothing hovers there.
        canvas = Canvas(across, tips=standalone or across == WIDE)
        room = across - 2 * MARGIN
        top = MARGIN if standalone else 4.0
        if standalone:
            for line in wrapped(self.title, TITLE, room, bold=True):
                canvas.text(MARGIN, top + TITLE - 2, line, size=TITLE, kind="b")
                top += TITLE + 3
            top += 7
        bottom = self.paint(canvas, top)
        if standalone:
            bottom += 6
            for line in (*wrapped(self.note, SMALL, room), *wrapped(self.made_with, SMALL, room)):
                bottom += SMALL + 4
                canvas.text(MARGIN, bottom, line, size=SMALL, kind="mu")
        canvas.height = bottom + (MARGIN if standalone else 6.0)
        kind = "gm-wide" if across == WIDE else "gm-narrow"
        # A page has the note as a caption beside what is inlined.
        note = self.note if standalone else ""
        return canvas.svg(kind=kind, title=self.title, note=note, standalone=standalone)


def made_with(meta: Mapping[str, Any]) -> str:
    """What a chart was measured on."""
    parts = [str(meta[key]) for key in ("gpu",) if meta.get(key)]
    if meta.get("torch"):
        parts.append(f"torch {meta['torch']}")
    if meta.get("date"):
        parts.append(str(meta["date"]))
    told = ", ".join(parts)
    if meta.get("device") == "cpu":
        told += "; on a CPU only ratios mean anything"
    return told


def stem(name: str, dtype: str) -> str:
    """The name of a file, whatever results say; bfloat16 is measured by default, and not named."""
    return slug(name if dtype == "bfloat16" else f"{name}_{dtype}")


@dataclass(frozen=True)
class Entry:
    """An item of a legend: its text, and what is drawn before it."""

    text: str
    style: Style | None = None
    kind: str = ""


def legend(canvas: Canvas, top: float, entries: Sequence[Entry], left: float = MARGIN) -> float:
    """Items one after another, in as many lines as they need; returns where they end.

    An entry with a style has its marker on a line; one without has a box of `kind`, or for "roof"
    and "goal" a dashed line.
    """
    x, y = left, top
    for entry in entries:
        bold = entry.text == OURS
        sample = 26.0 if entry.style is not None or entry.kind in ("roof", "goal") else 17.0
        text = shortened(entry.text, TEXT, canvas.width - left - MARGIN - sample, bold=bold)
        across = sample + width(text, TEXT, bold=bold)
        if x > left and x + across > canvas.width - MARGIN:
            x, y = left, y + 18
        if entry.style is not None:
            kind = f"ln s-{entry.style.colour}" + (" ours" if bold else "")
            canvas.path([(x, y + 6), (x + 20, y + 6)], kind, dash=entry.style.dash)
            canvas.marker((x + 10, y + 6), entry.style, 4.6 if bold else 4.0)
        elif entry.kind in ("roof", "goal"):
            canvas.line((x, y + 6), (x + 20, y + 6), entry.kind)
        else:
            canvas.box(x, y + 1, 11, 11, entry.kind, radius=2)
        canvas.text(x + sample, y + 10, text, kind="b" if bold else "")
        x += across + 16
    return y + 22 if entries else top


def entries_of(names: Sequence[str], styles: Styles) -> list[Entry]:
    return [Entry(name, styles[name]) for name in names]
