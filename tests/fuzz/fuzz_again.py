"""Other calls for the same kernels: what takes time is to compile, not to run.

The dtypes, shape, layouts and whatever else a kernel is compiled for stay. Numbers, specials and
their places change, and so do those options that are arguments of a kernel.
"""

from __future__ import annotations

from typing import Any

from fuzz_families import FAMILIES
from fuzz_plan import Plan
from fuzz_values import Drawn

# Whatever they are.
FREE = (
    "eps",
    "offset",
    "ignore_index",
    "ignored",
    "wrong",
    "z_loss",
    "return_lse",
    "grid",
    "keep",
    "spoil",
)
# If there is one in both calls, and none is zero or negative where the other is not.
OF_A_KIND = ("scale", "smoothing", "softcap", "limit", "alpha")


def again(first: Plan, others: list[Plan]) -> list[Plan]:
    """`first`, and as many calls like it as there are others, with what those hold."""
    plans = [first]
    for other in others:
        words = {
            name: _varied(name, word, other.words.get(name)) for name, word in first.words.items()
        }
        words = FAMILIES[first.op].settled(words)
        seed = other.seed
        while Plan(first.op, seed, words) in plans:
            seed += 1
        plans.append(Plan(first.op, seed, words))
    return plans


def _varied(name: str, word: Any, other: Any) -> Any:
    if isinstance(word, Drawn):
        if not isinstance(other, Drawn):
            return word
        parts = ("scale", "special", "where", "count")
        return word._replace(**{part: getattr(other, part) for part in parts})
    if name == "mask":
        return word if word is None or other is None else {**word, "keep": other["keep"]}
    if word is None or other is None:
        return word
    if name in FREE or (name in OF_A_KIND and _sign(word) == _sign(other)):
        return other
    return word


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)
