"""Patterns over the names of modules, as a checkpoint's config lists them: names, wildcards, and
regular expressions after ``re:``.

Names are looked up. Wildcards are matched by `fnmatch`, whose expressions do not backtrack. Regular
expressions may backtrack exponentially, which `re` cannot interrupt: it checks their syntax, and
`regex` matches them, with a timeout.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from fnmatch import translate
from typing import TYPE_CHECKING

from gristmill.checkpoints.checks import escaped
from gristmill.errors import CheckpointError
from gristmill.log import shown

if TYPE_CHECKING:
    import regex

_REGEX = "re:"
MAX_CHARACTERS = 1000  # of a wildcard or a regular expression
# With counted repeats written out, as `regex` does when it compiles. It takes up to 300 bytes for a
# character, and for repeated empty groups quadratic time: 0.1 s for these many characters.
MAX_WRITTEN_OUT = 1 << 13  # of one
MAX_TOTAL = 1 << 20  # of all of them in a list
COMPILE_TIMEOUT_S = 5.0  # for all of them in a list
MATCH_TIMEOUT_S = 1.0  # for a module and all patterns of a list
TOTAL_TIMEOUT_S = 60.0  # for all modules

_WILD = re.compile(r"[*?\[]")
_COUNT = re.compile(r"([0-9]+)(?:,[0-9]*)?\}|,[0-9]+\}")


class Patterns:
    """Names and patterns of modules, compiled once.

    Args:
        where: the file and the key that list them, for errors.
        patterns: as the config has them.
        inner: a name also matches the modules below it, and may be an inner part of a module's
            name.
    """

    def __init__(self, where: str, patterns: Iterable[str], *, inner: bool) -> None:
        self._where = where
        self._names: set[str] = set()
        self._inner: set[str] = set()
        self._wild: list[tuple[str, re.Pattern[str]]] = []
        self._expressions: list[tuple[str, regex.Pattern[str]]] = []
        self._left_s = TOTAL_TIMEOUT_S
        self._parts = 0  # of the longest name in `_inner`
        total, start = 0, time.thread_time()
        for pattern in patterns:
            is_expression = pattern.startswith(_REGEX)
            if not is_expression and _WILD.search(pattern) is None:
                self._names.add(pattern)
                if inner:
                    name = pattern.strip(".")
                    self._inner.add(name)
                    self._parts = max(self._parts, name.count(".") + 1)
                continue
            length = _length(where, pattern) if is_expression else len(pattern)
            total += length
            if len(pattern) > MAX_CHARACTERS or length > MAX_WRITTEN_OUT or total > MAX_TOTAL:
                raise CheckpointError(
                    f"{where}: {shown(pattern)} is too long: a pattern may have {MAX_CHARACTERS} "
                    f"characters, {MAX_WRITTEN_OUT} with counted repeats written out, and all of "
                    f"them {MAX_TOTAL}"
                )
            if is_expression:
                self._expressions.append((pattern, _compiled(where, pattern)))
            else:
                self._wild.append((pattern, re.compile(translate(pattern))))
            if time.thread_time() - start > COMPILE_TIMEOUT_S:
                raise CheckpointError(f"{where}: the patterns take too long to compile")

    def match(self, module: str) -> bool:
        # A pattern such as "a.*", for all modules below "a", also matches "a".
        below = f"{module}."
        if module in self._names or below in self._names:
            return True
        if not self._inner.isdisjoint(_runs(module, self._parts)):
            return True
        # CPU time, for a process may be stopped for a while. `regex` counts that of all threads.
        start = time.thread_time()
        end = start + min(MATCH_TIMEOUT_S, self._left_s)
        try:
            for pattern, wild in self._wild:  # noqa: B007, the error names it
                if wild.match(module) or wild.match(below):
                    return True
            if self._wild and time.thread_time() > end:
                raise TimeoutError
            for pattern, expression in self._expressions:  # noqa: B007
                if expression.match(module, timeout=max(end - time.thread_time(), 0.001)):
                    return True
        except TimeoutError:
            raise CheckpointError(
                f"{self._where}: {shown(pattern)} takes too long to match module {shown(module)}: "
                f"the limit is {MATCH_TIMEOUT_S:g} s for a module and {TOTAL_TIMEOUT_S:g} s in "
                f"total"
            ) from None
        finally:
            self._left_s -= time.thread_time() - start
        return False


def _length(where: str, pattern: str) -> int:
    """The length with counted repeats written out."""
    length = len(pattern)
    for after in pattern.split("{")[1:] if length <= MAX_CHARACTERS else ():
        count = _COUNT.match(after)
        if count is None:  # `regex` has fuzzy matching in braces
            raise CheckpointError(f"{where}: {shown(pattern)} has a brace that is not a count")
        length *= max(int(count[1] or 1), 1)
    return length


def _compiled(where: str, pattern: str) -> regex.Pattern[str]:
    import regex

    if "[:" in pattern:  # it opens a POSIX class in `regex` alone
        raise CheckpointError(f"{where}: {shown(pattern)} has a POSIX class, which is not read")
    try:
        text = pattern.removeprefix(_REGEX)
        re.compile(text)
        return regex.compile(text, regex.VERSION0)
    except (re.error, regex.error, OverflowError, RecursionError) as problem:
        raise CheckpointError(
            f"{where}: {shown(pattern)} cannot be compiled: {escaped(str(problem))}"
        ) from problem


def _runs(module: str, most: int) -> Iterator[str]:
    """Every run of up to `most` parts of a dotted name."""
    parts = module.split(".")
    for start in range(len(parts)):
        for end in range(start + 1, min(start + most, len(parts)) + 1):
            yield ".".join(parts[start:end])
