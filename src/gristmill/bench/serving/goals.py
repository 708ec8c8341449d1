"""The goals of the suite `vllm`: how much faster gristmill has to be, and where a run misses that.

All goals are in `GOALS`. A goal is judged at a batch where every one of `PEERS` was timed and where
one of `OURS` has a row, timed or failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gristmill.bench.results import Row, failed

# What is compared: the fastest of the first over the fastest of the second.
OURS = ("nvfp4_gristmill", "nvfp4_gristmill_norms")
PEERS = ("bf16", "nvfp4_marlin")
MISSED = "Goals missed"


class Goal(NamedTuple):
    """Tokens/s over those of the fastest peer, for batches up to `batch`; None: for any batch."""

    batch: int | None
    ratio: float


# By model, the first goal that covers a batch counts. A mixture of experts has none: its experts
# are another op, and bf16 has not been timed beside it yet. The tiny model only runs on a CPU.
GOALS: Mapping[str, Sequence[Goal]] = {"llama-8b": (Goal(64, 1.25), Goal(None, 1.0))}


class Comparison(NamedTuple):
    """The fastest of gristmill's rows at a batch over the fastest peer's, which is `peer`."""

    ratio: float
    peer: str


def compared(of_batch: Mapping[str, Row]) -> Comparison | None:
    """By implementation, the rows of a batch; None where one of the two sides was not timed."""
    ours, peer = _fastest(of_batch, OURS), _fastest(of_batch, PEERS)
    if ours is None or peer is None:
        return None
    return Comparison(peer["ms"] / ours["ms"], peer["impl"])


def goal_at(model: str, batch: int) -> float | None:
    for goal in GOALS.get(model, ()):
        if goal.batch is None or batch <= goal.batch:
            return goal.ratio
    return None


def verdict(model: str, by_batch: Mapping[int, Mapping[str, Row]]) -> str | None:
    """One line: whether the goals are met, and where they are not; None if none was judged."""
    judged, missed = 0, []
    for batch, of_batch in sorted(by_batch.items()):
        goal = goal_at(model, batch)
        if goal is None or not any(impl in of_batch for impl in OURS):
            continue
        if not all(_is_timed(of_batch.get(impl)) for impl in PEERS):
            continue
        judged += 1
        found = compared(of_batch)
        if found is None:
            missed.append(f"batch {batch}: failed, goal {goal:.2f}x")
        elif found.ratio < goal:
            # Without the words a ratio just below the goal would read as if it met it.
            up = " (rounded up)" if round(found.ratio, 2) >= goal else ""
            missed.append(
                f"batch {batch}: {found.ratio:.2f}x{up} of {found.peer}, goal {goal:.2f}x"
            )
    if not judged:
        return None
    if not missed:
        return f"Goals met at {_counted(judged)} ({_told(model)})."
    return f"{MISSED} at {len(missed)} of {_counted(judged)} ({_told(model)}): {'; '.join(missed)}."


def _fastest(of_batch: Mapping[str, Row], impls: Iterable[str]) -> Row | None:
    timed = [of_batch[impl] for impl in impls if _is_timed(of_batch.get(impl))]
    return min(timed, key=lambda row: float(row["ms"]), default=None)


def _is_timed(row: Row | None) -> bool:
    """With layers of gristmill's, where these were asked for: without, the row has a reason."""
    return row is not None and "ms" in row and not failed(row)


def _counted(batches: int) -> str:
    return "1 batch" if batches == 1 else f"{batches} batches"


def _told(model: str) -> str:
    """What is asked of a model."""
    asked = ", ".join(
        f"{goal.ratio:.2f}x " + ("above" if goal.batch is None else f"up to batch {goal.batch}")
        for goal in GOALS[model]
    )
    return f"tokens/s of gristmill over the faster of {' and '.join(PEERS)}: {asked}"
