"""The rows of kernel time, problem by problem: ours, every peer's, and the ratio to the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gristmill.bench.product_report import TIE
from gristmill.bench.results import OURS, Results, Row, by_problem
from gristmill.bench.suites import KINDS


@dataclass(frozen=True)
class Problem:
    """One op at one shape and dtype, as one run measured it: implementation -> row."""

    op: str
    dtype: str
    label: str
    row_of: dict[str, Row]

    @property
    def suite(self) -> str:
        return KINDS[self.op].suite if self.op in KINDS else self.op

    @property
    def any(self) -> Row:
        return next(iter(self.row_of.values()))

    @property
    def ours(self) -> Row | None:
        """Our row, if it was timed."""
        row = self.row_of.get(OURS)
        return row if row is not None and "us" in row else None

    @property
    def peers(self) -> dict[str, Row]:
        """The row of each peer; of one with several ways the fastest."""
        found: dict[str, Row] = {}
        for row in self.row_of.values():
            name = peer_of(row)
            if name == OURS or "us" not in row:
                continue
            if name not in found or row["us"] < found[name]["us"]:
                found[name] = row
        return found

    @property
    def best(self) -> Row | None:
        return min(self.peers.values(), key=lambda row: float(row["us"]), default=None)

    @property
    def ratio(self) -> float | None:
        """The time of the best peer over ours: above 1 ours is faster."""
        if self.ours is None or self.best is None:
            return None
        return float(self.best["us"]) / float(self.ours["us"])

    @property
    def is_loss(self) -> bool:
        return self.ratio is not None and self.ratio < TIE


def peer_of(row: Row) -> str:
    """The library that a row is of; old files have the name of the implementation alone."""
    return str(row.get("peer") or str(row["impl"]).partition("_")[0])


def problems_of(results: Results) -> list[Problem]:
    """Every problem once."""
    return [Problem(*key, row_of) for key, row_of in by_problem(results.kernels()).items()]


def by_op(problems: Sequence[Problem]) -> dict[tuple[str, str], list[Problem]]:
    """(op, dtype) -> its problems, suites in their order."""
    order = list(KINDS)
    found: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        found.setdefault((problem.op, problem.dtype), []).append(problem)
    place = {name: index for index, name in enumerate(order)}
    return dict(sorted(found.items(), key=lambda item: place.get(item[0][0], len(order))))


def losses(problems: Sequence[Problem]) -> list[Problem]:
    """Those behind the best peer by more than 3%, the worst first."""
    return sorted((one for one in problems if one.is_loss), key=lambda one: one.ratio or 0.0)
