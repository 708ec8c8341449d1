"""NVFP4 mixture of experts in plain PyTorch: the semantics, and the kernel for anything.

Each expert computes every token, and a token takes what its own experts give. Nothing depends on
how tokens are routed, so nothing waits for the device. Products and sums are taken in fp32, or
fp64 for fp64 inputs.
"""

from __future__ import annotations

from typing import Any

import torch

from gristmill.ops.nvfp4_common import accumulator
from gristmill.ops.nvfp4_moe.semantics import Call


def nvfp4_moe(*args: Any) -> torch.Tensor:
    call = Call(*args)
    dtype = call.hidden_states.dtype
    precise = accumulator(dtype)
    ids, weights = call.local_ids(), call.topk_weights.to(precise)
    total = torch.zeros_like(call.hidden_states, dtype=precise)
    for expert in range(call.experts):
        share, served, x = _served(call, ids, weights, expert, precise)
        gate, up = _gate_and_up(call, expert, x)
        h = call.act.apply(gate, up).to(dtype).to(precise)
        y = h @ call.w2.expert(expert).whole(precise).t()
        if call.w2_bias is not None:
            y = y + call.w2_bias[expert].to(precise)
        total = total + torch.where(served, share * y, 0.0)
    return total.to(dtype)


def nvfp4_moe_backward(dy: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = Call(*args)
    dtype = call.hidden_states.dtype
    precise = accumulator(dtype)
    ids, weights, d = call.local_ids(), call.topk_weights.to(precise), dy.to(precise)
    dx = torch.zeros_like(call.hidden_states, dtype=precise)
    dweights = torch.zeros_like(weights)
    for expert in range(call.experts):
        share, served, x = _served(call, ids, weights, expert, precise)
        gate, up = _gate_and_up(call, expert, x)
        h = call.act.apply(gate, up).to(dtype).to(precise)
        dh = d @ call.w2.expert(expert).whole(precise)
        dshare = (dh * h).sum(-1, keepdim=True)
        if call.w2_bias is not None:
            dshare = dshare + (d @ call.w2_bias[expert].to(precise)).unsqueeze(-1)
        dgate, dup = call.act.backward(gate, up, share * dh)
        back = torch.cat((dgate, dup), -1) @ call.w13.expert(expert).whole(precise)
        dx = dx + torch.where(served, back, 0.0)
        dweights = torch.where(ids == expert, dshare, dweights)
    return dx.to(dtype), dweights.to(call.topk_weights.dtype)


def _served(
    call: Call, ids: torch.Tensor, weights: torch.Tensor, expert: int, precise: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What each token weighs at this expert, which tokens it has, and their values.

    The others are zeros: what one expert makes of a token of another must not overflow.
    """
    mine = ids == expert
    share = torch.where(mine, weights, 0.0).sum(-1, keepdim=True)
    served = mine.any(-1, keepdim=True)
    return share, served, torch.where(served, call.hidden_states.to(precise), 0.0)


def _gate_and_up(call: Call, expert: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    both = x @ call.w13.expert(expert).whole(x.dtype).t()
    if call.w13_bias is not None:
        both = both + call.w13_bias[expert].to(x.dtype)
    gate, up = both.chunk(2, -1)
    return gate, up
