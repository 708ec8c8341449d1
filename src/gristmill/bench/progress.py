"""How far a long command is: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    """Yields a function to call with what comes next, once before each of `total` steps."""
    if not console.is_terminal:
        count = 0

        def line(text: str) -> None:
            nonlocal count
            count += 1
            console.print(f"[{count}/{total}] {text}", markup=False, highlight=False)

        yield line
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=total)
        started = False

        def advance(text: str) -> None:
            nonlocal started
            bar.update(task, description=text, advance=1 if started else 0)
            started = True

        yield advance
        bar.update(task, completed=total)
