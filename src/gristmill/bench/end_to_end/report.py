"""The suite `end_to_end` as tables. Ratios are speeds: 2x is half the time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gristmill.bench.end_to_end.problem import SUITE
from gristmill.bench.product_report import Grid, percent
from gristmill.bench.results import Row, microseconds
from gristmill.bench.serving.report import speed

# What the others are held against.
_AGAINST = ("eager", "inductor")
_TITLES = {
    "training": "training one block with head and loss",
    "training_block": "training one block",
    "decoding": "decoding by one block",
    "decoding_moe": "decoding by one block of experts",
}


def tables(rows: Iterable[Row]) -> list[tuple[str, Grid]]:
    """One for each kind of training, and for each kind of decoding one of all batches."""
    mine = [row for row in rows if row.get("suite") == SUITE]
    found = []
    for op, model in dict.fromkeys((row["op"], row["model"]) for row in mine):
        of_op = [row for row in mine if (row["op"], row["model"]) == (op, model)]
        by_shape: dict[str, dict[str, Row]] = {}
        for row in of_op:
            by_shape.setdefault(row["shape"], {})[row["impl"]] = row
        title = f"end to end, {_TITLES.get(op, op)}, {model}"
        if op.startswith("training"):
            for shape, of_impl in by_shape.items():
                found.append((f"{title}, {shape} tokens: ms a step", _training(of_impl)))
        else:
            lengths = ", ".join(str(length) for length in dict.fromkeys(r["length"] for r in of_op))
            found.append(
                (f"{title}, {lengths} cached: µs a step", _decoding(list(by_shape.values())))
            )
    return found


def _training(of_impl: dict[str, Row]) -> Grid:
    against = [name for name in _AGAINST if name in of_impl]
    memory = any("peak_gib" in row for row in of_impl.values())
    header = ["what runs", "ms", *(f"vs {name}" for name in against), "tokens/s"]
    header += [*["peak GiB"] * memory, "error", "first call s"]
    body = []
    for impl, row in of_impl.items():
        cells = [microseconds(row["ms"]) if "ms" in row else "failed"]
        cells += [speed(of_impl[name], row) for name in against]
        cells += [_number(row, "tokens_per_s"), *[_number(row, "peak_gib")] * memory]
        cells += [_error(row), _number(row, "first_call_s")]
        body.append([impl, *cells])
    return header, body


def _decoding(by_batch: Sequence[dict[str, Row]]) -> Grid:
    """A line for each implementation, in blocks of columns by what they tell."""
    names = dict.fromkeys(impl for of_impl in by_batch for impl in of_impl)
    batches = [next(iter(of_impl.values()))["batch"] for of_impl in by_batch]
    against = [name for name in _AGAINST if any(name in of_impl for of_impl in by_batch)]
    roof = any("roof_share" in row for of_impl in by_batch for row in of_impl.values())
    header = ["what runs", *(f"batch {batch}" for batch in batches)]
    header += [f"vs {name}, {batch}" for name in against for batch in batches]
    header += [f"of roof, {batch}" for batch in batches] * roof
    body = []
    for impl in names:
        line = [impl, *(_time(of_impl.get(impl)) for of_impl in by_batch)]
        for name in against:
            line += [speed(of_impl.get(name), of_impl.get(impl)) for of_impl in by_batch]
        line += [_share(of_impl.get(impl, {})) for of_impl in by_batch] * roof
        body.append([*line, *[_error(_worst(impl, by_batch))]])
    return [*header, "error"], body


def _worst(impl: str, by_batch: Sequence[dict[str, Row]]) -> Row:
    rows = [of_impl[impl] for of_impl in by_batch if "fp64_error" in of_impl.get(impl, {})]
    return max(rows, key=lambda row: float(row["fp64_error"]), default={})


def _time(row: Row | None) -> str:
    if row is None:
        return "–"
    return microseconds(row["ms"] * 1e3) if "ms" in row else "failed"


def _share(row: Row) -> str:
    return f"{row['roof_share']:.0%}" if "roof_share" in row else ""


def _error(row: Row) -> str:
    return percent(row["fp64_error"]) if "fp64_error" in row else ""


def _number(row: Row, key: str) -> str:
    return microseconds(row[key]) if row.get(key) is not None else ""
