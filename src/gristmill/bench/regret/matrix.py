"""The hint by runtime matrix of the `regret` suite: what it is worth to choose.

A row per hint: the launch that was tuned at that size, run at every size of the grid, as a program
would run that tunes once. The last row is what the chooser picks at each size. All launches of one
size are timed in turns, and a launch that stands in several rows is timed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gristmill.bench.regret.families import KINDS, PRODUCT_ROWS, Family
from gristmill.bench.regret.suite import Advance, field_of, rival
from gristmill.bench.results import OURS, Results, Row, first_line
from gristmill.select.chooser import refusal, resolve
from gristmill.select.copies import sets_for_tuning
from gristmill.select.timing import Timing, time_interleaved
from gristmill.select.tuning import Candidate, Function, measure

SUITE = "matrix"
CHOSEN = "chosen"
SAMPLES = 9


@dataclass(frozen=True)
class Matrix:
    """A family, the sizes that launches are tuned at, and those they are run at."""

    family: Family
    hints: tuple[int, ...]
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.family}, tuned at {', '.join(map(str, self.hints))}"


# Few rows, a batch, and more than fill a GPU; for products those that Inductor was tried with.
_HINTS, _PRODUCT_HINTS = (1, 256, 16384), (64, 256, 4096)
_SIZES = tuple(2**power for power in range(17))
_QUICK_SIZES, _QUICK_PRODUCT_SIZES = _SIZES[::4], tuple(2**power for power in range(6, 13))
_NAMES = ("linear_silu", "rms_norm", "rms_norm_bwd")


def matrices(
    device_type: str, *, quick: bool = False, names: Sequence[str] = (), dtype: str = "bfloat16"
) -> list[Matrix]:
    """The matrices to measure: a product and two row ops, of `names` if any are given."""
    found = []
    for name in _NAMES:
        kind = KINDS[name]
        if names and name not in names:
            continue
        if device_type != "cuda":
            found.append(Matrix(Family(name, kind.cpu[0], dtype), (4, 64), (4, 16, 64)))
        elif kind.product:
            sizes = _QUICK_PRODUCT_SIZES if quick else PRODUCT_ROWS
            found.append(Matrix(Family(name, (4096, 4096), dtype), _PRODUCT_HINTS, sizes))
        else:
            sizes = _QUICK_SIZES if quick else _SIZES
            found.append(Matrix(Family(name, (4096,), dtype), _HINTS, sizes))
    return found


def todo(found: Sequence[Matrix], results: Results) -> list[Matrix]:
    """The matrices that the results lack, each with the sizes that they lack."""

    def lacks(matrix: Matrix, size: int) -> bool:
        return not results.has(suite=SUITE, **matrix.family.problem(size))

    left = [
        replace(matrix, sizes=tuple(size for size in matrix.sizes if lacks(matrix, size)))
        for matrix in found
    ]
    return [matrix for matrix in left if matrix.sizes]


def steps(found: Sequence[Matrix]) -> int:
    return sum(len(matrix.hints) + len(matrix.sizes) for matrix in found)


def run(
    found: Sequence[Matrix],
    device: torch.device,
    results: Results,
    advance: Advance,
    *,
    samples: int = SAMPLES,
) -> None:
    """Measure every matrix; `advance` is told about each size before it starts."""
    for matrix in todo(found, results):
        launches: dict[int, Candidate] = {}
        for hint in matrix.hints:
            advance(f"matrix {matrix.family}: tuned at {hint}")
            launches[hint] = tuned_at(matrix.family, hint, device)
        for size in matrix.sizes:
            advance(f"matrix {matrix.family}: run at {size}")
            try:
                results.add(column(matrix.family, size, launches, device, samples))
            except torch.OutOfMemoryError as error:
                results.note(f"left out: {matrix.family} at {size}: {first_line(error)}")
            if device.type == "cuda":
                torch.cuda.empty_cache()


def tuned_at(family: Family, hint: int, device: torch.device) -> Candidate:
    """The launch that a table has for this size; where none speaks of it, the winner of a tuning.

    What is measured here is not remembered.
    """
    op = family.op
    args = family.arguments(hint, device)
    problem = op.problem(*args)
    choice, _ = resolve(op.name, op.variants, problem)
    if choice.source != "preference":
        return Candidate(choice.variant, choice.config)
    field = field_of(op, problem, args)
    measured = measure(
        field.plans,
        args,
        incumbent=field.picked,
        l2_bytes=problem.device.l2_bytes,
        written=op.written,
    )
    return field.named[measured.winner]


def column(
    family: Family,
    size: int,
    launches: Mapping[int, Candidate],
    device: torch.device,
    samples: int,
) -> list[Row]:
    """The cells of one size: a row of results for each hint, and one for what is chosen."""
    op = family.op
    args = family.arguments(size, device)
    problem = op.problem(*args)
    choice, plan = resolve(op.name, op.variants, problem)
    chosen = Candidate(choice.variant, choice.config)
    plans: dict[str, Function] = {str(chosen): plan}
    failures: dict[str, str] = {}
    with torch.no_grad():
        expected = plan(*args)
        for launch in launches.values():
            name = str(launch)
            if name in plans or name in failures:
                continue
            reason = refusal(launch.variant, problem)
            if reason is None:
                try:
                    plans[name] = rival(launch, problem, args, expected)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:  # it was tuned for another size, and may not fit this
                    reason = f"{type(error).__name__}: {first_line(error)}"
            if reason is not None:
                failures[name] = reason
        del expected
        sets = sets_for_tuning(args, problem.device.l2_bytes, written=op.written)
        times = time_interleaved(plans, sets, samples=samples)
    head = {"suite": SUITE, **family.problem(size), "impl": OURS, "error": None}
    lines: list[tuple[int | str, Candidate]] = [*launches.items(), (CHOSEN, chosen)]
    return [
        {**head, "hint": hint, "launch": str(launch), **_cell(str(launch), times, failures)}
        for hint, launch in lines
    ]


def _cell(
    name: str, times: Mapping[str, Timing | Exception], failures: Mapping[str, str]
) -> dict[str, Any]:
    """The time of a launch; where it cannot run at this size, which is no failure of ours, why."""
    timing = times.get(name)
    if isinstance(timing, Timing):
        return {"us": round(timing.us, 3), "spread_us": round(timing.spread_us, 3)}
    if timing is None:
        return {"impossible": failures[name]}
    return {"impossible": f"{type(timing).__name__}: {first_line(timing)}"}
