"""The logger, and warnings that are given once.

What each level has (docs/observability.md): a warning is something slower or less safe than it
should be, once each; info is what explains time (a compile, a tuning); debug is every choice and
every kernel read from disk. Nothing is logged per call. Every event is one line, and its first word
says what it is.

The logger has a handler that speaks only where the program has set up no logging of its own: a
library must not write over a program's log, but the reason for a slow fallback must not vanish in
a program that has none. The level comes from GRISTMILL_LOG (see settings.py).
"""

from __future__ import annotations

import logging
import os
import reprlib
import sys

from gristmill.locks import Lock


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
_last_resort = _LastResort()
if not logger.handlers:
    logger.addHandler(_last_resort)

if hasattr(os, "register_at_fork"):
    # A thread that writes a line holds the stream's own lock, which a forked child would find held
    # for ever: so none is at it when the process forks. The handler's is renewed by logging itself.
    os.register_at_fork(before=_last_resort.acquire, after_in_parent=_last_resort.release)

# In the order in which they were given; of too many the oldest are forgotten.
_given: dict[str, None] = {}
_GIVEN_KEPT = 1024
_kinds: dict[str, int] = {}
_lock = Lock()


# Of one kind of event so many are told: reasons may hold sizes and addresses, and a growing length
# must not fill a log.
_KIND_MOST = 16
# What one line may hold: compilers write pages.
_LINE_MOST = 1000


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        try:
            return super().repr_int(x, level)
        except ValueError:  # Python limits the digits
            return f"<an integer of {x.bit_length()} bits>"


_short = _Short()
_short.maxstring = _short.maxother = 100


def warn_once(key: str, message: str, *, kind: str | None = None) -> None:
    """Log `message` as a warning, the first time in this process that `key` is seen."""
    log_once(logging.WARNING, key, message, kind=kind)


def log_once(level: int, key: str, message: str, *, kind: str | None = None) -> None:
    """Log `message` the first time in this process that `key` is seen.

    With `kind`, at most 16 of that kind; the last says that it is the last, and further ones are
    logged at level debug.
    """
    with _lock:
        if key in _given:
            return
        _given[key] = None
        if len(_given) > _GIVEN_KEPT:
            del _given[next(iter(_given))]
        if kind is not None:
            _kinds[kind] = _kinds.get(kind, 0) + 1
            if _kinds[kind] == _KIND_MOST:
                message += " (more of this kind: GRISTMILL_LOG=debug)"
            elif _kinds[kind] > _KIND_MOST:
                level = logging.DEBUG
            if len(_kinds) > _GIVEN_KEPT:
                del _kinds[next(iter(_kinds))]
    logger.log(level, "%s", message)


def one_line(text: object, most: int = _LINE_MOST) -> str:
    """`text` without line breaks, and cut where it is longer than a line of a log should be."""
    words = " ".join(str(text).split())
    return words if len(words) <= most else f"{words[: most - 4]} ..."


def shown(value: object) -> str:
    """The repr of a value for a message, in 300 characters at most."""
    text = _short.repr(value)
    return text if len(text) <= 300 else f"{text[:296]} ..."


def forget_warnings() -> None:
    """Let every warning be given again (tests that count them call this)."""
    with _lock:
        _given.clear()
        _kinds.clear()
