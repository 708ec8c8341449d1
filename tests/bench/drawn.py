"""Reading a drawing again: where its text is, by the widths that it was laid out with."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass

from gristmill.bench.charts.text import width

SVG = "{http://www.w3.org/2000/svg}"
_INHERITED = ("class", "style", "text-anchor")


@dataclass(frozen=True)
class Text:
    """A line of text and the box it takes."""

    text: str
    kinds: tuple[str, ...]
    left: float
    top: float
    right: float
    bottom: float

    @property
    def middle(self) -> float:
        return (self.left + self.right) / 2

    def touches(self, other: Text) -> bool:
        """Coordinates are rounded to a tenth: so much is no overlap."""
        across = min(self.right, other.right) - max(self.left, other.left)
        down = min(self.bottom, other.bottom) - max(self.top, other.top)
        return across > 0.2 and down > 0.2


def parsed(svg: str) -> ET.Element:
    return ET.fromstring(svg)


def size(root: ET.Element) -> tuple[float, float]:
    across, down = root.attrib["viewBox"].split()[2:]
    return float(across), float(down)


def texts(root: ET.Element) -> list[Text]:
    return [_box(node, shared) for node, shared in _elements(root, {}) if node.tag == SVG + "text"]


def marks(root: ET.Element, kind: str) -> list[tuple[float, float, str]]:
    """Where marks of a class are, with their tooltips."""
    found = []
    for node, shared in _elements(root, {}):
        if kind not in shared.get("class", "").split():
            continue
        tip = node.findtext(SVG + "title") or ""
        if node.tag == SVG + "circle":
            found.append((float(node.attrib["cx"]), float(node.attrib["cy"]), tip))
        elif node.tag == SVG + "path":
            starts = re.findall(r"M(-?[\d.]+) (-?[\d.]+)", node.attrib["d"])
            found += [(float(x), float(y), tip) for x, y in starts]
    return found


def lines(root: ET.Element, kind: str) -> list[list[tuple[float, float]]]:
    """The corners of every polyline of a class."""
    found = []
    for node, shared in _elements(root, {}):
        if node.tag == SVG + "polyline" and kind in shared.get("class", "").split():
            pairs = (pair.split(",") for pair in node.attrib["points"].split())
            found.append([(float(x), float(y)) for x, y in pairs])
    return found


def boxes(root: ET.Element, kind: str) -> list[tuple[float, float, float, float]]:
    """x, y, width and height of every rectangle of a class."""
    return [
        tuple(float(node.attrib[key]) for key in ("x", "y", "width", "height"))  # type: ignore[misc]
        for node, shared in _elements(root, {})
        if node.tag == SVG + "rect" and kind in shared.get("class", "").split()
    ]


def _elements(
    node: ET.Element, shared: dict[str, str]
) -> Iterator[tuple[ET.Element, dict[str, str]]]:
    for child in node:
        mine = shared | {key: child.attrib[key] for key in _INHERITED if key in child.attrib}
        yield child, mine
        yield from _elements(child, mine)


def _box(node: ET.Element, shared: dict[str, str]) -> Text:
    found = re.search(r"font-size:([\d.]+)px", shared.get("style", ""))
    height = float(found.group(1)) if found else 11.0
    kinds = tuple(shared.get("class", "").split())
    text = node.text or ""
    across = width(text, height, bold="b" in kinds)
    part = {"middle": 0.5, "end": 1.0}.get(shared.get("text-anchor", ""), 0.0)
    left, base = float(node.attrib["x"]) - part * across, float(node.attrib["y"])
    return Text(text, kinds, left, base - 0.74 * height, left + across, base + 0.21 * height)
