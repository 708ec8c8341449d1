"""Timings that are known beforehand, and calls that are compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from gristmill.multikernel import MultiKernel, forget_plans
from gristmill.select import reset_tables
from gristmill.select.copies import rotate
from gristmill.select.timing import Timing
from gristmill.settings import reload_settings

Function = Callable[..., Any]


class FakeTiming:
    """Stands for the clock: each candidate runs once, on what it would be timed on, and gets the
    time that `us(name, arguments)` gives. `runs` has what was timed.
    """

    def __init__(self, us: Callable[[str, Any], float]) -> None:
        self._us = us
        self.runs: list[str] = []

    def __call__(
        self, candidates: Mapping[str, Function], argsets: Sequence[Any], **options: Any
    ) -> dict[str, Timing | Exception]:
        results: dict[str, Timing | Exception] = {}
        for name, function in candidates.items():
            self.runs.append(name)
            try:
                function(*argsets[0])
            except Exception as error:
                results[name] = error
            else:
                results[name] = Timing(self._us(name, argsets[0]), 0.0, 3, "wall")
        return results


def fake_timing(
    monkeypatch: pytest.MonkeyPatch, us: Mapping[str, float] | Callable[[str, Any], float]
) -> FakeTiming:
    """What is timed from here on takes as long as `us` says."""
    clock = FakeTiming(us if callable(us) else lambda name, _: us[name])
    monkeypatch.setattr("gristmill.select.tuning.time_interleaved", clock)
    return clock


def set_tuning(monkeypatch: pytest.MonkeyPatch, mode: str = "first-call") -> None:
    monkeypatch.setenv("GRISTMILL_TUNE", mode)
    reload_settings()


def forget_choices() -> None:
    """As a fresh process: files are read again, and nothing measured in this one is known."""
    reset_tables()
    forget_plans()


def copied(values: Sequence[Any]) -> tuple[Any, ...]:
    """Copies that share memory as the originals do."""
    return rotate(values, 1)[0]


def same_bits(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(one, other)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same_bits, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_bits(one[key], other[key]) for key in one)
    return bool(one == other)


def chosen(one: MultiKernel, *args: Any, **kwargs: Any) -> str | None:
    return one.explain(*args, **kwargs).chosen


def plus(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def minus(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Gives something else, so that a result tells who ran."""
    return x - y


def pair(rows: int, columns: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(rows, columns), torch.ones(rows, columns)


def ran(one: MultiKernel, *args: Any, **kwargs: Any) -> str:
    return {2.0: "plus", 0.0: "minus"}[float(one(*args, **kwargs).flatten()[0])]


def make_two(**options: Any) -> MultiKernel:
    return MultiKernel("two", {"plus": plus, "minus": minus}, **options)
