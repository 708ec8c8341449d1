"""The kernels of dense products at the layers of common models; see ops/ready.py for others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from gristmill.ops.linear.configs import STURDY
from gristmill.ops.linear.triton import TritonMatmul
from gristmill.ops.op import Arguments, Op
from gristmill.ops.space import Needed, chosen, in_every_mode, tabled
from gristmill.select.chooser import Choice
from gristmill.select.device import Device
from gristmill.select.problem import HINTS, Problem

# N and K: attention, up and down of models of 1B, 8B and 70B parameters.
LAYERS = (
    *((2048, 2048), (8192, 2048), (2048, 8192)),
    *((4096, 4096), (6144, 4096), (14336, 4096), (4096, 14336)),
    *((8192, 8192), (10240, 8192), (28672, 8192), (8192, 28672)),
)
# Those that are followed by an activation.
UP = ((14336, 4096), (28672, 8192))
ACTIVATIONS = ("relu", "silu", "gelu", "gelu_tanh")
# What else N and K decide: by what powers of two they divide, and whether whole tiles cover them.
# Rows of other K are not aligned to 16 bytes, and left to torch's own product.
WIDTHS = (4096, 4112, 4104, 4100, 4098, 4097)
DEPTHS = (4096, 4112, 4104)


def linear(op: Op, device: Device, dtype: torch.dtype) -> Iterator[Needed]:
    yield from _linear(op, device, dtype, LAYERS, (None,))
    yield from _linear(op, device, dtype, UP, ACTIVATIONS)
    yield from _sturdy_linear(op, device, dtype)
    yield from _tuned_linear(op, device, dtype)


def linear_with_pre(op: Op, device: Device, dtype: torch.dtype) -> Iterator[Needed]:
    yield from _linear(op, device, dtype, UP, ACTIVATIONS)
    yield from _sturdy_linear(op, device, dtype)
    yield from _tuned_linear(op, device, dtype)


def _tuned_linear(op: Op, device: Device, dtype: torch.dtype) -> Iterator[Needed]:
    for sizes, words, _ in tabled(op, device):
        layer, activation = (sizes["N"], sizes["K"]), next(iter({*words} & {*ACTIVATIONS}), None)
        yield from _linear(op, device, dtype, (layer,), (activation,), (sizes["rows"],))


def _sturdy_linear(op: Op, device: Device, dtype: torch.dtype) -> Iterator[Needed]:
    """For every N and K at least one kernel of each variant."""
    for columns, depth in itertools.product(WIDTHS, DEPTHS):
        x = torch.empty((256, depth), dtype=dtype, device="meta")
        weight = torch.empty((columns, depth), dtype=dtype, device="meta")
        bias = torch.empty(columns, dtype=dtype, device="meta")
        for beside, activation in itertools.product((None, bias), (None, *ACTIVATIONS)):
            problem = op.problem(x, weight, beside, activation, device=device)
            yield from _sturdy(op, problem)


def _sturdy(op: Op, problem: Problem) -> Iterator[Needed]:
    if problem.layout.dtype == torch.float32:
        return  # never preferred
    for variant in op.variants:
        if isinstance(variant, TritonMatmul) and variant.unable(problem) is None:
            choice = Choice(variant, STURDY[variant.kind], "preference", "for any N and K")
            yield Needed(problem, choice)


def _linear(
    op: Op,
    device: Device,
    dtype: torch.dtype,
    layers: tuple[tuple[int, int], ...],
    activations: tuple[str | None, ...],
    counts: tuple[int, ...] = HINTS,
) -> Iterator[Needed]:
    for columns, depth in layers:
        weight = torch.empty((columns, depth), dtype=dtype, device="meta")
        bias = torch.empty(columns, dtype=dtype, device="meta")
        for rows in counts:
            x = torch.empty((rows, depth), dtype=dtype, device="meta")
            for activation in activations:
                for beside in (None, bias):
                    args = (x, weight, beside, activation)
                    for problem in in_every_mode(op, device, args):
                        yield from chosen(op, problem)


def matmul(op: Op, device: Device, dtype: torch.dtype) -> Iterator[Needed]:
    """A product, with either side transposed: what gradients of a layer are, too."""
    for (columns, depth), rows in itertools.product(LAYERS[3:7], HINTS):
        for args in _sides(rows, columns, depth, dtype):
            for problem in in_every_mode(op, device, args):
                yield from chosen(op, problem)
    for sizes, _, _ in tabled(op, device):
        several = (sizes["batch"],) if "batch" in sizes else ()
        for args in _sides(sizes["rows"], sizes["N"], sizes["K"], dtype, several):
            for problem in in_every_mode(op, device, args):
                yield from chosen(op, problem)
    for columns, depth, stack in itertools.product(WIDTHS, DEPTHS, ((), (4,))):
        for args in _sides(256, columns, depth, dtype, stack):
            yield from _sturdy(op, op.problem(*args, device=device))


def _sides(
    rows: int, columns: int, depth: int, dtype: torch.dtype, stack: tuple[int, ...] = ()
) -> Iterator[Arguments]:
    """The matrices of a product, or of several side by side (`stack`): as they are, and turned."""

    def matrix(height: int, width: int) -> torch.Tensor:
        return torch.empty((*stack, height, width), dtype=dtype, device="meta")

    yield matrix(rows, depth), matrix(depth, columns)
    yield matrix(rows, depth), matrix(columns, depth).mT
    yield matrix(depth, rows).mT, matrix(depth, columns)
