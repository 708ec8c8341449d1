"""`gristmill bench`: from options to a run, and from its rows to tables, files and plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import typer
from rich.console import Console

from gristmill.bench import (
    choice,
    cold_start,
    families,
    host,
    matrix,
    regret,
    runner,
    serving_suites,
)
from gristmill.bench.environment import describe
from gristmill.bench.expert_models import KNOWN as EXPERTS
from gristmill.bench.peers import Peer, choose
from gristmill.bench.progress import progress
from gristmill.bench.report import markdown, print_results
from gristmill.bench.results import OURS, Results, Row, load
from gristmill.bench.suites import KERNEL_SUITES, SUITES, Shape, Task, known, layers_of, tasks
from gristmill.cli.common import FAILURE, console, parse_dtype, parse_shape, torch_device
from gristmill.errors import ArgumentError
from gristmill.jit.compilers import Compilable
from gristmill.jit.parallel import compile_all
from gristmill.select.device import device_of


@dataclass(frozen=True)
class Options:
    """The command line as it was typed."""

    suites: Sequence[str]
    quick: bool
    ops: Sequence[str]
    shapes: Sequence[str]
    dtypes: Sequence[str]
    layers: Sequence[str]
    rows: Sequence[str]
    models: Sequence[str]
    routings: Sequence[str]
    batches: Sequence[str]
    implementations: Sequence[str]
    peers: Sequence[str] | None
    samples: int | None
    device: str | None
    json: Path | None
    markdown: Path | None
    plots: Path | None
    read: Path | None


def run(options: Options) -> None:
    out = console()
    if options.plots is not None:
        from gristmill.bench.plots import require

        require()
    results = _measured(options, out) if options.read is None else load(options.read)
    print_results(results, out)
    _write(results, options, out)
    if any(_is_ours(row) for row in results.failures()):
        raise typer.Exit(FAILURE)


def _is_ours(row: Row) -> bool:
    """Rows of whole models say it themselves: gristmill may have a part in several of them."""
    return bool(row.get("ours", row["impl"] == OURS))


def _measured(options: Options, out: Console) -> Results:
    # Everything that can be wrong with the command line is found before anything is measured.
    suites = list(SUITES) if "all" in options.suites else list(options.suites)
    for suite in suites:
        known("suite", suite, (*SUITES, "all"))
    kernels = [suite for suite in suites if suite in KERNEL_SUITES]
    device = torch_device(options.device)
    dtypes = [parse_dtype(dtype) for dtype in options.dtypes]
    whole = serving_suites.choose(suites, options.suites, device, _filters(options))
    names = [name for name in options.ops if name not in whole.ops]
    models = [name for name in options.models if name in EXPERTS or name not in whole.models]
    found, notes = tasks(
        device.type,
        suites=kernels or KERNEL_SUITES,
        quick=options.quick,
        names=names,
        shapes=[_rows(shape) for shape in options.shapes],
        dtypes=dtypes,
        layers=[layer for text in options.layers for layer in layers_of(text)],
        rows=[_size(text) for text in options.rows],
        models=models,
        routings=options.routings,
    )
    peers: list[Peer] = []
    missing: dict[str, str] = {}
    # Names that only whole models have leave nothing for the other suites.
    others = bool(names) >= bool(options.ops) and bool(models) >= bool(options.models)
    if kernels and others:  # the other suites compare with torch alone
        peers, missing = choose(options.peers or (), device, {task.name for task in found})
    else:
        found, notes = [], []
    if others:
        points, grids = _regret_problems(suites, bool(kernels), device, options, names, dtypes)
    else:
        points, grids = [], []
    meta = {**describe(device, peers), "suites": suites, "missing_peers": missing, "notes": notes}
    results = Results(meta, path=options.json)
    against = ", ".join(peer.name for peer in peers)
    out.print(f"{meta['gpu']}, torch {meta['torch']}" + (f"; peers: {against}" if against else ""))
    _measure(suites, found, peers, device, results, options, dtypes, out)
    _measure_regret(points, grids, device, results, options, out)
    serving_suites.run(whole, device, results, out, samples=options.samples, quick=options.quick)
    return results


def _filters(options: Options) -> serving_suites.Filters:
    return serving_suites.Filters(
        ops=options.ops,
        models=options.models,
        implementations=options.implementations,
        batches=[_size(text, "sequences") for text in options.batches],
        quick=options.quick,
    )


def _measure(
    suites: Sequence[str],
    found: Sequence[Task],
    peers: Sequence[Peer],
    device: torch.device,
    results: Results,
    options: Options,
    dtypes: Sequence[str],
    out: Console,
) -> None:
    if found:
        samples = options.samples or (runner.QUICK_SAMPLES if options.quick else runner.SAMPLES)
        with progress(out, len(found)) as advance:
            runner.Runner(device, peers, results, samples=samples).run(found, advance)
    repeats = 1 if options.quick else 3
    dtype = dtypes[0] if dtypes else "bfloat16"
    if "host" in suites:
        with progress(out, host.host_steps()) as advance:
            host.run_host(device, results, advance, dtype=dtype, rounds=repeats)
    if cold_start.SUITE in suites:
        with progress(out, cold_start.steps(device)) as advance:
            cold_start.run(
                device, results, advance, repeats=options.samples or (1 if options.quick else 5)
            )
    if "choice" in suites:
        with progress(out, choice.steps()) as advance:
            choice.run(device, results, advance, dtype=dtype, repeats=repeats)


def _regret_problems(
    suites: Sequence[str],
    beside_others: bool,
    device: torch.device,
    options: Options,
    names: Sequence[str],
    dtypes: Sequence[str],
) -> tuple[list[families.Point], list[matrix.Matrix]]:
    """What the suite `regret` is to measure; shapes given by hand leave out the matrices."""
    if "regret" not in suites:
        return [], []
    if beside_others and names:  # which may know more ops
        names = [name for name in names if name in families.KINDS]
        if not names:
            return [], []
    shapes = [_rows(shape) for shape in options.shapes]
    points = families.points(
        device.type, quick=options.quick, names=names, shapes=shapes, dtypes=dtypes
    )
    if shapes:
        return points, []
    grids = [
        one
        for dtype in dtypes or ("bfloat16",)
        for one in matrix.matrices(device.type, quick=options.quick, names=names, dtype=dtype)
    ]
    return points, grids


def _measure_regret(
    points: Sequence[families.Point],
    grids: Sequence[matrix.Matrix],
    device: torch.device,
    results: Results,
    options: Options,
    out: Console,
) -> None:
    if not points:
        return
    results.meta.setdefault("method", runner.METHODS.get(device.type, runner.METHODS["cpu"]))
    sizes = [
        families.Point(grid.family, rows) for grid in grids for rows in (*grid.hints, *grid.sizes)
    ]
    _compile(regret.programs([*points, *sizes], device), device, out)
    with progress(out, len(points)) as advance:
        regret.run(points, device, results, advance)
    samples = options.samples or matrix.SAMPLES
    with progress(out, matrix.steps(grids)) as advance:
        matrix.run(grids, device, results, advance, samples=samples)
    results.save()


def _compile(programs: Sequence[Compilable], device: torch.device, out: Console) -> None:
    """Compile ahead and in parallel; what fails is told where it is missed."""
    if not programs:
        return
    out.print(f"compiling {len(programs)} programs that are candidates")
    if out.is_terminal:
        with progress(out, len(programs)) as advance:
            compile_all(
                programs,
                device_of(device).arch,
                progress=lambda done, number, total: advance(done.program.source),
            )
    else:
        compile_all(programs, device_of(device).arch)


def _write(results: Results, options: Options, out: Console) -> None:
    written = [results.path] if results.path is not None else []
    if options.markdown is not None:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(markdown(results))
        written.append(options.markdown)
    if options.plots is not None:
        from gristmill.bench.cold_start_report import write_cold_start_plot
        from gristmill.bench.plots import write_plots
        from gristmill.bench.regret_plots import write_regret_plots

        written += write_plots(results, options.plots)
        written += write_regret_plots(results, options.plots)
        written += write_cold_start_plot(results, options.plots)
    if written:
        out.print("written: " + ", ".join(map(str, written)), soft_wrap=True)


def _rows(text: str) -> Shape:
    shape = parse_shape(text)
    if len(shape) < 2 or min(shape) < 1:
        raise ArgumentError(f"{text!r}: a benchmark takes rows x columns, as in 4096x8192")
    return shape


def _size(text: str, what: str = "rows") -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentError(f"{text!r} is no number of {what}: write one such as 64")
    return int(text)
