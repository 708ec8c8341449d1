"""Pictures of the suite `regret`: regret over the rows, and the hint by runtime matrix."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from gristmill.bench.matrix import CHOSEN
from gristmill.bench.plots import INK, MUTED, PAPER, STYLE, made_with, require, save
from gristmill.bench.regret import MEAN_GOAL, WORST_GOAL
from gristmill.bench.regret_report import Cells, families, gains, matrices, measured, percent
from gristmill.bench.results import Results, Row

# One per family, told apart also by those who see fewer colours, and in print.
_LINES = (("#c2410c", "o"), ("#2563eb", "^"), ("#0d9488", "D"), ("#7c3aed", "v"), ("#ca8a04", "P"))
_GOALS = ((MEAN_GOAL, "#65a30d"), (WORST_GOAL, "#be185d"))
# From the least of a column to the worst: as light as the paper, then ever darker.
_HEAT = (PAPER, "#ffedd5", "#fdba74", "#ea580c", "#7c2d12")
# Beyond this many columns numbers no longer fit into cells.
_MOST_NUMBERS = 40


def write_regret_plots(results: Results, folder: Path, *, suffix: str = "svg") -> list[Path]:
    """`regret_<op>` for every op and dtype, `matrix_<op>` for every matrix; returns the paths."""
    rows = measured(results)
    found = matrices(results)
    if not rows and not found:
        return []
    require()
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with plt.rc_context(STYLE):
        for op, dtype in dict.fromkeys((row["op"], row["dtype"]) for row in rows):
            chosen = [row for row in rows if (row["op"], row["dtype"]) == (op, dtype)]
            figure = _regret(plt, chosen, f"{op}, {dtype}", results.meta)
            paths.append(save(figure, folder / f"regret_{op}{_dtype(dtype)}.{suffix}"))
        for cells in found:
            figure = _matrix(plt, cells, results.meta)
            name = f"matrix_{cells.op}_{cells.dims}{_dtype(cells.dtype)}.{suffix}"
            paths.append(save(figure, folder / name))
    return paths


def _dtype(name: str) -> str:
    return "" if name == "bfloat16" else f"_{name}"


def _regret(plt: Any, rows: list[Row], title: str, meta: dict[str, Any]) -> Any:
    """One line per family, with the worst of each written beside it."""
    figure, axis = plt.subplots(figsize=(8.5, 4.2))
    lines = families(rows)
    sizes = sorted({row["M"] for row in rows})
    worst = max(row["regret"] for row in rows)
    for index, ((_, dims, _), row_of) in enumerate(lines.items()):
        colour, marker = _LINES[index % len(_LINES)]
        there = sorted(row_of)
        regrets = [100 * row_of[size]["regret"] for size in there]
        axis.plot(
            there,
            regrets,
            color=colour,
            marker=marker,
            markersize=5.5,
            markeredgecolor=PAPER,
            markeredgewidth=0.8,
            linewidth=1.8,
            label=f"N = {dims}" if "x" not in dims else f"NxK = {dims}",
            zorder=3,
        )
        peak = max(there, key=lambda size: float(row_of[size]["regret"]))
        axis.annotate(
            f"{percent(row_of[peak]['regret'])} at {peak}",
            (peak, 100 * row_of[peak]["regret"]),
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
            color=colour,
            fontsize=8,
        )
    for goal, colour in _GOALS:
        axis.axhline(100 * goal, color=colour, linestyle=(0, (4, 3)), linewidth=1.2, zorder=2)
        axis.text(
            1.005,
            100 * goal,
            f"{goal:.0%}",
            transform=axis.get_yaxis_transform(),
            va="center",
            color=colour,
            fontsize=9,
        )
    axis.set_xscale("log", base=2)
    ticks = [size for size in sizes if size & (size - 1) == 0] or sizes
    step = -(-len(ticks) // 12)
    axis.set_xticks(ticks[::step], [f"{size:,}" for size in ticks[::step]])
    axis.minorticks_off()
    axis.set_ylim(0, 100 * max(1.2 * WORST_GOAL, 1.12 * worst))
    axis.set_xlabel("rows")
    axis.set_ylabel("% longer than the best")
    axis.set_title(
        "regret: time of what is picked over the best there is (lower is better)",
        loc="left",
        fontsize=10,
        color=MUTED,
    )
    axis.legend(frameon=False, ncols=len(lines), loc="upper right", fontsize=9)
    _around(figure, axis, f"{title}: regret", meta)
    return figure


def _matrix(plt: Any, cells: Cells, meta: dict[str, Any]) -> Any:
    """A heat map of times over the least in their column, on a logarithmic scale."""
    from matplotlib.colors import LinearSegmentedColormap, LogNorm

    hints = cells.lines
    ratios = [[cells.over_best(hint, size) for size in cells.sizes] for hint in hints]
    values = [[math.nan if one is None else one for one in line] for line in ratios]
    highest = max(one for line in ratios for one in line if one is not None)
    colours = LinearSegmentedColormap.from_list("heat", _HEAT).with_extremes(bad="#f3f4f6")
    width = max(5.0, 1.8 + 0.44 * len(cells.sizes))
    figure, axis = plt.subplots(figsize=(width, 1.1 + 0.45 * len(hints)))
    top = max(1.5, highest)
    norm = LogNorm(1.0, top)
    image = axis.imshow(values, cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
    if len(cells.sizes) <= _MOST_NUMBERS:
        for line, hint in enumerate(hints):
            for place, size in enumerate(cells.sizes):
                one = cells.over_best(hint, size)
                # White on the dark half of the scale.
                dark = one is not None and math.log(one) > 0.7 * math.log(top)
                axis.text(
                    place,
                    line,
                    "–" if one is None else f"{one:.2f}",
                    ha="center",
                    va="center",
                    color=PAPER if dark else INK,
                    fontsize=7.5,
                )
    axis.set_yticks(range(len(hints)), [*(f"tuned at {one}" for one in cells.hints), CHOSEN])
    axis.set_xticks(range(len(cells.sizes)), [str(size) for size in cells.sizes], rotation=60)
    # White lines between cells, the thickest above what is chosen.
    axis.set_xticks([place - 0.5 for place in range(1, len(cells.sizes))], minor=True)
    axis.set_yticks([line - 0.5 for line in range(1, len(hints))], minor=True)
    axis.grid(False)
    axis.grid(True, which="minor", axis="both", color=PAPER, linewidth=1.5)
    axis.axhline(len(cells.hints) - 0.5, color=INK, linewidth=1.2)
    axis.tick_params(which="both", length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)
    axis.set_xlabel("rows it runs at")
    axis.set_title(
        "time over the least in the column (1 is best)", loc="left", fontsize=10, color=MUTED
    )
    bar = figure.colorbar(image, ax=axis, pad=0.015, aspect=12)
    ticks = [one for one in (1, 1.1, 1.25, 1.5, 2, 3, 5, 10, 20, 50, 100) if one <= top]
    bar.set_ticks(ticks, labels=[f"{one:g}×" for one in ticks])
    bar.minorticks_off()
    bar.outline.set_visible(False)
    lines = gains(cells)
    _around(figure, axis, cells.title, meta, lines[-1] if lines else "")
    return figure


def _around(figure: Any, axis: Any, title: str, meta: dict[str, Any], line: str = "") -> None:
    """The title above a picture; beneath it what it shows, in words, and what made it."""
    box = axis.get_position()
    height = figure.get_size_inches()[1]
    top = box.y1 + 0.42 / height
    figure.suptitle(title, x=box.x0, y=top, ha="left", va="bottom", fontsize=13, fontweight="bold")
    place = box.y0 - 0.9 / height
    for text, colour in ((line, INK), (made_with(meta), MUTED)):
        if text:
            figure.text(box.x0, place, text, ha="left", va="top", color=colour, fontsize=9)
            place -= 0.22 / height
