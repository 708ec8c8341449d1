"""What tuning has won, in words and in numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gristmill.names import counted
from gristmill.select.tuning import Outcome


@dataclass
class TuneReport:
    """What a `gristmill.tune` region has measured, problem by problem, and what `fn` returned.

    `outcomes` grows while the region runs. Each has the `row` that was kept, what ran `before` and
    how long that took (`before_us`), and `won`, the part of the time that is saved now.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    result: Any = None

    @property
    def changed(self) -> list[Outcome]:
        """The problems that run otherwise now."""
        return [outcome for outcome in self.outcomes if is_changed(outcome)]

    @property
    def speedup(self) -> float:
        """Time before over time now, the geometric mean over the problems."""
        return speedup(self.outcomes)

    def as_dict(self) -> dict[str, Any]:
        return {
            "problems": [outcome_as_dict(outcome) for outcome in self.outcomes],
            "changed": len(self.changed),
            "speedup": self.speedup,
        }

    def __str__(self) -> str:
        if not self.outcomes:
            return (
                "nothing was tuned: there was nothing to choose, a row of a table covered it "
                "already, or another rank has measured it"
            )
        return "\n".join([*lines(self.outcomes), summary(self.outcomes)])


def is_changed(outcome: Outcome) -> bool:
    """Whether something else runs than before."""
    return winner(outcome) != outcome.before


def winner(outcome: Outcome) -> str:
    """What runs now, in the words of `Outcome.before`."""
    values = outcome.row.config or {}
    return " ".join([outcome.row.variant, *(f"{name}={it}" for name, it in values.items())])


def speedup(outcomes: Sequence[Outcome]) -> float:
    """The geometric mean of time before over time now; 1.0 where nothing can be compared."""
    known = [outcome for outcome in outcomes if outcome.before_us and outcome.row.us]
    if not known:
        return 1.0
    logs = [math.log((outcome.before_us or 1.0) / outcome.row.us) for outcome in known]
    return math.exp(math.fsum(logs) / len(logs))


def summary(outcomes: Sequence[Outcome]) -> str:
    changed = sum(map(is_changed, outcomes))
    return (
        f"{counted(len(outcomes), 'problem')} tuned, {changed} with another choice than before; "
        f"{speedup(outcomes):.3f} times as fast (geometric mean)"
    )


def lines(outcomes: Sequence[Outcome]) -> list[str]:
    """One line for each problem, in columns."""
    cells = [_cells(outcome) for outcome in outcomes]
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    return [
        "  ".join(
            [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]
        ).rstrip()
        for row in cells
    ]


def line(outcome: Outcome, *, with_key: bool = True) -> str:
    """One problem: what ran before, what runs now, and how long they take."""
    return "  ".join(cell for cell in _cells(outcome)[0 if with_key else 1 :] if cell)


def outcome_as_dict(outcome: Outcome) -> dict[str, Any]:
    """Plain data, for --json."""
    return {
        **dataclasses.asdict(outcome.row),
        "before": outcome.before,
        "before_us": outcome.before_us,
        "winner": winner(outcome),
        "changed": is_changed(outcome),
        "won": outcome.won,
        "failures": dict(outcome.failures),
    }


def _cells(outcome: Outcome) -> tuple[str, str, str, str]:
    row, before = outcome.row, outcome.before.split(" ")[0]
    if not is_changed(outcome):
        return row.key, f"{row.variant} stays", f"{row.us:.2f} us", ""
    launch = "with another launch" if before == row.variant else ""
    names = f"{row.variant} {launch}" if launch else f"{before} -> {row.variant}"
    if outcome.before_us is None:
        return row.key, names, f"{row.us:.2f} us", "what was chosen before did not run"
    return row.key, names, f"{outcome.before_us:.2f} -> {row.us:.2f} us", f"{-outcome.won:+.1%}"
