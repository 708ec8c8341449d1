"""How far a long command is, and how long it may still take: a bar, or plain lines in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

# A step shorter than this was there already, and says nothing about those to come.
_NOTHING_S = 0.02


class Clock:
    """What remains of a number of steps, by the time that those before took."""

    def __init__(self, total: int, now: Callable[[], float] = time.monotonic) -> None:
        self._total, self._now = total, now
        self._begun, self._taken, self._counted = 0, 0.0, 0
        self._last: float | None = None

    def step(self) -> str:
        """A step begins: what is left, with it, as in "about 3 min left"; empty if not known."""
        now = self._now()
        if self._last is not None and now - self._last > _NOTHING_S:
            self._taken += now - self._last
            self._counted += 1
        self._last = now
        left = self._total - self._begun
        self._begun += 1
        if not self._counted:
            return ""
        return f"about {duration(left * self._taken / self._counted)} left"


def duration(seconds: float) -> str:
    """As a reader counts it: 8 s, 3 min, 1 h 05 min."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


@contextmanager
def progress(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    """Yields a function to call with what comes next, once before each of `total` steps."""
    clock = Clock(total)
    if not console.is_terminal:
        count = 0

        def line(text: str) -> None:
            nonlocal count
            count += 1
            left = clock.step()
            told = f"[{count}/{total}] {text}" + (f" ({left})" if left else "")
            console.print(told, markup=False, highlight=False)

        yield line
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=total, left="")
        started = False

        def advance(text: str) -> None:
            nonlocal started
            bar.update(task, description=text, advance=1 if started else 0, left=clock.step())
            started = True

        yield advance
        bar.update(task, completed=total)
