"""The kernels of NVFP4 products at the layers of common models; see ops/ready.py for others."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gristmill.formats.nvfp4.tensor import ROWS
from gristmill.ops.linear.space import LAYERS
from gristmill.ops.nvfp4_linear.cases import random_weight
from gristmill.ops.nvfp4_linear.problem import SIZES
from gristmill.ops.op import Op
from gristmill.ops.space import Needed, chosen, in_every_mode, tabled
from gristmill.select.chooser import Choice
from gristmill.select.device import Device
from gristmill.select.problem import Problem

# Beside those of dense layers: gate and up in one, and weights of models with many experts.
_MORE = (
    *((28672, 4096), (57344, 8192), (3584, 3584), (4608, 3584), (37888, 3584), (3584, 18944)),
    *((5120, 5120), (7168, 5120), (51200, 5120), (5120, 25600)),
    *((2112, 7168), (24576, 1536), (7168, 16384), (4096, 7168), (7168, 2048)),
    *((64, 64), (80, 48), (256, 256), (512, 1024), (1024, 512)),
)
_LINES = (1, 8, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 16384)


def forward(op: Op, device: Device, dtype: torch.dtype) -> Iterator[Needed]:
    if dtype == torch.float32:
        return
    prepared = op.example_for(device, (1, 64, 64), dtype)[5]
    sizes = [(line, *layer) for layer in (*LAYERS, *_MORE) for line in _LINES]
    for one, _, covers in tabled(op, device):
        # A launch is another kernel where other tiles hold the rows.
        stops = {one["rows"], *(stop for stop in SIZES.stops if stop in covers)}
        sizes += [(lines, one["N"], one["K"]) for lines in sorted(stops)]
    for layout in dict.fromkeys((prepared, ROWS)):
        for lines, rows, columns in dict.fromkeys(sizes):
            weight = random_weight((rows, columns), "meta", layout=layout)[:3]
            x = torch.empty((lines, columns), dtype=dtype, device="meta")
            for bias, out, act in _options(dtype, layout == prepared):
                shift = None if bias is None else torch.empty(rows, dtype=bias, device="meta")
                args = (x, *weight, shift, layout, out, act)
                for problem in in_every_mode(op, device, args):
                    yield from chosen(op, problem)
                    if (lines, rows, columns) == sizes[0]:
                        yield from _stand_in(op, problem)


def _stand_in(op: Op, problem: Problem) -> Iterator[Needed]:
    """What any sizes can fall back on where nothing may be compiled: it has no config."""
    for variant in op.variants:
        if variant.name == "dequantized" and variant.supports(problem) is None:
            yield Needed(problem, Choice(variant, None, "preference", "stands in for others"))


def _options(
    dtype: torch.dtype, prepared: bool
) -> Iterator[tuple[torch.dtype | None, torch.dtype | None, str | None]]:
    yield None, None, None
    yield dtype, None, None
    if prepared:
        yield torch.float32, None, None
        yield None, torch.float32, None
        for act in ("fp8", "nvfp4"):
            for bias in (None, dtype):
                yield bias, None, act


def backward(op: Op, device: Device, dtype: torch.dtype) -> Iterator[Needed]:
    if dtype == torch.float32:
        return
    prepared = op.example_for(device, (1, 64, 64), dtype)[4]
    for layout in dict.fromkeys((prepared, ROWS)):
        for rows, columns in ((4096, 4096), (72, 80)):
            weight = random_weight((rows, columns), "meta", layout=layout)[:3]
            for lines in (1, 256, 4096):
                for gradient in (dtype, torch.float32):
                    dy = torch.empty((lines, rows), dtype=gradient, device="meta")
                    args = (dy, *weight, layout, columns, dtype)
                    for problem in in_every_mode(op, device, args):
                        yield from chosen(op, problem)
