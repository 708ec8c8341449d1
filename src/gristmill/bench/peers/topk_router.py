"""The router of a mixture: by softmax, and as DeepSeek has it, by sigmoid and bias, in groups.

Torch has no op for it: `eager` is the layer as models write it, and `inductor` the same, compiled.
vLLM has a kernel for each. Ids are chosen and written by everybody; compared are the weights, which
are those of the right experts, whoever of equal ones is chosen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gristmill.bench.peers.peer import Builders, Function, Sets, compiled

TASKS = ("topk_router", "topk_router_grouped")
Routed = tuple[Tensor, Tensor]


def plain(logits: Tensor, topk: int) -> Routed:
    """Softmax over all, the largest of them, weights that add up to one."""
    weights, ids = torch.softmax(logits.float(), -1).topk(topk, -1)
    return weights / weights.sum(-1, keepdim=True), ids.int()


def plain_grouped(
    logits: Tensor, topk: int, bias: Tensor, groups: int, topk_groups: int, scale: float
) -> Routed:
    """Chosen by sigmoid plus bias, from the groups whose two largest sum to most."""
    scores = torch.sigmoid(logits.float())
    biased = scores + bias
    best = biased.unflatten(-1, (groups, -1)).topk(2, -1).values.sum(-1).topk(topk_groups, -1)
    there = torch.zeros_like(biased[:, :groups]).scatter_(-1, best.indices, 1.0)
    members = there.repeat_interleave(biased.shape[-1] // groups, -1)
    ids = biased.masked_fill(members == 0, float("-inf")).topk(topk, -1).indices
    weights = scores.gather(-1, ids)
    return weights / weights.sum(-1, keepdim=True) * scale, ids.int()


def formula(
    logits: Tensor,
    topk: int,
    scoring: str,
    renormalize: bool,
    bias: Tensor | None,
    groups: int,
    topk_groups: int,
    scale: float,
    *_: object,
) -> Routed:
    """The layer of a task, over the op's arguments."""
    if bias is None:
        return plain(logits, topk)
    return plain_grouped(logits, topk, bias, groups, topk_groups, scale)


def _weights_of(function: Function) -> Function:
    """Those outputs of it that are compared; both are made."""

    def call(*args: Any) -> Any:
        return function(*args)[:1]

    return call


def _eager(sets: Sets) -> Function:
    return _weights_of(formula)


def _inductor(sets: Sets) -> Function:
    return _weights_of(compiled(formula))


def _vllm(sets: Sets) -> Function:
    from vllm._custom_ops import topk_softmax

    def layer(logits: Tensor, topk: int, *_: object) -> Routed:
        shape = (len(logits), topk)
        weights = logits.new_empty(shape, dtype=torch.float32)
        ids, places = (logits.new_empty(shape, dtype=torch.int32) for _ in range(2))
        topk_softmax(weights, ids, places, logits, True)
        return weights, ids

    return _weights_of(layer)


def _vllm_grouped(sets: Sets) -> Function:
    from vllm._custom_ops import grouped_topk

    def layer(logits: Tensor, topk: int, _: str, renormalize: bool, *rest: Any) -> Any:
        bias, groups, topk_groups, scale, *_ids = rest
        sigmoid = 1
        return grouped_topk(logits, groups, topk_groups, topk, renormalize, scale, bias, sigmoid)

    return _weights_of(layer)


def _ours(sets: Sets) -> Function:
    from gristmill.ops.topk_router import TOPK_ROUTER

    return _weights_of(TOPK_ROUTER.run)


BUILDERS: Builders = {
    "gristmill": dict.fromkeys(TASKS, _ours),
    "eager": dict.fromkeys(TASKS, _eager),
    "inductor": dict.fromkeys(TASKS, _inductor),
    "vllm": {TASKS[0]: _vllm, TASKS[1]: _vllm_grouped},
}
