"""Ratios to the best peer as heat maps, one for each op: every cell a number with its colour.

Where most sizes were measured at most M, M is across and the other sizes are down. Where they were
not, such a table would be empty for the most part: there cells come one after another, by the sets
of shapes that they belong to, and each says what it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gristmill.bench.page.headline import against, number, times
from gristmill.bench.page.html import Html, cell, element, join, row, table
from gristmill.bench.problems import Problem, by_op
from gristmill.bench.product_report import count_of

# Upper ends of the classes of ratios. From 0.97 to 1.03 is a tie, and has no colour.
_CLASSES = (
    (0.80, "l3", "below 0.80"),
    (0.90, "l2", "0.80 to 0.90"),
    (0.97, "l1", "0.90 to 0.97"),
    (1.03, "t", "level, within 3%"),
    (1.25, "w1", "1.03 to 1.25"),
    (2.00, "w2", "1.25 to 2"),
    (math.inf, "w3", "2 and above"),
)


# A table of which no more is filled is none.
_DENSE = 0.5


@dataclass(frozen=True)
class Map:
    """The cells of one op: line -> M -> problem."""

    op: str
    dtype: str
    down: str
    cells: Mapping[str, Mapping[int, Problem]]
    given: Sequence[Problem]

    @property
    def columns(self) -> list[int]:
        return sorted({size for line in self.cells.values() for size in line})

    @property
    def problems(self) -> list[Problem]:
        return [problem for line in self.cells.values() for problem in line.values()]

    @property
    def is_dense(self) -> bool:
        return len(self.problems) > _DENSE * len(self.cells) * len(self.columns)

    @property
    def name(self) -> str:
        return self.op if self.dtype == "bfloat16" else f"{self.op} {self.dtype}"


def class_of(ratio: float) -> str:
    return next(name for end, name, _ in _CLASSES if ratio < end)


def maps(problems: Sequence[Problem]) -> list[Map]:
    """One for each op and dtype of which anything can be compared."""
    found = []
    for (op, dtype), some in by_op(problems).items():
        if not any(problem.ratio is not None for problem in some):
            continue
        cells: dict[str, dict[int, Problem]] = {}
        for problem in some:
            line, size = _place(problem)
            if size in cells.get(line, {}):  # another shape of as many rows
                line = problem.label
            cells.setdefault(line, {})[size] = problem
        down = "model, routing" if some[0].any.get("model") else _down(some[0])
        found.append(Map(op, dtype, down, dict(sorted(cells.items(), key=_order)), some))
    return found


def _down(problem: Problem) -> str:
    return "N" if problem.any.get("K") is None else "N x K"


def _place(problem: Problem) -> tuple[str, int]:
    one = problem.any
    if one.get("model"):
        return f"{one['model']}, {one['routing']}", int(one["M"])
    if one.get("K") is not None:
        return f"{one['N']}x{one['K']}", int(one["M"])
    return str(one["N"]), int(one["M"])


def _order(item: tuple[str, object]) -> tuple[int, ...]:
    """Sizes by size; models stay as they came."""
    sizes = item[0].split("x")
    return tuple(map(int, sizes)) if all(size.isdecimal() for size in sizes) else (0,)


def heat_maps(problems: Sequence[Problem]) -> Html:
    drawn = maps(problems)
    if not drawn:
        return element("p", "Nothing was measured beside a peer.", class_="none")
    return join([legend(), element("div", *map(_drawn, drawn), class_="maps")])


def legend() -> Html:
    shown = (element("li", text, class_=f"h {name}") for _, name, text in _CLASSES)
    return element("ul", *shown, class_="legend", aria_label="Colours")


def _drawn(one: Map) -> Html:
    ratios = [problem.ratio for problem in one.problems if problem.ratio is not None]
    told = against(ratios)
    caption = join(
        [
            element("b", one.name),
            f" {times(told.ratio)} as fast as the best peer; {count_of(ratios)}, "
            f"{told.behind} behind by more than 3%",
        ]
    )
    if one.is_dense:
        return element("div", _matrix(one, caption), class_="map")
    return element("div", element("p", caption), *_groups(one), class_="map wide")


def _matrix(one: Map, caption: Html) -> Html:
    columns = one.columns
    lines = [
        row([cell(line, name="th scope=row"), *(_cell(found.get(size)) for size in columns)])
        for line, found in one.cells.items()
    ]
    header = [f"{one.down} by M", *map(str, columns)]
    return table(caption, header, lines, class_="heat", label=f"Ratios of {one.name}")


def _groups(one: Map) -> list[Html]:
    """A list for each set of shapes; of rows that name none, one list of all."""
    groups: dict[str, list[Problem]] = {}
    for problem in one.given:
        groups.setdefault(next(iter(problem.any.get("sets") or [""])), []).append(problem)
    return [
        element(
            "ul",
            element("li", name, class_="set") if name else "",
            *map(_tile, some),
            class_="tiles",
            aria_label=f"Ratios of {one.name} {name}".strip(),
        )
        for name, some in groups.items()
    ]


def _tile(problem: Problem) -> Html:
    text, class_ = _told(problem)
    return element("li", element("b", text), problem.label, class_=class_)


def _cell(problem: Problem | None) -> Html:
    if problem is None:
        return cell("")
    text, class_ = _told(problem)
    return cell(text, class_)


def _told(problem: Problem) -> tuple[str, str]:
    if problem.ours is None:
        return "failed", "h f"
    if problem.ratio is None:
        return "–", "h t"
    return number(problem.ratio), f"h {class_of(problem.ratio)}"
