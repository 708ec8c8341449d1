"""Patterns over the names of modules, as a checkpoint's config lists them: names, wildcards, and
regular expressions after ``re:``.

A checkpoint can come from anybody, and an expression can keep Python's `re` busy for years, which
nothing can interrupt. So expressions are matched here, at all places of a name at once: each step
takes the places where a match may have got to, bits of an integer, to those after it. That takes at
most as many such operations as the product of the lengths of pattern and name. Whether there is a
match is the same as for `re.match`.

What has no such bound is refused: a repeated group inside of another or of a lookahead, and back
references. So is what no config has: lookbehind, flags, atomic groups, possessive repeats.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property

from gristmill.errors import CheckpointError

REGEX = "re:"
MOST_CHARACTERS = 1000  # of a wildcard or an expression
MOST_TOGETHER = 1 << 16  # of all of them
_MOST_NESTED = 20  # groups

_WILD = re.compile(r"[*?\[]")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_COUNT = re.compile(r"\{(?!\})([0-9]*)(,?)([0-9]*)\}")
_GROUP = re.compile(r"\((?:\?(?::|P<\w+>|(=)|(!)))?")


class Patterns:
    """Names and patterns of modules, compiled once.

    Args:
        key: what the config calls the list, for errors.
        patterns: as the config has them.
        inner: a name also speaks for what lies below it, and may be some inner part of the whole
            name.
    """

    def __init__(self, key: str, patterns: Iterable[str], *, inner: bool) -> None:
        self._names: set[str] = set()
        self._inner: set[str] = set()
        self._wild: list[re.Pattern[str]] = []
        self._expressions: list[Expression] = []
        together = 0
        for pattern in patterns:
            is_regex = pattern.startswith(REGEX)
            if not is_regex and _WILD.search(pattern) is None:
                self._names.add(pattern)
                if inner:
                    self._inner.add(pattern.strip("."))
                continue
            together += len(pattern)
            if len(pattern) > MOST_CHARACTERS or together > MOST_TOGETHER:
                raise CheckpointError(
                    f"{key}: patterns may have {MOST_CHARACTERS} characters each and "
                    f"{MOST_TOGETHER} together; {_shown(pattern)} has {len(pattern)}, and those up "
                    f"to it have {together}"
                )
            try:
                if is_regex:
                    self._expressions.append(Expression(pattern[len(REGEX) :]))
                else:
                    self._wild.append(re.compile(translate(pattern)))
            except (ValueError, re.error) as problem:
                raise CheckpointError(f"{key}: {_shown(pattern)} {problem}") from problem

    def match(self, module: str) -> bool:
        # With the dot: a pattern that takes everything below a module takes the module.
        below = f"{module}."
        if module in self._names or below in self._names:
            return True
        if self._inner and not self._inner.isdisjoint(_runs(module)):
            return True
        if any(wild.match(module) or wild.match(below) for wild in self._wild):
            return True
        if not self._expressions:
            return False
        name = _Name(module)
        return any(expression.matches(name) for expression in self._expressions)


class Expression:
    """A regular expression, matched from the start of a name.

    ValueError, with words that go on after the pattern, if it is none or none that is taken.
    """

    def __init__(self, pattern: str) -> None:
        self._steps = _Parser(pattern).parsed()

    def match(self, name: str) -> bool:
        return self.matches(_Name(name))

    def matches(self, name: _Name) -> bool:
        return self._steps.after(name, 1) != 0


def _shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 100 else f"{pattern[:100]}...")


def _runs(module: str) -> Iterator[str]:
    """Every run of parts of a dotted name."""
    dots = [at for at, character in enumerate(module) if character == "."]
    starts, stops = [0, *(at + 1 for at in dots)], [*dots, len(module)]
    for number, start in enumerate(starts):
        for stop in stops[number:]:
            yield module[start:stop]


class _Name:
    """A name that is matched. Place n is before its character n, and one more is at its end.

    Attributes:
        where: of each character, the places before it.
        known: what steps have found that does not depend on where they start.
    """

    def __init__(self, name: str) -> None:
        self.end = 1 << len(name)
        self.everywhere = 2 * self.end - 1
        self.where: dict[str, int] = {}
        for at, character in enumerate(name):
            self.where[character] = self.where.get(character, 0) | 1 << at
        self.known: dict[_Step, tuple[int, int]] = {}

    @cached_property
    def edges(self) -> int:
        """The places between a character of a word and what is none."""
        words = 0
        for character, places in self.where.items():
            if character == "_" or character.isalnum():
                words |= places
        return words ^ (words << 1)


@dataclass(frozen=True, eq=False)
class _Step:
    """A part of an expression. `loops`: it has a repeated group."""

    loops: bool

    def after(self, name: _Name, places: int) -> int:
        """Where a match may be after this part if it may be at `places` before."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class _Literal(_Step):
    character: str

    def where(self, name: _Name) -> int:
        return name.where.get(self.character, 0)

    def after(self, name: _Name, places: int) -> int:
        return (places & self.where(name)) << 1


@dataclass(frozen=True, eq=False)
class _Class(_Literal):
    """A class of characters, such as ``[^.]``, ``\\d`` or ``.``, which `re` judges one by one."""

    kind: re.Pattern[str]

    def where(self, name: _Name) -> int:
        if self not in name.known:
            found = 0
            for character, places in name.where.items():
                if self.kind.match(character):
                    found |= places
            name.known[self] = found, 0
        return name.known[self][0]


@dataclass(frozen=True, eq=False)
class _Edge(_Step):
    """``^``, ``$``, or an escape of ``A``, ``Z``, ``b`` or ``B``."""

    kind: str

    def after(self, name: _Name, places: int) -> int:
        if self.kind in "^A":
            return places & 1
        if self.kind in "bB":
            return places & (name.edges if self.kind == "b" else ~name.edges)
        newline = name.where.get("\n", 0) & (name.end >> 1) if self.kind == "$" else 0
        return places & (name.end | newline)


@dataclass(frozen=True, eq=False)
class _Sequence(_Step):
    steps: tuple[_Step, ...]

    def after(self, name: _Name, places: int) -> int:
        for step in self.steps:
            if not places:
                break
            places = step.after(name, places)
        return places


@dataclass(frozen=True, eq=False)
class _Either(_Step):
    branches: tuple[_Step, ...]

    def after(self, name: _Name, places: int) -> int:
        found = 0
        for branch in self.branches:
            found |= branch.after(name, places)
        return found


@dataclass(frozen=True, eq=False)
class _Ahead(_Step):
    """A lookahead: whether it holds at a place is found once for each name."""

    inner: _Step
    is_negative: bool

    def after(self, name: _Name, places: int) -> int:
        tried, holds = name.known.get(self, (0, 0))
        left = places & ~tried
        while left:
            place = left & -left
            left ^= place
            if (self.inner.after(name, place) != 0) != self.is_negative:
                holds |= place
        name.known[self] = tried | places, holds
        return places & holds


@dataclass(frozen=True, eq=False)
class _Repeat(_Step):
    inner: _Step
    least: int
    most: int | None

    def after(self, name: _Name, places: int) -> int:
        # Matches only move on, so after at most one round for each place nothing changes.
        for _ in range(self.least):
            before, places = places, self.inner.after(name, places)
            if places == before:
                break
        if self.most is None and isinstance(self.inner, _Literal):
            # All at once: an addition carries through a run of ones.
            run = self.inner.where(name)
            return (((places & run) + run) ^ run) | places
        new, rounds = places, self.least
        while new and (self.most is None or rounds < self.most):
            new = self.inner.after(name, new) & ~places
            places |= new
            rounds += 1
        return places


class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def parsed(self) -> _Step:
        found = self._either(0)
        if self.at < len(self.text):
            raise self._error("unbalanced parenthesis")
        return found

    def _error(self, reason: str) -> ValueError:
        return ValueError(f"is no regular expression: {reason} at position {self.at}")

    def _refused(self, what: str) -> ValueError:
        return ValueError(f"has {what} at position {self.at}, which is not taken")

    def _next(self) -> str:
        return self.text[self.at : self.at + 1]

    def _either(self, depth: int) -> _Step:
        branches = [self._sequence(depth)]
        while self._next() == "|":
            self.at += 1
            branches.append(self._sequence(depth))
        if len(branches) == 1:
            return branches[0]
        return _Either(any(branch.loops for branch in branches), tuple(branches))

    def _sequence(self, depth: int) -> _Step:
        steps: list[_Step] = []
        while self._next() not in ("", "|", ")"):
            steps.append(self._repeated(self._one(depth)))
        return _Sequence(any(step.loops for step in steps), tuple(steps))

    def _one(self, depth: int) -> _Step:
        character = self._next()
        if character == "(":
            return self._group(depth)
        if character == "[":
            found = _CLASS.match(self.text, self.at)
            if found is None:
                raise self._error("unterminated character set")
            return self._class(found[0])
        if character == "\\":
            return self._escaped(self.text[self.at + 1 : self.at + 2])
        if self._count() is not None:
            raise self._error("nothing to repeat")
        if character == ".":
            return self._class(character)
        self.at += 1
        return _Edge(False, character) if character in "^$" else _Literal(False, character)

    def _escaped(self, character: str) -> _Step:
        if character and character in "dDsSwW":
            return self._class(f"\\{character}")
        is_edge = character != "" and character in "AZbB"
        if not is_edge and (character == "" or (character.isascii() and character.isalnum())):
            raise self._refused(f"the escape '\\{character}'")
        self.at += 2
        return _Edge(False, character) if is_edge else _Literal(False, character)

    def _class(self, text: str) -> _Step:
        try:
            kind = re.compile(text)
        except re.error as problem:
            raise self._error(str(problem)) from problem
        self.at += len(text)
        return _Class(False, text, kind)

    def _group(self, depth: int) -> _Step:
        found = _GROUP.match(self.text, self.at)
        after = found.end() if found else self.at
        if found is None or self.text[after : after + 1] == "?":
            raise self._refused(f"the group {self.text[self.at : self.at + 4]!r}")
        if depth == _MOST_NESTED:
            raise self._refused(f"more than {_MOST_NESTED} groups inside of each other")
        start, self.at = self.at, after
        inner = self._either(depth + 1)
        if self._next() != ")":
            self.at = start
            raise self._error("unterminated group")
        self.at += 1
        if not (found[1] or found[2]):
            return inner
        if inner.loops:
            raise self._refused("a repeated group in the lookahead that ends")
        return _Ahead(False, inner, found[2] is not None)

    def _count(self) -> tuple[int, int | None, int] | None:
        """How often what stands before is repeated, at least and at most, and what tells it."""
        one = {"*": (0, None, 1), "+": (1, None, 1), "?": (0, 1, 1)}.get(self._next())
        if one is not None:
            return one
        found = _COUNT.match(self.text, self.at)
        if found is None:
            return None
        least = int(found[1] or 0)
        most = least if not found[2] else int(found[3]) if found[3] else None
        return least, most, len(found[0])

    def _repeated(self, inner: _Step) -> _Step:
        count = self._count()
        if count is None:
            return inner
        least, most, length = count
        if isinstance(inner, _Edge):
            raise self._error("nothing to repeat")
        if most is not None and most < least:
            raise self._error("min repeat greater than max repeat")
        is_loop = not isinstance(inner, _Literal) and (most is None or most > 1)
        if is_loop and inner.loops:
            raise self._refused("a repeat of a group with a repeated group in it")
        self.at += length
        if self._next() == "+":
            raise self._refused("a possessive repeat")
        if self._next() == "?":  # as few as can be: that decides nothing
            self.at += 1
        if self._count() is not None:
            raise self._error("multiple repeat")
        return _Repeat(is_loop or inner.loops, inner, least, most)
