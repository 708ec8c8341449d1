"""Charts of starts, of host time, and of whole blocks: what is not the time of a kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gristmill.bench.charts.bars import (
    Bar,
    Segment,
    axis,
    bars,
    columns,
    heading,
    name_line,
)
from gristmill.bench.charts.canvas import SMALL, Canvas
from gristmill.bench.charts.chart import Entry, entries_of, legend
from gristmill.bench.charts.scales import Linear, Log
from gristmill.bench.charts.text import width
from gristmill.bench.charts.theme import Styles
from gristmill.bench.problems import peer_of
from gristmill.bench.product_report import TIE
from gristmill.bench.results import OURS, Row, implementations, is_ours, label, microseconds

COLD_NOTE = (
    "Seconds that gristmill adds to the start of a process, beyond torch's own start. "
    "The thin line: the least and the most of several starts."
)
HOST_NOTE = "Host time of an eager call, before any kernel runs; the best of several rounds."
END_NOTE = (
    "One block of a transformer, the same work by different kernels; beside a time how often it "
    "fits into that of the first. Red: a peer is faster by more than 3%."
)
# A part of a start: its key, its name, its class.
_PARTS = (
    ("import_s", "import gristmill", "p0"),
    ("prepare_s", "weights in order", "p1"),
    ("warmup_s", "warm-up", "p2"),
    ("first_call_s", "first call or step", "p3"),
    ("first_step_s", "first call or step", "p3"),
)


def draw_cold_start(rows: Sequence[Row]) -> Callable[[Canvas, float], float]:
    """Empty caches and full ones have scales of their own: a factor of ten lies between them."""
    panels = {
        "Empty cache": [_start(row) for row in rows if row["cache"] == "empty"],
        "Warm cache, or a bundle": [_start(row) for row in rows if row["cache"] != "empty"],
    }
    goals = {
        "Empty cache": {row["goal_s"] for row in rows if _goal(row, "empty")},
        "Warm cache, or a bundle": {row["goal_s"] for row in rows if _goal(row, "warm", "bundle")},
    }
    drawn = {segment.kind for some in panels.values() for bar in some for segment in bar.segments}
    named = {kind: name for _, name, kind in _PARTS if kind in drawn}

    def paint(canvas: Canvas, top: float) -> float:
        entries = [Entry(name, kind=kind) for kind, name in named.items()]
        if any(goals.values()):
            entries.append(Entry("goal for a whole model", kind="goal"))
        top = legend(canvas, top, entries)
        every = [bar for some in panels.values() for bar in some]
        room = max(width(bar.value, SMALL) for bar in every) + 8
        place = columns(canvas, [(bar.name, bar.also) for bar in every], room)
        for name, some in panels.items():
            if not some:
                continue
            top = heading(canvas, top, name, "seconds beyond torch's own start")
            bottom = top + place.line * len(some)
            highest = max([bar.end for bar in some] + list(goals[name])) * 1.02
            scale = Linear(0.0, highest, place.left, place.right)
            axis(canvas, scale, top, bottom, "s")
            bars(canvas, place, top, some, scale)
            for goal in sorted(goals[name]):
                canvas.line((scale(goal), top), (scale(goal), bottom), "goal")
            top = bottom + 28
        return top - 8

    return paint


def _goal(row: Row, *caches: str) -> bool:
    return "goal_s" in row and row["cache"] in caches


def _start(row: Row) -> Bar:
    end, segments = 0.0, []
    for key, name, kind in _PARTS:
        # What the work itself takes is at the end of a first call or step: cut off there.
        length = max(0.0, min(row.get(key) or 0.0, row["beyond_s"] - end))
        if length:
            segments.append(Segment(length, kind, f"{name}: {length:.3f} s"))
        end += length
    shape = str(row.get("shape", f"{row.get('M', '')}x{row.get('N', '')}"))
    name = f"{row['op']} {shape.replace('x', '×')}".strip()
    least, most = row.get("least_s", 0.0), row.get("most_s", 0.0)
    return Bar(name, row["cache"], tuple(segments), f"{row['beyond_s']:.3f} s", least, most)


def draw_host_cost(rows: Sequence[Row], styles: Styles) -> Callable[[Canvas, float], float]:
    """A line for each call: a marker for everybody's time, and a thin line between them."""
    names = implementations(list(rows))
    calls: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        call = f"{row['mode']} {label(row).replace('x', '×')}"
        calls.setdefault(row["op"], {}).setdefault(call, {})[row["impl"]] = row["host_us"]
    lowest = min(row["host_us"] for row in rows) / 1.15
    highest = max(row["host_us"] for row in rows) * 1.15

    def paint(canvas: Canvas, top: float) -> float:
        top = legend(canvas, top, entries_of(names, styles))
        lines = [(call, "") for of_op in calls.values() for call in of_op]
        values = [_compared(us) for of_op in calls.values() for us in of_op.values()]
        place = columns(canvas, lines, max(width(text, SMALL) for text in values) + 8)
        for op, of_op in calls.items():
            top = heading(canvas, top, op)
            bottom = top + place.line * len(of_op)
            # Of a logarithm: a call takes ten microseconds, its backward pass a hundred.
            scale = Log(lowest, highest, place.left, place.right)
            axis(canvas, scale, top, bottom, "µs")
            for call, us in of_op.items():
                name_line(canvas, place, top, call)
                y = top + place.middle
                ends = sorted(us.values())
                canvas.line((scale(ends[0]), y), (scale(ends[-1]), y), "whisker")
                for name in reversed([name for name in names if name in us]):
                    at = (scale(us[name]), y)
                    title = f"{name}, {op} {call}: {us[name]:.2f} µs"
                    canvas.marker(at, styles[name], 4.6, title=title)
                worse = us.get(OURS, 0.0) > min(us.values()) / TIE
                kind = "bad" if worse else ""
                text = _compared(us)
                canvas.text(scale.end + 8, y + 4, text, size=SMALL, kind=kind)
                top += place.line
            top = bottom + 28
        return top - 8

    return paint


def _compared(us: Mapping[str, float]) -> str:
    """Our time, and over that of eager if that is known."""
    if OURS not in us:
        return ""
    ratio = f", {us[OURS] / us['eager']:.2f}× eager" if us.get("eager") else ""
    return f"{microseconds(us[OURS])} µs{ratio}"


def draw_end_to_end(rows: Sequence[Row], styles: Styles) -> Callable[[Canvas, float], float]:
    """A group for each problem, a bar for everybody; one scale for what is of one op and model."""
    problems: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows:
        what = (str(row["op"]), str(row.get("model") or ""))
        problems.setdefault(what, {}).setdefault(_shape(row), []).append(row)

    def paint(canvas: Canvas, top: float) -> float:
        blocks = {
            what: {shape: [_block(row, some, styles) for row in some] for shape, some in of.items()}
            for what, of in problems.items()
        }
        every = [bar for of in blocks.values() for some in of.values() for bar in some]
        room = max(width(bar.value, SMALL) for bar in every) + 8
        place = columns(canvas, [(bar.name, "") for bar in every], room)
        for (op, model), by_shape in blocks.items():
            highest = max(bar.end for some in by_shape.values() for bar in some) or 1.0
            scale = Linear(0.0, highest, place.left, place.right)
            for shape, some in by_shape.items():
                top = heading(canvas, top, op, ", ".join(filter(None, (model, shape))))
                top = bars(canvas, place, top, some, scale) + 10
        return top - 6

    return paint


def _shape(row: Row) -> str:
    shape = str(row.get("shape") or (f"batch {row['batch']}" if "batch" in row else ""))
    return shape.replace("x", "×") if shape.replace("x", "").isdecimal() else shape


def _ms(row: Row) -> float | None:
    if row.get("ms") is not None:
        return float(row["ms"])
    return float(row["us"]) / 1e3 if row.get("us") is not None else None


def _block(row: Row, some: Sequence[Row], styles: Styles) -> Bar:
    """A time as a bar, with the speed-up over the first of those that have a time."""
    ms = _ms(row)
    if ms is None:
        return Bar(str(row["impl"]), "", (), "failed")
    told = f"{microseconds(ms)} ms" if ms >= 1 else f"{microseconds(1e3 * ms)} µs"
    timed = [(time, other) for other in some if (time := _ms(other)) is not None]
    first_ms, first = timed[0]
    if first is not row:
        told += f", {first_ms / ms:.2f}× {first['impl']}"
    ours = is_ours(row)
    behind = ours and any(time < TIE * ms for time, other in timed if not is_ours(other))
    kind = f"f-{styles[OURS if ours else peer_of(row)].colour}"
    segment = Segment(ms, kind, f"{row['impl']}: {told}")
    return Bar(str(row["impl"]), "", (segment,), told, is_loss=behind)
