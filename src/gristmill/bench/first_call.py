"""What the `start` suite runs in a fresh process: one first call, timed, as JSON on stdout.

CUDA is initialised before the clock starts: it costs seconds that no kernel library can save. Of an
NVFP4 weight the clock also sees how it is put from the order of checkpoints in that of kernels.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence

import torch

from gristmill.formats.nvfp4 import NVFP4Tensor
from gristmill.formats.nvfp4.tensor import BLOCK
from gristmill.ops.op import Arguments, Op
from gristmill.ops.registry import OPS
from gristmill.select.chooser import resolve
from gristmill.select.counters import counters


def main(words: Sequence[str], import_s: float) -> None:
    """`words`: the op, its shape as 256x4096, the dtype, the device."""
    name, shape, dtype, place = words
    device = torch.device(place)
    if device.type == "cuda":
        torch.ones(1, device=device).sum().item()

    op = OPS[name]
    sizes = tuple(map(int, shape.split("x")))
    prepare = _nvfp4_linear if name == "nvfp4_linear" else _example
    prepared = prepare(op, sizes, getattr(torch, dtype), device)
    _synchronize(device)

    start = time.perf_counter()
    args = prepared()
    _synchronize(device)
    prepare_s = time.perf_counter() - start
    op.run(*args)
    _synchronize(device)
    first_call_s = time.perf_counter() - start

    compiles = counters()["compiles"]
    choice, _ = resolve(op.name, op.variants, op.problem(*args))
    answer = {
        "first_call_s": first_call_s,
        **({} if prepare is _example else {"prepare_s": prepare_s}),
        "import_s": import_s,
        "variant": choice.variant.name,
        "compiles": compiles,
    }
    sys.stdout.write(json.dumps(answer) + "\n")


def _example(
    op: Op, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], Arguments]:
    """Arguments that are ready before the clock starts."""
    args = op.example(sizes, dtype, device)
    return lambda: args


def _nvfp4_linear(
    op: Op, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], Arguments]:
    """A weight that is prepared while the clock runs."""
    rows, outputs, columns = sizes
    x = torch.randn((rows, columns), dtype=dtype, device=device)
    codes = torch.randint(256, (outputs, columns // 2), dtype=torch.uint8, device=device)
    scales = torch.ones((outputs, columns // BLOCK), device=device).to(torch.float8_e4m3fn)
    checkpoint = NVFP4Tensor(codes, scales, torch.tensor(1 / columns, device=device))

    def prepare() -> Arguments:
        packed = checkpoint.prepare(in_place=True)
        parts = (packed.codes, packed.scales, packed.row_scale)
        return op.bind_arguments(x, *parts, layout=packed.layout)

    return prepare


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
