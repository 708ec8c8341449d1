"""What the machine did between two runs: the drift of each problem and the scatter around it.

compare.py says what both are for. A witness is whatever is in both files, is not ours and is the
same code in both: a copy, a peer of the same version, torch's own part of a start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median, median_high, median_low
from typing import Any

from gristmill.bench.compare.rows import MEASURES, Key, Readings

# The first guess of a scatter counts as much as this many witnesses.
_GUESS_WEIGHT = 8
# A median's deviation to a standard deviation, of a normal distribution.
_MAD = 1.4826
# And the same of what nine in ten are within: it counts where tails are heavy, as a host's are.
_NINETY = 1.645


@dataclass(frozen=True)
class Drift:
    """What the witnesses of an op have in common, and what they scatter by around it."""

    measure: str
    op: str
    factor: float
    scatter: float
    witnesses: int


class Versions:
    """Whether a peer is the same code in both files."""

    def __init__(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        self._old, self._new = old, new

    def of(self, peer: str) -> tuple[str | None, str | None]:
        return self._one(self._old, peer), self._one(self._new, peer)

    def same(self, peer: str) -> bool:
        one, other = self.of(peer)
        return one == other

    def _one(self, meta: Mapping[str, Any], peer: str) -> str | None:
        """A version by the peer's name; of an implementation ("quack_one_pass") by its peer's."""
        known: Mapping[str, str | None] = meta.get("peers", {})
        named = [name for name in known if peer == name or peer.startswith(f"{name}_")]
        return known[max(named, key=len)] if named else None


Witnesses = dict[Key, float]


def witnesses(before: Readings, after: Readings, versions: Versions) -> Witnesses:
    """log(new / old) of everything in both files that is not ours and whose code is the same."""
    return {
        key: math.log(after.values[key].value / one.value)
        for key, one in before.values.items()
        if not one.ours and key in after.values and versions.same(one.peer)
    }


class Drifts:
    """The drift of each problem, and the scatter of each op around it, by the witnesses."""

    def __init__(self, witnesses: Witnesses) -> None:
        self._witnesses = witnesses
        self._of_problem: dict[tuple[str, ...], list[Key]] = {}
        self._of_op: dict[tuple[str, ...], list[float]] = {}
        self._of_measure: dict[str, list[float]] = {}
        for key, change in witnesses.items():
            self._of_problem.setdefault(key[:3], []).append(key)
            self._of_op.setdefault(key[:2], []).append(change)
            self._of_measure.setdefault(key.measure, []).append(change)
        # Each held against the others, as ours is against all; in no doubt for it, or what is left
        # of them would be too little.
        self._left: dict[tuple[str, ...], list[float]] = {}
        for key, change in witnesses.items():
            left = change - median(self._heard(key))
            self._left.setdefault(key[:2], []).append(left)
            self._left.setdefault(key[:1], []).append(left)

    def drift(self, key: Key, moved: float) -> float:
        """As the witnesses of its problem have it.

        Of two in the middle what is nearest to `moved`, the change itself: in doubt for ours.
        """
        heard = self._heard(key)
        return min(max(moved, median_low(heard)), median_high(heard))

    def _heard(self, key: Key) -> list[float]:
        """The changes of the problem's witnesses, itself not among them, and the common one."""
        others = [one for one in self._of_problem.get(key[:3], []) if one != key]
        return [*(self._witnesses[one] for one in others), self._common(key)]

    def _common(self, key: Key) -> float:
        of_op = self._of_op.get(key[:2], [])
        if len(of_op) >= _GUESS_WEIGHT:
            return median(of_op)
        of_measure = self._of_measure.get(key.measure, [])
        return median(of_measure) if of_measure else 0.0

    def count(self, key: Key) -> int:
        return len(self._of_problem.get(key[:3], []))

    def scatter(self, key: Key) -> float:
        """By the op's witnesses; the fewer, the more all of the measure's and the guess count."""
        usual = self._blended(self._left.get(key[:1], []), MEASURES[key.measure].scatter)
        return self._blended(self._left.get(key[:2], []), usual)

    def _blended(self, left: list[float], guess: float) -> float:
        sizes = sorted(map(abs, left))
        seen = max(_MAD * median(sizes), sizes[9 * len(sizes) // 10] / _NINETY) if left else 0.0
        weight = _GUESS_WEIGHT
        return math.sqrt((len(left) * seen**2 + weight * guess**2) / (len(left) + weight))

    def told(self) -> list[Drift]:
        found = []
        for (measure, op), changes in self._of_op.items():
            factor = math.exp(median(changes))
            scatter = self.scatter(Key(measure, op, "", ""))
            found.append(Drift(measure, op, round(factor, 5), round(scatter, 5), len(changes)))
        return found
