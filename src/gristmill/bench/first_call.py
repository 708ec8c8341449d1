"""What the `start` suite runs in a fresh process: one first call, timed, as JSON on stdout.

CUDA is initialised before the clock starts: it costs seconds that no kernel library can save.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

import torch

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
    args = op.example(tuple(map(int, shape.split("x"))), getattr(torch, dtype), device)
    _synchronize(device)

    start = time.perf_counter()
    op.run(*args)
    _synchronize(device)
    first_call_s = time.perf_counter() - start

    compiles = counters()["compiles"]
    choice, _ = resolve(op.name, op.variants, op.problem(*args))
    answer = {
        "first_call_s": first_call_s,
        "import_s": import_s,
        "variant": choice.variant.name,
        "compiles": compiles,
    }
    sys.stdout.write(json.dumps(answer) + "\n")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
