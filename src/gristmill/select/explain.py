"""Why a problem runs by the variant it runs by, as data and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gristmill.errors import UnknownVariant, VariantUnavailable
from gristmill.select.chooser import Choice, failure_of, ranked
from gristmill.select.configs import config_to_json
from gristmill.select.problem import Problem, bucket
from gristmill.select.tables import tables_for
from gristmill.select.variant import Variant


@dataclass(frozen=True)
class ExplainedVariant:
    """One variant: whether it could run, why not, how it would be launched, what was measured.

    `status` is "chosen", "available", "declined" (another should be preferred), "unsupported" or
    "failed" (it was chosen before and could not be built).
    """

    variant: str
    status: str
    reason: str
    config: Any
    measured_us: float | None

    def as_dict(self) -> dict[str, Any]:
        return {
            "variant": self.variant,
            "status": self.status,
            "reason": self.reason,
            "config": config_to_json(self.config),
            "measured_us": self.measured_us,
        }

    def _detail(self) -> str:
        values = config_to_json(self.config) or {}
        config = " ".join(f"{name}={value}" for name, value in values.items())
        return "; ".join(part for part in (config, self.reason) if part)


@dataclass(frozen=True)
class Explanation:
    """What `gristmill.explain` returns: print it, or take it apart with `as_dict()`.

    `chosen` is None when the variant asked for by name cannot run; `reason` then says so.
    """

    problem: Problem
    rows: tuple[ExplainedVariant, ...]
    chosen: str | None
    source: str
    reason: str
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        problem = self.problem
        return {
            "op": problem.op,
            "rows": problem.rows,
            "hint": bucket(problem.rows),
            "dims": dict(problem.dims),
            "dtypes": dict(problem.dtypes),
            "flags": list(problem.flags),
            "device": problem.device.name,
            "arch": problem.device.arch,
            "variants": [row.as_dict() for row in self.rows],
            "chosen": self.chosen,
            "source": self.source,
            "reason": self.reason,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        problem = self.problem
        tuned = f"; choices are tuned at rows={bucket(problem.rows)}"
        lines = [problem.key(problem.rows), f"on {problem.device}{tuned}"]
        lines += ["", *self._grid(), ""]
        if self.chosen is None:
            lines.append(f"nothing runs: {self.reason}")
        else:
            lines.append(f"runs {self.chosen}, by {self.source}: {self.reason}")
        return "\n".join([*lines, *self.notes])

    def _grid(self) -> list[str]:
        """The variants as aligned columns; those that nothing fills are left out."""
        cells = [["", "variant", "status", "us", ""]]
        for row in self.rows:
            us = row.measured_us
            cells.append(
                [
                    "->" if row.variant == self.chosen else "",
                    row.variant,
                    row.status,
                    "" if us is None else f"{us:.2f}",
                    row._detail(),
                ]
            )
        columns = [column for column in zip(*cells, strict=True) if any(column[1:])]
        widths = [max(map(len, column)) for column in columns]
        return [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in zip(*columns, strict=True)
        ]


def explain_problem(op_name: str, variants: Sequence[Variant], problem: Problem) -> Explanation:
    """Every variant with its reason or config and measured time, and the one that runs.

    Builds nothing and times nothing: times come from the tables, failures from what this process
    has met.
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
    measured, notes = _from_tables(problem, variants)
    return Explanation(
        problem=problem,
        rows=tuple(
            _explained(variant, problem, choices, winner, measured.get(variant.name))
            for variant in variants
        ),
        chosen=winner.variant.name if winner else None,
        source=winner.source if winner else "",
        reason=reason or "every variant that supports it failed to build",
        notes=tuple(notes),
    )


def _explained(
    variant: Variant,
    problem: Problem,
    choices: Sequence[Choice],
    winner: Choice | None,
    measured_us: float | None,
) -> ExplainedVariant:
    reason = variant.supports(problem)
    if reason is not None:
        return ExplainedVariant(variant.name, "unsupported", reason, None, measured_us)
    choice = next((one for one in choices if one.variant is variant), None)
    config = choice.config if choice is not None else variant.config(problem)
    failure = failure_of(problem, variant)
    declined = variant.declines(problem)
    if winner is not None and winner.variant is variant:
        status = "chosen"
    elif failure is not None:
        status = "failed"
    else:
        status = "declined" if declined else "available"
    return ExplainedVariant(variant.name, status, failure or declined or "", config, measured_us)


def _from_tables(
    problem: Problem, variants: Sequence[Variant]
) -> tuple[dict[str, float], list[str]]:
    """Times by variant from the rows that still hold, and a note for each row that does not."""
    times: dict[str, float] = {}
    notes: list[str] = []
    key = problem.key(bucket(problem.rows))
    for source in tables_for(problem.device):
        row = source.table.rows.get(key)
        if row is None:
            continue
        if source.table.lookup(problem, variants) is None:
            notes.append(f"{source.label}: its row is ignored: {source.table.ignored[key]}")
            continue
        if row.second is not None:
            times.setdefault(row.second.variant, row.second.us)
        times.setdefault(row.variant, row.us)
        notes.append(f"times from the {source.label}, {source.note}, {row.date}")
    return times, notes
