"""Tuning ahead of time: all kernels are compiled first, then one kind of problem after another.

Rows take part in choices as soon as they are known to hold, and are on disk some seconds later or
when the run ends, in whatever way. So a run that is interrupted goes on where it was: row counts
that a row covers are passed over.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gristmill.errors import ArgumentError, DriverError, GristmillError, TableError
from gristmill.jit import cache
from gristmill.jit.compilers import Compilable
from gristmill.jit.parallel import Compiled, compile_all
from gristmill.ops.op import Op
from gristmill.select.chooser import ranked
from gristmill.select.copies import tensors_in
from gristmill.select.device import Device, device_of
from gristmill.select.overrides import active, batch_invariant
from gristmill.select.problem import Problem, Span
from gristmill.select.table import Row, Table
from gristmill.select.tables import check_own, remember, user_table_path
from gristmill.select.tuning import Candidate, Outcome, can_run, candidates, tune
from gristmill.settings import settings
from gristmill.tune.family import FamilySearch, search_of
from gristmill.tune.jobs import Family, Plan, Size

# Arguments that take more of the free memory than this leave too little for results and copies.
_SHARE_OF_MEMORY = 1 / 3
# Seconds, for the announcement. On an H200 about 400 programs were compiled in 15 processes and
# 9564 launches of 180 problems timed in two minutes (2026-11-16); how these divide is a guess.
_COMPILE_S, _LAUNCH_S, _PROBLEM_S = 1.5, 0.008, 0.05
_WRITE_EVERY_S = 5.0  # a large table takes a tenth of a second to write


@dataclass(frozen=True)
class Amount:
    """What a run is about to do.

    `problems`: measured in any case. `most`: upper bound if there is one switch per gap. `seconds`:
    an estimate.
    """

    families: int
    problems: int
    most: int
    programs: int
    seconds: float


class Watch:
    """Is told what happens; this one ignores it."""

    def starts(self, amount: Amount) -> None:
        """Nothing is compiled or measured yet."""

    def compiled(self, result: Compiled, number: int, total: int) -> None:
        """A program is in the cache, or could not be made."""

    def begins(self, key: str, total: int) -> None:
        """A problem is measured next, one of up to `total` (`Amount.most`)."""

    def ended(self, outcome: Outcome) -> None:
        """It was."""


@dataclass
class AheadReport:
    """What was done.

    `outcomes`: what was measured. `rows`: the rows that this made; one may hold for several of the
    measured row counts. `held`: how many row counts would have been measured if no row covered
    them. `alone`: how many kinds of problems have only one candidate. `notes`: why others were not
    tuned. `table`: the file that has the rows.
    """

    table: Path
    outcomes: list[Outcome] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    held: int = 0
    alone: int = 0
    compiled: list[Compiled] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def open_table(device: Device, path: Path | None) -> tuple[Path, Table]:
    """The file that rows go to, the user's own unless `path` is given, and what it holds now.

    The rows of `path` take part in the choices of this process.
    """
    if path is None and settings().table != "on":
        raise ArgumentError(
            f"tune: GRISTMILL_TABLE={settings().table} keeps no table; give one by --table"
        )
    place = path or user_table_path(device)
    if place is None:
        raise ArgumentError(
            "tune: there is no folder for the table (no home, and GRISTMILL_CACHE_DIR is not set); "
            "give a file by --table"
        )
    try:
        check_own(place, device)
        if not place.exists():
            return place, Table.for_device(device)
        known = Table.load(place)
    except OSError as error:
        raise TableError(f"table {place}: {error}; name another by --table") from error
    except TableError as error:
        raise TableError(f"{error}; move it away, or name another by --table") from error
    if known.gpu != device.name:
        raise TableError(f"table {place}: is for {known.gpu!r}, not for {device.name!r}")
    if path is not None:
        remember(device, list(known.rows.values()), keep=False)
    return place, known


def tune_ahead(
    plan: Plan,
    device: torch.device,
    table: tuple[Path, Table],
    *,
    thorough: bool = True,
    again: bool = False,
    workers: int | None = None,
    watch: Watch | None = None,
) -> AheadReport:
    """Tune the families of `plan` on `device`, and keep what wins in `table` (of `open_table`).

    `thorough`: all launches that variants think worth timing, else only their usual ones.
    `again`: also row counts that a row covers.
    """
    with batch_invariant(False):  # as in the plan
        return _Run(device, table, thorough, again, watch or Watch()).run(plan, workers)


class _Run:
    def __init__(
        self,
        device: torch.device,
        table: tuple[Path, Table],
        thorough: bool,
        again: bool,
        watch: Watch,
    ) -> None:
        self._where, self._device = device, device_of(device)
        self._path, self._known = table
        self._thorough, self._again, self._watch = thorough, again, watch
        self._report = AheadReport(self._path)
        self._steps = 0
        self._programs: set[Compilable] = set()
        self._unwritten: list[Row] = []
        self._written = time.monotonic()

    def run(self, plan: Plan, workers: int | None) -> AheadReport:
        self._report.notes += plan.notes
        tasks = [
            search_of(family, self._known, again=self._again)
            for family in plan.families
            if self._is_allowed(family)
        ]
        self._report.held += sum(task.held for task in tasks)
        programs: dict[Compilable, None] = {}
        tasks = [task for task in tasks if self._can_choose(task, programs)]
        self._programs = set(programs)
        amount = self._amount(tasks, programs, workers)
        self._watch.starts(amount)
        if programs:
            self._report.compiled = compile_all(
                programs, self._device.arch, workers=workers, progress=self._watch.compiled
            )
        self._steps = amount.most
        # What is alive now need not be looked at after each measurement, which would take 0.1 s.
        # Unfreezing takes in all objects: where the program has frozen some, they stay frozen.
        freezes = gc.get_freeze_count() == 0
        if freezes:
            gc.freeze()
        try:
            for task in tasks:
                self._do(task)
                self._report.rows += task.rows.values()
        finally:
            if freezes:
                gc.unfreeze()
            self._write()
        return self._report

    def _is_allowed(self, family: Family) -> bool:
        if family.op.name not in active():
            return True
        self._report.notes.append(f"{family.key}: {family.op.name} is forced by GRISTMILL_USE")
        return False

    def _can_choose(self, task: FamilySearch, programs: dict[Compilable, None]) -> bool:
        """Whether there is more than one candidate; what they compile goes into `programs`."""
        family = task.family
        if not task.todo and task.next() is None:
            return False
        sizes = family.search.rows if family.split else task.todo
        problems = [family.at(rows).problem for rows in sizes if rows not in task.known]
        try:
            found = [self._candidates(family.op, problem) for problem in problems]
        except GristmillError as error:
            self._report.notes.append(f"{family.key}: {error}")
            return False
        if all(len(several) < 2 for several in found):
            self._report.alone += 1
            return False
        task.candidates = max(map(len, found))
        known = {str(launch): launch for launch in task.launches.values()}.values()
        for problem, several in zip(problems, found, strict=True):
            neighbours = [one for one in known if can_run(one, problem)]
            for candidate in [*several, *neighbours]:
                programs.update(
                    dict.fromkeys(candidate.variant.programs(problem, candidate.config))
                )
        return True

    def _candidates(self, op: Op, problem: Problem) -> list[Candidate]:
        choice = ranked(op.name, op.variants, problem)[0]
        incumbent = Candidate(choice.variant, choice.config)
        return candidates(op.variants, problem, incumbent, thorough=self._thorough)

    def _amount(
        self, tasks: Sequence[FamilySearch], programs: Iterable[Compilable], workers: int | None
    ) -> Amount:
        arch = self._device.arch
        missing = sum(not cache.is_cached(program, arch) for program in programs)
        problems = sum(len(task.todo) for task in tasks)
        most = problems + sum(task.most_steps() for task in tasks)
        launches = sum(len(task.todo) * task.candidates for task in tasks)
        seconds = missing * _COMPILE_S / (workers or os.cpu_count() or 1)
        seconds += launches * _LAUNCH_S + problems * _PROBLEM_S
        return Amount(len(tasks), problems, most, missing, seconds)

    def _do(self, task: FamilySearch) -> None:
        """Measure along the rows. What is known so far counts after each step."""
        for rows in task.order():
            outcome = self._measured(task.family, rows, self._neighbours(task, rows))
            if outcome is None:
                task.gaps.add(rows)
                continue
            new = task.won(rows, outcome)
            remember(self._device, new, keep=False)
            self._unwritten += new
            self._report.outcomes.append(outcome)
            self._watch.ended(outcome)
            if time.monotonic() - self._written > _WRITE_EVERY_S:
                self._write()

    def _write(self) -> None:
        if self._unwritten:
            remember(self._device, self._unwritten, path=self._path)
        self._unwritten = []
        self._written = time.monotonic()

    def _neighbours(self, task: FamilySearch, rows: int) -> list[Candidate]:
        """The winners next to `rows`, if that takes no kernel that was not compiled ahead."""
        problem = task.family.at(rows).problem
        return [
            one
            for one in task.neighbours(rows)
            if can_run(one, problem)
            and self._programs.issuperset(one.variant.programs(problem, one.config))
        ]

    def _measured(
        self, family: Family, rows: int, neighbours: Sequence[Candidate]
    ) -> Outcome | None:
        size = family.at(rows)
        key = size.problem.key(rows)
        self._watch.begins(key, self._steps)
        try:
            return self._tuned(family.op, size, neighbours)
        except torch.OutOfMemoryError:
            self._report.notes.append(f"{key}: does not fit into the memory of the device")
        except Exception as error:
            # Of any kind: what compilers and libraries raise must not end a run of hours.
            self._report.notes.append(f"{key}: {type(error).__name__}: {error}")
            self._check_device(key, error)
        finally:
            gc.collect()
            if self._device.kind == "cuda":
                # Where the GPU has failed this does, too; that is told already.
                with contextlib.suppress(RuntimeError):
                    torch.cuda.empty_cache()
        return None

    def _tuned(self, op: Op, size: Size, neighbours: Sequence[Candidate]) -> Outcome:
        need, free = argument_bytes(size), free_bytes(self._where)
        if need > _SHARE_OF_MEMORY * free:
            raise ArgumentError(
                f"{op.name}: the arguments take {need / 1e9:.1f} GB, more than a third of the "
                f"{free / 1e9:.1f} GB that are free"
            )
        args = size.make(self._where)
        problem = op.problem(*args)
        return tune(
            op.name,
            op.variants,
            problem,
            args,
            key=problem.key(problem.rows),
            covers=Span(problem.rows, problem.rows),
            written=op.written,
            elsewhere=op.elsewhere,
            thorough=self._thorough,
            neighbours=neighbours,
        )

    def _check_device(self, key: str, error: Exception) -> None:
        """After some errors a GPU answers nothing else: then there is no use in going on."""
        if self._device.kind != "cuda":
            return
        try:
            torch.cuda.synchronize(self._where)
        except RuntimeError:
            raise DriverError(
                f"the GPU has failed at {key} ({error}); what was tuned before is in {self._path}"
            ) from error


def argument_bytes(size: Size) -> int:
    """What the arguments of a problem take, each piece of memory once."""
    storages = [one.untyped_storage() for one in tensors_in(size.make("meta"))]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def free_bytes(device: torch.device) -> int:
    """The memory that is free on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration):
        return 1 << 62  # not known: the allocator will say so
