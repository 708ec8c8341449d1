"""The `regret` suite: how much slower the picked kernel is than the best, and than the rule's.

    regret = picked_us / best_us - 1

At each problem the launch that runs (the pick: by a table, where one has an entry) is timed against
what would run without tables (the rule) and against every candidate: all variants that can run it,
each with all configs that it thinks worth timing, or with all that it enumerates. A first round
with few samples finds the candidates that go into the last one; all times that are compared are
medians of that last round, in which candidates take turns, sample by sample. The number is reported
as it is, noise included: the best of several equals is a little faster than any of them, so that
even a perfect choice has some regret. Nothing that is measured here changes a later choice.

A rival whose result is not that of the pick is not timed. Which of the two is wrong is not known
here, so such a problem is not judged: what was timed only says that its regret is no less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gristmill.bench.check import WrongResultError, check, check_lines
from gristmill.bench.inputs import Arguments
from gristmill.bench.regret.families import Point
from gristmill.bench.regret.sampling import Sampling
from gristmill.bench.results import OURS, Results, Row, described, first_line
from gristmill.errors import GristmillError
from gristmill.jit.compilers import Compilable
from gristmill.ops.op import Op
from gristmill.select.chooser import by_heuristics, ranked, resolve
from gristmill.select.copies import rotation_count
from gristmill.select.device import device_of
from gristmill.select.problem import Problem
from gristmill.select.tables import tables_for
from gristmill.select.tuning import (
    GROUP,
    HEAT_SAMPLES,
    Candidate,
    Function,
    Race,
    candidates,
    race,
)

Advance = Callable[[str], None]

SUITE = "regret"
# In the last round, which so many of the fastest of the first one go into.
SAMPLES, FINALISTS = 20, 8
# Value of "launches" in rows for which variants gave every launch that they enumerate.
ALL_LAUNCHES = "all"
# Of the memory that is free; the rest is left to what cannot be foreseen, such as workspaces.
_SHARE = 0.8


@dataclass(frozen=True)
class Method:
    """How points are measured: samples of the last round, and whether all launches take part."""

    samples: int = SAMPLES
    all_launches: bool = False


@dataclass(frozen=True)
class Field:
    """Everything that could run a problem, ready to run, and which of it was picked.

    `rule`: what would run without tables; None where that cannot be built. `plans` are by name, the
    pick and the rule among them; `failures` say why a candidate is not. `differing` are those that
    are not because they give something else than the pick.
    """

    picked: str
    source: str
    rule: str | None
    plans: Mapping[str, Function]
    named: Mapping[str, Candidate]
    failures: Mapping[str, str]
    differing: Sequence[str] = ()


def todo(points: Iterable[Point], results: Results, method: Method = Method()) -> list[Point]:
    """The points that the results lack; with all launches, those that lack a row of these."""
    launches = {"launches": ALL_LAUNCHES} if method.all_launches else {}
    return [
        point
        for point in points
        if not results.has(suite=SUITE, **point.family.problem(point.rows), **launches)
    ]


def describe(meta: dict[str, Any], sample: Sampling | None, method: Method) -> None:
    """Write into the meta of a run how problems are measured, and drawn, if any are.

    A run that goes on with another seed has the problems of both.
    """
    before = meta.get(SUITE, {})
    drawn: dict[str, Any] = {}
    if sample is not None:
        drawn = {
            "seeds": list(dict.fromkeys([*before.get("seeds", []), sample.seed])),
            "sizes": sample.sizes,
            "weights": sample.weights,
            "grid": sample.grid or before.get("grid", False),
        }
    meta[SUITE] = {
        **before,
        **drawn,
        "first_samples": HEAT_SAMPLES,
        "samples": method.samples,
        "finalists": FINALISTS,
        "all_launches": method.all_launches,
    }


def run(
    points: Sequence[Point],
    device: torch.device,
    results: Results,
    advance: Advance,
    method: Method = Method(),
) -> None:
    """Measure every point; `advance` is told about each before it starts."""
    for point in points:
        advance(f"regret {point}")
        try:
            reason = too_large(point, device, all_launches=method.all_launches)
            if reason is None:
                results.add([_row(point, device, method)])
            else:
                results.note(f"left out: {point}: {reason}")
        except torch.OutOfMemoryError as error:
            results.note(f"left out: {point}: not enough memory: {first_line(error)}")
        except (GristmillError, RuntimeError) as error:
            results.add([{**_head(point), "error": described(error)}])
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _row(point: Point, device: torch.device, method: Method) -> Row:
    op = point.family.op
    args = point.family.arguments(point.rows, device)
    problem = op.problem(*args)
    loose = point.family.kind.loose
    field = field_of(op, problem, args, loose=loose, all_launches=method.all_launches)
    timed = race(
        field.plans,
        args,
        always=[name for name in (field.picked, field.rule) if name is not None],
        finalists=FINALISTS,
        samples=method.samples,
        hopeless=None,  # no candidate is dropped: every median is of as many samples
        l2_bytes=problem.device.l2_bytes,
        written=op.written,
    )
    lacked = timed.errors.get(field.picked)
    if isinstance(lacked, torch.OutOfMemoryError):  # there was no room beside the copies
        raise lacked
    failed = {name: described(error) for name, error in timed.errors.items()}
    failures = {**field.failures, **failed}
    if field.picked not in timed.last:
        reason = failures.get(field.picked, "no reason given")
        raise GristmillError(f"what is picked, {field.picked}, could not be timed: {reason}")
    verdict = judged(field.picked, field.rule, timed)
    if field.differing:
        verdict["regret_at_least"] = verdict.pop("regret")
        verdict["differing"] = list(field.differing)
    every = {**timed.first, **timed.last}
    return {
        **_head(point),
        **verdict,
        "source": field.source,
        "tabled": tabled(problem),
        "samples": method.samples,
        "candidates": len(every),
        "finalists": len(timed.last),
        **({"launches": ALL_LAUNCHES} if method.all_launches else {}),
        "variants": by_variant(field.named, timed),
        "failures": failures,
    }


def tabled(problem: Problem) -> bool:
    """Whether a table in force has an entry for problems of this family, at any row count."""
    return any(source.table.family(problem) for source in tables_for(problem.device))


def judged(picked: str, rule: str | None, timed: Race) -> Row:
    """What a row says of the pick, the rule and the best: times, spreads, regrets."""
    last = timed.last
    best = min(last, key=lambda name: last[name].us)
    names = {"picked": picked, "best": best}
    if rule is not None and rule in last:
        names["rule"] = rule
    row: Row = dict(names)
    for key, name in names.items():
        row[f"{key}_us"] = round(last[name].us, 3)
        row[f"{key}_spread_us"] = round(last[name].spread_us, 3)
    row["regret"] = round(last[picked].us / last[best].us - 1, 5)
    if "rule" in names:
        row["rule_regret"] = round(last[names["rule"]].us / last[best].us - 1, 5)
        row["over_rule"] = round(last[picked].us / last[names["rule"]].us - 1, 5)
    row["method"] = last[best].method
    return row


def by_variant(named: Mapping[str, Candidate], timed: Race) -> dict[str, float]:
    """The best time of each variant, some of them of the first round only: for orientation."""
    times: dict[str, float] = {}
    for name, timing in {**timed.first, **timed.last}.items():
        variant = named[name].variant.name
        times[variant] = round(min(timing.us, times.get(variant, math.inf)), 3)
    return dict(sorted(times.items(), key=lambda one: one[1]))


def field_of(
    op: Op,
    problem: Problem,
    args: Arguments,
    *,
    loose: float | None = None,
    all_launches: bool = False,
) -> Field:
    """The pick and its rivals, bound and checked: what differs from the pick's results is out.

    `loose`: as in `families.Kind`.
    """
    choice, plan = resolve(op.name, op.variants, problem)
    picked = Candidate(choice.variant, choice.config)
    rule, rivals = entrants(op, problem, picked, all_launches=all_launches)
    plans: dict[str, Function] = {str(picked): plan}
    named = {str(picked): picked}
    failures: dict[str, str] = {}
    differing: list[str] = []
    with torch.no_grad():
        expected = plan(*args)
        for candidate in rivals:
            name = str(candidate)
            if name not in plans:
                try:
                    plans[name] = rival(candidate, problem, args, expected, loose=loose)
                    named[name] = candidate
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:  # it may fail in any way: it is reported, not timed
                    if isinstance(error, WrongResultError):
                        differing.append(name)
                    failures[name] = described(error)
    by_rule = str(rule) if rule is not None and str(rule) in plans else None
    return Field(str(picked), choice.source, by_rule, plans, named, failures, differing)


def entrants(
    op: Op, problem: Problem, picked: Candidate, *, all_launches: bool = False
) -> tuple[Candidate | None, list[Candidate]]:
    """What would run without tables, and all that is timed: the pick, that one, the candidates."""
    choice = by_heuristics(op.name, op.variants, problem)
    rule = None if choice is None else Candidate(choice.variant, choice.config)
    more = [] if rule is None else [rule]
    found = candidates(op.variants, problem, picked, thorough=True, more=more)
    if all_launches:
        for variant in dict.fromkeys(one.variant for one in found):
            configs = variant.all_configs(problem.asked())
            found += [Candidate(variant, config) for config in configs]
    return rule, list({str(candidate): candidate for candidate in found}.values())


def rival(
    candidate: Candidate,
    problem: Problem,
    args: Arguments,
    expected: Any,
    *,
    loose: float | None = None,
) -> Function:
    """The plan of a candidate; raises where it cannot be built, or gives something else."""
    plan = candidate.variant.bind(problem, candidate.config)
    if loose is not None:
        check_lines(plan(*args), expected, limit=loose)
    else:
        # Another variant may round once more: only what is another function must not win.
        check(plan(*args), expected, coarse=True)
    return plan


def programs(
    points: Iterable[Point], device: torch.device, *, all_launches: bool = False
) -> list[Compilable]:
    """Everything that the points' candidates are compiled from, each once; on a CPU nothing."""
    here = device_of(device)
    found: dict[Compilable, None] = {}
    for point in points:
        op, args = point.family.op, point.family.arguments(point.rows, "meta", here)
        problem = op.problem(*args, device=here)
        for candidate in _entrants(op, problem, all_launches=all_launches):
            found.update(dict.fromkeys(candidate.variant.programs(problem, candidate.config)))
    return list(found)


def _entrants(op: Op, problem: Problem, *, all_launches: bool) -> list[Candidate]:
    choice = ranked(op.name, op.variants, problem)[0]
    picked = Candidate(choice.variant, choice.config)
    return entrants(op, problem, picked, all_launches=all_launches)[1]


def too_large(point: Point, device: torch.device, *, all_launches: bool = False) -> str | None:
    """Why a problem does not fit beside the results of its candidates, if so.

    The graph of each candidate of a group holds memory for its own outputs.
    """
    if device.type != "cuda":
        return None
    op, here = point.family.op, device_of(device)
    args = point.family.arguments(point.rows, "meta", here)
    count = len(_entrants(op, op.problem(*args, device=here), all_launches=all_launches))
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
