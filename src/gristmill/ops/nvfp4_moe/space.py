"""The kernels of NVFP4 mixtures of experts at the sizes of common models; see ops/ready.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gristmill.formats.nvfp4.tensor import ROWS
from gristmill.ops.experts.space import LINES, MODELS, options, values
from gristmill.ops.nvfp4_linear.cases import random_weight
from gristmill.ops.nvfp4_moe.semantics import Call
from gristmill.ops.op import Op
from gristmill.ops.space import Needed, chosen, in_every_mode, tabled
from gristmill.select.device import Device


def forward(op: Op, device: Device, dtype: torch.dtype) -> Iterator[Needed]:
    if dtype == torch.float32:
        return
    sizes: list[tuple[int, ...]] = [(lines, *model) for model in MODELS for lines in LINES]
    names = ("rows", "E", "k", "H", "I")
    sizes += [tuple(one[name] for name in names) for one, _, _ in tabled(op, device)]
    for lines, *model in dict.fromkeys(sizes):
        experts, _, hidden, inner = model
        args = op.example_for(device, (lines, *model), dtype)
        for option in options(dtype):
            call = values(option, args, Call._fields, model)
            for problem in in_every_mode(op, device, call):
                yield from chosen(op, problem)
        w13 = random_weight((experts, 2 * inner, hidden), "meta", layout=ROWS, pairs=True)[:3]
        w2 = random_weight((experts, hidden, inner), "meta", layout=ROWS)[:3]
        unprepared = (*args[:3], *w13, *w2, *args[9:14], ROWS, args[15])
        for problem in in_every_mode(op, device, unprepared):
            yield from chosen(op, problem)
