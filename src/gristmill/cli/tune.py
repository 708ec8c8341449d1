"""`gristmill tune`: from options to a plan, and from what was measured to lines and numbers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from gristmill.bench.progress import progress
from gristmill.cli.common import (
    FAILURE,
    console,
    parse_options,
    parse_shape,
    torch_device,
    torch_dtype,
    write_json,
)
from gristmill.errors import ArgumentError
from gristmill.jit.parallel import Compiled
from gristmill.names import counted
from gristmill.ops.registry import OPS, known_op
from gristmill.select.device import Device, device_of
from gristmill.select.record import read_recording
from gristmill.select.tuning import Outcome
from gristmill.tune.ahead import AheadReport, Amount, Watch, open_table, tune_ahead
from gristmill.tune.jobs import CAPTURE_SIZES, Plan, plan_by_recording, plan_by_shapes
from gristmill.tune.report import is_changed, line, outcome_as_dict, speedup, summary

# More of these tell nothing new.
_MOST_NOTES = 20
_ROW_COUNT = re.compile(r"[1-9]\d{0,8}", re.ASCII)


@dataclass(frozen=True)
class Options:
    """The command line as it was typed."""

    ops: Sequence[str]
    shapes: Sequence[str]
    dtypes: Sequence[str]
    recorded: Path | None
    rows: str | None
    capture_sizes: str | None
    options: Sequence[str]
    split: bool
    probes: int
    again: bool
    quick: bool
    table: Path | None
    device: str | None
    workers: int | None
    json: bool


def run(options: Options) -> None:
    where = torch_device(options.device)
    device = device_of(where)
    make_plan = _planner(options, device)
    table = open_table(device, options.table)
    # What is for people goes to stderr when stdout is for machines.
    out = console(stderr=options.json)
    out.print(f"{device}, table {table[0]}", soft_wrap=True)
    plan = make_plan()
    with _Screen(out) as screen:
        report = tune_ahead(
            plan,
            where,
            table,
            thorough=not options.quick,
            again=options.again,
            workers=options.workers,
            watch=screen,
        )
    if options.json:
        write_json(_as_dict(report, device))
    else:
        _show(report, out)
    if not (report.outcomes or report.held or report.alone):
        raise typer.Exit(FAILURE)


def _check(options: Options) -> None:
    """ArgumentError for options that exclude each other."""
    named = (options.shapes, options.dtypes, options.rows, options.capture_sizes, options.options)
    if options.recorded is not None and any(named):
        raise ArgumentError(
            "--recorded has arguments of its own: leave out --shape, --dtype, --rows, "
            "--capture-sizes, --set"
        )
    if options.capture_sizes is not None and options.rows is not None:
        raise ArgumentError("--rows and --capture-sizes both name numbers of rows: give one")
    if options.capture_sizes is not None and not options.split:
        raise ArgumentError(
            "--capture-sizes needs the search, which --no-split turns off; name the sizes by --rows"
        )


def _planner(options: Options, device: Device) -> Callable[[], Plan]:
    """What makes the plan, which takes a while for many problems; ArgumentError comes before."""
    _check(options)
    names = [known_op(name).name for name in options.ops]
    if options.recorded is not None:
        recorded = read_recording(options.recorded)
        wanted = [one for one in recorded if not names or one.op in names]
        return partial(plan_by_recording, wanted, device, split=options.split)
    return partial(
        plan_by_shapes,
        names or list(OPS),
        device,
        shapes=[parse_shape(shape) for shape in options.shapes],
        dtypes=[torch_dtype(dtype) for dtype in options.dtypes or ("bfloat16",)],
        rows=_rows("--rows", options.rows),
        within=_capture_sizes(options.capture_sizes),
        options=parse_options(options.options),
        probes=options.probes if options.split else 0,
        split=options.split,
    )


def _capture_sizes(text: str | None) -> Sequence[int]:
    if text in CAPTURE_SIZES:
        return CAPTURE_SIZES[text]
    return _rows("--capture-sizes", text, f"{', '.join(CAPTURE_SIZES)} or ")


def _rows(option: str, text: str | None, names: str = "") -> list[int]:
    if text is None:
        return []
    words = [word.strip() for word in text.split(",")]
    if not all(_ROW_COUNT.fullmatch(word) for word in words):
        raise ArgumentError(f"{option} {text!r}: write {names}numbers of rows, as in 1,16,64")
    return sorted({int(word) for word in words})


class _Screen(Watch):
    """A bar on a terminal, lines in a log: first for the compiles, then for the measurements."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._bar = ExitStack()
        self._what = ""
        self._begun = 0
        self._advance: Callable[[str], None] = lambda text: None

    def __enter__(self) -> _Screen:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def starts(self, amount: Amount) -> None:
        if not amount.most:
            return
        more = amount.most - amount.problems
        extra = f", and up to {more} more where the choice changes between them" if more else ""
        self._out.print(
            f"{counted(amount.problems, 'problem')}{extra}; {counted(amount.programs, 'program')} "
            f"to compile; about {_duration(amount.seconds)}",
            soft_wrap=True,
        )

    def compiled(self, result: Compiled, number: int, total: int) -> None:
        if self._out.is_terminal:
            self._step("compiling", total)(f"compiling {result.program.source}")
        elif number == 1:
            self._out.print(f"compiling {counted(total, 'program')}")

    def begins(self, key: str, total: int) -> None:
        self._begun += 1
        if self._begun <= total:
            self._step("measuring", total)(key)
            return
        # The choice changes more often than once between two problems.
        self._bar.close()
        if not self._out.is_terminal:
            self._out.print(f"[{self._begun}] {key}", markup=False, highlight=False)

    def ended(self, outcome: Outcome) -> None:
        text = line(outcome, with_key=self._out.is_terminal)
        self._out.print(f"  {text}", markup=False, soft_wrap=True)

    def _step(self, what: str, total: int) -> Callable[[str], None]:
        if what != self._what:
            self._bar.close()
            self._what = what
            self._advance = self._bar.enter_context(progress(self._out, total))
        return self._advance


def _show(report: AheadReport, out: Console) -> None:
    notes = [f"not tuned: {note}" for note in report.notes]
    notes += [f"not compiled: {one}" for one in _not_compiled(report)]
    for note in notes[:_MOST_NOTES]:
        out.print(note.splitlines()[0], markup=False, soft_wrap=True)
    if len(notes) > _MOST_NOTES:
        out.print(f"and {len(notes) - _MOST_NOTES} more")
    out.print(summary(report.outcomes))
    if report.rows:
        out.print(f"{counted(len(report.rows), 'row')} of the table made from them")
    if report.held:
        held = counted(report.held, "problem")
        out.print(f"{held} passed over: covered by a row already (--again measures them anew)")
    if report.alone:
        out.print(f"{counted(report.alone, 'kind')} of problems with one candidate: no choice")
    out.print(f"table: {report.table}", soft_wrap=True)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _not_compiled(report: AheadReport) -> list[str]:
    return [
        f"{', '.join(one.program.names)} of {one.program.source}: {one.error}"
        for one in report.compiled
        if one.how == "failed"
    ]


def _as_dict(report: AheadReport, device: Device) -> dict[str, Any]:
    return {
        "device": device.name,
        "table": str(report.table),
        "problems": [outcome_as_dict(outcome) for outcome in report.outcomes],
        "rows": [dataclasses.asdict(row) for row in report.rows],
        "held": report.held,
        "alone": report.alone,
        "changed": sum(map(is_changed, report.outcomes)),
        "speedup": speedup(report.outcomes),
        "compiled": {
            how: sum(one.how == how for one in report.compiled)
            for how in ("compiled", "cached", "failed")
        },
        "notes": report.notes,
        "not_compiled": _not_compiled(report),
    }
