"""Drawing calls of an op and judging them: for tests, which stop, and for tools/fuzz.py."""

from __future__ import annotations

import math
from collections.abc import Callable

import hypothesis
from fuzz_again import again
from fuzz_families import FAMILIES
from fuzz_judge import judged
from fuzz_plan import Plan
from hypothesis import strategies as st


def each_plan(
    op: str,
    count: int,
    seed: int | None,
    body: Callable[[Plan], None],
    *,
    shrink: bool = True,
    repeat: int = 1,
) -> None:
    """Hand `count` calls of an op to `body`. No seed: the same ones every time.

    `repeat`: so many for the same kernels, see `again`.
    """
    plans = FAMILIES[op].plans(op)
    left = count
    phases = [hypothesis.Phase.generate]
    if shrink:
        phases.append(hypothesis.Phase.shrink)
    settings = hypothesis.settings(
        max_examples=math.ceil(count / repeat),
        deadline=None,
        database=None,
        derandomize=seed is None,
        phases=phases,
        suppress_health_check=list(hypothesis.HealthCheck),
    )

    @settings
    @hypothesis.given(call=plans, others=st.tuples(*[plans] * (repeat - 1)))
    def drawn(call: Plan, others: tuple[Plan, ...]) -> None:
        nonlocal left
        calls = again(call, list(others))
        # What shrinks is shown as often as it takes.
        for one in calls if shrink else calls[:left]:
            left -= 1
            body(one)

    if seed is not None:
        drawn = hypothesis.seed(seed)(drawn)
    drawn()


def check(given: Plan, device: str) -> None:
    """Raise if a variant answers a call wrongly."""
    mismatches = judged(given, device).mismatches
    assert not mismatches, "\n".join([*mismatches, f"of {given!r} on {device}"])
