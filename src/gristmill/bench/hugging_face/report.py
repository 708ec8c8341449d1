"""The suite `transformers` as tables, one for each op. Ratios are speeds: 2x is half the time."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gristmill.bench.hugging_face.suite import SUITE
from gristmill.bench.product_report import Grid
from gristmill.bench.results import Row, microseconds
from gristmill.bench.serving.report import speed

_Cells = Callable[[Row, dict[str, Row]], list[str]]


def tables(rows: Iterable[Row]) -> list[tuple[str, Grid]]:
    mine = [row for row in rows if row.get("suite") == SUITE]
    found = []
    for op, (title, header, cells) in _TABLES.items():
        of_impl = {row["impl"]: row for row in mine if row["op"] == op}
        if of_impl:
            shape = next(iter(of_impl.values()))["shape"]
            body = [[impl, *cells(row, of_impl)] for impl, row in of_impl.items()]
            found.append((f"transformers, {title} ({shape})", (["what runs", *header], body)))
    return found


def _training(row: Row, of_impl: dict[str, Row]) -> list[str]:
    eager = of_impl.get("eager")
    return [
        _time(row),
        speed(eager, row),
        speed(of_impl.get("compiled"), row),
        _number(row, "tokens_per_s"),
        _number(row, "peak_gib"),
        _share(eager, row, "peak_gib"),
        f"{row['losses'][-1]:.4f}" if row.get("losses") else "",
        _off(row),
        _number(row, "first_step_s"),
        str(row.get("graph_breaks", "")),
    ]


def _loss(row: Row, of_impl: dict[str, Row]) -> list[str]:
    eager = of_impl.get("eager")
    return [
        _time(row),
        speed(eager, row),
        _number(row, "peak_gib"),
        _share(eager, row, "peak_gib"),
        f"{row['losses'][-1]:.4f}" if row.get("losses") else "",
        _off(row),
    ]


def _generation(row: Row, of_impl: dict[str, Row]) -> list[str]:
    # A row of replays beside one of replays, or the host's time would pass for the kernels'.
    dense = of_impl.get("bf16_graph" if row["impl"].endswith("_graph") else "bf16")
    return [
        _time(row),
        speed(dense, row),
        _number(row, "steady_ms"),
        speed(dense, row, "steady_ms"),
        _number(row, "tokens_per_s"),
        _number(row, "prefill_ms"),
        _number(row, "weights_gib"),
        _number(row, "first_step_s"),
        f"{row['graph_breaks']}, {row['capture_skips']}" if "graph_breaks" in row else "",
    ]


_TABLES: dict[str, tuple[str, list[str], _Cells]] = {
    "training": (
        "training step",
        [
            *("ms", "vs eager", "vs compiled", "tokens/s", "peak GiB", "of eager's"),
            *("loss", "off eager's", "first step s", "graph breaks"),
        ],
        _training,
    ),
    "loss": (
        "head and loss, forward and backward",
        ["ms", "vs eager", "peak GiB", "of eager's", "loss", "off eager's"],
        _loss,
    ),
    "generation": (
        "generation, batch 1",
        [
            *("ms per token", "vs bf16", "median step ms", "steps vs bf16", "tokens/s"),
            *("prefill ms", "weights GiB", "first s", "breaks, not captured"),
        ],
        _generation,
    ),
}


def _time(row: Row) -> str:
    return microseconds(row["ms"]) if "ms" in row else "failed"


def _number(row: Row, key: str) -> str:
    return microseconds(row[key]) if row.get(key) is not None else ""


def _share(other: Row | None, row: Row, key: str) -> str:
    if other is None or not other.get(key) or row.get(key) is None:
        return ""
    return f"{row[key] / other[key]:.2f}"


def _off(row: Row) -> str:
    return f"{row['loss_off']:.3%}" if "loss_off" in row else ""
