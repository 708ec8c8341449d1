"""The suites of whole models, and of a block of one: from options to rows.

These are `end_to_end`, `vllm` and `transformers`; what they have in common are batches and
implementations to choose from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console

from gristmill.bench.end_to_end import suite as end_to_end
from gristmill.bench.hugging_face import suite as hugging_face
from gristmill.bench.progress import progress
from gristmill.bench.results import Results
from gristmill.bench.runner import QUICK_SAMPLES, SAMPLES
from gristmill.bench.serving import suite as serving
from gristmill.bench.serving.models import KNOWN
from gristmill.bench.suites import known
from gristmill.errors import ArgumentError

_SUITES = (end_to_end.SUITE, serving.SUITE, hugging_face.SUITE)
_NOT_ASKED = f"batches and impls are those of the suites {', '.join(_SUITES)}: name one of these"


@dataclass(frozen=True)
class Filters:
    """What of the command line says which rows are wanted; empty means all."""

    ops: Sequence[str] = ()
    models: Sequence[str] = ()
    implementations: Sequence[str] = ()
    batches: Sequence[int] = ()
    quick: bool = False


@dataclass(frozen=True)
class Chosen:
    """What is measured, and the models of the command line that were meant for these suites.

    `blocks`: of the suite `end_to_end`, what its `run` takes to choose among its rows.
    """

    plan: serving.Plan | None = None
    cases: Sequence[hugging_face.Case] = ()
    blocks: Mapping[str, Any] | None = None
    models: Collection[str] = ()
    notes: Sequence[str] = field(default_factory=list)

    @property
    def suites(self) -> list[str]:
        """Those that are measured."""
        there = {
            end_to_end.SUITE: self.blocks is not None,
            serving.SUITE: self.plan is not None,
            hugging_face.SUITE: bool(self.cases),
        }
        return [suite for suite, is_there in there.items() if is_there]


def choose(
    suites: Sequence[str], named: Sequence[str], device: torch.device, filters: Filters
) -> Chosen:
    """Of `suites` those of whole models; one that cannot run here is an error if it was `named`.

    Beside other suites ("all") it is a note. With filters that only other suites know, nothing of
    these is measured.
    """
    those = [suite for suite in _SUITES if suite in suites]
    if not those and (filters.implementations or filters.batches):
        raise ArgumentError(_NOT_ASKED)
    reasons = {serving.SUITE: serving.missing(device), hugging_face.SUITE: hugging_face.missing()}
    notes = []
    for suite in list(those):
        if (why := reasons.get(suite)) is not None:
            if suite in named:
                raise ArgumentError(why)
            notes.append(why)
            those.remove(suite)
    alone = len(suites) == 1
    names = _implementations(those, filters)
    plan = _plan(device, filters, names, alone) if serving.SUITE in those else None
    found = _cases(filters, names, alone) if hugging_face.SUITE in those else []
    blocks = _blocks(device, filters, names, alone) if end_to_end.SUITE in those else None
    return Chosen(plan, found, blocks, models=KNOWN if serving.SUITE in those else (), notes=notes)


def _implementations(suites: Sequence[str], filters: Filters) -> dict[str, list[str]]:
    """Of the names that are asked for, those of each suite; all must be somebody's."""
    there = {
        serving.SUITE: list(serving.IMPLEMENTATIONS),
        hugging_face.SUITE: list(dict.fromkeys(case.impl for case in hugging_face.CASES)),
        end_to_end.SUITE: list(end_to_end.IMPLEMENTATIONS),
    }
    every = dict.fromkeys(name for suite in suites for name in there[suite])
    wanted = [known("implementation", name, every) for name in filters.implementations if suites]
    return {suite: [name for name in wanted if name in there[suite]] for suite in suites}


def _plan(
    device: torch.device, filters: Filters, names: dict[str, list[str]], alone: bool
) -> serving.Plan | None:
    mine = names[serving.SUITE]
    models = [name for name in filters.models if alone or name in KNOWN]
    for asked, kept in ((filters.implementations, mine), (filters.models, models)):
        if asked and not kept:
            return None
    if filters.ops and not alone:  # this suite has none
        return None
    return serving.plan(
        device, models=models, implementations=mine, batches=filters.batches, quick=filters.quick
    )


def _cases(filters: Filters, names: dict[str, list[str]], alone: bool) -> list[hugging_face.Case]:
    mine = names[hugging_face.SUITE]
    ops = [name for name in filters.ops if alone or name in hugging_face.OPS]
    if (filters.ops and not ops) or (filters.implementations and not mine):
        return []
    if filters.models and not alone:  # this suite has none
        return []
    return hugging_face.cases(ops, mine, quick=filters.quick)


def _blocks(
    device: torch.device, filters: Filters, names: dict[str, list[str]], alone: bool
) -> dict[str, Any] | None:
    mine = names[end_to_end.SUITE]
    ops = [name for name in filters.ops if alone or name in end_to_end.OPS]
    if (filters.ops and not ops) or (filters.implementations and not mine):
        return None
    if filters.models:  # this suite has none to choose from
        if alone:
            raise ArgumentError(f"the models of {end_to_end.SUITE} go by --op: leave out --models")
        return None
    chosen: dict[str, Any] = {"ops": ops, "implementations": mine, "batches": filters.batches}
    end_to_end.steps(device, filters.quick, **chosen)  # says what is wrong with them
    return chosen


def run(
    chosen: Chosen,
    device: torch.device,
    results: Results,
    out: Console,
    *,
    samples: int | None,
    quick: bool,
    done: Callable[[str], None],
) -> None:
    """Measure what was chosen; `done` is told about each suite when it is complete."""
    for text in chosen.notes:
        results.note(text)
    if chosen.blocks is not None:
        with progress(out, end_to_end.steps(device, quick, **chosen.blocks)) as advance:
            count = samples or (QUICK_SAMPLES if quick else SAMPLES)
            end_to_end.run(device, results, advance, samples=count, quick=quick, **chosen.blocks)
        done(end_to_end.SUITE)
    if chosen.plan is not None:
        with progress(out, chosen.plan.steps) as advance:
            repeats = samples or (1 if quick else serving.REPEATS)
            serving.run(device, results, advance, chosen.plan, repeats=repeats)
        done(serving.SUITE)
    if chosen.cases:
        with progress(out, len(chosen.cases)) as advance:
            usual = hugging_face.QUICK_REPEATS if quick else hugging_face.REPEATS
            hugging_face.run(device, results, advance, chosen.cases, repeats=samples or usual)
        done(hugging_face.SUITE)
