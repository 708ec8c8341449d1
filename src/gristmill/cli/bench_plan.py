"""From the options of `gristmill bench` to what is to be measured.

Everything that can be wrong with a command line is found here, before anything is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gristmill.bench import host_cost, whole_models
from gristmill.bench.choice import suite as choice
from gristmill.bench.cold_start import suite as cold_start
from gristmill.bench.end_to_end import suite as end_to_end
from gristmill.bench.experts.models import KNOWN as EXPERTS
from gristmill.bench.hugging_face import suite as hugging_face
from gristmill.bench.peers import Peer, choose
from gristmill.bench.regret import families, matrix
from gristmill.bench.regret import suite as regret
from gristmill.bench.regret.sampling import QUICK, Sampling
from gristmill.bench.shapes import Shape
from gristmill.bench.suites import KERNEL_SUITES, KINDS, SUITES, Task, known, layers_of, tasks
from gristmill.cli.common import parse_dtype, parse_shape, torch_device
from gristmill.errors import ArgumentError
from gristmill.settings import settings

ALL = "all"
_COSTS = (host_cost.SUITE, cold_start.SUITE, choice.SUITE)


@dataclass(frozen=True)
class Options:
    """The command line as it was typed; `command` is all of it."""

    suites: Sequence[str]
    quick: bool
    ops: Sequence[str]
    sets: Sequence[str]
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
    seed: int | None
    sizes: int | None
    weights: int | None
    grid: bool
    all_launches: bool
    check: bool
    device: str | None
    json: Path | None
    markdown: Path | None
    plots: Path | None
    report: Path | None
    read: Sequence[Path]
    resume: bool
    jobs: int
    command: str


@dataclass(frozen=True)
class Plan:
    """What is measured: problems of kernel time with their peers, and those of other suites.

    `names`: for each of the others that takes part, the ops that were asked for; none means all.
    `chosen`: the options that choose among what these suites have, as they are typed.
    """

    device: torch.device
    suites: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Shape]
    tasks: Sequence[Task]
    peers: Sequence[Peer]
    missing: dict[str, str]
    notes: Sequence[str]
    names: dict[str, list[str]]
    points: Sequence[families.Point]
    grids: Sequence[matrix.Matrix]
    sample: Sampling = field(default_factory=Sampling)
    method: regret.Method = field(default_factory=regret.Method)
    whole: whole_models.Chosen = field(default_factory=whole_models.Chosen)
    chosen: str = ""

    @property
    def others(self) -> dict[str, str]:
        """Suites that are not of kernel time, each with what was `chosen` of it."""
        suites = [suite for suite in _COSTS if suite in self.names]
        suites += [regret.SUITE] if self.points or self.grids else []
        return {suite: f"{suite} {self.chosen}".strip() for suite in [*suites, *self.whole.suites]}

    @property
    def dtype(self) -> str:
        """That of suites which have one only."""
        return self.dtypes[0] if self.dtypes else "bfloat16"


def plan_of(options: Options) -> Plan:
    settings()  # a mistake in the environment is one of every row
    suites = list(SUITES) if ALL in options.suites else list(dict.fromkeys(options.suites))
    for suite in suites:
        known("suite", suite, (*SUITES, ALL))
    device = torch_device(options.device)
    dtypes = [parse_dtype(dtype) for dtype in options.dtypes]
    shapes = [_shape(text) for text in options.shapes]
    whole = whole_models.choose(suites, options.suites, device, _filters(options))
    names = _names(suites, options.ops, device)
    found, notes, peers, missing = _kernel_tasks(suites, options, device, dtypes, shapes, whole)
    points: list[families.Point] = []
    grids: list[matrix.Matrix] = []
    sample, method = _sampling(options, suites)
    if regret.SUITE in names:
        points, grids = _regret(names[regret.SUITE], options, device, dtypes, shapes, sample)
    return Plan(
        *(device, suites, dtypes, shapes, found, peers, missing, notes, names),
        *(points, grids, sample, method, whole, _chosen(options)),
    )


def _ops_of(suite: str, device: torch.device) -> list[str]:
    """The ops that a suite has, by the names of result files."""
    if suite in KERNEL_SUITES:
        return [name for name, kind in KINDS.items() if kind.suite == suite]
    return {
        host_cost.SUITE: lambda: list(host_cost.CALLS),
        cold_start.SUITE: lambda: [start.name for start in cold_start.starts(device)],
        regret.SUITE: lambda: list(families.KINDS),
        choice.SUITE: lambda: [step.op for step in choice.planned(device)],
        end_to_end.SUITE: lambda: list(end_to_end.OPS),
        hugging_face.SUITE: lambda: list(hugging_face.OPS),
    }.get(suite, list)()


def _names(suites: Sequence[str], ops: Sequence[str], device: torch.device) -> dict[str, list[str]]:
    """Of the ops that are asked for those of each suite; one that has none of them is left out."""
    there = {suite: _ops_of(suite, device) for suite in suites}
    every = dict.fromkeys(name for names in there.values() for name in names)
    for op in ops:
        known("op", op, every)
    wanted = {suite: [op for op in ops if op in names] for suite, names in there.items()}
    return {suite: names for suite, names in wanted.items() if names or not ops}


def _kernel_tasks(
    suites: Sequence[str],
    options: Options,
    device: torch.device,
    dtypes: Sequence[str],
    shapes: Sequence[Shape],
    whole: whole_models.Chosen,
) -> tuple[list[Task], list[str], list[Peer], dict[str, str]]:
    """Problems of kernel time, notes on what was left out, the peers, and who is missing."""
    kernels = [suite for suite in suites if suite in KERNEL_SUITES]
    if not kernels:
        asked = (options.sets, options.layers, options.rows, options.routings)
        if any(asked):
            raise ArgumentError(
                "sets, layers, rows and routing choose problems of kernel time: name a suite of "
                f"these: {', '.join(KERNEL_SUITES)}"
            )
        return [], [], [], {}
    named = [op for op in options.ops if op in KINDS and KINDS[op].suite in kernels]
    models = [name for name in options.models if name in EXPERTS or name not in whole.models]
    if (options.ops and not named) or (options.models and not models):
        return [], [], [], {}  # these are names that only other suites have
    found, notes = tasks(
        device.type,
        suites=kernels,
        quick=options.quick,
        names=named,
        sets=options.sets,
        shapes=shapes,
        dtypes=dtypes,
        layers=[layer for text in options.layers for layer in layers_of(text)],
        rows=[_size(text) for text in options.rows],
        models=models,
        routings=options.routings,
    )
    peers, missing = choose(options.peers or (), device, {task.name for task in found})
    return found, notes, peers, missing


def _regret(
    names: Sequence[str],
    options: Options,
    device: torch.device,
    dtypes: Sequence[str],
    shapes: Sequence[Shape],
    sample: Sampling,
) -> tuple[list[families.Point], list[matrix.Matrix]]:
    """What the suite `regret` is to measure; shapes given by hand leave out the matrices."""
    points = families.points(
        device.type, quick=options.quick, names=names, shapes=shapes, dtypes=dtypes, sample=sample
    )
    if shapes:
        return points, []
    return points, [
        one
        for dtype in dtypes or ("bfloat16",)
        for one in matrix.matrices(device.type, quick=options.quick, names=names, dtype=dtype)
    ]


def _sampling(options: Options, suites: Sequence[str]) -> tuple[Sampling, regret.Method]:
    """How the suite `regret` draws its problems, and how it measures them."""
    usual = QUICK if options.quick else Sampling()
    sample = Sampling(
        seed=usual.seed if options.seed is None else options.seed,
        sizes=usual.sizes if options.sizes is None else options.sizes,
        weights=usual.weights if options.weights is None else options.weights,
        grid=options.grid,
    )
    given = (options.seed, options.sizes, options.weights)
    chosen = options.grid or options.all_launches or any(one is not None for one in given)
    if chosen and regret.SUITE not in suites:
        raise ArgumentError(
            "seed, sizes, weights, grid and all-launches choose what the suite regret measures: "
            "name that suite"
        )
    return sample, regret.Method(options.samples or regret.SAMPLES, options.all_launches)


def _filters(options: Options) -> whole_models.Filters:
    return whole_models.Filters(
        ops=options.ops,
        models=options.models,
        implementations=options.implementations,
        batches=[_size(text, "sequences") for text in options.batches],
        quick=options.quick,
    )


def _chosen(options: Options) -> str:
    words = ["--quick"] if options.quick else []
    for name, values in (
        *(("--op", options.ops), ("--shape", options.shapes), ("--dtype", options.dtypes)),
        *(("--models", options.models), ("--batches", options.batches)),
        ("--impls", options.implementations),
    ):
        words += [f"{name} {value}" for value in values]
    for name, value in (("--seed", options.seed), ("--sizes", options.sizes)):
        words += [] if value is None else [f"{name} {value}"]
    words += [] if options.weights is None else [f"--weights {options.weights}"]
    words += ["--grid"] * options.grid + ["--all-launches"] * options.all_launches
    return " ".join(words)


def _shape(text: str) -> Shape:
    shape = parse_shape(text)
    if len(shape) < 2 or min(shape) < 1:
        raise ArgumentError(f"{text!r}: a benchmark takes rows x columns, as in 4096x8192")
    return shape


def _size(text: str, what: str = "rows") -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentError(f"{text!r} is no number of {what}: write one such as 64")
    return int(text)
