"""The suite `cold_start` as a table and as a picture: by part, beyond torch's own start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gristmill.bench.plots import INK, MUTED, STYLE, made_with, require, save
from gristmill.bench.product_report import Grid
from gristmill.bench.results import Results, Row

# A part of a start: its key, its name, its colour.
_PARTS = (
    ("import_s", "import gristmill", "#c2410c"),
    ("prepare_s", "weights in order", "#7c3aed"),
    ("warmup_s", "warm-up", "#2563eb"),
    ("first_call_s", "first call or step", "#0d9488"),
    ("first_step_s", "first call or step", "#0d9488"),
)
_GOAL = "#be185d"


def table(rows: list[Row]) -> tuple[str, Grid] | None:
    """One line per start and cache; rows of results from before this suite have fewer cells."""
    found = [row for row in rows if "cache" in row]
    if not found:
        return None
    header = [
        *("start", "cache", "import", "weights", "warm-up", "first call or step"),
        *("together", "least to most", "goal", "torch's own", "compiles"),
    ]
    return "cold start: seconds beyond torch's own start", (header, [_line(row) for row in found])


def _line(row: Row) -> list[str]:
    first = next((row[key] for key in ("first_call_s", "first_step_s") if key in row), None)
    together = _seconds(row.get("beyond_s"))
    if "import_s" not in row:
        together = "failed"
    between = f"{row['least_s']:.3f} to {row['most_s']:.3f}" if "least_s" in row else ""
    where = f" for {row['target']}" if "target" in row else ""
    return [
        f"{row['op']} {_problem(row)}".strip() + where,
        row["cache"],
        _seconds(row.get("import_s")),
        _seconds(row.get("prepare_s")),
        _seconds(row.get("warmup_s")),
        _seconds(first),
        together,
        between,
        f"{row['goal_s']:g}" if "goal_s" in row else "",
        _seconds(row.get("torch_s")),
        str(row.get("compiles", "")),
    ]


def _problem(row: Row) -> str:
    return str(row.get("shape", f"{row.get('M', '')}x{row.get('N', '')}"))


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def write_cold_start_plot(results: Results, folder: Path, *, suffix: str = "svg") -> list[Path]:
    """`cold_start`: a bar per start and cache, by part; nothing if nothing was measured."""
    rows = [row for row in results.rows if "cache" in row and "beyond_s" in row]
    if not rows:
        return []
    require()
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context({**STYLE, "axes.grid.axis": "x"}):
        figure = _figure(plt, rows, results.meta)
        return [save(figure, folder / f"cold_start.{suffix}")]


def _figure(plt: Any, rows: list[Row], meta: dict[str, Any]) -> Any:
    """Empty caches and full ones have panels of their own: a factor of ten lies between them."""
    panels = [
        ("empty cache", [row for row in rows if row["cache"] == "empty"]),
        ("warm cache, or a bundle", [row for row in rows if row["cache"] != "empty"]),
    ]
    panels = [(title, some) for title, some in panels if some]
    heights = [len(some) + 1 for _, some in panels]
    figure, axes = plt.subplots(
        len(panels),
        1,
        figsize=(9.0, 1.6 + 0.36 * sum(heights)),
        gridspec_kw={"height_ratios": heights, "hspace": 0.16},
        squeeze=False,
    )
    for axis, (title, some) in zip(axes[:, 0], panels, strict=True):
        _draw(axis, some)
        axis.set_title(title, loc="left", fontsize=10, color=MUTED)
    last = axes[-1, 0]
    last.set_xlabel("seconds beyond torch's own start (lower is better)")
    handles: dict[str, Any] = {}
    for axis in axes[:, 0]:
        for handle, text in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(text, handle)
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="upper left",
        bbox_to_anchor=(0.91, 0.88),
        frameon=False,
    )
    place = axes[0, 0].get_position()
    top = place.y1 + 0.55 / figure.get_figheight()
    figure.suptitle("cold start", x=place.x0, y=top, ha="left", fontsize=14, fontweight="bold")
    bottom = last.get_position().y0
    drop = 0.75 / figure.get_figheight()
    figure.text(place.x0, bottom - drop, made_with(meta), ha="left", color=MUTED, fontsize=9)
    return figure


def _draw(axis: Any, rows: list[Row]) -> None:
    places = range(len(rows))
    ends = [0.0] * len(rows)
    for key, name, colour in _PARTS:
        # What the work itself takes is at the end of a first call or step: cut off there.
        widths = [
            max(0.0, min(row.get(key, 0.0), row["beyond_s"] - end))
            for row, end in zip(rows, ends, strict=True)
        ]
        if any(widths):
            axis.barh(places, widths, left=ends, height=0.7, color=colour, label=name)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for place, row in zip(places, rows, strict=True):
        axis.plot([row["least_s"], row["most_s"]], [place, place], color=INK, linewidth=1.2)
        text = f" {row['beyond_s']:.3f} s"
        axis.text(max(row["beyond_s"], row["most_s"]), place, text, va="center", fontsize=8)
    for goal in sorted({row["goal_s"] for row in rows if "goal_s" in row}):
        style = {"color": _GOAL, "linestyle": (0, (4, 3)), "linewidth": 1.2}
        axis.axvline(goal, label="goal, whole model", **style)
    axis.set_yticks(places, [f"{row['op']} {_problem(row)}\n{row['cache']}" for row in rows])
    axis.tick_params(length=0, labelsize=7.5)
    axis.invert_yaxis()
    axis.margins(x=0.12)
