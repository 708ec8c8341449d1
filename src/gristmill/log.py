"""The logger, and warnings that are given once.

The logger has a handler that speaks only where the program has set up no logging of its own: a
library must not write over a program's log, but the reason for a slow fallback must not vanish in
a program that has none. The level comes from GRISTMILL_LOG (see settings.py).
"""

from __future__ import annotations

import logging
import sys
import threading


class _LastResort(logging.Handler):
    """Writes to stderr, unless the program handles logging itself."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers or logger.handlers != [self]:
            return
        try:
            sys.stderr.write(f"gristmill: {record.levelname.lower()}: {self.format(record)}\n")
        except OSError:
            self.handleError(record)


logger = logging.getLogger("gristmill")
if not logger.handlers:
    logger.addHandler(_LastResort())

# In the order in which they were given; of too many the oldest are forgotten.
_given: dict[str, None] = {}
_GIVEN_KEPT = 1024
_lock = threading.Lock()


def warn_once(key: str, message: str) -> None:
    """Log `message` as a warning, the first time in this process that `key` is seen."""
    with _lock:
        if key in _given:
            return
        _given[key] = None
        if len(_given) > _GIVEN_KEPT:
            del _given[next(iter(_given))]
    logger.warning("%s", message)


def forget_warnings() -> None:
    """Let every warning be given again (tests that count them call this)."""
    with _lock:
        _given.clear()
