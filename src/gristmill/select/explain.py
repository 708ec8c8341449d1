"""Why a problem runs by the variant it runs by, as data and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gristmill.errors import UnknownVariant, VariantUnavailable
from gristmill.log import one_line
from gristmill.select.chooser import Choice, failure_of, ranked, refusal
from gristmill.select.configs import config_to_json
from gristmill.select.overrides import active
from gristmill.select.problem import Problem, Span
from gristmill.select.roof import Roof, Work, roof_of
from gristmill.select.sight import spoken_for
from gristmill.select.table import Row, revive
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
        config = launch_words("", config_to_json(self.config)).strip()
        return "; ".join(part for part in (config, self.reason) if part)


@dataclass(frozen=True)
class Evidence:
    """A row of a table that covers the problem; `ignored` is why it is not believed, "" if it is.

    `below` and `above` are the rows of the same table that cover the next smaller and the next
    larger row counts. `row` is None where the table has only these.
    """

    source: str
    note: str
    row: Row | None
    ignored: str = ""
    below: Row | None = None
    above: Row | None = None

    def as_dict(self) -> dict[str, Any]:
        rows = {"row": self.row, "below": self.below, "above": self.above}
        plain = {name: row and dataclasses.asdict(row) for name, row in rows.items()}
        return {"source": self.source, "note": self.note, "ignored": self.ignored, **plain}

    def __str__(self) -> str:
        lines = []
        if self.row is None:
            lines.append(f"{self.source}: no row covers this number of rows")
        elif self.ignored:
            at = f"its row for {self.row.covers}"
            lines.append(f"{self.source}: {at} is ignored: {self.ignored}")
        else:
            lines.append(f"{self.source}: {self._measured(self.row)}")
        for word, row in (("below", self.below), ("above", self.above)):
            if row is not None:
                launch = launch_words(row.variant, row.config)
                at = f"{row.us:.2f} us at rows={row.rows}"
                lines.append(f"  {word}, for {row.covers}: {launch}, {at}")
        return "\n".join(lines)

    def _measured(self, row: Row) -> str:
        text = (
            f"{self.note} at rows={row.rows} on {row.date}, torch {row.torch}: "
            f"{row.variant} {row.us:.2f} us (spread {row.spread_us:.2f})"
        )
        if row.second is not None:
            text += f", then {row.second.variant} {row.second.us:.2f} us"
        text += f"; {row.candidates} launches were timed"
        if row.also:
            also = (f"{us:.2f} us at rows={rows}" for rows, us in row.also.items())
            text += f"; this one also took {', '.join(also)}"
        return text


def launch_words(variant: str, config: Mapping[str, Any] | None) -> str:
    """A launch on one line: the variant and the values of its config."""
    return " ".join([variant, *(f"{name}={value}" for name, value in (config or {}).items())])


@dataclass(frozen=True)
class Explanation:
    """What `gristmill.explain` returns: print it, or take it apart with `as_dict()`.

    `chosen` is None when nothing can run it as asked for; `reason` then says so. `measured_at` is
    the number of rows at which the choice was measured, and `covers` says for which it holds (None:
    no row of a table decides). `notes` say what tables hold, `changes` how to get another choice.
    """

    problem: Problem
    rows: tuple[ExplainedVariant, ...]
    chosen: str | None
    source: str
    reason: str
    measured_at: int | None
    covers: Span | None
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
            "measured_at": self.measured_at,
            "covers": None if self.covers is None else list(self.covers),
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
            asked = self.problem.asked().rows
            return f"whatever the number of rows, the choice is that for {asked}"
        if self.covers is None:
            return "no row of a table decides"
        return f"{self.covers} share the choice measured at rows={self.measured_at}"

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
    believed = next((one.row for one in evidence if one.row and not one.ignored), None)
    decided = None
    if believed is not None and winner is not None and winner.source != "preference":
        decided = believed if winner.variant.name == believed.variant else None
    roof = roof_of(problem.device, cost)
    rows = tuple(
        _explained(variant, problem, choices, winner, believed, roof) for variant in variants
    )
    return Explanation(
        problem=problem,
        rows=rows,
        chosen=winner.variant.name if winner else None,
        source=winner.source if winner else "",
        reason=reason or "every variant that supports it failed to build",
        measured_at=None if decided is None else decided.rows,
        covers=None if decided is None else decided.covers,
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
    """What each table knows of the problem, believed or not."""
    asked = problem.asked()
    found = []
    for source in _sources(problem):
        table = source.table
        row, family = table.row(asked), table.family(asked)
        if not family:
            continue
        below = [one for one in family if one.covers.end < asked.rows]
        above = [one for one in family if one.covers.least > asked.rows]
        found.append(
            Evidence(
                source.label,
                source.note,
                row,
                "" if row is None else _why_ignored(row, asked, variants),
                below[-1] if below else None,
                above[0] if above else None,
            )
        )
    return found


def _why_ignored(row: Row, asked: Problem, variants: Sequence[Variant]) -> str:
    """Why a row that covers a problem is passed over; "" if it decides."""
    variant = next((one for one in variants if one.name == row.variant), None)
    reason = None if variant is None else refusal(variant, asked)
    if reason is not None:
        return one_line(f"{row.variant} cannot run this problem: {reason}", 300)
    found = revive(row, asked, variants)
    return one_line(found, 300) if isinstance(found, str) else ""


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
