"""A call of an NVFP4 mixture-of-experts op as the chooser sees it."""

from __future__ import annotations

from typing import Any

import torch

from gristmill.formats.nvfp4.tensor import ROWS
from gristmill.ops.nvfp4_moe.semantics import Call
from gristmill.select.device import Device
from gristmill.select.problem import Problem


def forward_problem(device: Device, *args: Any) -> Problem:
    call = Call(*args)
    return _problem("nvfp4_moe", device, call, {"x": call.hidden_states.dtype})


def backward_problem(device: Device, dy: torch.Tensor, *args: Any) -> Problem:
    call = Call(*args)
    dtypes = {"dy": dy.dtype, "x": call.hidden_states.dtype}
    return _problem("nvfp4_moe_backward", device, call, dtypes)


def _problem(op: str, device: Device, call: Call, dtypes: dict[str, torch.dtype]) -> Problem:
    words = {
        "bias": call.w13_bias is not None or call.w2_bias is not None,
        "mapped": call.expert_map is not None,
        call.layout: call.layout != ROWS,
    }
    rows, hidden = call.hidden_states.shape
    return Problem(
        op=op,
        rows=rows,
        dims=(
            ("E", call.experts),
            ("k", call.topk_ids.shape[1]),
            ("H", hidden),
            ("I", call.intermediate),
        ),
        dtypes=tuple((name, str(one).removeprefix("torch.")) for name, one in dtypes.items()),
        flags=tuple(word for word, present in words.items() if present),
        device=device,
    )
