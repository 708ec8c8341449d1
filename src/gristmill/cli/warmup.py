"""`gristmill warmup`: from options to a warm-up, and from what it did to lines and numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from gristmill.cli.common import (
    FAILURE,
    check_file,
    console,
    parse_shape,
    torch_dtype,
    write_json,
)
from gristmill.errors import ArgumentError
from gristmill.jit.compilers import to_text
from gristmill.names import counted
from gristmill.select.device import Device
from gristmill.warmup import DTYPES, Report, Wanted, Warmed, jobs_of, targets_of
from gristmill.warmup import run as warm_up

# In a log: up to so many programs have a line each, more have one for every twentieth part.
_EACH = 40
_PARTS = 20
# More of these tell nothing new.
_MOST_NOTES = 20


@dataclass(frozen=True)
class Options:
    """The command line as it was typed."""

    ops: Sequence[str] = ()
    shapes: Sequence[str] = ()
    dtypes: Sequence[str] = ()
    archs: Sequence[str] = ()
    every: bool = False
    recorded: Path | None = None
    programs: Sequence[str] = ()
    bundle: Path | None = None
    workers: int | None = None
    dry_run: bool = False
    json: bool = False


def run(options: Options) -> None:
    wanted = _wanted(options)
    targets = targets_of(None, options.archs or None)
    if options.dry_run:
        _tell(wanted, targets, options.json)
        return
    if options.bundle is not None and not options.bundle.absolute().parent.is_dir():
        raise ArgumentError(f"--bundle {options.bundle}: there is no such folder")
    if options.bundle is not None:
        check_file(options.bundle)
    with _watch(console(stderr=options.json)) as show:
        report = warm_up(
            wanted,
            targets,
            not options.archs,
            bundle=options.bundle,
            workers=options.workers,
            progress=show,
        )
    if options.json:
        write_json(_as_dict(report))
    else:
        _summarise(report)
    _complain(report)
    if report.count("failed"):
        raise typer.Exit(FAILURE)


def _wanted(options: Options) -> Wanted:
    ways = {
        "--shape": bool(options.shapes),
        "--all": options.every,
        "--recorded": options.recorded is not None,
    }
    given = [name for name, so in ways.items() if so]
    if len(given) > 1:
        raise ArgumentError(f"give one of {' and '.join(given)}, not both")
    if options.recorded is not None and options.dtypes:
        raise ArgumentError("--recorded has dtypes of its own: leave out --dtype")
    return Wanted(
        ops=options.ops or None,
        shapes=[parse_shape(shape) for shape in options.shapes] or None,
        dtypes=[torch_dtype(dtype) for dtype in options.dtypes] or DTYPES,
        every=options.every,
        recorded=options.recorded,
        programs=options.programs,
    )


def _tell(wanted: Wanted, targets: Sequence[Device], as_json: bool) -> None:
    """What would be compiled, and for whom."""
    found = [
        (target.arch, "" if needed is None else needed.problem.op, program)
        for target in targets
        for program, needed in jobs_of(wanted, target, []).items()
    ]
    if as_json:
        write_json([{"arch": arch, "op": op, "program": to_text(one)} for arch, op, one in found])
        return
    out = console()
    for arch, op, one in found:
        out.print(f"{arch}  {op or 'named'}  {one.source}  {', '.join(one.names)}", markup=False)
    for op, count in Counter(op or "named" for _, op, _ in found).items():
        out.print(f"{count:7d}  {op}", markup=False)
    out.print(f"{counted(len(found), 'program')}; nothing was compiled")


@contextmanager
def _watch(out: Console) -> Iterator[Callable[[Warmed, int, int], None]]:
    if not out.is_terminal:
        yield _in_lines(out)
        return
    columns = (
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
        *(TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()),
    )
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task("looking", total=None)

        def show(warmed: Warmed, number: int, total: int) -> None:
            if total <= _EACH:
                out.print(_line(warmed), markup=False)
            words = f"{warmed.op or warmed.source} {_kernels(warmed)}"[:48]
            bar.update(task, completed=number, total=total, description=words)

        yield show


def _in_lines(out: Console) -> Callable[[Warmed, int, int], None]:
    def show(warmed: Warmed, number: int, total: int) -> None:
        if total <= _EACH:
            out.print(_line(warmed), markup=False)
        elif number * _PARTS // total > (number - 1) * _PARTS // total:
            out.print(f"[{number}/{total}] {warmed.op} {_kernels(warmed)}", markup=False)

    return show


def _line(warmed: Warmed) -> str:
    what = f"{warmed.op} {warmed.variant}".strip() or warmed.source
    return (
        f"{warmed.seconds:7.3f} s  {warmed.how:8s}  {what} ({_kernels(warmed)}) for {warmed.arch}"
    )


def _kernels(warmed: Warmed) -> str:
    return ", ".join(name.split("<")[0] for name in warmed.kernels)


def _summarise(report: Report) -> None:
    out, failed = console(), report.count("failed")
    words = [
        f"{counted(report.count('compiled'), 'program')} compiled",
        f"{report.count('cached')} already in the cache",
        *([f"{failed} failed"] if failed else []),
        f"{report.seconds:.1f} s",
    ]
    out.print(", ".join(words))
    if report.bundle is not None:
        size = report.bundle.stat().st_size / 1e6
        out.print(f"{report.bundle}: {size:.1f} MB, sha256 {report.sha256}", soft_wrap=True)


def _complain(report: Report) -> None:
    """What failed, and what was left out."""
    err = console(stderr=True)
    failed = [one for one in report.done if one.how == "failed"]
    for one in failed[:_MOST_NOTES]:
        what = f"{one.op} {one.variant} {', '.join(one.kernels)} for {one.arch}".strip()
        err.print(f"failed: {what}: {one.error}", markup=False, soft_wrap=True)
    for note in report.notes[:_MOST_NOTES]:
        err.print(note, markup=False, soft_wrap=True)
    more = max(0, len(failed) - _MOST_NOTES) + max(0, len(report.notes) - _MOST_NOTES)
    if more:
        err.print(f"and {more} more")


def _as_dict(report: Report) -> dict[str, Any]:
    found: dict[str, Any] = {
        **{how: report.count(how) for how in ("compiled", "cached", "failed")},
        "seconds": report.seconds,
        "programs": [asdict(one) for one in report.done],
        "notes": report.notes,
    }
    if report.bundle is not None:
        found["bundle"] = {
            "path": str(report.bundle),
            "bytes": report.bundle.stat().st_size,
            "sha256": report.sha256,
        }
    return found
