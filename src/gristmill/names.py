"""Words for people: names that do not exist, and how many there are of a thing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def meant(word: str, known: Iterable[str]) -> str:
    """A guess, where `word` is like one of the names that there are."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def counted(number: int, noun: str) -> str:
    """1 program, 2 programs."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
