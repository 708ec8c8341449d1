"""The `regret` suite: how much slower the picked kernel is than the best there is.

    regret = picked_us / best_us - 1

At each problem the launch that the chooser picks is timed against every candidate: all variants
that can run it, each with all configs that it thinks worth timing. A first round drops the
hopeless; pick and best are then compared in one round, sample by sample. The number is reported as
it is, noise included: the best of several equals is a little faster than any of them, so that even
a perfect choice has some regret. Nothing that is measured here changes a later choice.

A rival whose result is not that of the pick is not timed. Which of the two is wrong is not known
here, so such a problem is not judged: what was timed only says that its regret is no less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gristmill.bench.check import WrongResultError, check
from gristmill.bench.inputs import Arguments
from gristmill.bench.regret.families import Point
from gristmill.bench.results import OURS, Results, Row, described, first_line
from gristmill.errors import GristmillError
from gristmill.jit.compilers import Compilable
from gristmill.ops.op import Op
from gristmill.select.chooser import ranked, resolve
from gristmill.select.copies import rotation_count
from gristmill.select.device import device_of
from gristmill.select.problem import Problem
from gristmill.select.timing import Timing
from gristmill.select.tuning import GROUP, Candidate, Function, candidates, measure

Advance = Callable[[str], None]

SUITE = "regret"
# What a choice may cost: on average over a family's sizes, and at the worst of them.
MEAN_GOAL, WORST_GOAL = 0.03, 0.10
# Of the memory that is free; the rest is left to what cannot be foreseen, such as workspaces.
_SHARE = 0.8


@dataclass(frozen=True)
class Field:
    """Everything that could run a problem, ready to run, and which of it was picked.

    `plans` are by name, the pick among them; `failures` say why a candidate is not. `differing` are
    those that are not because they give something else than the pick.
    """

    picked: str
    source: str
    plans: Mapping[str, Function]
    named: Mapping[str, Candidate]
    failures: Mapping[str, str]
    differing: Sequence[str] = ()


def todo(points: Iterable[Point], results: Results) -> list[Point]:
    """The points that the results lack."""
    return [
        point
        for point in points
        if not results.has(suite=SUITE, **point.family.problem(point.rows))
    ]


def run(points: Sequence[Point], device: torch.device, results: Results, advance: Advance) -> None:
    """Measure every point; `advance` is told about each before it starts."""
    for point in points:
        advance(f"regret {point}")
        try:
            reason = too_large(point, device)
            if reason is None:
                results.add([_row(point, device)])
            else:
                results.note(f"left out: {point}: {reason}")
        except torch.OutOfMemoryError as error:
            results.note(f"left out: {point}: not enough memory: {first_line(error)}")
        except (GristmillError, RuntimeError) as error:
            results.add([{**_head(point), "error": described(error)}])
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _row(point: Point, device: torch.device) -> Row:
    op = point.family.op
    args = point.family.arguments(point.rows, device)
    problem = op.problem(*args)
    field = field_of(op, problem, args)
    measured = measure(
        field.plans,
        args,
        incumbent=field.picked,
        l2_bytes=problem.device.l2_bytes,
        written=op.written,
    )
    failures = {**field.failures, **measured.failures}
    if field.picked not in measured.timings:
        reason = failures.get(field.picked, "no reason given")
        raise GristmillError(f"what is picked, {field.picked}, could not be timed: {reason}")
    # The winner and the second were both in the last round; the incumbent wins by noise, too.
    last = [name for name in (measured.winner, measured.second) if name is not None]
    best = min(last, key=lambda name: measured.timings[name].us)
    times = measured.timings
    verdict = judged(field.picked, times[field.picked], best, times[best])
    if field.differing:
        verdict["regret_at_least"] = verdict.pop("regret")
        verdict["differing"] = list(field.differing)
    return {
        **_head(point),
        **verdict,
        "source": field.source,
        "candidates": len(times),
        "variants": by_variant(field.named, times),
        "failures": failures,
    }


def judged(picked: str, picked_timing: Timing, best: str, best_timing: Timing) -> Row:
    """What a row says of a pick and of the best: both, their times and spreads, the regret."""
    return {
        "picked": picked,
        "best": best,
        "picked_us": round(picked_timing.us, 3),
        "best_us": round(best_timing.us, 3),
        "picked_spread_us": round(picked_timing.spread_us, 3),
        "best_spread_us": round(best_timing.spread_us, 3),
        "regret": round(picked_timing.us / best_timing.us - 1, 5),
        "method": best_timing.method,
    }


def by_variant(named: Mapping[str, Candidate], timings: Mapping[str, Timing]) -> dict[str, float]:
    """The best time of each variant, some of them of the first round only: for orientation."""
    times: dict[str, float] = {}
    for name, timing in timings.items():
        variant = named[name].variant.name
        times[variant] = round(min(timing.us, times.get(variant, math.inf)), 3)
    return dict(sorted(times.items(), key=lambda one: one[1]))


def field_of(op: Op, problem: Problem, args: Arguments) -> Field:
    """The pick and its rivals, bound and checked: what differs from the pick's results is out."""
    choice, plan = resolve(op.name, op.variants, problem)
    picked = Candidate(choice.variant, choice.config)
    plans: dict[str, Function] = {str(picked): plan}
    named = {str(picked): picked}
    failures: dict[str, str] = {}
    differing: list[str] = []
    with torch.no_grad():
        expected = plan(*args)
        for candidate in candidates(op.variants, problem, picked, thorough=True):
            name = str(candidate)
            if name not in plans:
                try:
                    plans[name] = rival(candidate, problem, args, expected)
                    named[name] = candidate
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:  # it may fail in any way: it is reported, not timed
                    if isinstance(error, WrongResultError):
                        differing.append(name)
                    failures[name] = described(error)
    return Field(str(picked), choice.source, plans, named, failures, differing)


def rival(candidate: Candidate, problem: Problem, args: Arguments, expected: Any) -> Function:
    """The plan of a candidate; raises where it cannot be built, or gives something else."""
    plan = candidate.variant.bind(problem, candidate.config)
    # Another variant may round once more: only what is another function must not win.
    check(plan(*args), expected, coarse=True)
    return plan


def programs(points: Iterable[Point], device: torch.device) -> list[Compilable]:
    """Everything that the points' candidates are compiled from, each once; on a CPU nothing."""
    here = device_of(device)
    found: dict[Compilable, None] = {}
    for point in points:
        op, args = point.family.op, point.family.arguments(point.rows, "meta", here)
        problem = op.problem(*args, device=here)
        for candidate in _candidates(op, problem):
            found.update(dict.fromkeys(candidate.variant.programs(problem, candidate.config)))
    return list(found)


def _candidates(op: Op, problem: Problem) -> list[Candidate]:
    choice = ranked(op.name, op.variants, problem)[0]
    picked = Candidate(choice.variant, choice.config)
    return candidates(op.variants, problem, picked, thorough=True)


def too_large(point: Point, device: torch.device) -> str | None:
    """Why a problem does not fit beside the results of its candidates, if so.

    The graph of each candidate of a group holds memory for its own outputs.
    """
    if device.type != "cuda":
        return None
    op, here = point.family.op, device_of(device)
    args = point.family.arguments(point.rows, "meta", here)
    count = len(_candidates(op, op.problem(*args, device=here)))
    read, results = nbytes(args), nbytes(op.outputs(*args))
    copies = rotation_count(read, here.l2_bytes)
    needed = read * (1 if copies == 1 else 1 + copies) + results * (min(GROUP, count) + 2)
    free, _ = torch.cuda.mem_get_info(here.index)
    if needed <= _SHARE * free:
        return None
    return f"needs {needed / 1e9:.0f} GB with {count} candidates, {free / 1e9:.0f} GB are free"


def nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(nbytes, value)) if isinstance(value, (tuple, list)) else 0


def _head(point: Point) -> Row:
    problem = point.family.problem(point.rows)
    return {"suite": SUITE, **problem, "impl": OURS, "error": None}
