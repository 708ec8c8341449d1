"""The variant that runs torch's topk.

torch leaves it open which of equal values come first. So what is compared are integers: the value
in the upper half, in the order of floats, and in the lower half the distance of the id from the
last one. No two are equal, and of equal values the lowest id has the largest integer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gristmill.ops.plain import laid_out
from gristmill.ops.topk_router import semantics
from gristmill.ops.topk_router.reference import scores_of, weights_of
from gristmill.ops.topk_router.semantics import Call
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

_OUTSIDE = torch.iinfo(torch.int64).min  # below the key of every number


class Library(Variant):
    name = "library"
    summary = "torch's topk, of integers that have no ties"

    def supports(self, problem: Problem) -> str | None:
        if problem.dtype("logits") == "float64":
            return "what is compared are fp32 numbers"
        return None

    def bind(self, problem: Problem, config: None) -> Callable[..., Any]:
        return laid_out(_run, semantics.outputs_forward)


def _run(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = Call(*args)
    logits = call.logits.float()
    scores = None
    # Where weights are made to add up to one the others cancel; a sigmoid knows no others.
    if call.bias is not None or (call.scoring == "softmax" and not call.renormalize):
        scores = scores_of(logits, call.scoring)
    ranked = logits
    if call.bias is not None and scores is not None:
        ranked = scores + call.bias.float()
    keys = _keys(ranked)
    if call.grouped:
        keys = torch.where(_kept(call, ranked, keys), keys, _OUTSIDE)
    ids = _ids(keys.topk(call.topk, -1).values, call.experts)
    weights = weights_of(call, logits, scores, ids)
    if call.scale != 1.0:
        weights = weights * call.scale
    return weights, ids.to(call.ids)


def _keys(values: torch.Tensor) -> torch.Tensor:
    bits = (values + 0.0).view(torch.int32)  # -0 becomes 0
    order = torch.where(values.isnan(), torch.iinfo(torch.int32).max, bits ^ (bits >> 31 & ~_SIGN))
    count = values.shape[-1]
    distance = torch.arange(count - 1, -1, -1, dtype=torch.int64, device=values.device)
    return (order.long() << 32) + distance


_SIGN = -(2**31)


def _ids(keys: torch.Tensor, count: int) -> torch.Tensor:
    return count - 1 - (keys & 0xFFFFFFFF)


def _kept(call: Call, ranked: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """``(M, experts)`` bool: whether the expert's group is among the best."""
    if call.bias is None:
        # Of groups whose largest are equal the first has the lowest id.
        best = keys.unflatten(-1, (call.groups, call.group_size)).amax(-1)
    else:
        members = ranked.unflatten(-1, (call.groups, call.group_size))
        best = _keys(members.topk(min(2, call.group_size), -1).values.sum(-1))
    least = best.topk(call.topk_groups, -1).values[..., -1:]
    kept: torch.Tensor = best >= least
    return kept.repeat_interleave(call.group_size, -1)
