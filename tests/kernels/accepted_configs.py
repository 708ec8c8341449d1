"""Configs as a table could have them: launches, and launches with a field changed."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import fields, replace
from typing import Any

from fuzz_emulated import st

from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

ANY = (-1, 0, 1, 2, 3, 5, 7, 10**6, 10**12, 2**31, 10**4000, -(10**4000))
POWERS = (4, 8, 16, 32, 64, 128, 256, 512)


def _number(draw: Any, value: int) -> int:
    """Beside the value, one that another config may have, or anything."""
    near = (value * 2, value // 2, value + 1, value - 1)
    found: int = draw(st.sampled_from((*near, *near, *POWERS, *ANY)))
    return found


@st.composite
def changed(draw: Any, config: Any) -> Any:
    """The config, or with one or two fields changed."""
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 1, 2]))):
        name = draw(st.sampled_from([field.name for field in fields(config)]))
        value = getattr(config, name)
        if isinstance(value, bool):
            value = not value
        elif isinstance(value, str):
            value = {"scan": "launch", "launch": "scan"}[value]
        elif isinstance(value, tuple):
            at = draw(st.integers(0, len(value) - 1))
            value = (*value[:at], _number(draw, value[at]), *value[at + 1 :])
        else:
            value = _number(draw, value)
        config = replace(config, **{name: value})
    return config


class Seen:
    """What was accepted and what was rejected, by a word."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, bool]] = Counter()

    def accepts(self, variant: Variant, problem: Problem, config: Any, what: str) -> bool:
        """Whether it is; a rejection comes at once, in a few words."""
        begin = time.perf_counter()
        reason = variant.rejects(problem, config)
        assert time.perf_counter() - begin < 1.0, config
        assert reason is None or 0 < len(reason) < 200, reason
        self.counts[what, reason is None] += 1
        return reason is None

    def enough(self, what: str, least: int) -> None:
        """Else nothing was tested."""
        assert min(self.counts[what, True], self.counts[what, False]) >= least, self.counts
