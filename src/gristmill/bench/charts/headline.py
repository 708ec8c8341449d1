"""The picture that comes first: for each family of ops, how ours does against every peer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gristmill.bench.charts.canvas import HEAD, SMALL, TEXT, Canvas
from gristmill.bench.charts.chart import MARGIN
from gristmill.bench.charts.plot import times
from gristmill.bench.charts.scales import Log
from gristmill.bench.charts.text import apart, shortened, width
from gristmill.bench.charts.theme import Styles
from gristmill.bench.problems import Problem
from gristmill.bench.product_report import TIE, count_of, geometric_mean
from gristmill.bench.results import OURS
from gristmill.bench.suites import KERNEL_SUITES

TITLE = "Speed against other libraries"
NOTE = (
    "Times of others over ours, geometric means over all problems that both were timed on: right "
    "of 1 ours is faster. Behind: ours takes more than 3% longer. Short strokes: each problem "
    "against the fastest peer on it; those beyond the scale stand at its edge."
)
BEST = "fastest of them"
_NAMES = 132.0  # the column of names, on wide paper
_LINE, _RUG = 15.5, 13.0
_MOST_LINES = 22  # more of them go into two columns, on wide paper
_TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 15, 20, 30, 50, 100)


@dataclass(frozen=True)
class Family:
    """The ratios of one family: to each peer, and to the fastest on each problem."""

    name: str
    peers: dict[str, list[float]]
    best: list[float]

    @property
    def lines(self) -> list[tuple[str, list[float]]]:
        """The fastest on each problem first, then the peers, the closest first."""
        peers = sorted(self.peers.items(), key=lambda item: geometric_mean(item[1]))
        return peers if len(peers) == 1 else [(BEST, self.best), *peers]


def families(problems: Sequence[Problem]) -> list[Family]:
    """In the order of the suites; only those that somebody is compared on."""
    found: dict[str, Family] = {}
    for one in problems:
        ours, ratio = one.ours, one.ratio
        if ours is None or ratio is None:
            continue
        family = found.setdefault(one.suite, Family(one.suite, {}, []))
        family.best.append(ratio)
        for peer, row in one.peers.items():
            family.peers.setdefault(peer, []).append(row["us"] / ours["us"])
    order = {name: index for index, name in enumerate(KERNEL_SUITES)}
    return sorted(found.values(), key=lambda family: order.get(family.name, len(order)))


@dataclass(frozen=True)
class _Column:
    """Where families are drawn one under another; `beside`: their names have room on the left."""

    left: float
    right: float
    beside: bool
    families: Sequence[Family]

    @property
    def start(self) -> float:
        return self.left + (_NAMES if self.beside else 0.0)

    def height(self, family: Family) -> float:
        needed = 8 + len(family.lines) * _LINE + _RUG + 5
        return max(needed, 46.0) if self.beside else needed + 20

    @property
    def heights(self) -> list[float]:
        return [self.height(family) for family in self.families]


def draw_headline(found: Sequence[Family], styles: Styles) -> Callable[[Canvas, float], float]:
    """How to paint families on one scale, in two columns where they are many."""
    means = [geometric_mean(ratios) for family in found for _, ratios in family.lines]
    # Every mean and every loss is on the scale; a single large win does not stretch it.
    low = min([0.8, *means, *(ratio for family in found for ratio in family.best)]) / 1.06
    high = max([1.6, *means]) * 1.15

    def paint(canvas: Canvas, top: float) -> float:
        columns = _columns(canvas, found)
        # The same scale in both columns: what is as long is as much.
        length = min(_length(column, low, high) for column in columns)
        scales = [Log(low, high, column.start, column.start + length) for column in columns]
        return max(
            _column(canvas, top, column, scale, styles)
            for column, scale in zip(columns, scales, strict=True)
        )

    return paint


def _columns(canvas: Canvas, found: Sequence[Family]) -> list[_Column]:
    left, right = MARGIN, canvas.width - MARGIN
    if canvas.width <= 600:
        return [_Column(left, right, False, found)]
    if sum(len(family.lines) for family in found) <= _MOST_LINES or len(found) < 2:
        return [_Column(left, right, True, found)]
    middle = canvas.width / 2
    heights = _Column(left, right, False, found).heights
    # The cut that makes the longer of the two columns the shortest.
    cut = min(
        range(1, len(found)), key=lambda index: max(sum(heights[:index]), sum(heights[index:]))
    )
    return [
        _Column(left, middle - 11, False, found[:cut]),
        _Column(middle + 11, right, False, found[cut:]),
    ]


def _column(canvas: Canvas, top: float, column: _Column, scale: Log, styles: Styles) -> float:
    if width(slower := "ours slower", TEXT) + 7 <= scale(1) - column.left:
        canvas.text(scale(1) - 7, top + 10, slower, anchor="end", kind="mu")
    canvas.text(scale(1) + 7, top + 10, "ours faster", kind="mu")
    _numbers(canvas, scale, top + 27)
    top += 35
    for family, height in zip(column.families, column.heights, strict=True):
        if column.beside:
            canvas.line((column.left, top), (column.right, top), "grid")
        _name(canvas, column, family, top)
        y = top + (8 if column.beside else 24)
        _ground(canvas, scale, top if column.beside else top + 22, top + height)
        for peer, ratios in family.lines:
            _dot(canvas, family, peer, ratios, scale, styles, y + _LINE / 2)
            y += _LINE
        _rug(canvas, family, scale, y + 1)
        top += height
    return top


def _length(column: _Column, low: float, high: float) -> float:
    """How long the scale can be so that there is room for the words beside every dot."""
    room = column.right - column.start - 4
    length = room
    for family in column.families:
        for peer, ratios in family.lines:
            words = _words(family, peer, ratios)
            across = sum(width(text, TEXT, bold=kind.startswith("b ")) + 5 for text, kind in words)
            share = Log(low, high, 0.0, 1.0)(max(1.0, geometric_mean(ratios)))
            length = min(length, (room - across) / share)
    return max(length, 80.0)


def _words(family: Family, peer: str, ratios: Sequence[float]) -> list[tuple[str, str]]:
    """What is written beside a dot, each part with its class."""
    behind = sum(ratio < TIE for ratio in ratios)
    few = f" on {len(ratios)}" if len(ratios) != len(family.best) else ""
    bold = "b " if peer == BEST else ""
    words = [(f"{geometric_mean(ratios):.2f}×", "b halo"), (f"{peer}{few}", f"{bold}halo")]
    return words + ([(f"{behind} behind", "bad halo")] if behind else [])


def _numbers(canvas: Canvas, scale: Log, y: float) -> None:
    ticks = [tick for tick in _TICKS if scale.low * 1.04 <= tick <= scale.high / 1.04]
    # Those that everything is read against come first, the others where there is room.
    for chosen in (ticks, [tick for tick in ticks if tick in (0.2, 0.5, 1, 2, 5, 10, 20, 50)]):
        places, texts = [scale(tick) for tick in chosen], [times(tick) for tick in chosen]
        shown = apart(places, texts, TEXT, 9)
        if len(shown) == len(chosen) or chosen is not ticks:
            break
    for index in shown:
        kind = "b" if chosen[index] == 1 else "mu"
        canvas.text(places[index], y, texts[index], anchor="middle", kind=kind)


def _ground(canvas: Canvas, scale: Log, top: float, bottom: float) -> None:
    canvas.box(scale.start, top, scale(1) - scale.start, bottom - top, "zone")
    for tick in _TICKS:
        if scale.low <= tick <= scale.high and tick != 1:
            canvas.line((scale(tick), top), (scale(tick), bottom), "grid")
    canvas.line((scale(1), top), (scale(1), bottom), "axis")


def _name(canvas: Canvas, column: _Column, family: Family, top: float) -> None:
    name = shortened(family.name, HEAD, _NAMES - 8, bold=True)
    counts = count_of(family.best)
    if column.beside:
        canvas.text(column.left, top + 21, name, size=HEAD, kind="b")
        canvas.text(column.left, top + 36, counts, size=SMALL, kind="mu")
    else:
        across = canvas.text(column.left, top + 16, name, size=HEAD, kind="b")
        canvas.text(column.left + across + 8, top + 16, counts, size=SMALL, kind="mu")


def _dot(
    canvas: Canvas,
    family: Family,
    peer: str,
    ratios: Sequence[float],
    scale: Log,
    styles: Styles,
    y: float,
) -> None:
    """The mean as a marker, and beside it in words."""
    style = styles[OURS if peer == BEST else peer]
    mean = geometric_mean(ratios)
    behind = sum(ratio < TIE for ratio in ratios)
    x = scale(mean)
    canvas.line((scale(1), y), (x, y), f"ln s-{style.colour}")
    told = f"{mean:.2f} times over {count_of(ratios)}, behind by more than 3% on {behind}"
    size = 5.0 if peer == BEST else 4.4
    canvas.marker((x, y), style, size, title=f"{family.name} against {peer}: {told}")
    # Never over its line: that of a loss ends at one.
    x = max(x, scale(1)) + 9
    for text, kind in _words(family, peer, ratios):
        x += canvas.text(x, y + 3.9, text, kind=kind) + 5


def _rug(canvas: Canvas, family: Family, scale: Log, top: float) -> None:
    """A stroke for each problem; a loss is drawn over wins, and longer."""
    places = [(round(scale(min(ratio, scale.high))), ratio < TIE) for ratio in family.best]
    # Problems that would be drawn at the same place are drawn once.
    for x, loss in sorted(set(places)):
        if loss:
            canvas.line((x, top), (x, top + 10), "tick-bad")
    for x, loss in sorted(set(places)):
        if not loss:
            canvas.line((x, top + 2), (x, top + 8), "tick")
