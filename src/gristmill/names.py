"""What the text of an error adds about a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def meant(word: str, known: Iterable[str]) -> str:
    """A guess, where `word` is like one of the names that there are."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
