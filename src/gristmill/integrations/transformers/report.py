"""What `patch` and `unpatch` did to a model, and what they left alone and why."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Replaced:
    """A module, by its name in the model ("" is the model itself), and what it runs now.

    `was` is what it ran before, a class or a function; `now` is what it runs, with its options:
    "rms_norm(eps=1e-05, casting='llama')".
    """

    name: str
    was: str
    now: str


@dataclass(frozen=True)
class Left:
    """A module that was looked at and not changed."""

    name: str
    what: str
    reason: str


@dataclass(frozen=True)
class PatchReport:
    """What was replaced, and what was not; `print` shows it, equal lines of equal layers as one."""

    replaced: tuple[Replaced, ...] = ()
    left: tuple[Left, ...] = ()

    def __add__(self, other: PatchReport) -> PatchReport:
        return PatchReport(self.replaced + other.replaced, self.left + other.left)

    def __str__(self) -> str:
        done = [(one.name, f"{one.was} -> {one.now}") for one in self.replaced]
        not_done = [(one.name, f"{one.what}: {one.reason}") for one in self.left]
        parts = [_part("replaced", done), _part("left", not_done)]
        return "\n".join(part for part in parts if part) or "nothing was replaced"


def _part(title: str, entries: list[tuple[str, str]]) -> str:
    if not entries:
        return ""
    names: dict[tuple[str, str], list[str]] = {}
    for name, text in entries:
        # Layers differ in their numbers; "{}" marks where these were.
        names.setdefault((re.sub(r"\d+", "{}", name), text), []).append(name)
    lines = [(_joined(group), text) for (_, text), group in names.items()]
    width = max(len(name) for name, _ in lines)
    return "\n".join([f"{title} ({len(entries)}):", *(f"  {n:<{width}}  {t}" for n, t in lines)])


def _joined(names: list[str]) -> str:
    """Names that differ in numbers only, as one: "layers.{0-3,6}.norm"."""
    first = names[0] or "(the model)"
    if len(names) == 1:
        return first
    columns = zip(*(re.findall(r"\d+", name) for name in names), strict=True)
    numbers = [sorted({int(number) for number in column}) for column in columns]
    parts = re.split(r"\d+", first)
    return "".join(
        part + (_ranges(some) if len(some) > 1 else str(some[0]) if some else "")
        for part, some in zip(parts, [*numbers, []], strict=True)
    )


def _ranges(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 as "{0-2,5}"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return "{" + ",".join("-".join(str(end) for end in ends) for ends in ranges) + "}"
