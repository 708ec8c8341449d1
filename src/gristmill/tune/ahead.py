"""Tuning ahead of time: all kernels are compiled first, then problem by problem is measured.

Each row is kept as soon as it is known for good, so a run that is interrupted goes on where it
was: what has a row that holds is passed over.
"""

from __future__ import annotations

import contextlib
import gc
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gristmill.errors import ArgumentError, DriverError, GristmillError, TableError
from gristmill.jit.compilers import Compilable
from gristmill.jit.parallel import Compiled, compile_all
from gristmill.ops.op import Op
from gristmill.select.chooser import ranked
from gristmill.select.copies import tensors_in
from gristmill.select.device import Device, device_of
from gristmill.select.overrides import active, batch_invariant
from gristmill.select.problem import Problem
from gristmill.select.table import Table
from gristmill.select.tables import check_own, remember, user_table_path
from gristmill.select.tuning import Candidate, Outcome, candidates, tune
from gristmill.settings import settings
from gristmill.tune.jobs import Job, Plan, Size

# A bucket is split where its choice loses more than this at a size between two hints.
SPLIT = 0.03
# Arguments that take more of the free memory than this leave too little for results and copies.
_SHARE_OF_MEMORY = 1 / 3


class Watch:
    """Is told what happens; this one does not mind."""

    def compiled(self, result: Compiled, number: int, total: int) -> None:
        """A program is in the cache, or could not be made."""

    def begins(self, key: str, total: int) -> None:
        """A problem is measured next, one of `total`."""

    def ended(self, outcome: Outcome, kept: bool) -> None:
        """It was; `kept`: there is a row of it now."""


@dataclass
class AheadReport:
    """What was done.

    `tuned`: rows at hints. `splits`: rows at sizes between them, of `probed` that were tried.
    `held`: how many problems had a row already. `alone`: how many have but one candidate. `notes`:
    why others were not tuned. `table`: the file that has the rows.
    """

    table: Path
    tuned: list[Outcome] = field(default_factory=list)
    splits: list[Outcome] = field(default_factory=list)
    probed: int = 0
    held: int = 0
    alone: int = 0
    compiled: list[Compiled] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def outcomes(self) -> list[Outcome]:
        return [*self.tuned, *self.splits]


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
    """Do the jobs of `plan` on `device`, and keep what wins in `table` (of `open_table`).

    `thorough`: all launches that variants think worth timing, else only their usual ones.
    `again`: also what has a row that holds.
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

    def run(self, plan: Plan, workers: int | None) -> AheadReport:
        self._report.notes += plan.notes
        jobs = [job for job in plan.jobs if self._is_wanted(job)]
        programs: dict[Compilable, None] = {}
        jobs = [job for job in jobs if self._can_choose(job, programs)]
        if programs:
            self._report.compiled = compile_all(
                programs, self._device.arch, workers=workers, progress=self._watch.compiled
            )
        self._steps = sum(len(self._sizes(job)) for job in jobs)
        for job in jobs:
            self._do(job)
        return self._report

    def _is_wanted(self, job: Job) -> bool:
        if job.op.name in active():
            self._report.notes.append(f"{job.key}: {job.op.name} is forced by GRISTMILL_USE")
            return False
        if self._holds(job) and not job.asked:
            self._report.held += 1
            return False
        return True

    def _holds(self, job: Job) -> bool:
        return not self._again and self._has_row(job.op, job.key, job.size.problem)

    def _sizes(self, job: Job) -> tuple[Size, ...]:
        """What is measured for a job."""
        return job.asked if self._holds(job) else (job.size, *job.probes, *job.asked)

    def _has_row(self, op: Op, key: str, problem: Problem) -> bool:
        known = self._known
        return known.key(problem) == key and known.lookup(problem, op.variants) is not None

    def _can_choose(self, job: Job, programs: dict[Compilable, None]) -> bool:
        """Whether there is more than one candidate; what they compile goes into `programs`."""
        try:
            sizes = self._sizes(job)
            found = [self._candidates(job.op, size.problem) for size in sizes]
        except GristmillError as error:
            self._report.notes.append(f"{job.key}: {error}")
            return False
        if len(found[0]) < 2:
            self._report.alone += 1
            return False
        for size, several in zip(sizes, found, strict=True):
            for one in several:
                programs.update(dict.fromkeys(one.variant.programs(size.problem, one.config)))
        return True

    def _candidates(self, op: Op, problem: Problem) -> list[Candidate]:
        choice = ranked(op.name, op.variants, problem)[0]
        incumbent = Candidate(choice.variant, choice.config)
        return candidates(op.variants, problem, incumbent, thorough=self._thorough)

    def _do(self, job: Job) -> None:
        """The row of a job and those of its probes: they are kept together or not at all."""
        rows, probes = [], job.asked
        if self._holds(job):
            self._report.held += 1
        elif (outcome := self._measured(job.op, job.size, job.hint)) is not None:
            probes = (*job.probes, *job.asked)
            self._report.tuned.append(outcome)
            self._watch.ended(outcome, True)
            rows.append(outcome.row)
            # In this process at once: what is measured next is compared with it.
            remember(self._device, rows, keep=False)
        for probe in probes:
            outcome = self._measured(job.op, probe, probe.rows)
            if outcome is None:
                continue
            self._report.probed += 1
            wins = outcome.before_us is None or outcome.won > SPLIT
            self._watch.ended(outcome, wins)
            if wins:
                self._report.splits.append(outcome)
                rows.append(outcome.row)
                remember(self._device, [outcome.row], keep=False)
        if rows:
            remember(self._device, rows, path=self._path)

    def _measured(self, op: Op, size: Size, hint: int) -> Outcome | None:
        key = size.problem.key(hint)
        self._watch.begins(key, self._steps)
        try:
            return self._tuned(op, size, hint)
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

    def _tuned(self, op: Op, size: Size, hint: int) -> Outcome:
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
            key=problem.key(hint),
            written=op.written,
            elsewhere=op.elsewhere,
            thorough=self._thorough,
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
