"""`gristmill bench`: from a plan to a run, and from its rows to tables, files, plots and a page."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console

from gristmill.bench import host_cost, runner, runs, whole_models
from gristmill.bench.ahead import compiling as ahead
from gristmill.bench.choice import suite as choice
from gristmill.bench.cold_start import suite as cold_start
from gristmill.bench.environment import describe
from gristmill.bench.progress import progress
from gristmill.bench.regret import families, matrix
from gristmill.bench.regret import suite as regret
from gristmill.bench.regret.report import failed_goals
from gristmill.bench.report import markdown, print_results
from gristmill.bench.results import Results, Row, is_ours
from gristmill.bench.suites import Task
from gristmill.cli.bench_plan import Options, Plan, plan_of
from gristmill.cli.common import FAILURE, check_file, check_folder, console
from gristmill.jit.compilers import Compilable
from gristmill.jit.parallel import compile_all
from gristmill.names import counted
from gristmill.select.device import device_of

# What a shell says of a process that SIGTERM has ended.
_TERMINATED = 128 + signal.SIGTERM


def run(options: Options) -> None:
    out = console()
    _check_outputs(options)
    if options.read:
        results = runs.read(options.read)
        results.path = options.json
        results.save()
    else:
        results = _measured(plan_of(options), options, out)
    print_results(results, out)
    _write(results, options, out)
    failed = any(_is_ours(row) for row in results.failures())
    if options.check:
        for reason in (reasons := failed_goals(results)):
            typer.echo(f"check: {reason}", err=True)
        failed = failed or bool(reasons)
    if failed:
        raise typer.Exit(FAILURE)


def _check_outputs(options: Options) -> None:
    """What cannot be written is said before hours of measuring."""
    for folder in filter(None, (options.report, options.plots)):
        check_folder(folder)
    if options.json is not None:
        check_file(options.json)
    if options.markdown is not None:
        check_file(options.markdown, replaced=False)


def _is_ours(row: Row) -> bool:
    """Whether a failure is gristmill's. A problem that does not fit the device is nobody's."""
    return is_ours(row) and not row["error"].startswith(runner.NO_MEMORY)


def _measured(plan: Plan, options: Options, out: Console) -> Results:
    meta = {
        **describe(plan.device, plan.peers),
        "suites": list(plan.suites),
        "missing_peers": plan.missing,
        "notes": list(plan.notes),
        "commands": [options.command],
        "finished": False,
        runs.UNMEASURED: [*map(str, plan.tasks), *plan.others.values()],
    }
    results = runs.begin(meta, options.json, resume=options.resume)
    against = ", ".join(peer.name for peer in plan.peers)
    out.print(f"{meta['gpu']}, torch {meta['torch']}" + (f"; peers: {against}" if against else ""))
    kernels = _runner(plan, results, options) if plan.tasks else None
    todo = kernels.todo(plan.tasks, out.print) if kernels else []  # which may refuse to go on
    results.save()
    with _terminated_in_order(), _interrupted(options.json):
        if kernels:
            _measure_kernels(kernels, todo, plan, options, out)
        _measure_costs(plan, results, options, out)
        _measure_regret(plan, results, options, out)
        whole_models.run(
            *(plan.whole, plan.device, results, out),
            samples=options.samples,
            quick=options.quick,
            done=lambda suite: runs.complete(results, plan.others[suite]),
        )
    runs.finish(results)
    return results


@contextmanager
def _interrupted(path: Path | None) -> Iterator[None]:
    """Says how to go on, to who has pressed Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        if path is not None:
            typer.echo(f"stopped; {path} has what was measured: --resume goes on with it", err=True)
        raise


@contextmanager
def _terminated_in_order() -> Iterator[None]:
    """SIGTERM, as a time limit sends it, becomes an exception: processes are ended on the way."""

    def stop(number: int, frame: Any) -> None:
        raise SystemExit(_TERMINATED)

    if threading.current_thread() is not threading.main_thread():  # only that one may be told
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _runner(plan: Plan, results: Results, options: Options) -> runner.Runner:
    if options.jobs:
        results.meta["jobs"] = options.jobs
    return runner.Runner(
        plan.device,
        plan.peers,
        results,
        samples=options.samples or (runner.QUICK_SAMPLES if options.quick else runner.SAMPLES),
        # Also where the part of the run before this one had compiled ahead.
        ahead="jobs" in results.meta,
    )


def _measure_kernels(
    kernels: runner.Runner, todo: Sequence[Task], plan: Plan, options: Options, out: Console
) -> None:
    if options.jobs:
        _compile(ahead.own_programs(todo, plan.device), plan.device, out, options.jobs)
        _compile_peers(plan, ahead.worth(todo, plan.peers), kernels.results, options.jobs, out)
    with progress(out, len(todo)) as advance:
        kernels.run(todo, advance)


def _compile_peers(
    plan: Plan, tasks: Sequence[Any], results: Results, jobs: int, out: Console
) -> None:
    if not tasks:
        return
    out.print(f"compiling ahead for {len(tasks)} problems, in {min(jobs, len(tasks))} processes")
    with progress(out, len(tasks)) as advance:
        for text in ahead.compile_ahead(tasks, plan.peers, plan.device, jobs, advance):
            results.note(text)


def _measure_costs(plan: Plan, results: Results, options: Options, out: Console) -> None:
    """What a call costs the host, a start, and a choice."""
    device, quick = plan.device, options.quick
    repeats = 1 if quick else 3
    if (ops := plan.names.get(host_cost.SUITE)) is not None:
        with progress(out, host_cost.steps(ops, plan.shapes)) as advance:
            host_cost.run(
                *(device, results, advance),
                dtype=plan.dtype,
                rounds=repeats,
                ops=ops,
                shapes=plan.shapes,
            )
        runs.complete(results, plan.others[host_cost.SUITE])
    if (ops := plan.names.get(cold_start.SUITE)) is not None:
        with progress(out, cold_start.steps(device, ops)) as advance:
            starts = options.samples or (1 if quick else 5)
            cold_start.run(device, results, advance, repeats=starts, names=ops)
        runs.complete(results, plan.others[cold_start.SUITE])
    if (ops := plan.names.get(choice.SUITE)) is not None:
        steps = choice.planned(device, dtype=plan.dtype, repeats=repeats, names=ops)
        with progress(out, len(steps)) as advance:
            choice.run(steps, plan.dtype, results, advance)
        runs.complete(results, plan.others[choice.SUITE])


def _measure_regret(plan: Plan, results: Results, options: Options, out: Console) -> None:
    if regret.SUITE not in plan.others:
        return
    sampled = families.sampled(plan.points) and plan.device.type == "cuda" and not plan.shapes
    regret.describe(results.meta, plan.sample if sampled else None, plan.method)
    points = regret.todo(plan.points, results, plan.method)
    grids = matrix.todo(plan.grids, results)
    if points or grids:
        _measure_points(plan, points, grids, results, options, out)
    runs.complete(results, plan.others[regret.SUITE])


def _measure_points(
    plan: Plan,
    points: Sequence[families.Point],
    grids: Sequence[matrix.Matrix],
    results: Results,
    options: Options,
    out: Console,
) -> None:
    device = plan.device
    results.meta.setdefault("method", runner.METHODS.get(device.type, runner.METHODS["cpu"]))
    sizes = [
        families.Point(grid.family, rows) for grid in grids for rows in (*grid.hints, *grid.sizes)
    ]
    found = [
        *regret.programs(points, device, all_launches=plan.method.all_launches),
        *regret.programs(sizes, device),
    ]
    _compile(list(dict.fromkeys(found)), device, out, options.jobs)
    with progress(out, len(points)) as advance:
        regret.run(points, device, results, advance, plan.method)
    with progress(out, matrix.steps(grids)) as advance:
        samples = options.samples or matrix.SAMPLES
        matrix.run(grids, device, results, advance, samples=samples)


def _compile(programs: Sequence[Compilable], device: torch.device, out: Console, jobs: int) -> None:
    """Compile gristmill's own ahead and in parallel; what fails is told where it is missed."""
    if not programs:
        return
    out.print(f"compiling {counted(len(programs), 'program')} of gristmill's")
    workers, arch = jobs or None, device_of(device).arch
    if not out.is_terminal:
        compile_all(programs, arch, workers=workers)
        return
    with progress(out, len(programs)) as advance:
        compile_all(
            *(programs, arch),
            workers=workers,
            progress=lambda done, number, total: advance(done.program.source),
        )


def _write(results: Results, options: Options, out: Console) -> None:
    written = [] if results.path is None else [str(results.path)]
    if options.markdown is not None:
        file = options.markdown.resolve()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(markdown(results), encoding="utf-8")
        written.append(str(options.markdown))
    if options.plots is not None:
        from gristmill.bench.charts import write_charts

        drawn = write_charts(results, options.plots.resolve())
        written.append(f"{len(drawn)} plots in {options.plots}")
    if options.report is not None:
        from gristmill.bench.page import write_page

        page = write_page(results, options.report.resolve())
        written.append(str(options.report / page.name))
    if written:
        out.print("written: " + ", ".join(written), soft_wrap=True)
