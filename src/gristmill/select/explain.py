"""Why a problem runs by the variant it runs by, as data and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gristmill.errors import UnknownVariant, VariantUnavailable
from gristmill.select.chooser import Choice, failure_of, ranked, refusal
from gristmill.select.configs import config_to_json
from gristmill.select.overrides import active
from gristmill.select.problem import HINTS, Problem, bucket, bucket_edges
from gristmill.select.roof import Roof, Work, roof_of
from gristmill.select.sight import spoken_for
from gristmill.select.table import Row
from gristmill.select.tables import TableSource, tables_for
from gristmill.select.variant import Variant
from gristmill.settings import settings


@dataclass(frozen=True)
class ExplainedVariant:
    """One variant: whether it could run, why not, how it would be launched, what was measured.

    `status` is "chosen", "available", "declined" (another should be preferred), "unsupported",
    "excluded" (it is not deterministic or not batch-invariant, as is asked for) or "failed" (it was
    chosen before and could not be built). `of_roof`: the part of the roof's speed that it reaches,
    where it was measured at this very number of rows.
    """

    variant: str
    status: str
    reason: str
    config: Any
    measured_us: float | None
    of_roof: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "variant": self.variant,
            "status": self.status,
            "reason": self.reason,
            "config": config_to_json(self.config),
            "measured_us": self.measured_us,
            "of_roof": self.of_roof,
        }

    def _detail(self) -> str:
        values = config_to_json(self.config) or {}
        config = " ".join(f"{name}={value}" for name, value in values.items())
        return "; ".join(part for part in (config, self.reason) if part)


@dataclass(frozen=True)
class Evidence:
    """A row that speaks for the problem; `ignored` is why it is not believed, "" if it is."""

    source: str
    note: str
    row: Row
    ignored: str

    def as_dict(self) -> dict[str, Any]:
        row = dataclasses.asdict(self.row)
        return {"source": self.source, "note": self.note, "ignored": self.ignored, "row": row}

    def __str__(self) -> str:
        row = self.row
        if self.ignored:
            return f"{self.source}: its row for rows={row.hint} is ignored: {self.ignored}"
        text = (
            f"{self.source}: {self.note} at rows={row.rows} on {row.date}, torch {row.torch}: "
            f"{row.variant} {row.us:.2f} us (spread {row.spread_us:.2f})"
        )
        if row.second is not None:
            text += f", then {row.second.variant} {row.second.us:.2f} us"
        return f"{text}; {row.candidates} launches were timed"


@dataclass(frozen=True)
class Explanation:
    """What `gristmill.explain` returns: print it, or take it apart with `as_dict()`.

    `chosen` is None when nothing can run it as asked for; `reason` then says so. `edges` are the
    least and the greatest number of rows that share the choice tuned at `hint` (None: no end).
    `notes` say what tables hold, `changes` how to get another choice.
    """

    problem: Problem
    rows: tuple[ExplainedVariant, ...]
    chosen: str | None
    source: str
    reason: str
    hint: int
    edges: tuple[int, int | None]
    roof: Roof | None
    evidence: tuple[Evidence, ...]
    modes: dict[str, Any]
    changes: tuple[str, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(str(one) for one in self.evidence)

    def as_dict(self) -> dict[str, Any]:
        problem = self.problem
        return {
            "op": problem.op,
            "rows": problem.rows,
            "hint": self.hint,
            "edges": list(self.edges),
            "dims": dict(problem.dims),
            "dtypes": dict(problem.dtypes),
            "flags": list(problem.flags),
            "device": problem.device.name,
            "arch": problem.device.arch,
            "roof": None if self.roof is None else self.roof.as_dict(),
            "variants": [row.as_dict() for row in self.rows],
            "chosen": self.chosen,
            "source": self.source,
            "reason": self.reason,
            "evidence": [one.as_dict() for one in self.evidence],
            "modes": dict(self.modes),
            "notes": list(self.notes),
            "changes": list(self.changes),
        }

    def __str__(self) -> str:
        problem = self.problem
        lines = [problem.key(problem.rows), f"on {problem.device}; {self._shared()}"]
        if self.roof is not None:
            lines.append(f"roof: {self.roof}")
        lines += ["", *self._grid(), ""]
        if self.chosen is None:
            lines.append(f"nothing runs: {self.reason}")
        else:
            lines.append(f"runs {self.chosen}, by {self.source}: {self.reason}")
        lines += self.notes
        lines.append(f"in force: {', '.join(self._in_force())}")
        if self.changes:
            lines += ["to change it:", *(f"  {line}" for line in self.changes)]
        return "\n".join(lines)

    def _shared(self) -> str:
        if self.problem.batch_invariant:
            return f"whatever the number of rows, the choice is that for {self.hint}"
        low, high = self.edges
        rows = f"{low} rows and more" if high is None else f"{low} to {high} rows"
        return f"{rows} share the choice tuned at rows={self.hint}"

    def _in_force(self) -> list[str]:
        modes = self.modes
        words = ["deterministic"] if modes["deterministic"] else []
        words += ["batch-invariant"] if modes["batch_invariant"] else []
        words += [f"use {modes['use']}"] if modes["use"] else []
        return [*words, f"GRISTMILL_TUNE={modes['tune']}", f"GRISTMILL_TABLE={modes['table']}"]

    def _grid(self) -> list[str]:
        """The variants as aligned columns; those that nothing fills are left out."""
        cells = [["", "variant", "status", "us", "of roof", ""]]
        for row in self.rows:
            us, share = row.measured_us, row.of_roof
            cells.append(
                [
                    "->" if row.variant == self.chosen else "",
                    row.variant,
                    row.status,
                    "" if us is None else f"{us:.2f}",
                    "" if share is None else f"{share:.0%}",
                    row._detail(),
                ]
            )
        columns = [column for column in zip(*cells, strict=True) if any(column[1:])]
        widths = [max(map(len, column)) for column in columns]
        return [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in zip(*columns, strict=True)
        ]


def explain_problem(
    op_name: str,
    variants: Sequence[Variant],
    problem: Problem,
    *,
    cost: Work | None = None,
    tune_command: str | None = None,
) -> Explanation:
    """Every variant with its reason or config and measured time, and the one that runs.

    Builds nothing and times nothing: times come from the tables, failures from what this process
    has met. `cost` (bytes and operations) gives the roof; `tune_command` is the command line that
    tunes this very problem, where there is one.
    """
    choices: list[Choice] = []
    reason = ""
    try:
        choices = ranked(op_name, variants, problem)
    except (VariantUnavailable, UnknownVariant) as error:
        reason = str(error)
    winner = next((one for one in choices if failure_of(problem, one.variant) is None), None)
    if winner is not None:
        reason = winner.reason
    evidence = tuple(_evidence(problem, variants))
    believed = next((one.row for one in evidence if not one.ignored), None)
    roof = roof_of(problem.device, cost)
    rows = tuple(
        _explained(variant, problem, choices, winner, believed, roof) for variant in variants
    )
    hint, edges = _bucket(problem, believed, evidence)
    return Explanation(
        problem=problem,
        rows=rows,
        chosen=winner.variant.name if winner else None,
        source=winner.source if winner else "",
        reason=reason or "every variant that supports it failed to build",
        hint=hint,
        edges=edges,
        roof=roof,
        evidence=evidence,
        modes=_modes(op_name, problem),
        changes=tuple(_changes(op_name, variants, problem, rows, tune_command)),
    )


def _explained(
    variant: Variant,
    problem: Problem,
    choices: Sequence[Choice],
    winner: Choice | None,
    believed: Row | None,
    roof: Roof | None,
) -> ExplainedVariant:
    us = share = None
    if believed is not None:
        won = variant.name == believed.variant
        us = believed.us if won else believed.times.get(variant.name)
        if us is not None and roof is not None and believed.rows == problem.rows:
            share = roof.share(us)
    refused = refusal(variant, problem)
    if refused is not None:
        able = variant.supports(problem) is None
        status = "excluded" if able else "unsupported"
        return ExplainedVariant(variant.name, status, refused, None, us, share)
    asked = problem.asked()
    choice = next((one for one in choices if one.variant is variant), None)
    config = choice.config if choice is not None else variant.config(asked)
    failure = failure_of(problem, variant)
    declined = variant.declines(asked)
    if winner is not None and winner.variant is variant:
        status = "chosen"
    elif failure is not None:
        status = "failed"
    else:
        status = "declined" if declined else "available"
    return ExplainedVariant(variant.name, status, failure or declined or "", config, us, share)


def _sources(problem: Problem) -> list[TableSource]:
    """The tables that take part: with rows that know no batch, the shipped ones alone."""
    return [
        source
        for source in tables_for(problem.device)
        if source.shipped or not problem.batch_invariant
    ]


def _evidence(problem: Problem, variants: Sequence[Variant]) -> list[Evidence]:
    """The row of each table that speaks for the problem, believed or not."""
    asked = problem.asked()
    found = []
    for source in _sources(problem):
        row = source.table.row(asked)
        if row is not None:
            held = source.table.lookup(asked, variants) is not None
            ignored = "" if held else source.table.ignored[row.key]
            found.append(Evidence(source.label, source.note, row, ignored))
    return found


def _bucket(
    problem: Problem, believed: Row | None, evidence: Sequence[Evidence]
) -> tuple[int, tuple[int, int | None]]:
    """The hint that speaks for the problem, and the row counts that have it in common."""
    asked = problem.asked()
    hints: Sequence[int] = HINTS
    row = believed or next((one.row for one in evidence), None)
    for source in _sources(problem):
        if row is None or source.table.row(asked) is row:
            hints = source.table.hints(asked)
            break
    hint = bucket(asked.rows, hints)
    return hint, bucket_edges(hint, hints)


def _modes(op_name: str, problem: Problem) -> dict[str, Any]:
    """What is asked of the chooser here; `use` is the variant asked for by name, or None."""
    return {
        "deterministic": problem.deterministic,
        "batch_invariant": problem.batch_invariant,
        "use": active().get(op_name),
        "tune": settings().tune,
        "table": settings().table,
    }


def _changes(
    op_name: str,
    variants: Sequence[Variant],
    problem: Problem,
    rows: Sequence[ExplainedVariant],
    tune_command: str | None,
) -> list[str]:
    """How to get another choice: by name, by measurement, or by asking for less."""
    lines = []
    forced = active().get(op_name)
    if forced is not None and settings().use.get(op_name) == forced:
        lines.append(f"take {op_name}:{forced} out of GRISTMILL_USE")
    elif forced is not None:
        lines.append(f'leave the block of gm.use("{op_name}", "{forced}")')
    if any(row.status == "excluded" for row in rows):
        if problem.deterministic:
            lines.append("torch.use_deterministic_algorithms(False)")
        if problem.batch_invariant:
            lines.append("with gm.batch_invariant(False): ...")
    others = [row for row in rows if row.status in ("available", "declined")]
    others.sort(key=lambda row: (row.status, row.measured_us is None, row.measured_us or 0.0))
    if others:
        name = others[0].variant
        lines.append(f'with gm.use("{op_name}", "{name}"): ...')
        lines.append(f"GRISTMILL_USE={op_name}:{name}")
        if forced is None and not problem.batch_invariant:
            again = "again=True" if spoken_for(problem, variants) else ""
            lines.append(tune_command or f"with gm.tune({again}): ...")
    return lines
