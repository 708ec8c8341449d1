"""Limits on what choices may cost, as data, and whether rows of results keep them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gristmill.bench.results import Row

MEAN, WORST, OVER_RULE = "mean regret", "worst regret", "pick over rule"
# Without goals of its own, of an op.
MEAN_GOAL, WORST_GOAL = 0.03, 0.10
# How much longer than the rule's launch a pick may take, where that is judged.
RULE_GOAL = 0.03


@dataclass(frozen=True)
class Goal:
    """A limit on one number of the problems of an op.

    `what`: MEAN, WORST, or OVER_RULE: the largest `picked_us / rule_us - 1`. `tabled`: only of
    families with entries in a table (True) or without (False).
    """

    what: str
    limit: float
    tabled: bool | None = None

    def covers(self, row: Row) -> bool:
        """Whether the goal is about this row, and the row has the number."""
        if self.tabled is not None and is_tabled(row) != self.tabled:
            return False
        return "regret" in row and (self.what != OVER_RULE or over_rule(row) is not None)

    def value(self, row: Row) -> float:
        """What the goal limits: of one row."""
        return (over_rule(row) or 0.0) if self.what == OVER_RULE else float(row["regret"])

    def __str__(self) -> str:
        return f"{self.what}{group_name(self.tabled)}"


DEFAULT_GOALS = (Goal(MEAN, MEAN_GOAL), Goal(WORST, WORST_GOAL))
NVFP4_GOALS = (
    Goal(MEAN, 0.015, tabled=True),
    Goal(WORST, 0.08, tabled=True),
    Goal(MEAN, 0.04, tabled=False),
    Goal(WORST, 0.15, tabled=False),
    Goal(OVER_RULE, RULE_GOAL),
)


@dataclass(frozen=True)
class Outcome:
    """What one goal of an op has come to; `reached` and `worst` are None without problems."""

    op: str
    goal: Goal
    count: int
    reached: float | None
    worst: Row | None

    @property
    def met(self) -> bool:
        """Also true without problems: a run passes only if another goal of the op has some."""
        return self.reached is None or self.reached <= self.goal.limit


def outcome(op: str, goal: Goal, rows: Iterable[Row]) -> Outcome:
    """One goal over the rows of one op."""
    covered = [row for row in rows if goal.covers(row)]
    if not covered:
        return Outcome(op, goal, 0, None, None)
    worst = max(covered, key=goal.value)
    values = [goal.value(row) for row in covered]
    reached = sum(values) / len(values) if goal.what == MEAN else max(values)
    return Outcome(op, goal, len(covered), reached, worst)


def is_tabled(row: Row) -> bool:
    """Whether a table has entries for the row's family; of rows that do not say it, its source."""
    return bool(row.get("tabled", row.get("source") != "preference"))


def over_rule(row: Row) -> float | None:
    """How much longer the pick takes than the rule's launch; None where that was not timed."""
    if row.get("rule_us") is None:
        return None
    return float(row["picked_us"]) / float(row["rule_us"]) - 1


def group_name(tabled: bool | None) -> str:
    return {None: "", True: ", in the table", False: ", not in the table"}[tabled]


def groups(goals: Sequence[Goal]) -> tuple[bool | None, ...]:
    """The groups of families that these goals tell apart."""
    return (True, False) if any(goal.tabled is not None for goal in goals) else (None,)


def limits(goals: Sequence[Goal], row: Row) -> tuple[float, float]:
    """The mean and the worst regret that the goals allow problems such as the row's."""
    about = [goal for goal in goals if goal.tabled in (None, is_tabled(row))]
    mean, worst = (
        min((goal.limit for goal in about if goal.what == what), default=usual)
        for what, usual in ((MEAN, MEAN_GOAL), (WORST, WORST_GOAL))
    )
    return mean, worst
