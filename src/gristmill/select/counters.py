"""What the library has done in this process: compiles, cache hits, plans, choices, fallbacks."""

from __future__ import annotations

from collections import Counter
from typing import TypedDict, cast

from gristmill.jit import counters as jit_counters
from gristmill.locks import Lock

_LOCK = Lock()
_CHOICES: Counter[str] = Counter()
_FALLBACKS: Counter[str] = Counter()
_TUNINGS: Counter[str] = Counter()


class Counters(TypedDict):
    """What `counters()` gives: a plain dict with these keys."""

    compiles: int
    compile_seconds: float
    memory_hits: int
    disk_hits: int
    layer_hits: int
    loads: int
    load_seconds: float
    rejected: int
    plans: int
    choices: dict[str, int]
    fallbacks: dict[str, int]
    tunings: dict[str, int]


def count_choice(op: str, variant: str) -> None:
    """One plan was made: `op` will run by `variant` for one more kind of problem."""
    with _LOCK:
        _CHOICES[f"{op}:{variant}"] += 1


def count_fallback(op: str, variant: str) -> None:
    """`variant` was wanted for `op`, could not be built, and the next one was tried."""
    with _LOCK:
        _FALLBACKS[f"{op}:{variant}"] += 1


def count_tuning(op: str) -> None:
    """The variants of one problem of `op` were timed here."""
    with _LOCK:
        _TUNINGS[op] += 1


def counters() -> Counters:
    """All counters since the start of this process, as a new dict.

    Of programs: `compiles` and the `compile_seconds` they took; `memory_hits`, `disk_hits` (the
    user's folder) and `layer_hits` (GRISTMILL_CACHE_LAYERS) where nothing had to be compiled;
    `rejected`, files of a cache that were there and were not used, because they are damaged, of
    another content than their name says, or not trusted; `loads` onto a GPU and their
    `load_seconds`. Of choices: `plans` made; `choices` says by op:variant how many of them took
    each variant; `fallbacks` by op:variant how often one was passed over because it could not be
    built; `tunings` by op how many problems were timed. Calls are not counted: that would cost host
    time on each.
    """
    with _LOCK:
        own = {
            "plans": sum(_CHOICES.values()),
            "choices": dict(sorted(_CHOICES.items())),
            "fallbacks": dict(sorted(_FALLBACKS.items())),
            "tunings": dict(sorted(_TUNINGS.items())),
        }
    return cast(Counters, {**jit_counters.snapshot(), **own})


def reset_counters() -> None:
    """Set every counter to zero, the compiler's too."""
    with _LOCK:
        _CHOICES.clear()
        _FALLBACKS.clear()
        _TUNINGS.clear()
    jit_counters.reset()
