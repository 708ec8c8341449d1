"""The `choice` suite: what choosing costs the host.

Every call pays for looking up the plan of its problem; the first call of a problem pays for making
the choice, and where it is asked to tune, for that.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gristmill.bench.fresh import in_fresh_process
from gristmill.bench.regret.families import KINDS, Family
from gristmill.bench.results import OURS, Results, Row
from gristmill.bench.suites import known, written
from gristmill.errors import GristmillError
from gristmill.multikernel import MultiKernel
from gristmill.select.chooser import resolve
from gristmill.select.device import device_of
from gristmill.select.sight import placed
from gristmill.select.tables import remember, reset_tables
from gristmill.select.timing import time_host
from gristmill.select.tuning import tune

# What a choice may cost: a lookup on every call, tuning once per problem.
LOOKUP_US, TUNING_S = 1.5, 0.5
CANDIDATES = 4
SUITE = "choice"
MULTIKERNEL, _FLOAT = "MultiKernel", "float32"
# What is told, as "what" of a row.
LOOKUP = "lookup on every call"
BEYOND = "a call beyond the bare function"
FIRST = "first choice, by a table"
NEXT = "the same of the next problem of a process"

_LOOKED_UP = ("rms_norm", "linear_silu", "softmax")
_TUNED = ("rms_norm", "linear_silu")
_ROWS, _OTHER_ROWS = 256, 1024
# Sizes of one bucket: a row measured at 64 speaks for all of them.
_BUCKET = range(40, 104, 2)
_ROUNDS, _BLOCKS, _CALLS = 3, 3, 5_000

Advance = Callable[[str], None]


@dataclass(frozen=True)
class Step:
    """What is measured at once: `what` of its rows, and how they are made."""

    text: str
    op: str
    what: str
    rows: Callable[[], Iterable[Row]]


def planned(
    device: torch.device, *, dtype: str = "bfloat16", repeats: int = 3, names: Sequence[str] = ()
) -> list[Step]:
    """Everything there is to measure, or of that what is named."""
    found: list[Step] = []
    families = {name: _family(name, dtype, device) for name in (*_LOOKED_UP, *_TUNED)}

    def step(text: str, op: str, what: str, rows: Callable[[], Iterable[Row]]) -> None:
        found.append(Step(text, op, what, rows))

    for name in _LOOKED_UP:
        step(
            *(f"lookup, {families[name]}", name, LOOKUP),
            partial(_lookup_rows, families[name], device),
        )
    step("MultiKernel", MULTIKERNEL, BEYOND, partial(_multikernel_rows, device))
    for name in _LOOKED_UP:
        step(
            *(f"first choice, {families[name]}", name, FIRST),
            partial(_first_choice_rows, families[name], device),
        )
    for name in _TUNED:
        # The last of its rows; the others are there when this is.
        step(
            *(f"first-call tuning, {families[name]}", name, NEXT),
            partial(tuning_rows, families[name], device, repeats),
        )
    there = list(dict.fromkeys(one.op for one in found))
    wanted = [known("op", name, there) for name in names]
    return [one for one in found if not names or one.op in wanted]


def run(planned: Sequence[Step], dtype: str, results: Results, advance: Advance) -> None:
    """Measure everything; `advance` is told about each step before it starts."""
    for step in planned:
        advance(f"{SUITE}: {step.text}")
        about = {"suite": SUITE, "op": step.op, "what": step.what}
        if not results.has(**about, dtype=_FLOAT if step.op == MULTIKERNEL else dtype):
            results.add(list(step.rows()))


def _lookup_rows(family: Family, device: torch.device) -> list[Row]:
    us = lookup_us(family, device)
    return [_row(family, _ROWS, LOOKUP, us=us, limit=LOOKUP_US)]


def _multikernel_rows(device: torch.device) -> list[Row]:
    head = {"suite": SUITE, "op": MULTIKERNEL, "dtype": _FLOAT, "M": 16, "N": 64}
    cost = _cost(BEYOND, us=multikernel_us(device), limit=LOOKUP_US)
    return [{**head, "impl": OURS, "error": None, **cost}]


def _first_choice_rows(family: Family, device: torch.device) -> list[Row]:
    return [_row(family, _BUCKET[0], FIRST, us=first_choice_us(family, device))]


def lookup_us(family: Family, device: torch.device) -> float:
    """Host time to make the key of a call and find its plan, which is there.

    Less what it takes to call a function that does nothing, since an op does this in line.
    """
    op, args = family.op, family.arguments(_ROWS, device)
    op.run(*args)
    key, get = op._key, op._plans.get
    if get(key(*args)) is None:
        raise GristmillError(f"{op.name} has not remembered its plan")
    return _beyond(lambda *args: get(key(*args)), lambda *args: None, args)


def multikernel_us(device: torch.device) -> float:
    """Host time that a MultiKernel of two tensors adds to the function that it picks."""
    kernel = MultiKernel("bench_choice", {"first": _first, "second": _second})
    args = (torch.zeros(16, 64, device=device), torch.zeros(16, 64, device=device))
    kernel(*args)
    return _beyond(kernel, _first, args)


def _beyond(function: Callable[..., Any], bare: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """Host time of a call of `function` less that of `bare`, in turns; the best of each."""
    best = [math.inf, math.inf]
    for _ in range(_ROUNDS):
        for index, one in enumerate((function, bare)):
            best[index] = min(best[index], time_host(one, args, blocks=_BLOCKS, calls=_CALLS))
    return best[0] - best[1]


def first_choice_us(family: Family, device: torch.device) -> float:
    """Host time of a choice that a table makes, its kernel loaded: problem, lookup, plan.

    The median over sizes of one bucket, each met for the first time. The row is measured here, and
    forgotten again.
    """
    op, here = family.op, device_of(device)
    calls = [family.arguments(rows, device) for rows in _BUCKET]
    middle = family.arguments(64, device)
    problem = op.problem(*middle)
    key, covers = placed(problem)
    outcome = tune(op.name, op.variants, problem, middle, key=key, covers=covers)
    try:
        remember(here, [outcome.row], keep=False)
        times = []
        for args in (*calls, *calls):  # the first pass loads kernels
            start = time.perf_counter()
            choice, _ = resolve(op.name, op.variants, op.problem(*args))
            times.append(time.perf_counter() - start)
            if choice.source == "preference":
                raise GristmillError(f"{op.name}: no table spoke for {args[0].shape[0]} rows")
    finally:
        reset_tables()
    return median(times[len(calls) :]) * 1e6


def tuning_rows(family: Family, device: torch.device, repeats: int) -> Iterator[Row]:
    """Seconds of a first call that tunes: nothing compiled, all compiled, and in mid-program.

    The first two are the first calls of fresh processes, the last is the second problem of one
    whose kernels were compiled before, too. Medians of `repeats`, but for the empty cache.
    """
    empty: list[dict[str, Any]] = []
    warm: list[list[dict[str, Any]]] = []
    try:
        with tempfile.TemporaryDirectory(prefix="gristmill-bench-") as folder:
            for _ in range(1 + repeats):
                tuned = _tuned(family, device, Path(folder))
                if empty:
                    warm.append(tuned)
                else:
                    empty = tuned
                # What was tuned is kept with the kernels, and would not be tuned again.
                shutil.rmtree(Path(folder) / "tables", ignore_errors=True)
    except GristmillError as error:
        yield {**_row(family, _ROWS, "first-call tuning"), "error": str(error)}
        return
    yield _tuning_row(family, _ROWS, "first-call tuning, nothing compiled before", empty[:1])
    first, second = ([tuned[index] for tuned in warm] for index in (0, 1))
    what = "first-call tuning, kernels compiled before"
    yield _tuning_row(family, _ROWS, what, first, limit=TUNING_S)
    yield _tuning_row(family, _OTHER_ROWS, NEXT, second, limit=TUNING_S)


def _tuned(family: Family, device: torch.device, cache: Path) -> list[dict[str, Any]]:
    environment = {"GRISTMILL_CACHE_DIR": str(cache), "GRISTMILL_TUNE": "first-call"}
    words = [family.name, written(family.dims), family.dtype, str(device), str(CANDIDATES)]
    words += [str(_ROWS), str(_OTHER_ROWS)]
    module, what = "gristmill.bench.choice.first_tuning", f"tuning of {family}"
    tuned: list[dict[str, Any]] = in_fresh_process(module, words, environment, what)["tuned"]
    return tuned


def _tuning_row(
    family: Family,
    rows: int,
    what: str,
    runs: list[dict[str, Any]],
    limit: float | None = None,
) -> Row:
    seconds = median(run["seconds"] for run in runs)
    return {
        **_row(family, rows, what, seconds=seconds, limit=limit),
        "candidates": runs[0]["candidates"],
        "compiles": runs[0]["compiles"],
    }


def _family(name: str, dtype: str, device: torch.device) -> Family:
    kind = KINDS[name]
    dims = (kind.quick if device.type == "cuda" else kind.cpu)[0]
    return Family(name, dims, dtype)


def _row(family: Family, rows: int, what: str, **cost: float | None) -> Row:
    head = {"suite": SUITE, **family.problem(rows), "impl": OURS, "error": None}
    return {**head, **_cost(what, **cost)}


def _cost(
    what: str,
    *,
    us: float | None = None,
    seconds: float | None = None,
    limit: float | None = None,
) -> dict[str, Any]:
    """A cost in µs or in seconds, and the limit in the same unit, if there is one."""
    cost: dict[str, Any] = {"what": what, "limit": limit}
    if us is not None:
        cost["choice_us"] = round(us, 3)
    if seconds is not None:
        cost["choice_s"] = round(seconds, 4)
    return cost


def _first(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x


def _second(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y
