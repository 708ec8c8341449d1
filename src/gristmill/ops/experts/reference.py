"""A mixture of experts in plain PyTorch, whatever its weights are kept as.

Each expert computes every token, and a token takes what its own experts give. Nothing depends on
how tokens are routed, so nothing waits for the device. Products and sums are taken in fp32, or
fp64 for fp64 inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gristmill.ops.nvfp4_common import accumulator

# `matrix(expert, dtype)`: one of the weights, which ops keep in ways of their own. `call` is the
# arguments by their names: `Call` of the op's semantics.
Matrix = Callable[[int, torch.dtype], torch.Tensor]


def forward(call: Any, w13: Matrix, w2: Matrix) -> torch.Tensor:
    dtype = call.hidden_states.dtype
    precise = accumulator(dtype)
    ids, weights = call.local_ids(), call.topk_weights.to(precise)
    total = torch.zeros_like(call.hidden_states, dtype=precise)
    for expert in range(call.experts):
        share, served, x = _served(call, ids, weights, expert)
        gate, up = _gate_and_up(call, expert, x, w13)
        h = call.act.apply(gate, up).to(dtype).to(precise)
        y = h @ w2(expert, precise).t()
        if call.w2_bias is not None:
            y = y + call.w2_bias[expert].to(precise)
        total = total + torch.where(served, share * y, 0.0)
    result: torch.Tensor = total.to(dtype)
    return result


def backward(
    dy: torch.Tensor,
    call: Any,
    w13: Matrix,
    w2: Matrix,
    trained: list[tuple[torch.Tensor, ...]] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of hidden states and of weights of slots.

    To `trained`, if given, each expert's gradients are added: of w13, w2 and their biases.
    """
    dtype = call.hidden_states.dtype
    precise = accumulator(dtype)
    ids, weights, d = call.local_ids(), call.topk_weights.to(precise), dy.to(precise)
    dx = torch.zeros_like(call.hidden_states, dtype=precise)
    dweights = torch.zeros_like(weights)
    for expert in range(call.experts):
        share, served, x = _served(call, ids, weights, expert)
        gate, up = _gate_and_up(call, expert, x, w13)
        h = call.act.apply(gate, up).to(dtype).to(precise)
        dh = d @ w2(expert, precise)
        dshare = (dh * h).sum(-1, keepdim=True)
        if call.w2_bias is not None:
            dshare = dshare + (d @ call.w2_bias[expert].to(precise)).unsqueeze(-1)
        # Zeros where a token is another's: what this expert makes of it may be no number.
        both = torch.cat(call.act.backward(gate, up, share * dh), -1)
        both = torch.where(served, both, 0.0)
        dx = dx + torch.where(served, both @ w13(expert, precise), 0.0)
        dweights = torch.where(ids == expert, dshare, dweights)
        if trained is not None:
            own = torch.where(served, share * d, 0.0)
            h = torch.where(served, h, 0.0)
            trained.append((both.t() @ x, own.t() @ h, both.sum(0), own.sum(0)))
    return dx.to(dtype), dweights.to(call.topk_weights.dtype)


def _served(
    call: Any, ids: torch.Tensor, weights: torch.Tensor, expert: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What each token weighs at this expert, which tokens it has, and their values.

    The others are zeros: what one expert makes of a token of another must not overflow.
    """
    mine = ids == expert
    share = torch.where(mine, weights, 0.0).sum(-1, keepdim=True)
    served = mine.any(-1, keepdim=True)
    return share, served, torch.where(served, call.hidden_states.to(weights.dtype), 0.0)


def _gate_and_up(
    call: Any, expert: int, x: torch.Tensor, w13: Matrix
) -> tuple[torch.Tensor, torch.Tensor]:
    both = x @ w13(expert, x.dtype).t()
    if call.w13_bias is not None:
        both = both + call.w13_bias[expert].to(x.dtype)
    gate, up = both.chunk(2, -1)
    return gate, up
