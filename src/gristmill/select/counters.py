"""What the library has done in this process: compiles, cache hits, plans, choices, fallbacks."""

from __future__ import annotations

from collections import Counter
from threading import Lock
from typing import Any

from gristmill.jit import counters as jit_counters

_LOCK = Lock()
_CHOICES: Counter[str] = Counter()
_FALLBACKS: Counter[str] = Counter()


def count_choice(op: str, variant: str) -> None:
    """One plan was made: `op` will run by `variant` for one more kind of problem."""
    with _LOCK:
        _CHOICES[f"{op}:{variant}"] += 1


def count_fallback(op: str, variant: str) -> None:
    """`variant` was wanted for `op`, could not be built, and the next one was tried."""
    with _LOCK:
        _FALLBACKS[f"{op}:{variant}"] += 1


def counters() -> dict[str, Any]:
    """All counters since the start (or the last reset), as a new dict.

    `plans` counts plans made; `choices` says by op:variant how many of them took each variant;
    `fallbacks` how often a variant was passed over because it could not be built. Calls are not
    counted: that would cost host time on each.
    """
    with _LOCK:
        own: dict[str, Any] = {
            "plans": sum(_CHOICES.values()),
            "choices": dict(sorted(_CHOICES.items())),
            "fallbacks": dict(sorted(_FALLBACKS.items())),
        }
    return {**jit_counters.snapshot(), **own}


def reset_counters() -> None:
    """Set every counter to zero, the compiler's too."""
    with _LOCK:
        _CHOICES.clear()
        _FALLBACKS.clear()
    jit_counters.reset()
