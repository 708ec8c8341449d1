"""Charts of the suite `regret`: regret over rows, and the hint by runtime matrix as heat."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from gristmill.bench.charts.canvas import SMALL, TEXT, Canvas, Point
from gristmill.bench.charts.chart import MARGIN, Entry, legend
from gristmill.bench.charts.plot import Area, Look, grid, percent, section, series, side_by_side
from gristmill.bench.charts.scales import Linear, Log
from gristmill.bench.charts.text import apart, width
from gristmill.bench.charts.theme import HEATS, Styles
from gristmill.bench.regret.families import KINDS, goals_of
from gristmill.bench.regret.goals import group_name, groups, is_tabled, limits
from gristmill.bench.regret.matrix import CHOSEN
from gristmill.bench.regret.report import Cells
from gristmill.bench.results import OURS, Row, label, microseconds

REGRET_NOTE = (
    "Regret: how much longer what is picked takes than the best candidate there is, over rows. "
    "Dashed: the goals, on average and at worst. A small cross at the foot: not judged."
)
MATRIX_NOTE = (
    "A line for each launch that was tuned at one size, run at every size; the last is what is "
    "chosen at each. Numbers are times over the least in their column: 1 is best."
)
_HEIGHT = 104.0
# A cell is of the first heat that its ratio does not exceed; above the last, of the darkest.
HEAT_STEPS = (1.02, 1.1, 1.25, 1.5, 2.0)
_CELL, _CELL_HEIGHT, _LINES = 34.0, 22.0, 88.0


def draw_regret(
    lines: Mapping[str, Mapping[int, Row]], styles: Styles
) -> Callable[[Canvas, float], float]:
    """`lines`: for each family, rows by M; a row without a regret was not judged.

    A panel for each family; of an op whose weights are drawn, one for all that are in the table and
    one for the others.
    """
    panels = _panels(lines)
    every = [row for rows in panels.values() for row in rows]
    largest = max(_limits(row)[1] for row in every)
    highest = max([1.25 * largest, *(1.2 * row["regret"] for row in every if _has(row))])
    scale = Linear(0.0, highest, _HEIGHT, 0.0)

    def paint(canvas: Canvas, top: float) -> float:
        goals = [Entry(text, kind="goal") for text in _goals(panels)]
        top = legend(canvas, top, [Entry(OURS, styles[OURS]), *goals])
        top = section(canvas, top, "Regret over rows", "lower is better")
        look = Look(_HEIGHT, 16, scale, scale.ticks(5), percent)
        return side_by_side(
            canvas, top, panels, look, lambda rows, area: _panel(canvas, area, rows, highest)
        )

    def _panel(canvas: Canvas, area: Area, rows: Sequence[Row], highest: float) -> None:
        y = Linear(0.0, highest, area.bottom, area.top)
        grid(canvas, area, y, y.ticks(5)[1:])
        for goal in _limits(rows[0]):
            canvas.line((area.left, y(goal)), (area.right, y(goal)), "goal")
        sizes = sorted({int(row["M"]) for row in rows})
        x = _sizes(sizes, area)
        points: list[Point | None] = [
            (x(row["M"]), y(row["regret"])) if _has(row) else None for row in rows
        ]
        for row in rows:
            if not _has(row):
                title = f"{row['M']} rows: not judged, at least {_told(row)}"
                canvas.miss((x(row["M"]), area.bottom - 5), styles[OURS], title=title)
        apart_by_weight = _is_sampled(rows[0])
        series(
            canvas,
            [OURS],
            styles,
            lambda _: points,
            # Of the many that are small the axis says enough.
            lambda _, index: _tip(rows[index]),
            joined=not apart_by_weight,
            size=2.0 if apart_by_weight else 3.4,
        )
        _peak(canvas, area, [row for row in rows if _has(row)], x, y)
        texts = [f"{size}" for size in sizes]
        for index in apart([x(size) for size in sizes], texts, TEXT, 7):
            canvas.text(x(sizes[index]), area.bottom + 14, texts[index], anchor="middle")

    return paint


def _panels(lines: Mapping[str, Mapping[int, Row]]) -> dict[str, list[Row]]:
    """The rows of each panel, ascending by M."""
    panels: dict[str, list[Row]] = {}
    for name, of_size in lines.items():
        for size in sorted(of_size):
            row = of_size[size]
            tabled = "in the table" if is_tabled(row) else "not in the table"
            panels.setdefault(f"weights {tabled}" if _is_sampled(row) else name, []).append(row)
    return {name: sorted(rows, key=lambda row: int(row["M"])) for name, rows in panels.items()}


def _is_sampled(row: Row) -> bool:
    return row["op"] in KINDS and KINDS[row["op"]].sampled


def _limits(row: Row) -> tuple[float, float]:
    """The mean and the worst regret allowed to the family of a row."""
    return limits(goals_of(row["op"]), row)


def _goals(panels: Mapping[str, Sequence[Row]]) -> list[str]:
    """The goals of the panels, each once: in the table and outside of it they may differ."""
    told: dict[str, None] = {}
    for rows in panels.values():
        apart_by_table = len(groups(goals_of(rows[0]["op"]))) > 1
        group = group_name(is_tabled(rows[0]) if apart_by_table else None)
        mean, worst = (f"{100 * limit:g}%" for limit in _limits(rows[0]))
        told[f"goals{group}: {mean} on average, {worst} at worst"] = None
    return list(told)


def _sizes(sizes: Sequence[int], area: Area) -> Log | Linear:
    inset = 10.0
    if len(sizes) == 1:
        return Linear(sizes[0] - 1, sizes[0] + 1, area.left, area.right)
    return Log(sizes[0], sizes[-1], area.left + inset, area.right - inset)


def _peak(canvas: Canvas, area: Area, rows: Sequence[Row], x: Log | Linear, y: Linear) -> None:
    if not rows:
        return
    worst = max(rows, key=lambda row: float(row["regret"]))
    size = worst["M"]
    text = f"{100 * worst['regret']:.1f}% at {label(worst) if _is_sampled(worst) else size}"
    half = width(text, SMALL) / 2
    place = min(max(x(size), area.left + half), area.right - half)
    canvas.text(place, y(worst["regret"]) - 8, text, size=SMALL, anchor="middle", kind="halo")


def _has(row: Row) -> bool:
    return row.get("regret") is not None and not row.get("differing")


def _tip(row: Row) -> str:
    about = label(row) if _is_sampled(row) else f"{row['M']} rows"
    return f"{about}: {_told(row)}" if row["regret"] > _limits(row)[0] else ""


def _told(row: Row) -> str:
    """A regret in words; of a large one also what was picked in the place of what."""
    regret = float(row.get("regret") or row.get("regret_at_least") or 0.0)
    text = f"{100 * regret:.1f}%"
    picked, best = (str(row.get(key, "")).partition(" ")[0] for key in ("picked", "best"))
    return text if regret <= _limits(row)[0] or picked == best else f"{text}: {picked}, not {best}"


def draw_matrix(cells: Cells) -> Callable[[Canvas, float], float]:
    """A cell for each launch and size; sizes that a line has no room for go into a line below."""

    def paint(canvas: Canvas, top: float) -> float:
        top = legend(canvas, top, _heats())
        how = "1 is best; the last line is what is chosen"
        top = section(canvas, top, "Time over the least in the column", how)
        room = canvas.width - 2 * MARGIN - _LINES
        widest = max(width(f"{size}", TEXT) for size in cells.sizes) + 6
        most = max(1, math.floor(room / max(_CELL, widest)))
        parts = math.ceil(len(cells.sizes) / most)
        each = math.ceil(len(cells.sizes) / parts)
        across = min(52.0, room / each)
        for part in range(parts):
            top = _block(canvas, top, cells, cells.sizes[part * each : (part + 1) * each], across)
        return top

    return paint


def _heats() -> list[Entry]:
    texts = [f"up to {step:g}" for step in HEAT_STEPS] + [f"more than {HEAT_STEPS[-1]:g}"]
    return [Entry(text, kind=f"h{heat}") for heat, text in enumerate(texts)]


def heat(ratio: float) -> int:
    return next((index for index, step in enumerate(HEAT_STEPS) if ratio <= step), HEATS - 1)


def _block(canvas: Canvas, top: float, cells: Cells, sizes: Sequence[int], across: float) -> float:
    left = MARGIN + _LINES
    top += 4
    for line, hint in enumerate(cells.lines):
        if hint == CHOSEN and line:
            canvas.line((MARGIN, top + 1.5), (left + across * len(sizes), top + 1.5), "axis")
            top += 3
        name = CHOSEN if hint == CHOSEN else f"tuned at {hint}"
        canvas.text(MARGIN, top + 15, name, kind="b" if hint == CHOSEN else "")
        for place, size in enumerate(sizes):
            _cell(canvas, left + place * across, top, across, cells, hint, size)
        top += _CELL_HEIGHT
    for place, size in enumerate(sizes):
        canvas.text(left + (place + 0.5) * across, top + 14, f"{size}", anchor="middle", kind="mu")
    canvas.text(MARGIN, top + 14, "rows it runs at", kind="mu")
    return top + 30


def _cell(
    canvas: Canvas, x: float, y: float, across: float, cells: Cells, hint: int | str, size: int
) -> None:
    ratio = cells.over_best(hint, size)
    middle = x + across / 2
    if ratio is None:
        canvas.text(middle, y + 15, "–", anchor="middle", kind="mu")
        return
    level = heat(ratio)
    title = f"{hint}, run at {size}: {microseconds(cells.us[hint][size])} µs, {ratio:.2f}"
    canvas.box(x + 1, y + 1, across - 2, _CELL_HEIGHT - 2, f"h{level}", radius=2, title=title)
    text = f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"
    kind = "od" if level >= HEATS - 2 else ""
    canvas.text(middle, y + 15, text, size=SMALL, anchor="middle", kind=kind)
