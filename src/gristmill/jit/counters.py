"""What the jit has done in this process. Launches are not counted: that would cost host time."""

from __future__ import annotations

from gristmill.locks import Lock

_NAMES = (
    "compiles",
    "compile_seconds",
    "memory_hits",
    "disk_hits",
    "layer_hits",
    "loads",
    "load_seconds",
    "rejected",
)

_lock = Lock()
_values: dict[str, float] = dict.fromkeys(_NAMES, 0)


def add(name: str, amount: float = 1) -> None:
    """Add to one counter; a name that is not listed above is a mistake in the library."""
    with _lock:
        _values[name] += amount


def snapshot() -> dict[str, float]:
    """All counters at this moment."""
    with _lock:
        return dict(_values)


def reset() -> None:
    """Set all counters to zero."""
    with _lock:
        _values.update(dict.fromkeys(_NAMES, 0))
