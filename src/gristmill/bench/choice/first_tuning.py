"""What the `choice` suite runs in a fresh process: calls that tune, timed, as JSON on stdout.

GRISTMILL_TUNE=first-call is set there. CUDA is initialised before the clock starts.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence

import torch

from gristmill.bench.regret.families import Family
from gristmill.errors import GristmillError
from gristmill.select.chooser import refusal
from gristmill.select.counters import counters
from gristmill.select.device import device_of
from gristmill.select.tables import tables_for


def main(words: Sequence[str], imports: Mapping[str, float]) -> None:
    """`words`: the family's name, its dims as 4096x4096, the dtype, the device, the most
    candidates, then one or more numbers of rows, which are tuned one after the other.
    """
    del imports
    name, dims, dtype, place, most, *sizes = words
    device = torch.device(place)
    if device.type == "cuda":
        torch.ones(1, device=device).sum().item()
    family = Family(name, tuple(map(int, dims.split("x"))), dtype)
    tuned = [_tuned(family, int(rows), device, int(most)) for rows in sizes]
    sys.stdout.write(json.dumps({"tuned": tuned}) + "\n")


def _tuned(family: Family, rows: int, device: torch.device, most: int) -> dict[str, float]:
    op = family.op
    args = family.arguments(rows, device)
    problem = op.problem(*args)
    # This process's own copy of the op: with no more variants than the question is about.
    able = [one for one in op.variants if refusal(one, problem) is None]
    if device.type == "cuda":
        able = [one for one in able if not one.is_reference] or able
    every, op.variants = op.variants, tuple(able[:most])
    before = counters()["compiles"]
    _synchronize(device)
    start = time.perf_counter()
    op.run(*args)
    _synchronize(device)
    seconds = time.perf_counter() - start
    op.variants = every
    row = tables_for(device_of(device))[0].table.row(problem)
    if row is None:
        raise GristmillError(f"{family} at {rows} rows was not tuned by its first call")
    return {
        "seconds": seconds,
        "candidates": row.candidates,
        "compiles": counters()["compiles"] - before,
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
