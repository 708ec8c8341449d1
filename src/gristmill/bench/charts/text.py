"""How wide text is, without a browser: so that labels are placed where they fit.

Widths are those of Arial and of the fonts made to its measure (Helvetica, Liberation Sans), which
come first in the font stack; a little is added for fonts that are wider. Prose that may fill a line
breaks early enough for DejaVu Sans, the only font on many Linux machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

FONT = '"Helvetica Neue", Helvetica, Arial, "Liberation Sans", system-ui, sans-serif'
# Thousandths of the font's size.
_WIDTHS = {
    **dict.fromkeys("'", 191),
    **dict.fromkeys("ijl", 222),
    **dict.fromkeys("|", 260),
    **dict.fromkeys(" !,./:;I[\\]ft", 278),
    **dict.fromkeys("()-`r·", 333),
    **dict.fromkeys("{}", 334),
    **dict.fromkeys('"', 355),
    **dict.fromkeys("*", 389),
    **dict.fromkeys("^", 469),
    **dict.fromkeys("Jcksvxyz", 500),
    **dict.fromkeys("#$0123456789?L_abdeghnopqu–", 556),
    **dict.fromkeys("µ", 576),
    **dict.fromkeys("+<=>~×", 584),
    **dict.fromkeys("FTZ", 611),
    **dict.fromkeys("&ABEKPSVXY", 667),
    **dict.fromkeys("CDHNRUw", 722),
    **dict.fromkeys("GOQ", 778),
    **dict.fromkeys("Mm", 833),
    **dict.fromkeys("%", 889),
    **dict.fromkeys("W", 944),
    **dict.fromkeys("@—…", 1015),
}
# Of a letter that is not in the table: the widest, so that nothing is ever too narrow.
_UNKNOWN = 1015
_BOLD = 1.08
_MARGIN = 1.03
# A line of prose in DejaVu Sans over `width`: 1.12, in bold 1.17.
WIDEST = 1.18


def width(text: str, size: float, *, bold: bool = False) -> float:
    """The width of a line of text in units of the drawing."""
    thousandths = sum(_WIDTHS.get(letter, _UNKNOWN) for letter in text)
    return thousandths / 1000 * size * _MARGIN * (_BOLD if bold else 1.0)


def shortened(text: str, size: float, room: float, *, bold: bool = False) -> str:
    """The text, cut and ended with … where it is wider than the room."""
    if width(text, size, bold=bold) <= room:
        return text
    while text and width(text + "…", size, bold=bold) > room:
        text = text[:-1]
    return text.rstrip(" ,;:") + "…"


def wrapped(text: str, size: float, room: float, *, bold: bool = False) -> list[str]:
    """The text in lines that fit in any font; a word that does not fit alone is cut."""
    lines: list[str] = []
    for word in text.split():
        if lines and width(f"{lines[-1]} {word}", size, bold=bold) * WIDEST <= room:
            lines[-1] += f" {word}"
        else:
            lines.append(shortened(word, size, room, bold=bold))
    return lines


def apart(places: Sequence[float], texts: Sequence[str], size: float, gap: float) -> list[int]:
    """Which of the labels centred at `places` to show so that none touches the next.

    Every second, third, ... from the first on; the last takes the place of its neighbour if the
    two do not fit both.
    """
    widths = [width(text, size) for text in texts]

    def fit(left: int, right: int) -> bool:
        return places[right] - places[left] >= (widths[left] + widths[right]) / 2 + gap

    for step in range(1, len(places) + 1):
        shown = list(range(0, len(places), step))
        if not all(fit(left, right) for left, right in pairwise(shown)):
            continue
        last = len(places) - 1
        if shown[-1] != last:
            if len(shown) > 1 and not fit(shown[-1], last):
                shown.pop()
            if fit(shown[-1], last):
                shown.append(last)
        return shown
    return []
