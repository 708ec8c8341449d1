"""Families of problems: an op at one size of everything but its rows, and the rows it is met at.

A choice is made from the rows, so what it costs to choose wrongly is seen along them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gristmill.bench.inputs import Arguments, dtype_of
from gristmill.bench.regret import sampling
from gristmill.bench.regret.goals import DEFAULT_GOALS, NVFP4_GOALS, Goal
from gristmill.bench.regret.sampling import Sampling
from gristmill.bench.shapes import Shape
from gristmill.bench.suites import DTYPES, known, written
from gristmill.ops.op import Op
from gristmill.ops.registry import OPS
from gristmill.select.device import Device

# Powers of two, which tuning meets too, and between them sizes that nobody has tuned for.
ROWS = tuple(sorted([2**power for power in range(17)] + [3, 24, 100, 700, 3000, 20000]))
QUICK_ROWS = (1, 3, 32, 100, 700, 4096, 20000)
# A product's tiles cut its rows: the steps are finer where one more tile is a larger part.
PRODUCT_ROWS = (*range(64, 1024, 64), *range(1024, 4097, 256))
QUICK_PRODUCT_ROWS = (64, 192, 448, 1024, 2304, 4096)
# A CPU has two variants, and what they take says nothing about a GPU: it shows that all runs.
CPU_ROWS = (4, 64)


@dataclass(frozen=True)
class Kind:
    """An op with its options, and the sizes that stay while the rows change: N, or N and K.

    `sampled`: row counts, and weights beside those of `dims`, are drawn at random. `loose`:
    variants may round inputs, so results are compared row by row, to this relative error.
    """

    op: str
    dims: tuple[tuple[int, ...], ...]
    quick: tuple[tuple[int, ...], ...]
    cpu: tuple[tuple[int, ...], ...]
    options: tuple[tuple[str, Any], ...] = ()
    goals: tuple[Goal, ...] = DEFAULT_GOALS
    sampled: bool = False
    loose: float | None = None

    @property
    def product(self) -> bool:
        return len(self.dims[0]) == 2

    def rows(self, device_type: str, *, quick: bool) -> tuple[int, ...]:
        if device_type != "cuda":
            return CPU_ROWS
        if self.product:
            return QUICK_PRODUCT_ROWS if quick else PRODUCT_ROWS
        return QUICK_ROWS if quick else ROWS

    def sizes(self, device_type: str, *, quick: bool) -> tuple[tuple[int, ...], ...]:
        if device_type != "cuda":
            return self.cpu
        return self.quick if quick else self.dims

    def problems(
        self, device_type: str, *, quick: bool, sample: Sampling
    ) -> Iterator[tuple[tuple[int, ...], int]]:
        """Every problem to measure, as its dims and its rows."""
        sizes, sampled = (
            self.sizes(device_type, quick=quick),
            device_type == "cuda" and self.sampled,
        )
        if sampled:
            sizes = (*sizes, *sample.drawn())
        for dims in sizes:
            rows = sample.rows(dims) if sampled else self.rows(device_type, quick=quick)
            yield from ((dims, size) for size in rows)


def _rows(op: str) -> Kind:
    return Kind(op, ((1024,), (4096,), (8192,)), ((4096,),), ((256,),))


def _nvfp4(**more: Any) -> Kind:
    cpu = ((128, 256),)
    weights, quick = sampling.NAMED_WEIGHTS, sampling.QUICK_WEIGHTS
    return Kind("nvfp4_linear", weights, quick, cpu, goals=NVFP4_GOALS, sampled=True, **more)


def _loss(op: str) -> Kind:
    return Kind(op, ((32768,), (128256,)), ((32768,),), ((1000,),))


# By the names of result files, as in `suites`.
KINDS: dict[str, Kind] = {
    "rms_norm": _rows("rms_norm"),
    "add_rms_norm": _rows("add_rms_norm"),
    "rms_norm_bwd": _rows("rms_norm_backward"),
    "layer_norm": _rows("layer_norm"),
    "layer_norm_bwd": _rows("layer_norm_backward"),
    "softmax": _rows("softmax"),
    "softmax_bwd": _rows("softmax_backward"),
    "cross_entropy": _loss("cross_entropy"),
    "cross_entropy_bwd": _loss("cross_entropy_backward"),
    "linear_silu": Kind(
        "linear",
        ((4096, 4096), (14336, 4096)),
        ((4096, 4096),),
        ((128, 256),),
        (("activation", "silu"),),
    ),
    "nvfp4_linear": _nvfp4(),
    # Two results, each with inputs rounded to E4M3, differ by 5% of their size.
    "nvfp4_linear_fp8": _nvfp4(options=(("act", "fp8"),), loose=0.08),
}


def goals_of(name: str) -> tuple[Goal, ...]:
    """The goals of a kind, by its name in results; of one that is not known, the default."""
    return KINDS[name].goals if name in KINDS else DEFAULT_GOALS


@dataclass(frozen=True)
class Family:
    """A kind of problem at one N (and K), in one dtype."""

    name: str
    dims: tuple[int, ...]
    dtype: str

    @property
    def kind(self) -> Kind:
        return KINDS[self.name]

    @property
    def op(self) -> Op:
        return OPS[self.kind.op]

    def arguments(
        self, rows: int, device: torch.device | str, target: Device | None = None
    ) -> Arguments:
        """The op's positional arguments at so many rows: its example, the same on every run.

        With "meta" for the device: their shapes alone, as they are on `target`.
        """
        cuda = torch.device(device).type == "cuda"
        with torch.random.fork_rng(devices=[torch.device(device)] if cuda else []):
            torch.manual_seed(20)
            shape, dtype = (rows, *self.dims), dtype_of(self.dtype)
            options = dict(self.kind.options)
            return self.op.example_with(options, shape, dtype, device, target)

    def problem(self, rows: int) -> dict[str, Any]:
        """The keys of a row of results that say which problem it is about."""
        return {
            "op": self.name,
            "dtype": self.dtype,
            "M": rows,
            "N": self.dims[0],
            "K": self.dims[1] if len(self.dims) == 2 else None,
            "shape": written((rows, *self.dims)),
        }

    def __str__(self) -> str:
        return f"{self.name} {'x'.join(map(str, self.dims))} {self.dtype}"


@dataclass(frozen=True)
class Point:
    """A family at a number of rows."""

    family: Family
    rows: int

    def __str__(self) -> str:
        family = self.family
        return f"{family.name} {written((self.rows, *family.dims))} {family.dtype}"


def points(
    device_type: str,
    *,
    quick: bool = False,
    names: Sequence[str] = (),
    shapes: Sequence[Shape] = (),
    dtypes: Sequence[str] = (),
    sample: Sampling | None = None,
) -> list[Point]:
    """The problems to measure; an empty filter means everything there is.

    `sample`: what is drawn for the kinds that are `sampled`; None: the default of the run.

    Of `shapes` those of three numbers are MxNxK for products, and rows of all leading dims for the
    others; for products two numbers are MxK, with N = K.
    """
    chosen = [known("op", name, list(KINDS)) for name in names] or list(KINDS)
    found: list[Point] = []
    for dtype in [known("dtype", dtype, DTYPES) for dtype in dtypes] or ["bfloat16"]:
        for name in chosen:
            kind = KINDS[name]
            if shapes:
                sizes = [_named(shape, product=kind.product) for shape in shapes]
                found += [Point(Family(name, dims, dtype), rows) for rows, dims in sizes]
                continue
            drawn = sample or (sampling.QUICK if quick else Sampling())
            found += [
                Point(Family(name, dims, dtype), rows)
                for dims, rows in kind.problems(device_type, quick=quick, sample=drawn)
            ]
    return found


def sampled(points: Sequence[Point]) -> bool:
    """Whether some of the problems are of a kind whose problems are drawn."""
    return any(point.family.kind.sampled for point in points)


def _named(shape: Shape, *, product: bool) -> tuple[int, tuple[int, ...]]:
    if not product:
        return math.prod(shape[:-1]), shape[-1:]
    if len(shape) == 2:
        return shape[0], (shape[1], shape[1])
    return math.prod(shape[:-2]), shape[-2:]
