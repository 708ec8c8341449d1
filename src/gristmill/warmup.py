"""Compiling ahead: in an image build, before capturing a graph, before traffic comes.

A warm-up walks the same road as a call (problem, choice, programs, cache) and stops before the
launch, so what it leaves in the cache is what the calls will look for. It needs no GPU when an
architecture is named. What it warms up for is one of: shapes of ops, the calls that a run has
recorded, or everything: every kernel that the ops have (see ops/space.py for what that means).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gristmill.errors import ArgumentError, GristmillError, VariantUnavailable
from gristmill.formats.nvfp4 import packing
from gristmill.formats.nvfp4.tensor import FRAGMENTS, layout_of
from gristmill.jit import bundle as bundles
from gristmill.jit import cache
from gristmill.jit.compilers import Compilable, from_text
from gristmill.jit.parallel import Compiled, compile_all
from gristmill.log import logger, one_line
from gristmill.ops.registry import OPS, known_op
from gristmill.ops.space import Needed, programs_of
from gristmill.select.chooser import choices
from gristmill.select.device import KNOWN, Device, device_of
from gristmill.select.problem import HINTS
from gristmill.select.record import read_recording, rebuilt
from gristmill.select.tables import table_name, user_table
from gristmill.settings import settings

# Row lengths that cover the kernels of common models: head sizes, then hidden sizes; for losses the
# sizes of vocabularies. A kernel serves a range of lengths, so these few leave little uncompiled.
COLUMNS = (64, 128, 256, 512, 1024, 2048, 3072, 4096, 5120, 6144, 7168, 8192, 12288, 16384)
VOCABULARIES = (32000, 32768, 50257, 128256, 151936, 262144)
# Experts of mixtures, which are the columns of a router's logits.
EXPERTS = (8, 64, 128, 160, 256, 384, 512)
# N and K of linear layers of a model of 8B parameters: attention, then up and down.
LAYERS = ((4096, 4096), (6144, 4096), (14336, 4096), (4096, 14336))
PRODUCTS = ("linear", "linear_with_pre", "matmul")
ROUTERS = ("topk_router", "topk_router_backward")
DTYPES = (torch.bfloat16,)

Shapes = Sequence[tuple[int, ...]]
Ops = str | Iterable[str] | Mapping[str, Shapes] | None
# What needs a program; None where it was named itself.
Jobs = dict[Compilable, Needed | None]


@dataclass(frozen=True)
class Warmed:
    """What became of one program; `op` and `variant` are empty where it was named itself.

    `how` is "compiled", "cached" (it was there before) or "failed", with the reason in `error`.
    """

    op: str
    variant: str
    source: str
    kernels: tuple[str, ...]
    arch: str
    seconds: float
    how: str
    error: str = ""


Progress = Callable[[Warmed, int, int], None]


@dataclass
class Report:
    """What a warm-up did; `sha256` is that of the bundle, `notes` say what was left out."""

    done: list[Warmed] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    bundle: Path | None = None
    sha256: str = ""
    failed: set[tuple[str, Compilable]] = field(default_factory=set)  # architecture and program

    def count(self, how: str) -> int:
        return sum(one.how == how for one in self.done)


@dataclass(frozen=True)
class Wanted:
    """What to warm up for; see `warmup`."""

    ops: Ops = None
    shapes: Shapes | None = None
    dtypes: Sequence[torch.dtype] = DTYPES
    every: bool = False
    recorded: Path | None = None
    programs: Sequence[str] = ()


def warmup(
    ops: Ops = None,
    *,
    shapes: Shapes | None = None,
    dtypes: Sequence[torch.dtype] = DTYPES,
    device: torch.device | str | None = None,
    arch: str | Sequence[str] | None = None,
    progress: Progress | None = None,
    every: bool = False,
    recorded: Path | str | None = None,
    programs: Sequence[str] = (),
    bundle: Path | str | None = None,
    workers: int | None = None,
) -> list[Warmed]:
    """Compile what calls of `ops` (default: all) at `shapes` and `dtypes` will run.

    Without `shapes`: at the row lengths of common models, for cross entropy at vocabularies, for
    routers at numbers of experts, for products of matrices (whose shapes are M x N x K) at the
    layers of one. `ops` may also map each op to its shapes: a whole model in one call.

    For the GPU `device` (default: the current one) kernels are also loaded, so that a first call
    finds them ready. With `arch` ("sm_90a", or several) they are only compiled into the cache, for
    a GPU that need not be here. `progress` is called after each program with it, its number and
    the total.

    Args:
        every: every kernel of the ops for rows of `dtypes`, in place of shapes; only compiled.
        recorded: the calls in this file, which GRISTMILL_RECORD has written, in place of shapes.
        programs: these programs, too, as the message of KernelNotCached names them.
        bundle: a file that gets all of it, for GRISTMILL_CACHE_LAYERS elsewhere, with the user's
            tuned table, whose rows have had a say in it.
        workers: processes to compile in; by default by the cores.

    What does not compile is "failed" in the result, is logged, and hinders nothing else.
    """
    wanted = Wanted(
        ops, shapes, dtypes, every, None if recorded is None else Path(recorded), programs
    )
    _check(wanted)
    targets = targets_of(device, arch)
    to = None if bundle is None else Path(bundle)
    if to is not None and not to.absolute().parent.is_dir():
        raise ArgumentError(f"warmup: there is no folder {to.absolute().parent} for the bundle")
    return run(wanted, targets, arch is None, bundle=to, workers=workers, progress=progress).done


def run(
    wanted: Wanted,
    targets: Sequence[Device],
    here: bool,
    *,
    bundle: Path | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """As `warmup`, with the whole report; `here`: the target is a GPU of this machine."""
    start, report = time.perf_counter(), Report(bundle=bundle)
    jobs = [(target, jobs_of(wanted, target, report.notes)) for target in targets]
    total = sum(len(one) for _, one in jobs)
    for target, found in jobs:
        _compile(found, target, total, workers, report, progress)
        if here and not wanted.every:
            _load(found, target, report.failed)
    for one in report.done:
        if one.how == "failed":
            what, why = f"{one.kernels[0]} for {one.arch}", one_line(one.error)
            logger.warning("failed %s: does not compile: %s", what, why)
    if bundle is not None:
        report.sha256 = _write(bundle, jobs, report)
    report.seconds = time.perf_counter() - start
    return report


def _check(wanted: Wanted) -> None:
    shaped = wanted.shapes is not None or isinstance(wanted.ops, Mapping)
    given = {"shapes": shaped, "every": wanted.every, "recorded": wanted.recorded is not None}
    named = [name for name, there in given.items() if there]
    if len(named) > 1:
        raise ArgumentError(f"warmup: give one of shapes, every and recorded, not {named}")


def jobs_of(wanted: Wanted, target: Device, notes: list[str]) -> Jobs:
    """Each program once, with the first problem that needs it."""
    jobs: Jobs = {from_text(text): None for text in wanted.programs}
    names = _names(wanted.ops)
    if wanted.recorded is not None:
        only = names if wanted.ops is not None else None
        found = _recorded(wanted.recorded, only, target, notes)
    elif wanted.every:
        every = programs_of([OPS[name] for name in names], target, wanted.dtypes)
        return {**jobs, **every, **_packing(names, target, every=True)}
    elif wanted.programs and wanted.ops is None and wanted.shapes is None:
        return jobs
    else:
        found = _at_shapes(wanted, names, target)
    for needed in found:
        variant, config = needed.choice.variant, needed.choice.config
        for program in variant.programs(needed.problem, config):
            jobs.setdefault(program, needed)
    met = {needed.problem.op for needed in jobs.values() if needed is not None}
    return {**jobs, **_packing(met, target, every=False)}


def _packing(names: Iterable[str], target: Device, *, every: bool) -> Jobs:
    """What brings NVFP4 weights into the order of the ops' kernels, where that is needed."""
    needed = {"nvfp4_linear", "nvfp4_moe"} & set(names) and layout_of(target.arch) == FRAGMENTS
    return dict.fromkeys(packing.programs(every)) if needed else {}


def default_shapes(op: str) -> tuple[tuple[int, ...], ...]:
    """What an op is warmed up for unless shapes are given."""
    if op in PRODUCTS:
        return tuple((rows, *layer) for layer in LAYERS for rows in HINTS)
    lengths: tuple[int, ...] = COLUMNS
    if "cross_entropy" in op or op == "scale_gradient_":
        lengths = VOCABULARIES
    elif op in ROUTERS:
        lengths = EXPERTS
    return tuple((rows, columns) for columns in lengths for rows in HINTS)


def target_device(arch: str) -> Device:
    """The device that stands for an architecture, or an error that lists those there are."""
    if arch not in KNOWN:
        raise ArgumentError(f"unknown architecture {arch!r}: there are {', '.join(KNOWN)}")
    return KNOWN[arch]


def targets_of(device: torch.device | str | None, arch: str | Sequence[str] | None) -> list[Device]:
    """What to compile for: the GPU, or what stands for architectures."""
    if arch is not None:
        if device is not None:
            raise ArgumentError("warmup: give a device or an architecture, not both")
        names = [arch] if isinstance(arch, str) else list(dict.fromkeys(arch))
        return [target_device(name) for name in names]
    if device is None and not torch.cuda.is_available():
        raise ArgumentError(
            "warmup: there is no GPU here; name the architecture to compile for "
            f"({', '.join(KNOWN)})"
        )
    found = device_of(torch.device("cuda") if device is None else device)
    if found.kind != "cuda":
        raise ArgumentError(f"warmup: nothing is compiled for {found.name}; give a CUDA device")
    return [found]


def _names(ops: Ops) -> list[str]:
    names = list(OPS) if ops is None else [ops] if isinstance(ops, str) else list(ops)
    return [known_op(name).name for name in names]


def _at_shapes(wanted: Wanted, names: Sequence[str], target: Device) -> Iterator[Needed]:
    for name in names:
        op, shapes = OPS[name], wanted.shapes
        if isinstance(wanted.ops, Mapping):
            shapes = wanted.ops[name]
        for dtype in wanted.dtypes:
            for shape in default_shapes(name) if shapes is None else shapes:
                problem = op.problem(*op.example_for(target, shape, dtype), device=target)
                try:
                    yield Needed(problem, next(choices(op.name, op.variants, problem)))
                except VariantUnavailable:
                    continue  # a variant forced by name cannot run this: no call will need it


def _recorded(
    path: Path, names: Sequence[str] | None, target: Device, notes: list[str]
) -> Iterator[Needed]:
    """What the calls of a recording run on `target`, wherever they were recorded."""
    for one in read_recording(path):
        op = OPS.get(one.op)
        if names is not None and one.op not in names:
            continue
        if op is None:
            notes.append(f"{one.key}: {one.op} is no op of gristmill's; its kernels are its own")
            continue
        try:
            args = rebuilt(one, "meta", {})
            op.check(*args)  # another version may have had other arguments
            problem = op.problem(*args, device=target)
            yield Needed(problem, next(choices(op.name, op.variants, problem)))
        except (
            GristmillError,
            RuntimeError,
            ValueError,
            TypeError,
            LookupError,
            AttributeError,
        ) as error:
            notes.append(f"{one.key}: the recorded call does not fit {one.op}: {error!r}")


def _compile(
    jobs: Jobs,
    target: Device,
    total: int,
    workers: int | None,
    report: Report,
    progress: Progress | None,
) -> None:
    def tell(result: Compiled, number: int, count: int) -> None:
        needed = jobs[result.program]
        if result.how == "failed":
            report.failed.add((target.arch, result.program))
        report.done.append(
            Warmed(
                op="" if needed is None else needed.problem.op,
                variant="" if needed is None else needed.choice.variant.name,
                source=result.program.source,
                kernels=result.program.names,
                arch=target.arch,
                seconds=result.seconds,
                how=result.how,
                error=result.error,
            )
        )
        if progress is not None:
            progress(report.done[-1], len(report.done), total)

    compile_all(jobs, target.arch, workers=workers, progress=tell)


def _load(jobs: Jobs, target: Device, failed: set[tuple[str, Compilable]]) -> None:
    """Bring kernels onto the GPU: each program once, with whatever runs beside it."""
    loaded: set[Compilable] = set()
    for program, needed in jobs.items():
        if needed is None or program in loaded:
            continue
        variant, config = needed.choice.variant, needed.choice.config
        together = variant.programs(needed.problem, config)
        if not any((target.arch, one) in failed for one in together):
            variant.bind(needed.problem, config)
        loaded.update(together)


def _write(path: Path, jobs: Sequence[tuple[Device, Jobs]], report: Report) -> str:
    kernels = (
        cache.encoded(program, target.arch)
        for target, found in jobs
        for program in found
        if (target.arch, program) not in report.failed
    )
    tables = []
    if settings().table == "on":
        for target, _ in jobs:
            content = user_table(target)
            if content is not None:
                tables.append((table_name(target), content))
    return bundles.write(path, kernels, tables)
