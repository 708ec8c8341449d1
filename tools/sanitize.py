"""Every kernel of every op under NVIDIA's compute-sanitizer, on small problems.

    PYTHONPATH=src python tools/sanitize.py --tool every --jobs 10
    PYTHONPATH=src python tools/sanitize.py --tool racecheck softmax cuda_block
    PYTHONPATH=src python tools/sanitize.py --list nvfp4_moe
    PYTHONPATH=src python tools/sanitize.py nvfp4_moe cuda_wgmma

The first command compiles all kernels in worker processes, then runs them under memcheck,
racecheck, initcheck and synccheck, in several processes at a time, each with some of the runs
(tools/sanitize_runs.py). It ends with how often each kernel was launched and a line for each tool,
and exits with 1 on any finding in a kernel of ours that sanitize_accepted.py does not list with its
reason, any wrong result, a kernel that was never launched, or a tool that does not find the fault
of a kernel made for it (sanitize_canary.cu). Words narrow it down to ops and variants of these
names; with --all also what shows nothing new is run.
--list says what would run, and needs no GPU. Without --tool everything runs right here, and only
results are checked.

What no tool sees: races in global memory and in the shared memory of other blocks of a cluster; by
racecheck, what tensor copies write and the tensor cores' asynchronous reads of shared memory.
tests/emulation stops at those, as far as it knows the instruction. What single tools do not see is
in sanitize_blind.py.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct
from typing import Any

import sanitize_report as report
import torch
from sanitize_blind import (
    CANARIES,
    RINGS,
    UNSEEN,
    misjudged,
    products_for,
    rings_for,
    unseen,
)
from sanitize_report import STARTED, TOOLS, WALKED, Outcome
from sanitize_runs import Run, cuda_kernels, every_run, kernel_of, reached, triton_kernels

from gristmill.jit import Kernel, Program
from gristmill.jit.parallel import compile_all
from gristmill.ops import launch
from gristmill.select.device import KNOWN, Device, device_of

HERE = Path(__file__).resolve()
# What a program costs beside a run: it is loaded, and its code is rewritten; or compiled first.
LOADING, COMPILING = 4, 20
CANARY_SECONDS = 90.0
FAULTY = {kernel for kernels in CANARIES.values() for kernel in kernels}
# Where the CUDA toolkit puts it, if it is on no path.
USUAL = ("/usr/local/cuda/bin/compute-sanitizer", "/opt/cuda/bin/compute-sanitizer")


def main(words: Sequence[str]) -> int:
    """Does what the words of a command line say."""
    options = parser().parse_args(words)
    if options.walk is not None:
        some = chosen(json.loads(options.walk.read_text()), device_here())
        return walk(some, options.tool, every_lane=options.every_lane)
    if options.canary is not None:
        return canary(options.canary)
    device = device_here() if torch.cuda.is_available() else KNOWN[options.arch]
    some = every_run(device, options.words, everything=options.all)
    kernels = cuda_kernels() | triton_kernels()
    if options.list:
        return listed(some, set() if options.words else kernels)
    if not torch.cuda.is_available() and not options.compile:
        sys.stderr.write("sanitize: there is no GPU here; --list says what would run\n")
        return 2
    if not some:
        sys.stderr.write(f"sanitize: nothing is called {' '.join(options.words)}\n")
        return 2
    if not compiled(some, device.arch, options.jobs):
        return 1
    if options.compile:
        return 0
    if options.tool is None:
        return walk(some)
    tools = TOOLS if options.tool == "every" else (options.tool,)
    return sanitized(Driver(options), tools, some, set() if options.words else kernels)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("words", nargs="*", help="names of ops and variants; default: all")
    made.add_argument("--tool", choices=(*TOOLS, "every"), help="of compute-sanitizer")
    made.add_argument("--jobs", type=int, default=8, help="processes at a time")
    made.add_argument("--limit", type=float, default=420, help="seconds for each process")
    made.add_argument("--all", action="store_true", help="also runs that show nothing new")
    made.add_argument("--list", action="store_true", help="say what would run")
    made.add_argument("--compile", action="store_true", help="fill the cache, and do no more")
    made.add_argument(
        "--arch", default="sm_90a", choices=sorted(KNOWN), help="for these two without a GPU"
    )
    made.add_argument("--logs", type=Path, help="a folder for the output of each process")
    made.add_argument("--sanitizer", help="compute-sanitizer, if it is not on the path")
    made.add_argument("--options", default="", help="more options for it")
    made.add_argument("--walk", type=Path, help=argparse.SUPPRESS)
    made.add_argument("--every-lane", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("--canary", choices=TOOLS, help=argparse.SUPPRESS)
    return made


def device_here() -> Device:
    return device_of("cuda")


def listed(some: list[Run], kernels: set[str]) -> int:
    for run in some:
        sys.stdout.write(f"{run.name} {run.words}\n")
    programs = {program for run in some for program in run.programs}
    sys.stdout.write(f"{len(some)} runs, {len(programs)} programs\n")
    missing = sorted(kernels - reached(some))
    for name in missing:
        sys.stdout.write(f"no run launches {name}\n")
    return 1 if missing else 0


def compiled(some: list[Run], arch: str, jobs: int) -> bool:
    """Brings all programs into the cache: a sanitizer has nothing to do with a compiler."""
    begin = time.monotonic()
    programs = [program for run in some for program in run.programs]
    programs += map(canary_program, sorted(FAULTY))
    results = compile_all(programs, arch, workers=max(1, jobs))
    failed = [one for one in results if one.how == "failed"]
    for one in failed:
        sys.stdout.write(f"{one.program.source} {one.program.names}: {one.error}\n")
    fresh = sum(one.how == "compiled" for one in results)
    seconds = time.monotonic() - begin
    sys.stdout.write(f"{len(results)} programs, {fresh} compiled now, {seconds:.0f} s\n")
    sys.stdout.flush()
    return not failed


# ---- in a process under the sanitizer ----


def chosen(names: Iterable[str], device: Device) -> list[Run]:
    """The runs of these names, in their order."""
    wanted = list(names)
    words = {word for name in wanted for word in name.split("/")[:2]}
    found = {run.name: run for run in every_run(device, sorted(words), everything=True)}
    return [found[name] for name in wanted]


def walk(some: list[Run], tool: str | None = None, *, every_lane: bool = False) -> int:
    """Starts one after another, and says in the end what was launched and what was wrong.

    `tool` is the one that looks on, `every_lane` as in sanitize_blind.py.
    """
    torch.set_num_threads(1)  # there are other processes
    launched: Counter[str] = Counter()
    wrong: list[str] = []
    with counted(launched), products_for(tool), rings_for(tool, every_lane=every_lane):
        for run in some:
            sys.stdout.write(f"{STARTED}{run.name} {run.words}\n")
            sys.stdout.flush()
            try:
                error = run.start("cuda")
                torch.cuda.synchronize()
            except Exception as raised:  # the runs behind it are still worth something
                error = f"{type(raised).__name__}: {raised}"
            if error is not None:
                wrong.append(f"{run.name} {run.words}: {error}")
                sys.stdout.write(f"    WRONG: {error}\n")
    told = {"runs": len(some), "wrong": wrong, "launched": launched}
    sys.stdout.write(f"\n{WALKED}{json.dumps(told)}\n")
    sys.stdout.flush()
    return 1 if wrong or not some else 0


@contextmanager
def counted(launched: Counter[str]) -> Any:
    """Counts launches by the functions of kernels."""
    originals = {name: getattr(Kernel, name) for name in ("prepare", "prepare_separate")}

    def counting(prepare: Any) -> Any:
        def prepared(kernel: Kernel, **given: Any) -> Any:
            start, name = prepare(kernel, **given), kernel_of(kernel.name)

            def started(*values: Any) -> None:
                launched[name] += 1
                start(*values)

            return started

        return prepared

    for name, prepare in originals.items():
        setattr(Kernel, name, counting(prepare))
    try:
        yield
    finally:
        for name, prepare in originals.items():
            setattr(Kernel, name, prepare)


def canary_program(kernel: str) -> Program:
    return Program("sanitize_canary.cu", (f"{kernel}<7>",), root=HERE.parent)


def canary(tool: str) -> int:
    """Launches the kernels that show what this tool sees."""
    for kernel in CANARIES[tool]:
        program, ring = canary_program(kernel), "ring" in kernel
        make = torch.zeros if ring else torch.empty
        # Of a ring the last warp copies, six rows of 256 numbers.
        read = make(6 * 256 if ring else 64, dtype=torch.int32, device="cuda")
        written = torch.empty(64, dtype=torch.int32, device="cuda")
        threads = 96 if ring else 64
        call = launch.KernelCall(program, program.names[0], 1, threads, 0, Struct("<QQI"))
        start = launch.prepare(call, device_here().index)
        start(launch.current_stream(0), read.data_ptr(), written.data_ptr(), 64)
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            sys.stdout.write(f"{error}\n")
    told = {"runs": 1, "wrong": [], "launched": dict.fromkeys(CANARIES[tool], 1)}
    sys.stdout.write(f"\n{WALKED}{json.dumps(told)}\n")
    return 0


# ---- around those ----


def shards(some: Sequence[Run], count: int, tool: str | None = None) -> list[list[str]]:
    """Names of runs in so many pieces that take about as long; neighbours share their programs."""
    costs: list[int] = []
    seen: set[Any] = set()
    for run in some:
        fresh = set(run.programs) - seen
        own = sum(tool == "racecheck" and one.source in RINGS for one in fresh)
        costs.append(1 + LOADING * len(fresh) + COMPILING * own)
        seen |= set(run.programs)
    total, done = sum(costs), 0
    found: list[list[str]] = [[] for _ in range(min(max(1, count), len(some)))]
    for run, cost in zip(some, costs, strict=True):
        found[min(len(found) - 1, done * len(found) // total)].append(run.name)
        done += cost
    return [one for one in found if one]


def captured(command: Sequence[str], limit: float) -> tuple[str, int | None]:
    """What a command writes, and its exit code; None where it is ended for taking too long."""
    with tempfile.TemporaryFile() as output:
        # A group of its own: the sanitizer is the parent of what it looks at, and both must end.
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        code: int | None = None
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return output.read().decode(errors="replace"), code


@dataclass
class Driver:
    """Starts processes of this script under the sanitizer."""

    options: argparse.Namespace
    # Read once, by the thread that makes this one: CPython 3.11 counts the depth of a tree that it
    # builds in one place for all threads, and `ast.parse` in two at once can fail by that.
    cuda: set[str] = field(default_factory=cuda_kernels)
    triton: set[str] = field(default_factory=triton_kernels)

    @property
    def sanitizer(self) -> str | None:
        return (
            self.options.sanitizer
            or shutil.which("compute-sanitizer")
            or next((path for path in USUAL if Path(path).is_file()), None)
        )

    def run(
        self,
        tool: str,
        name: str,
        words: Sequence[str],
        limit: float | None = None,
        *,
        accepting: bool = True,
    ) -> Outcome:
        begin = time.monotonic()
        command = [
            # Each tensor in memory of its own, with known ends and nothing left from another.
            *("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1"),
            str(self.sanitizer),
            *report.arguments(
                tool,
                self.cuda | FAULTY,
                self.triton,
                shlex.split(self.options.options),
            ),
            *(sys.executable, str(HERE), *words),
        ]
        text, code = captured(command, limit or self.options.limit)
        if self.options.logs is not None:
            self.options.logs.mkdir(parents=True, exist_ok=True)
            (self.options.logs / f"{tool}-{name}.txt").write_text(text)
        ours = self.cuda | self.triton | FAULTY
        found = report.read(tool, text, code, ours, accepting=accepting)
        if found.broken:
            found.broken.append("\n".join(["its last lines:", *text.splitlines()[-15:]]))
        found.seconds = time.monotonic() - begin
        return found

    def blind(self, tool: str) -> Outcome:
        """An outcome that is clean if the tool sees the fault that is there."""
        found = self.run(tool, "canary", ["--canary", tool], CANARY_SECONDS)
        outcome = Outcome(tool)
        outcome.broken += misjudged(tool, {str(one.kernel) for one in found.errors})
        if outcome.broken:
            outcome.broken += found.broken
        return outcome


def ringed(some: Iterable[Run]) -> list[Run]:
    """The runs that launch kernels with rings."""
    return [run for run in some if any(program.source in RINGS for program in run.programs)]


def started(
    driver: Driver,
    pool: ThreadPoolExecutor,
    folder: Path,
    tool: str,
    some: Sequence[Run],
    *,
    every_lane: bool = False,
) -> list[Future[Outcome]]:
    """Start processes that run `some` under `tool`; with `every_lane` no report is accepted."""
    waiting = []
    for number, names in enumerate(shards(some, driver.options.jobs, tool)):
        name = f"{number}-every-lane" if every_lane else f"{number}"
        path = folder / f"{tool}-{name}.json"
        path.write_text(json.dumps(names))
        words = ["--tool", tool, "--walk", str(path), *["--every-lane"] * every_lane]
        waiting.append(pool.submit(driver.run, tool, name, words, accepting=not every_lane))
    return waiting


def sanitized(driver: Driver, tools: Sequence[str], some: list[Run], kernels: set[str]) -> int:
    """Runs `some` under each tool; a kernel that is never launched is a finding.

    racecheck then looks at kernels with rings once more, with an arrival of every lane.
    """
    if driver.sanitizer is None:
        sys.stderr.write("sanitize: there is no compute-sanitizer; --sanitizer says where it is\n")
        return 2
    totals = []
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(max(1, driver.options.jobs)) as pool,
    ):
        for tool in tools:
            begin = time.monotonic()
            seen = [run for run in some if not reached([run]) & unseen(tool)]
            waiting = [pool.submit(driver.blind, tool)]
            waiting += started(driver, pool, Path(folder), tool, seen)
            total = report.together(tool, (one.result() for one in waiting))
            for name in report.never(total, kernels - unseen(tool)):
                total.broken.append(f"{name} was never launched")
            if tool == "racecheck":
                rings = ringed(seen)
                waiting = started(driver, pool, Path(folder), tool, rings, every_lane=True)
                lanes = report.together(tool, (one.result() for one in waiting))
                for name in report.never(lanes, kernels & reached(rings)):
                    lanes.broken.append(f"{name} was never launched with an arrival of every lane")
                total = report.together(tool, [total, lanes])
            total.seconds = time.monotonic() - begin
            for line in report.details(total):
                sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
            totals.append(total)
    for (tool, kernel), reason in UNSEEN.items():
        if tool in tools and kernel in reached(some):
            sys.stdout.write(f"{tool} does not judge {kernel}: {reason}\n")
    named = kernels or reached(some)
    sys.stdout.write(f"\n{report.kernel_table(totals, named)}\n\n{report.table(totals)}\n")
    return 0 if all(one.clean for one in totals) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
