"""Two files of results, and what became slower between them: `gristmill bench compare`.

The same code measured twice gives two numbers. Three things are between them:

- Noise within a run. Each median has a standard error, from its samples' spread and their number.
- Drift: the machine was faster or slower that day. Every problem has witnesses, whose code did not
  change: the copy of as many bytes, and the peers (of the same version in both files), timed in
  turns with ours. What they moved by is the machine's doing. The drift of a problem is the median
  of its witnesses' changes and of the change that all witnesses of the op have in common: a median,
  because a witness may change by itself (a compiler that picks another kernel). Where there are two
  in the middle, the drift is what lies between them nearest to our own change: in doubt it was the
  machine.
- Scatter: what a number moves by although nothing changed and the drift is taken out: where memory
  came to lie, which clock a core had. Within a run it cannot be seen, and it is larger than the
  noise within: on an H200 five to nine standard errors in the median. The witnesses show it, each
  held against the others just as ours is held against all of them.

So a change is `log(new / old) - drift`, and its standard error is the root of the squares of both
medians' errors and of the scatter. It is a regression if it is larger than the threshold, and so
many standard errors that noise alone gives one such in the whole comparison with a probability of
`FALSE_ALARMS`. Ours over the roof alone would be simpler and is not enough: a copy is limited by
memory and drifts with its clock only, and where it is measured badly every row would be blamed.

Only numbers of gristmill's are judged. Peers' changes are shown, as what they are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import NormalDist, median
from typing import Any

from gristmill.bench.compare.drift import Drift, Drifts, Versions, witnesses
from gristmill.bench.compare.rows import MEASURES, Key, Readings, readings
from gristmill.bench.results import Results
from gristmill.errors import ArgumentError

FALSE_ALARMS = 0.05
# What must be the same for times to mean the same; beneath, what is only told.
SAME = ("gpu", "device", "driver", "cuda", "torch")
TOLD = ("gristmill", "revision", "triton", "python", "date")
SLOWER, FASTER, STEADY, UNCLEAR = "slower", "faster", "same", "unclear"
FAILS, WORKS, GONE, NEW = "fails", "works again", "gone", "new"


@dataclass(frozen=True)
class Change:
    """What became of one number of ours.

    `ratio` is new over old without the drift, `raw` with it, `noise` the standard error of either,
    relative. Where a side is missing they are None, and `reason` says why, if that is known.
    """

    key: Key
    verdict: str
    old: float | None = None
    new: float | None = None
    ratio: float | None = None
    raw: float | None = None
    noise: float | None = None
    witnesses: int = 0
    old_choice: str = ""
    new_choice: str = ""
    reason: str = ""


@dataclass(frozen=True)
class PeerChange:
    """A peer's times of an op, new over old: the geometric mean, the drift left in."""

    measure: str
    op: str
    peer: str
    ratio: float
    count: int
    old_version: str | None
    new_version: str | None


@dataclass(frozen=True)
class Summary:
    """All of ours of an op: the geometric mean of new over old, and how many fared how."""

    measure: str
    op: str
    ratio: float | None
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Comparison:
    """What two files say of each other; `critical` is the number of standard errors that count."""

    threshold: float
    critical: float
    changes: list[Change]
    drifts: list[Drift]
    peers: list[PeerChange]
    notes: list[str]

    @property
    def regressions(self) -> list[Change]:
        """What is slower, and what does not run any more; the worst first."""
        worse = [one for one in self.changes if one.verdict in (SLOWER, FAILS)]
        return sorted(worse, key=lambda one: -(one.ratio or math.inf))

    @property
    def exit_code(self) -> int:
        """1 if there are regressions, else 0. Files that cannot be compared have raised: 2."""
        return 1 if self.regressions else 0

    @property
    def summaries(self) -> list[Summary]:
        found: dict[tuple[str, str], list[Change]] = {}
        for change in self.changes:
            found.setdefault((change.key.measure, change.key.op), []).append(change)
        return [
            Summary(*of, _geomean(changes), dict(Counter(one.verdict for one in changes)))
            for of, changes in found.items()
        ]

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "exit_code": self.exit_code,
            "threshold": self.threshold,
            "critical": round(self.critical, 3),
            "summary": [asdict(one) for one in self.summaries],
            "drift": [asdict(one) for one in self.drifts],
            "peers": [asdict(one) for one in self.peers],
            "changes": [{**one.key._asdict(), **_beside(one)} for one in self.changes],
            "notes": self.notes,
        }


def compare(
    old: Results, new: Results, *, threshold: float = 0.03, across: bool = False
) -> Comparison:
    """Hold `new` against `old`: what of ours is slower by more than `threshold` and than noise.

    Raises ArgumentError for files that cannot be compared: of different machines or versions of
    torch (unless `across`), or without a number in common.
    """
    if not 0 < threshold < 1:
        raise ArgumentError(f"compare: a threshold is between 0 and 1, as 0.03; got {threshold}")
    notes = _differences(old.meta, new.meta, across=across)
    before, after = readings(old), readings(new)
    versions = Versions(old.meta, new.meta)
    drifts = Drifts(witnesses(before, after, versions))
    both = [key for key, one in before.values.items() if one.ours and key in after.values]
    if not both and not (before.values.keys() & after.values.keys()):
        raise ArgumentError("compare: the files have no problem in common, so nothing to compare")
    critical = NormalDist().inv_cdf(1 - FALSE_ALARMS / max(1, len(both)))
    usual = _usual_errors(before), _usual_errors(after)
    changes = []
    for key in both:
        one, other = before.values[key], after.values[key]
        noise = math.hypot(
            max(one.error, usual[0].get(key[:2], 0.0)),
            max(other.error, usual[1].get(key[:2], 0.0)),
            drifts.scatter(key),
        )
        moved = math.log(other.value / one.value)
        change = moved - drifts.drift(key, moved)
        least = MEASURES[key.measure].threshold(threshold, one.value)
        changes.append(
            Change(
                key,
                _verdict(change, noise, least, critical),
                old=one.value,
                new=other.value,
                ratio=round(math.exp(change), 5),
                raw=round(math.exp(moved), 5),
                noise=round(noise, 5),
                witnesses=drifts.count(key),
                old_choice=one.choice,
                new_choice=other.choice,
            )
        )
    changes += _one_sided(before, after)
    peers = _peer_changes(before, after, versions)
    return Comparison(threshold, critical, changes, drifts.told(), peers, notes)


def parse_threshold(text: str) -> float:
    """ "3%" and "0.03" -> 0.03."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise ArgumentError(f"{text!r} is not a threshold: write 3% or 0.03")
    return value


def _verdict(change: float, noise: float, least: float, critical: float) -> str:
    if abs(change) > math.log1p(least):
        if abs(change) <= critical * noise:
            return UNCLEAR
        return SLOWER if change > 0 else FASTER
    # Two standard errors: what is called the same would else have been seen to change.
    return STEADY if 2 * noise <= least else UNCLEAR


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], *, across: bool) -> list[str]:
    """What the files were made with, where it differs; raises where times then mean nothing."""
    apart = [_differs(name, old, new) for name in SAME if old.get(name) != new.get(name)]
    if apart and not across:
        raise ArgumentError(
            f"compare: the files differ in {'; '.join(apart)}. Times of different machines or "
            "libraries say nothing about this code; --across compares them anyway"
        )
    told = [_differs(name, old, new) for name in TOLD if old.get(name) != new.get(name)]
    return [f"differs: {line}" for line in [*apart, *told]]


def _differs(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    return f"{name}: {old.get(name)} -> {new.get(name)}"


def _usual_errors(of: Readings) -> dict[tuple[str, ...], float]:
    """The median error of an op's readings: none is trusted more, for a few samples that agree."""
    errors: dict[tuple[str, ...], list[float]] = {}
    for key, one in of.values.items():
        if one.error:
            errors.setdefault(key[:2], []).append(one.error)
    return {key: median(found) for key, found in errors.items()}


def _one_sided(before: Readings, after: Readings) -> list[Change]:
    """What is in one file only, and what failed in one."""
    found = []
    for key, one in before.values.items():
        if one.ours and key not in after.values:
            reason = after.failures.get(key, "")
            verdict = FAILS if key in after.failures else GONE
            found.append(Change(key, verdict, old=one.value, old_choice=one.choice, reason=reason))
    for key, one in after.values.items():
        if one.ours and key not in before.values:
            verdict = WORKS if key in before.failures else NEW
            found.append(Change(key, verdict, new=one.value, new_choice=one.choice))
    return found


def _peer_changes(before: Readings, after: Readings, versions: Versions) -> list[PeerChange]:
    changes: dict[tuple[str, str, str], list[float]] = {}
    peers: dict[str, str] = {}
    for key, one in before.values.items():
        if not one.ours and key in after.values:
            ratio = after.values[key].value / one.value
            changes.setdefault((key.measure, key.op, key.impl), []).append(ratio)
            peers[key.impl] = one.peer
    return [
        PeerChange(*of, round(_mean(ratios), 5), len(ratios), *versions.of(peers[of[2]]))
        for of, ratios in changes.items()
    ]


def _geomean(changes: Iterable[Change]) -> float | None:
    ratios = [one.ratio for one in changes if one.ratio is not None]
    return round(_mean(ratios), 5) if ratios else None


def _mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _beside(change: Change) -> dict[str, Any]:
    return {name: value for name, value in asdict(change).items() if name != "key"}
