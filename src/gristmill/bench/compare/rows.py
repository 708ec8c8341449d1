"""What two files of results are compared by: a reading per measure, problem and implementation.

A reading is a number, how far it can be trusted (the standard error of its median, from the spread
and the number of samples in the row) and who made it. The copy that a problem was measured beside
is a reading as well, and so is torch's own part of a cold start: they witness the machine.

Left out: cells of a matrix, which are launches that are not chosen; first calls of kernel rows,
which follow from what the cache held; their host times, taken once and not in turns (on an H200 the
same code gave 12.7 and 18.5 µs): the suite `host_cost` is for these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gristmill.bench.results import OURS, Results, Row, label

# Standard error of a median of normal samples: 1.2533 sigma / sqrt(n); IQR = 1.349 sigma.
_MEDIAN, _IQR = 1.2533, 1.349
# Expected range of n normal samples, in sigma.
_RANGE = {2: 1.128, 3: 1.693, 4: 2.059, 5: 2.326, 6: 2.534, 7: 2.704, 8: 2.847, 9: 2.970, 10: 3.078}
# Rows of regret do not say of how many samples their spread is; the last round has at least these.
_REGRET_SAMPLES = 5
COPY, TORCH = "copy", "torch"


@dataclass(frozen=True)
class Measure:
    """A kind of number: what makes a change of it worth a word, and what it scatters by.

    `least` and `floor` are the least change that counts, relative and in `unit`; of values below
    `small` only, where that is given. `scatter` is what a number of this kind moves between two
    runs of the same code, relative, as one standard deviation: a first guess, which the witnesses
    of the two files correct.
    """

    name: str
    unit: str
    scatter: float
    least: float = 0.0
    floor: float = 0.0
    small: float = math.inf

    def threshold(self, asked: float, value: float) -> float:
        """The relative change of `value` that counts, where `asked` is what the caller wants."""
        if value >= self.small:
            return asked
        return max(asked, self.least, self.floor / value)


MEASURES = {
    one.name: one
    for one in (
        # Copies and peers of two runs on the same H200 (2026-11-15) moved by 0.7% in the median.
        Measure("kernel", "µs", 0.01, least=0.05, floor=0.1, small=5.0),
        # Two host runs an hour apart on that machine: eager's calls differed by 10% to 97%.
        Measure("host", "µs", 0.05, least=0.10, floor=0.5),
        Measure("model", "ms", 0.02),
        Measure("start", "s", 0.10, least=0.10, floor=0.02),
        # Pick and best are timed in turns: what the machine does cancels out.
        Measure("regret", "x", 0.01),
    )
}


class Key(NamedTuple):
    """What must be the same in both files for two numbers to be of the same thing."""

    measure: str
    op: str
    problem: str
    impl: str


@dataclass(frozen=True)
class Reading:
    """A number; `error` is its standard error, relative.

    `choice` is what ran: the variant's name, then the values of its config as name=value; of a
    whole model op:variant of each kind of call.
    """

    value: float
    error: float
    peer: str
    ours: bool = False
    choice: str = ""


@dataclass
class Readings:
    """All of a file: what was measured, and why what was not."""

    values: dict[Key, Reading] = field(default_factory=dict)
    failures: dict[Key, str] = field(default_factory=dict)


def readings(results: Results) -> Readings:
    """Every comparable number of a file; of a problem that is there twice the last counts."""
    found = Readings()
    # A CPU's copy witnesses nothing: caches and page faults decide it.
    copies = results.meta.get("device") != "cpu"
    for row in results.rows:
        key = _key(row)
        if key is None:
            continue
        found.values.pop(key, None)
        found.failures.pop(key, None)
        if isinstance(row.get("error"), str):
            found.failures[key] = row["error"]
            continue
        for measure, impl, reading in _of_row(row, copies=copies):
            found.values[key._replace(measure=measure, impl=impl)] = reading
    return found


def _key(row: Row) -> Key | None:
    """The row's own key; None of rows that nothing is compared by."""
    suite, op = row.get("suite"), row["op"]
    if suite == "matrix" or (suite is None and "cache" in row):  # the latter: starts of old files
        return None
    if "mode" in row:
        measure = "host"
    elif suite is None:
        measure = "kernel"
    else:
        measure, op = _measure(suite, row), f"{suite}: {op}"
    parts = [row.get("dtype"), _shape(row), row.get("mode"), row.get("what"), row.get("cache")]
    return Key(measure, op, " ".join(str(part) for part in parts if part), row["impl"])


def _measure(suite: str, row: Row) -> str:
    if suite == "choice":
        return "start" if "choice_s" in row else "host"
    return {"regret": "regret", "cold_start": "start"}.get(suite, "model")


def _shape(row: Row) -> str:
    return label(row) if "shape" in row or "M" in row else ""


def _of_row(row: Row, *, copies: bool) -> Iterator[tuple[str, str, Reading]]:
    """The measures of a row that was timed, each with whose number it is."""
    impl = row["impl"]
    ours = impl == OURS or bool(row.get("ours"))
    about: dict[str, Any] = {"peer": str(row.get("peer", impl)), "ours": ours}
    if "us" in row and "suite" not in row:
        error = _of_spread(row["us"], row["spread_us"], row["samples"])
        yield "kernel", impl, Reading(row["us"], error, choice=_choice(row), **about)
        if copies and row.get("roof_us"):
            yield "kernel", COPY, Reading(row["roof_us"], 0.0, COPY)
    if row.get("host_us") and "mode" in row:
        yield "host", impl, Reading(row["host_us"], 0.0, **about)
    if row.get("choice_us"):
        yield "host", impl, Reading(row["choice_us"], 0.0, **about)
    if row.get("choice_s"):
        yield "start", impl, Reading(row["choice_s"], 0.0, **about)
    if row.get("beyond_s"):
        spread = float(row.get("most_s", 0.0)) - float(row.get("least_s", 0.0))
        error = _of_range(row["beyond_s"], spread, row.get("repeats", 1))
        yield "start", impl, Reading(row["beyond_s"], error, **about)
        yield "start", TORCH, Reading(row["torch_s"], 0.0, TORCH)
    if (row.get("ms") or 0) > 0:  # a difference of two times can come out negative, and is none
        # Rows of a block tell the interquartile range of samples, those of whole models the range.
        of = _of_spread if row.get("suite") == "end_to_end" else _of_range
        error = of(row["ms"], row.get("spread_ms", 0.0), row.get("repeats", 1))
        yield "model", impl, Reading(row["ms"], error, choice=_choices(row), **about)
    if "regret" in row:
        yield "regret", impl, _regret(row, about)


def _regret(row: Row, about: Mapping[str, Any]) -> Reading:
    errors = [
        _of_spread(row[f"{one}_us"], row[f"{one}_spread_us"], _REGRET_SAMPLES)
        for one in ("picked", "best")
    ]
    return Reading(1 + row["regret"], math.hypot(*errors), choice=row["picked"], **about)


def _choice(row: Row) -> str:
    """As rows of regret write it."""
    values = (row.get("config") or {}).items()
    return " ".join([row.get("variant", ""), *(f"{name}={value}" for name, value in values)])


def _choices(row: Row) -> str:
    """Of a whole model: which variants its calls ran on, without how often."""
    return " ".join(sorted(row.get("choices", {})))


def _of_spread(value: float, spread: float, samples: int) -> float:
    """The relative standard error of a median, from the interquartile range."""
    return _MEDIAN * spread / _IQR / math.sqrt(samples) / value


def _of_range(value: float, spread: float, repeats: int) -> float:
    """The same from the range; of a single run nothing is known."""
    if repeats < 2:
        return 0.0
    sigma = spread / _RANGE[min(repeats, max(_RANGE))]
    return _MEDIAN * sigma / math.sqrt(repeats) / value
