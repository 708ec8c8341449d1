"""Compiling ahead: in an image build, before capturing a graph, before traffic comes.

A warm-up walks the same road as a call (problem, choice, programs, cache) and stops before the
launch, so what it leaves in the cache is what the calls will look for. It needs no GPU when an
architecture is named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from gristmill.errors import ArgumentError, VariantUnavailable
from gristmill.jit import cache, counters
from gristmill.jit.compilers import Compilable
from gristmill.ops.registry import OPS
from gristmill.select.chooser import Choice, ranked
from gristmill.select.device import KNOWN, Device, device_of
from gristmill.select.problem import HINTS, Problem

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


@dataclass(frozen=True)
class Warmed:
    """One program that is in the cache now; `how` is "compiled", or "cached" if it was before."""

    op: str
    variant: str
    source: str
    kernels: tuple[str, ...]
    arch: str
    seconds: float
    how: str


Progress = Callable[[Warmed, int, int], None]


def warmup(
    ops: str | Iterable[str] | None = None,
    *,
    shapes: Sequence[tuple[int, ...]] | None = None,
    dtypes: Sequence[torch.dtype] = DTYPES,
    device: torch.device | str | None = None,
    arch: str | None = None,
    progress: Progress | None = None,
) -> list[Warmed]:
    """Compile what calls of `ops` (default: all) at `shapes` and `dtypes` will run.

    Without `shapes`: at the row lengths of common models, for cross entropy at vocabularies, for
    routers at numbers of experts, for products of matrices (whose shapes are M x N x K) at the
    layers of one.

    For the GPU `device` (default: the current one) kernels are also loaded, so that a first call
    finds them ready. With `arch` ("sm_90a") they are only compiled into the cache, for a GPU that
    need not be here. `progress` is called after each program with it, its number and the total.
    """
    target = _target(device, arch)
    jobs = _jobs(_names(ops), shapes, dtypes, target)
    done = []
    for number, (program, (problem, choice)) in enumerate(jobs.items(), start=1):
        compiled = counters.snapshot()["compiles"]
        start = time.perf_counter()
        cache.load_or_compile(program, target.arch)
        if arch is None:
            choice.variant.bind(problem, choice.config)
        warmed = Warmed(
            op=problem.op,
            variant=choice.variant.name,
            source=program.source,
            kernels=program.names,
            arch=target.arch,
            seconds=time.perf_counter() - start,
            how="compiled" if counters.snapshot()["compiles"] > compiled else "cached",
        )
        done.append(warmed)
        if progress is not None:
            progress(warmed, number, len(jobs))
    return done


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


def _target(device: torch.device | str | None, arch: str | None) -> Device:
    if arch is not None:
        if device is not None:
            raise ArgumentError("warmup: give a device or an architecture, not both")
        return target_device(arch)
    if device is None and not torch.cuda.is_available():
        raise ArgumentError(
            "warmup: there is no GPU here; name the architecture to compile for "
            f"({', '.join(KNOWN)})"
        )
    found = device_of(torch.device("cuda") if device is None else device)
    if found.kind != "cuda":
        raise ArgumentError(f"warmup: nothing is compiled for {found.name}; give a CUDA device")
    return found


def _names(ops: str | Iterable[str] | None) -> list[str]:
    names = list(OPS) if ops is None else [ops] if isinstance(ops, str) else list(ops)
    for name in names:
        if name not in OPS:
            raise ArgumentError(f"warmup: unknown op {name!r}: there are {', '.join(OPS)}")
    return names


def _jobs(
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]] | None,
    dtypes: Sequence[torch.dtype],
    target: Device,
) -> dict[Compilable, tuple[Problem, Choice]]:
    """Each program once, with the first problem that needs it."""
    jobs: dict[Compilable, tuple[Problem, Choice]] = {}
    for name in names:
        op = OPS[name]
        for dtype in dtypes:
            for shape in default_shapes(name) if shapes is None else shapes:
                problem = op.problem(*op.example_for(target, shape, dtype), device=target)
                try:
                    choice = ranked(op.name, op.variants, problem)[0]
                except VariantUnavailable:
                    continue  # a variant forced by name cannot run this: no call will need it
                for program in choice.variant.programs(problem, choice.config):
                    jobs.setdefault(program, (problem, choice))
    return jobs
