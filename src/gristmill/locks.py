"""Locks that a forked process can use, whoever held them when the process was forked.

A fork copies one thread. Had another one held a lock at that moment, nobody would ever release the
child's copy of it.
"""

from __future__ import annotations

import os
import threading
import weakref


class Lock:
    """As `threading.Lock`, for `with` only; in a forked child it starts anew, not held."""

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _instances.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Forget who holds it."""
        self._lock = threading.Lock()


class RLock:
    """As `threading.RLock`; in a forked child it starts anew, not held."""

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _instances.add(self)

    def acquire(self, timeout: float = -1) -> bool:
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Forget who holds it."""
        self._lock = threading.RLock()


_instances: weakref.WeakSet[Lock | RLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in _instances:
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
