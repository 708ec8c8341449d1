"""Results as pictures: one SVG per op, with bandwidth, the roof, and times of small problems."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gristmill.bench.results import OURS, Results, Row, implementations
from gristmill.bench.results import problems as by_problem
from gristmill.errors import GristmillError

# One colour per implementation in every picture, told apart also by those who see fewer colours.
COLOURS = {
    OURS: "#c2410c",
    "eager": "#6b7280",
    "inductor": "#2563eb",
    "quack": "#0d9488",
    "quack_one_pass": "#0d9488",
    "quack_two_pass": "#5eead4",
    "liger": "#7c3aed",
    "flashinfer": "#ca8a04",
    "cublas_bf16": "#6b7280",
    "humming": "#7c3aed",
    "quack_w4a16": "#0d9488",
    "vllm_marlin": "#ca8a04",
    "torch_grouped_mm_bf16": "#6b7280",
    "vllm_marlin_nvfp4": "#ca8a04",
    "vllm_fused_moe": "#ca8a04",
}
OTHER_COLOUR = "#be185d"
MARKERS = {
    OURS: "o",
    "eager": "s",
    "inductor": "^",
    "quack": "D",
    "quack_one_pass": "D",
    "quack_two_pass": "d",
    "liger": "v",
    "flashinfer": "P",
    "cublas_bf16": "s",
    "humming": "v",
    "quack_w4a16": "D",
    "vllm_marlin": "P",
    "torch_grouped_mm_bf16": "s",
    "vllm_marlin_nvfp4": "P",
    "vllm_fused_moe": "P",
}
INK, MUTED, FAINT, PAPER = "#1f2937", "#6b7280", "#e5e7eb", "#ffffff"
# Below this a problem is bound by latency, and its bandwidth says little: it is drawn as a time.
SMALL_BYTES = 16_000_000
# More products than this do not fit side by side: each weight gets a panel, so many in a line.
MOST_PRODUCTS = 40
ACROSS = 4
ROOF = "roof"

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "svg.hashsalt": "gristmill",  # the same results give the same file
}

Problem = tuple[tuple[Any, ...], dict[str, Row]]


def require() -> None:
    """Raise, with what to install, if no picture could be drawn: better before a long run."""
    try:
        import matplotlib
    except ImportError as error:
        raise GristmillError(
            "plots need matplotlib, which is not installed: pip install 'gristmill[bench]'"
        ) from error
    matplotlib.use("Agg")


def write_plots(results: Results, folder: Path, *, suffix: str = "svg") -> list[Path]:
    """One file per op and dtype; returns their paths (none when nothing was timed)."""
    require()
    import matplotlib.pyplot as plt

    rows = results.timed()
    paths = []
    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        for op, dtype in dict.fromkeys((row["op"], row["dtype"]) for row in rows):
            chosen = [row for row in rows if (row["op"], row["dtype"]) == (op, dtype)]
            figure = _figure(plt, chosen, f"{op}, {dtype}", results.meta)
            path = folder / (f"{op}.{suffix}" if dtype == "bfloat16" else f"{op}_{dtype}.{suffix}")
            paths.append(save(figure, path))
    return paths


def save(figure: Any, path: Path) -> Path:
    import matplotlib.pyplot as plt

    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, bbox_inches="tight", metadata=metadata, dpi=130)
    plt.close(figure)
    return path


def made_with(meta: dict[str, Any]) -> str:
    """The line under a picture."""
    made = f"{meta.get('gpu', '')}, torch {meta.get('torch', '?')}, {meta.get('date', '')}"
    if meta.get("device") == "cpu":
        made += "; on a CPU only ratios mean anything"
    return made


def _figure(plt: Any, rows: list[Row], title: str, meta: dict[str, Any]) -> Any:
    if "model" in rows[0]:
        return _figure_of_panels(plt, _by_model(rows), implementations(rows), title, meta)
    # By size, and at one size from many short rows to a few long ones.
    problems = sorted(by_problem(rows).items(), key=lambda one: (one[0][2] * one[0][3], one[0][3]))
    large = [one for one in problems if _bytes(one) > SMALL_BYTES]
    small = [one for one in problems if _bytes(one) <= SMALL_BYTES]
    panels = [panel for panel in (large, small) if panel]
    product = "tflop_per_s" in _any(problems[0])
    if product:  # bytes bound some, operations others: what all have is a roof
        panels = [sorted(problems, key=lambda one: (_any(one)["N"], _any(one)["K"], one[0][2]))]
    names = implementations(rows)
    if product and len(problems) > MOST_PRODUCTS:
        return _figure_of_panels(plt, _by_layer(panels[0]), names, title, meta)
    widths = [max(2.5, len(panel)) for panel in panels]
    legend = 1.5 + 0.7 * (len(names) + 1) + 0.08 * sum(map(len, names))
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(max(6.0, 2.0 + sum(widths), legend), 4.6),
        gridspec_kw={"width_ratios": widths, "wspace": 0.2},
        squeeze=False,
    )
    for axis, panel in zip(axes[0], panels, strict=True):
        draw = _draw_share if product else _draw_bandwidth if panel is large else _draw_times
        draw(axis, panel, names)
    _frame(figure, list(axes[0]), names, title, meta)
    return figure


def _by_layer(problems: Sequence[Problem]) -> dict[str, list[Problem]]:
    """A panel for each weight."""
    panels: dict[str, list[Problem]] = {}
    for one in problems:
        panels.setdefault(f"{_any(one)['N']}×{_any(one)['K']}", []).append(one)
    return panels


def _by_model(rows: list[Row]) -> dict[str, list[Problem]]:
    """A panel for each model and routing, the routings of a model one after another."""
    panels: dict[str, list[Problem]] = {}
    for one in sorted(by_problem(rows).items(), key=lambda one: one[0][2]):
        panels.setdefault(f"{_any(one)['model']}, {_any(one)['routing']}", []).append(one)
    order = list(dict.fromkeys((row["model"], row["routing"]) for row in rows))
    return {f"{model}, {routing}": panels[f"{model}, {routing}"] for model, routing in order}


def _figure_of_panels(
    plt: Any,
    panels: dict[str, list[Problem]],
    names: Sequence[str],
    title: str,
    meta: dict[str, Any],
) -> Any:
    """The share of the roof over M, in a panel for each of what M is the size of."""
    across = min(ACROSS, len(panels)) if len(panels) > 2 else 2
    down = math.ceil(len(panels) / across)
    figure, axes = plt.subplots(
        down,
        across,
        figsize=(4.4 * across, 3.2 * down),
        gridspec_kw={"wspace": 0.18, "hspace": 0.4},
        squeeze=False,
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (name, panel) in zip(axes.flat, panels.items(), strict=False):
        _draw_lines(axis, panel, names, [1.0] * len(panel), "roof_share")
        axis.set_xticks(range(len(panel)), [str(key[2]) for key, _ in panel], fontsize=7)
        axis.set_title(name, loc="left", fontsize=10, color=MUTED)
    for line in axes:
        line[0].set_ylabel("share of the roof")
    _frame(figure, list(axes.flat[: len(panels)]), names, f"{title}, by M", meta, 4.6 / 3.2 / down)
    return figure


def _frame(
    figure: Any,
    axes: Sequence[Any],
    names: Sequence[str],
    title: str,
    meta: dict[str, Any],
    unit: float = 1.0,
) -> None:
    """Legend and title above the panels, and beneath them what they were made with.

    `unit`: the height of a figure of a single line of panels over that of this one.
    """
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, text in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(text, handle)
    order = [name for name in (*names, ROOF) if name in handles]
    place = axes[0].get_position()
    top = place.y1
    figure.legend(
        [handles[name] for name in order],
        order,
        loc="lower left",
        bbox_to_anchor=(place.x0 - 0.008, top + 0.05 * unit),
        ncols=len(handles),
        frameon=False,
        handlelength=1.6,
        columnspacing=1.6,
    )
    figure.suptitle(
        title, x=place.x0, y=top + 0.19 * unit, ha="left", fontsize=14, fontweight="bold"
    )
    bottom = min(axis.get_position().y0 for axis in axes)
    figure.text(place.x0, bottom - 0.16 * unit, made_with(meta), ha="left", color=MUTED, fontsize=9)


def _draw_bandwidth(axis: Any, problems: Sequence[Problem], names: Sequence[str]) -> None:
    roof = [_any(one)["bytes"] / _any(one)["roof_us"] / 1e6 for one in problems]
    _draw_lines(axis, problems, names, roof, "tb_per_s")
    axis.set_ylabel("TB/s that must move")
    axis.set_title("bandwidth (higher is better)", loc="left", fontsize=10, color=MUTED)


def _draw_share(axis: Any, problems: Sequence[Problem], names: Sequence[str]) -> None:
    _draw_lines(axis, problems, names, [1.0] * len(problems), "roof_share")
    axis.set_ylabel("share of the roof")
    axis.set_title(
        "time of a copy, or of the operations if longer, over the time taken (higher is better)",
        loc="left",
        fontsize=10,
        color=MUTED,
    )


def _draw_lines(
    axis: Any, problems: Sequence[Problem], names: Sequence[str], roof: Sequence[float], field: str
) -> None:
    places = range(len(problems))
    axis.plot(places, roof, color=INK, linestyle=(0, (4, 3)), linewidth=1.4, label=ROOF)
    highest = max(roof)
    for name in reversed(names):  # ours last, on top
        # A gap where an implementation has no time: a line through it would invent one.
        rates = [row_of.get(name, {}).get(field, math.nan) for _, row_of in problems]
        if all(map(math.isnan, rates)):
            continue
        highest = max(highest, *(rate for rate in rates if not math.isnan(rate)))
        axis.plot(
            places,
            rates,
            color=COLOURS.get(name, OTHER_COLOUR),
            marker=MARKERS.get(name, "X"),
            markersize=7 if name == OURS else 5.5,
            markeredgecolor=PAPER,
            markeredgewidth=0.8,
            linewidth=2.4 if name == OURS else 1.5,
            label=name,
            zorder=3 if name == OURS else 2,
        )
    axis.set_ylim(0, 1.08 * highest)
    _name_shapes(axis, problems)


def _draw_times(axis: Any, problems: Sequence[Problem], names: Sequence[str]) -> None:
    width = 0.84 / len(names)
    for index, name in enumerate(names):
        offset = (index - (len(names) - 1) / 2) * width
        there = [place for place, (_, row_of) in enumerate(problems) if name in row_of]
        if there:
            axis.bar(
                [place + offset for place in there],
                [problems[place][1][name]["us"] for place in there],
                width=0.9 * width,
                color=COLOURS.get(name, OTHER_COLOUR),
                label=name,
            )
    axis.set_ylabel("µs per call")
    axis.set_title("small problems (lower is better)", loc="left", fontsize=10, color=MUTED)
    _name_shapes(axis, problems)


def _name_shapes(axis: Any, problems: Sequence[Problem]) -> None:
    labels = ["\n×".join(key[-1].rsplit("x", 1)).replace("x", "×") for key, _ in problems]
    axis.set_xticks(range(len(problems)), labels)
    axis.set_xlim(-0.6, len(problems) - 0.4)
    axis.tick_params(length=0)


def _any(problem: Problem) -> Row:
    """A row of the problem: bytes and roof are the same in each."""
    return next(iter(problem[1].values()))


def _bytes(problem: Problem) -> int:
    return int(_any(problem)["bytes"])
