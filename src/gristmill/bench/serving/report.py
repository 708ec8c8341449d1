"""The suite `vllm` as tables: three of each model, the first two with a row for each batch.

Names of implementations are without `nvfp4_` where they head columns: with six of them a table fits
into a terminal of 100 columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gristmill.bench.product_report import Grid
from gristmill.bench.results import Row, microseconds
from gristmill.bench.serving import goals
from gristmill.bench.serving.suite import IMPLEMENTATIONS, SUITE

VARIANTS = "variants of gristmill's"
# Kernels of a step, added up, take at least this share of its time if the GPU never waits.
_BUSY = 0.9
_TITLE = "vLLM, {}: {}"


class Part(NamedTuple):
    """A table with its title, and lines beneath it."""

    title: str
    grid: Grid
    lines: tuple[str, ...] = ()


class _Model(NamedTuple):
    """The rows of a model, by batch and implementation; both in order."""

    name: str
    impls: tuple[str, ...]
    by_batch: Mapping[int, Mapping[str, Row]]


def parts(rows: Iterable[Row]) -> list[Part]:
    """Of each model tokens/s and ms of a decode step by batch, then what an engine is and takes."""
    found = []
    for model in _models(rows):
        found.append(Part(_TITLE.format(model.name, "tokens/s"), _tokens(model), _lines(model)))
        found.append(Part(_TITLE.format(model.name, "ms per decode step"), _steps(model)))
        found.append(Part(_TITLE.format(model.name, "engines"), _engines(model)))
    return found


def is_alarm(line: str) -> bool:
    """Whether a line beneath a table says that a goal is missed."""
    return line.startswith(goals.MISSED)


def speed(other: Row | None, row: Row | None, key: str = "ms") -> str:
    """How many times as fast as the other."""
    if not other or not row or key not in other or key not in row:
        return ""
    return f"{other[key] / row[key]:.2f}x"


def _models(rows: Iterable[Row]) -> list[_Model]:
    """In the order of the suite, however the engines were put together."""
    order = list(IMPLEMENTATIONS)
    mine = [row for row in rows if row.get("suite") == SUITE]
    mine.sort(key=lambda row: order.index(row["impl"]) if row["impl"] in order else len(order))
    found = []
    for model in dict.fromkeys(row["op"] for row in mine):
        of_model = [row for row in mine if row["op"] == model]
        by_batch: dict[int, dict[str, Row]] = {row["batch"]: {} for row in of_model}
        for row in of_model:
            by_batch[row["batch"]][row["impl"]] = row
        impls = tuple(dict.fromkeys(row["impl"] for row in of_model))
        found.append(_Model(model, impls, dict(sorted(by_batch.items()))))
    return found


def _tokens(model: _Model) -> Grid:
    """The last column is the fastest NVFP4 engine of gristmill's over bf16 and Marlin's."""
    header = ["batch", *map(_short, model.impls), "vs best peer"]
    body = []
    for batch, of_batch in model.by_batch.items():
        cells = [_number(of_batch.get(impl), "tokens_per_s") for impl in model.impls]
        found = goals.compared(of_batch)
        body.append([str(batch), *cells, "" if found is None else f"{found.ratio:.2f}x"])
    return header, body


def _steps(model: _Model) -> Grid:
    header = ["batch", *map(_short, model.impls)]
    body = [
        [str(batch), *(_number(of_batch.get(impl), "ms") for impl in model.impls)]
        for batch, of_batch in model.by_batch.items()
    ]
    return header, body


def _engines(model: _Model) -> Grid:
    batches = list(model.by_batch)
    ends = list(dict.fromkeys((batches[0], batches[-1])))
    prefill = f"prefill ms, {' / '.join(map(str, ends))}"
    header = ["what runs", "GiB", "start s", prefill, VARIANTS]
    body = []
    for impl in model.impls:
        of_impl = [of_batch[impl] for of_batch in model.by_batch.values() if impl in of_batch]
        one = next((row for row in of_impl if "ms" in row), of_impl[0])
        times = [_number(model.by_batch[batch].get(impl), "prefill_ms") for batch in ends]
        cells = [_cell(one, "peak_gib"), _cell(one, "start_s"), " / ".join(times)]
        body.append([impl, *cells, _variants(one)])
    return header, body


def _lines(model: _Model) -> tuple[str, ...]:
    found = (goals.verdict(model.name, model.by_batch), _waits(model), _other_graphs(model))
    return tuple(line for line in found if line is not None)


def _waits(model: _Model) -> str | None:
    """Where a step is longer than its kernels: the host takes part, and ratios are nearer to 1."""
    waits = []
    for batch, of_batch in model.by_batch.items():
        shares = {
            impl: row["kernel_us"] / (row["ms"] * 1e3)
            for impl, row in of_batch.items()
            if "ms" in row and "kernel_us" in row
        }
        low = [f"{impl} {share:.0%}" for impl, share in shares.items() if share < _BUSY]
        if low:
            waits.append(f"batch {batch}: {', '.join(low)}")
    told = f"Kernels take less than {_BUSY:.0%} of a step, the GPU waits for the host"
    return f"{told}: {'; '.join(waits)}." if waits else None


def _other_graphs(model: _Model) -> str | None:
    """Batches that ran in a CUDA graph of another size, or in none."""
    found: dict[str, None] = {}
    for batch, of_batch in model.by_batch.items():
        for row in of_batch.values():
            if row.get("graph", batch) != batch:
                size = row["graph"]
                ran = "without one" if size is None else f"in that of {size}"
                found[f"batch {batch} ran {ran}"] = None
    return f"Not every batch has a CUDA graph of its size: {'; '.join(found)}." if found else None


def _short(impl: str) -> str:
    return impl.removeprefix("nvfp4_")


def _number(row: Row | None, key: str) -> str:
    """At most six characters."""
    if row is None:
        return "–"
    if key not in row:
        return "failed"
    value = float(row[key])
    return microseconds(value) if value < 99_999.5 else f"{value / 1e3:.0f}k"


def _cell(row: Row, key: str) -> str:
    value = row.get(key)
    return "" if value is None else microseconds(value)


def _variants(row: Row) -> str:
    """By op: `rms_norm: cuda_block, cuda_warp; nvfp4_linear: cuda_wgmma`."""
    by_op: dict[str, list[str]] = {}
    for name in row.get("choices", {}):
        op, _, variant = name.partition(":")
        by_op.setdefault(op, []).append(variant)
    return "; ".join(f"{op}: {', '.join(variants)}" for op, variants in by_op.items())
