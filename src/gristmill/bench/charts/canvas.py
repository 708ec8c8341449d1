"""A sheet to draw on, written out as SVG: text stays text, colours are names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from operator import itemgetter
from xml.sax.saxutils import escape

from gristmill.bench.charts.text import width
from gristmill.bench.charts.theme import Style, standalone_css

TITLE, HEAD, TEXT, SMALL = 15.0, 12.0, 11.0, 10.0
Point = tuple[float, float]
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def number(value: float) -> str:
    """A coordinate: a tenth of a unit is as fine as a screen shows."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def written(text: str) -> str:
    """Text as XML has it; what XML cannot hold, such as colours of a terminal, is left out."""
    return escape(_FORBIDDEN.sub("", text))


class Canvas:
    """What has been drawn so far. Later things lie above earlier ones.

    `tips`: marks carry tooltips. Without them, where nothing hovers, a drawing is half as long.
    """

    def __init__(self, width: float, *, tips: bool = True):
        self.width = width
        self.height = 0.0
        self._tips = tips
        # Tenths of a unit where something may be looked at closely.
        self._at = number if tips else lambda value: f"{value:.0f}"
        # What neighbours may share (class, anchor, size); the element up to there; what is in it.
        self._parts: list[tuple[str, str, str]] = []

    def _add(self, shared: str, element: str, title: str = "", text: str = "") -> None:
        tip = f"<title>{written(title)}</title>" if title and self._tips else ""
        self._parts.append((shared, element, written(text) + tip))

    def _add_path(self, shared: str, commands: str, title: str = "") -> None:
        """A path; one without a tooltip becomes a part of the same kind of path before it."""
        tip = title if self._tips else ""
        before = self._parts[-1] if self._parts else ("", "", "")
        if not tip and before[::2] == (shared, "") and before[1].startswith("path d="):
            self._parts[-1] = (shared, f'{before[1][:-1]}{commands}"', "")
        else:
            self._add(shared, f'path d="{commands}"', tip)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = TEXT,
        anchor: str = "start",
        kind: str = "",
        title: str = "",
    ) -> float:
        """A line of text on the baseline `y`; returns its width."""
        shared = [f'text-anchor="{anchor}"'] if anchor != "start" else []
        shared += [f'class="{kind}"'] if kind else []
        shared += [f'style="font-size:{size:g}px"'] if size != TEXT else []
        place = f'text x="{self._at(x)}" y="{self._at(y)}"'
        self._add(" ".join(shared), place, title, text)
        return width(text, size, bold="b" in kind.split())

    def line(self, start: Point, end: Point, kind: str) -> None:
        (x, y), (right, down) = start, end
        to = f"H{self._at(right)}" if y == down else f"V{self._at(down)}"
        if y != down and x != right:
            to = f"L{self._at(right)} {self._at(down)}"
        self._add_path(f'class="{kind}"', f"M{self._at(x)} {self._at(y)}{to}")

    def path(self, points: Sequence[Point], kind: str, *, dash: str = "") -> None:
        places = " ".join(f"{self._at(x)},{self._at(y)}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self._add(f'class="{kind}"{dashed}', f'polyline points="{places}"')

    def box(
        self,
        x: float,
        y: float,
        across: float,
        down: float,
        kind: str,
        *,
        radius: float = 0.0,
        title: str = "",
    ) -> None:
        place = f'x="{self._at(x)}" y="{self._at(y)}"'
        size = f'width="{self._at(across)}" height="{self._at(down)}"'
        rounded = f' rx="{number(radius)}"' if radius else ""
        self._add(f'class="{kind}"', f"rect {place} {size}{rounded}", title)

    def marker(self, at: Point, style: Style, size: float = 4.0, *, title: str = "") -> None:
        """A marker of radius `size`, with a tooltip."""
        shape = style.marker.removeprefix("open_")
        if shape in ("plus", "cross"):
            kind = f"st s-{style.colour}"
        elif style.marker.startswith("open_"):
            kind, size = f"op s-{style.colour}", size - 0.5
        else:
            kind = f"mk f-{style.colour}"
        self._mark(at, shape, size, kind, title)

    def miss(self, at: Point, style: Style, *, title: str) -> None:
        """Where somebody has no time: a small cross, thinner than any marker."""
        self._mark(at, "cross", 2.4, f"ln s-{style.colour}", title)

    def _mark(self, at: Point, shape: str, size: float, kind: str, title: str) -> None:
        shared, (x, y) = f'class="{kind}"', (self._at(at[0]), self._at(at[1]))
        if shape == "circle" and title and self._tips:
            self._add(shared, f'circle cx="{x}" cy="{y}" r="{number(size)}"', title)
        else:
            self._add_path(shared, f"M{x} {y}{outlined(shape, size)}", title)

    def svg(self, *, kind: str, title: str, note: str, standalone: bool) -> str:
        """The whole drawing; on its own it carries its styles and its paper."""
        across, down = number(self.width), number(self.height)
        head = f'<svg xmlns="http://www.w3.org/2000/svg" class="gm {kind}" role="img" '
        head += f'viewBox="0 0 {across} {down}"'
        parts = [f"<title>{written(title)}</title>"]
        parts += [f"<desc>{written(note)}</desc>"] if note else []
        if standalone:
            head += f' width="{across}" height="{down}"'
            parts.append(f"<style>\n{standalone_css()}\n</style>")
            parts.append(f'<rect width="{across}" height="{down}" rx="6" class="paper"/>')
        return "\n".join([head + ">", *parts, *self._elements(), "</svg>"]) + "\n"

    def _elements(self) -> Iterator[str]:
        """What neighbours share is written once, around them."""
        for shared, run in groupby(self._parts, key=itemgetter(0)):
            parts = [(element, inner) for _, element, inner in run]
            alone = len(parts) == 1 and shared
            if shared and not alone:
                yield f"<g {shared}>"
            for element, inner in parts:
                opened = f"<{element} {shared}" if alone else f"<{element}"
                name = element.partition(" ")[0]
                yield f"{opened}>{inner}</{name}>" if inner else f"{opened}/>"
            if shared and not alone:
                yield "</g>"


@lru_cache(maxsize=256)
def outlined(shape: str, size: float) -> str:
    """A marker around the current point, in relative commands of a path; about a circle's size."""
    if shape in ("plus", "cross"):
        ends = _PLUS if shape == "plus" else _CROSS
        return "".join(f"m{_pair(start, size)}l{_pair(end, size)}" for start, end in ends)
    if shape == "circle":
        # One arc around to a tenth beside its start, and closed: a circle in a few letters.
        return f"m0-{number(size)}a{number(size)} {number(size)} 0 1 1-.1 0z"
    corners = _CORNERS[shape]
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(corners)]
    return f"m{_pair(corners[0], size)}l{' '.join(_pair(step, size) for step in steps)}z".replace(
        " -", "-"
    )


def _pair(point: Point, size: float) -> str:
    return f"{number(point[0] * size)} {number(point[1] * size)}".replace(" -", "-")


_PLUS = (((-1, 0), (2, 0)), ((-1, -1), (0, 2)))
_CROSS = (((-0.85, -0.85), (1.7, 1.7)), ((-1.7, 0), (1.7, -1.7)))
_STAR = tuple(
    (radius * math.cos(turn), radius * math.sin(turn))
    for index in range(10)
    for radius, turn in [((1.35, 0.6)[index % 2], math.pi * (index / 5 - 0.5))]
)
_CORNERS: dict[str, tuple[Point, ...]] = {
    "square": ((-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88)),
    "diamond": ((0, -1.22), (1.22, 0), (0, 1.22), (-1.22, 0)),
    "up": ((0, -1.2), (1.1, 0.8), (-1.1, 0.8)),
    "down": ((0, 1.2), (1.1, -0.8), (-1.1, -0.8)),
    "star": _STAR,
}
