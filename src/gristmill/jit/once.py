"""Make each value once, however many threads ask, and hold no lock while it is made."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future
from typing import Any, Generic, TypeVar

from gristmill.locks import Lock

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Once(Generic[Key, Value]):
    """A dict that makes its missing values.

    Threads that ask for a key which is being made wait for that one result (or its error); threads
    that ask for any other key go on. An error is not remembered: the next caller tries again.
    """

    def __init__(self) -> None:
        self._made: dict[Key, Value] = {}
        self._making: dict[Key, Future[Value]] = {}
        self._lock = Lock()
        _instances.add(self)

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """The value of `key`, from `make()` if there is none yet."""
        while True:
            with contextlib.suppress(KeyError):
                return self._made[key]
            with self._lock:
                if key in self._made:
                    continue
                future = self._making.get(key)
                mine = future is None
                if future is None:
                    future = self._making[key] = Future()
            if mine:
                return self._make(key, make, future)
            try:
                return future.result()
            except CancelledError:
                # The thread that was making it was interrupted; that is no answer for this one.
                continue

    def _make(self, key: Key, make: Callable[[], Value], future: Future[Value]) -> Value:
        try:
            value = make()
        except BaseException as error:
            with self._lock:
                del self._making[key]
            if isinstance(error, Exception):
                future.set_exception(error)
            else:
                future.cancel()
            raise
        with self._lock:
            self._made[key] = value
            del self._making[key]
        future.set_result(value)
        return value

    def clear(self) -> None:
        """Forget all values; what is being made right now will still be kept."""
        with self._lock:
            self._made.clear()

    def forget_unfinished(self) -> None:
        """In a forked child the threads that were making values do not exist: wait for none."""
        self._making = {}


_instances: weakref.WeakSet[Once[Any, Any]] = weakref.WeakSet()


def _after_fork() -> None:
    for once in _instances:
        once.forget_unfinished()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
