"""The suite `vllm` as tables: by model, implementations by batch. Ratios are speeds.

In the order of the suite, however the engines were put together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gristmill.bench.product_report import Grid
from gristmill.bench.results import Row, microseconds
from gristmill.bench.serving.suite import IMPLEMENTATIONS, SUITE

VARIANTS = "variants of gristmill's"
# What each is held against, by the words of the column.
_AGAINST = {"bf16": "vs bf16", "nvfp4_marlin": "vs Marlin"}


def tables(rows: Iterable[Row]) -> list[tuple[str, Grid]]:
    """Two of each model: decode steps with what they are held against, and all else."""
    order = list(IMPLEMENTATIONS)
    mine = [row for row in rows if row.get("suite") == SUITE]
    mine.sort(key=lambda row: order.index(row["impl"]) if row["impl"] in order else len(order))
    found = []
    for model in dict.fromkeys(row["op"] for row in mine):
        of_model: dict[str, dict[int, Row]] = {}
        for row in mine:
            if row["op"] == model:
                of_model.setdefault(row["impl"], {})[row["batch"]] = row
        batches = sorted({batch for by_batch in of_model.values() for batch in by_batch})
        found.append((f"vLLM, {model}: ms per decode step", _steps(of_model, batches)))
        found.append((f"vLLM, {model}: beside decode steps", _beside(of_model, batches)))
    return found


def _steps(of_model: dict[str, dict[int, Row]], batches: list[int]) -> Grid:
    others = [name for name in _AGAINST if name in of_model]
    header = ["what runs", *(f"batch {batch}" for batch in batches)]
    header += [f"{_AGAINST[name]}, {batch}" for name in others for batch in batches]
    body = []
    for impl, by_batch in of_model.items():
        line = [impl, *(_number(by_batch.get(batch), "ms") for batch in batches)]
        for name in others:
            pairs = ((of_model[name].get(batch), by_batch.get(batch)) for batch in batches)
            line += [speed(*pair) for pair in pairs]
        body.append(line)
    return header, body


def _beside(of_model: dict[str, dict[int, Row]], batches: list[int]) -> Grid:
    header = ["what runs", *(f"tokens/s, {batch}" for batch in batches)]
    header += [f"prefill ms, {batch}" for batch in batches]
    header += ["GiB", "start s", VARIANTS]
    body = []
    for impl, by_batch in of_model.items():
        line = [impl, *(_number(by_batch.get(batch), "tokens_per_s") for batch in batches)]
        line += [_number(by_batch.get(batch), "prefill_ms") for batch in batches]
        one = next(iter(by_batch.values()))
        body.append([*line, *(_cell(one, key) for key in ("peak_gib", "start_s")), _variants(one)])
    return header, body


def speed(other: Row | None, row: Row | None, key: str = "ms") -> str:
    """How many times as fast as the other."""
    if not other or not row or key not in other or key not in row:
        return ""
    return f"{other[key] / row[key]:.2f}x"


def _number(row: Row | None, key: str) -> str:
    if row is None:
        return "–"
    return microseconds(row[key]) if key in row else "failed"


def _cell(row: Row, key: str) -> str:
    value: Any = row.get(key)
    return "" if value is None else microseconds(value)


def _variants(row: Row) -> str:
    return ", ".join(row.get("choices", {}))
