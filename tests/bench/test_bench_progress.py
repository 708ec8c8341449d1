from __future__ import annotations

import io

import pytest
from rich.console import Console

from gristmill.bench.progress import Clock, duration, progress


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.2, "1 s"), (8.4, "8 s"), (89, "89 s"), (125, "2 min"), (3900, "1 h 05 min")],
)
def test_durations(seconds: float, told: str) -> None:
    assert duration(seconds) == told


def test_what_is_left_is_judged_by_what_was() -> None:
    times = iter([0.0, 2.0, 2.001, 6.0])
    clock = Clock(11, now=lambda: next(times))
    assert clock.step() == ""
    assert clock.step() == "about 20 s left"  # ten, with this one, of two seconds each
    assert clock.step() == "about 18 s left"  # the one before was there already
    assert clock.step() == "about 24 s left"


def test_a_log_has_a_line_for_each_step() -> None:
    out = Console(file=io.StringIO(), width=80)
    with progress(out, 2) as advance:
        advance("[one]")
        advance("two")
    assert isinstance(out.file, io.StringIO)
    lines = out.file.getvalue().splitlines()
    assert lines[0] == "[1/2] [one]"
    assert lines[1].startswith("[2/2] two")


def test_a_terminal_has_a_bar() -> None:
    out = Console(file=io.StringIO(), width=80, force_terminal=True)
    with progress(out, 2) as advance:
        advance("one")
        advance("two")
    assert isinstance(out.file, io.StringIO)
    assert "two" in out.file.getvalue()
