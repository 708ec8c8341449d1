"""Ranks agree on which kernel runs, without a collective.

Ranks of one job that run different kernels for one problem get different bits, and wait for the
slowest. What a choice follows from is the same everywhere in a job that is set up well:
`check_equal` compares it once. What is decided while the job runs is decided by one rank for all:
`agree`. Both go through the store of the process group (select/group_store.py); a rank that never
calls is never waited for, and no wait is without a bound.

An entry of `agree` goes from nothing to a claim, by the first rank that comes, and from there to
a result or to "untuned", by whoever is first: the claimer with its result, or a waiter whose
patience is at its end. Each step is a compare-and-set, so there is one outcome and all ranks have
it. Where the store itself fails there is none to be had; such a rank takes the untuned choice,
which is what the others come to if it was the one to decide.

A wait in vain is a wait of all ranks, and the next problem would bring the next one. So after the
first an entry says that it is over: from then on whoever claims says "untuned" at once.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
import uuid
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress

from gristmill.errors import RanksDisagree
from gristmill.log import warn_once
from gristmill.select.group_store import Entries, StoreLost, alone, entries, store

__all__ = ["agree", "alone", "check_equal", "published", "store"]

# Begins every value: ranks with another protocol are told apart from ranks with another choice.
_TAG = "gristmill/1"
_UNTUNED = f"{_TAG} untuned"

_KINDS = ("claim", "result", "untuned", "equal", "stopped")

# The entry by which all ranks stop deciding: a rank has waited in vain.
_STOPPED = "stopped"

# The answer is looked for after 2 ms, then ever more seldom, at last 5 times a second: so a
# thousand waiting ranks ask 5000 times a second, of the 37,000 that a TCPStore answered on two
# busy CPU cores.
_FIRST_SLEEP_S, _LONGEST_SLEEP_S, _SLEEP_GROWTH = 0.002, 0.2, 1.5

_SHOWN = 5

# Of an entry's name, what it is on this rank and on the other; see `check_equal`.
Settled = Callable[[str, str | None, str | None], bool]

_NO_MORE = "nothing else is tuned in this job (tune ahead of time: gristmill tune)"


def agree(key: str, decide: Callable[[], str | None], *, wait_s: float = 30.0) -> str | None:
    """One answer to `key` on all ranks: that of the rank that asked first; None means untuned.

    The first rank to ask runs `decide()`, the others wait for what it says. None comes back on
    every rank alike if `decide` gives None or raises (that rank gets the exception), and if some
    rank has waited `wait_s` seconds: be it that the deciding rank is slow, dead, or kept from
    its work by a collective that the waiting rank has yet to join. An answer holds for the life
    of the store. After one such wait nobody decides any more: what has an answer keeps it, and all
    else is untuned. With no process group, or one rank, this is `decide()`.

    `key` must hold all that may make ranks differ on purpose, such as the GPU's name.

    Never call this with a lock held that `decide` or another thread of this rank needs.
    """
    found = entries()
    if found is None:
        return decide()
    mine = f"{_TAG} claim {found.rank} {uuid.uuid4().hex}"
    try:
        # Before the claim, so that none is made without need; what is claimed or settled by others
        # is honoured all the same, or ranks that see this at different times would differ.
        stopped_by = _stopped_by(found)
        held = found.claim(f"choice/{key}", mine)
        if held != mine:
            return _wait(found, key, held, wait_s)
    except StoreLost as lost:
        _warn_of_a_lost_store(lost)
        return None
    if stopped_by is not None:
        warn_once(
            f"stopped {found.generation}",
            f"ranks have waited for each other for too long, as rank {stopped_by} says: {_NO_MORE}",
        )
        return _settle(found, key, mine, None)
    try:
        decided = decide()
    except BaseException:
        _settle(found, key, mine, None)  # the others need not wait for nothing
        raise
    return _settle(found, key, mine, decided)


def _settle(found: Entries, key: str, claim: str, decided: str | None) -> str | None:
    """Make `decided` the answer to `key`, unless the other ranks have given up; the answer."""
    outcome = _UNTUNED if decided is None else f"{_TAG} result {decided}"
    place = f"choice/{key}"
    try:
        kind, text = _parsed(place, found.settle(place, claim, outcome))
    except StoreLost as lost:
        _warn_of_a_lost_store(lost)
        return None
    if kind == "result":
        return text
    if decided is not None:
        _stop(found)
        warn_once(
            f"late {place}",
            f"rank {found.rank} was too slow in choosing for {key}: the other ranks have stopped "
            f"waiting, and all run the untuned choice; {_NO_MORE}",
        )
    return None


def published(key: str) -> str | None:
    """The answer to `key` that ranks have agreed on, if there is one by now. Never waits."""
    found = entries()
    if found is None:
        return None
    try:
        held = found.read(f"choice/{key}")
    except StoreLost as lost:
        _warn_of_a_lost_store(lost)
        return None
    if held is None:
        return None
    kind, text = _parsed(f"choice/{key}", held)
    return text if kind == "result" else None


def _wait(found: Entries, key: str, held: str, wait_s: float) -> str | None:
    """The answer to `key`, whose entry holds `held` now; after `wait_s` seconds there is none."""
    place = f"choice/{key}"
    start = time.monotonic()
    sleep_s = _FIRST_SLEEP_S
    while True:
        kind, text = _parsed(place, held)
        if kind != "claim":
            return text if kind == "result" else None
        left = wait_s - (time.monotonic() - start)
        if left <= 0:
            return _give_up(found, key, held, wait_s)
        time.sleep(min(sleep_s, left))
        sleep_s = min(sleep_s * _SLEEP_GROWTH, _LONGEST_SLEEP_S)
        held = found.read(place) or held


def _give_up(found: Entries, key: str, claim: str, wait_s: float) -> str | None:
    """Say for all ranks that there is no answer to `key`, unless it comes at this very moment."""
    place = f"choice/{key}"
    _stop(found)  # first, so that whoever sees the outcome sees this, too
    kind, text = _parsed(place, found.settle(place, claim, _UNTUNED))
    if kind == "result":
        return text
    rank = _parsed(place, claim)[1].partition(" ")[0]
    warn_once(
        f"in vain {place}",
        f"rank {rank} has not said within {wait_s:g} s which kernel is best for {key}: all ranks "
        f"run the untuned choice; {_NO_MORE}",
    )
    return None


def _stop(found: Entries) -> None:
    """Tell all ranks to decide nothing more; where that fails, they wait once more, no worse."""
    with suppress(StoreLost):
        found.claim(_STOPPED, f"{_TAG} stopped {found.rank}")


def _stopped_by(found: Entries) -> str | None:
    """The rank by which all have stopped deciding, if they have."""
    held = found.read(_STOPPED)
    return None if held is None else _parsed(_STOPPED, held)[1]


def _warn_of_a_lost_store(lost: StoreLost) -> None:
    warn_once(
        f"store lost {lost}",
        f"the store of the process group cannot be used ({lost}): this rank takes untuned "
        f"choices and compares nothing with other ranks, so they may run other kernels",
    )


def _parsed(place: str, value: str) -> tuple[str, str]:
    """Kind (one of _KINDS) and text of an entry."""
    tag, _, rest = value.partition(" ")
    kind, _, text = rest.partition(" ")
    if tag != _TAG or kind not in _KINDS:
        shown = value if len(value) <= 80 else f"{value[:80]}..."
        raise RanksDisagree(
            f"the store of the process group holds {shown!r} under gristmill/{place}, which is not "
            f"of the form that this version of gristmill writes ({_TAG} ...): run the same version "
            f"on all ranks"
        )
    return kind, text


def check_equal(topic: str, mine: Mapping[str, str], *, settled: Settled | None = None) -> None:
    """Raise RanksDisagree if `mine` is not what the first rank to come here with `topic` had.

    Compared once for each process group and topic, by hash; the mapping itself is sent only where
    hashes differ. A rank that comes first has nothing to compare with and returns at once, so of
    two ranks that differ the later one raises. With no process group, or one rank, nothing is
    done.

    settled: whether an entry (its name, and what it is here and on the first rank) differs only by
    what ranks have agreed on in this run. That is no difference: it was tuned since the first rank
    came here, because no rank had it or because it was stale, and read from a shared table by this
    rank, which came later.
    """
    found = entries()
    if found is None or topic in found.checked:
        return
    # A store that has seen an earlier group of this program has what was compared then.
    place = f"equal/{found.generation}/{topic}"
    packed = _packed(mine)
    digest = hashlib.sha256(packed.encode()).hexdigest()
    try:
        held = found.read(place)
        if held is None:
            # The mapping first: whoever sees the claim must find what it stands for.
            found.claim(f"{place}/{digest}", f"{_TAG} equal {packed}")
            held = found.claim(place, f"{_TAG} equal {found.rank} {digest}")
        rank, _, other = _parsed(place, held)[1].partition(" ")
        if other != digest:
            _compare(found, topic, f"{place}/{other}", rank, mine, settled)
    except StoreLost as lost:
        _warn_of_a_lost_store(lost)
        return
    # Not where they differ: who catches the error and calls again must see it again.
    found.checked.add(topic)


def _compare(
    found: Entries,
    topic: str,
    place: str,
    rank: str,
    mine: Mapping[str, str],
    settled: Settled | None,
) -> None:
    """Raise RanksDisagree unless `mine` and the mapping that `rank` left at `place` agree."""
    held = found.read(place)
    if held is None:
        raise StoreLost(f"what rank {rank} has written is not there")
    theirs = _unpacked(_parsed(place, held)[1])
    differing = []
    for name in sorted(mine.keys() | theirs.keys()):
        here, there = mine.get(name), theirs.get(name)
        if here == there or (settled is not None and settled(name, here, there)):
            continue
        differing.append(
            f"{name}: {there or 'nothing'} on rank {rank}, {here or 'nothing'} on rank {found.rank}"
        )
    if differing:
        more = len(differing) - _SHOWN
        raise RanksDisagree(
            f"{topic}: ranks {rank} and {found.rank} would run different kernels. "
            + "; ".join(differing[:_SHOWN])
            + (f"; and {more} more" if more > 0 else "")
            + ". Give all ranks the same version of gristmill, the same GRISTMILL_* settings and "
            "the same tuned table: copy the table of one to all, or set GRISTMILL_TABLE=off on all"
        )


def _packed(mapping: Mapping[str, str]) -> str:
    text = json.dumps(dict(mapping), sort_keys=True)
    return base64.b64encode(zlib.compress(text.encode())).decode()


def _unpacked(text: str) -> dict[str, str]:
    found: dict[str, str] = json.loads(zlib.decompress(base64.b64decode(text)))
    return found
