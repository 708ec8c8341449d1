"""The kernels of dense mixtures of experts; products are torch's own, so sizes hardly matter."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gristmill.ops.experts.space import MODELS, options, values
from gristmill.ops.moe.semantics import Call
from gristmill.ops.op import Op
from gristmill.ops.space import Needed, chosen, in_every_mode
from gristmill.select.device import Device


def forward(op: Op, device: Device, dtype: torch.dtype) -> Iterator[Needed]:
    for model in (*MODELS, (8, 2, 72, 40), (8, 2, 76, 44)):
        for lines in (1, 64, 4096):
            args = op.example_for(device, (lines, *model), dtype)
            for option in options(dtype):
                call = values(option, args, Call._fields, model)
                for problem in in_every_mode(op, device, call):
                    yield from chosen(op, problem)
