"""Taking turns at the clock, without waiting for ever.

A kernel that is being timed may wait for another thread: a backward pass on CUDA has threads of its
own, and so have thread pools. If that thread waits for its turn to time something, each waits for
the other. Hence a bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gristmill.locks import RLock

# The longest that a thread waits for its turn. Measuring a problem takes half a second, with the
# compilation of its candidates some seconds.
WAIT_S = 30.0


class Turns:
    """One thread at a time, and none waits for more than WAIT_S."""

    def __init__(self) -> None:
        self._lock = RLock()
        # Somebody has waited in vain for the one whose turn it is: nobody else need do so.
        self._stuck = False

    @contextmanager
    def turn(self, share: float = 1.0) -> Iterator[bool]:
        """Whether it is this thread's turn, after at most `share` of WAIT_S."""
        if not self._lock.acquire(timeout=0.0 if self._stuck else share * WAIT_S):
            self._stuck = True
            yield False
            return
        try:
            yield True
        finally:
            self._stuck = False
            self._lock.release()
