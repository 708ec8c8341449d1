"""A call of a router op as the chooser and the kernels see it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from gristmill.ops.rows.layout import access
from gristmill.ops.topk_router.semantics import BackwardCall, Call
from gristmill.select.device import Device
from gristmill.select.problem import Problem

VECTOR = 4  # experts that a lane has side by side, as in topk_router.cu


@dataclass(frozen=True)
class Details:
    """What a plan needs beyond what a choice depends on.

    `access`: bytes of the widest access to the logits; `strided`: those of a token, or the bias, do
    not lie side by side. `bias` and `written`: as `access`, of the bias and of the gradient.
    """

    rows: int
    dtype: torch.dtype
    strided: bool
    access: int
    bias: int
    written: int


def forward_problem(device: Device, *args: Any) -> Problem:
    call = Call(*args)
    dtypes = {"logits": call.logits.dtype}
    if call.bias is not None:
        dtypes["bias"] = call.bias.dtype
    if call.ids != torch.int32:
        dtypes["ids"] = call.ids
    words = {
        "sigmoid": call.scoring == "sigmoid",
        "renormalized": call.renormalize,
        "grouped": call.grouped,
    }
    dims = {"k": call.topk, **({"groups": call.groups} if call.grouped else {})}
    return _problem("topk_router", device, call.logits, call.bias, dims, dtypes, words)


def backward_problem(device: Device, *args: Any) -> Problem:
    call = BackwardCall(*args)
    dtypes = {
        "logits": call.logits.dtype,  # first: examples are made for it
        "dweights": call.dweights.dtype,
        "ids": call.topk_ids.dtype,
    }
    words = {"sigmoid": call.scoring == "sigmoid", "renormalized": call.renormalize}
    dims = {"k": call.topk_ids.shape[1]}
    return _problem("topk_router_backward", device, call.logits, None, dims, dtypes, words)


def _problem(
    op: str,
    device: Device,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    dims: dict[str, int],
    dtypes: dict[str, torch.dtype],
    words: dict[str, bool],
) -> Problem:
    rows, experts = logits.shape
    lines = [logits] if bias is None else [logits, bias]
    strided = experts > 1 and any(one.stride(-1) != 1 for one in lines)
    # Side by side in vectors, as wide as their addresses and the rows' distance let them be.
    vector = 1 if strided else VECTOR
    details = Details(
        rows=rows,
        dtype=logits.dtype,
        strided=strided,
        access=access(logits, vector, logits.stride(0)),
        bias=0 if bias is None else access(bias, vector),
        written=math.gcd(16, VECTOR * logits.element_size(), experts * logits.element_size()),
    )
    return Problem(
        op=op,
        rows=rows,
        dims=(("E", experts), *dims.items()),
        dtypes=tuple((name, str(one).removeprefix("torch.")) for name, one in dtypes.items()),
        flags=tuple(word for word, so in {**words, "strided": strided}.items() if so),
        device=device,
        layout=details,
    )
