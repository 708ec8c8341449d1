"""A mixture of dense experts in plain PyTorch: the semantics, and the kernel for anything.

Each expert computes every token, and a token takes what its own experts give. Nothing depends on
how tokens are routed, so nothing waits for the device. Products and sums are taken in fp32, or
fp64 for fp64 inputs.
"""

from __future__ import annotations

from typing import Any

import torch

from gristmill.ops.by_row import by_row
from gristmill.ops.moe.semantics import Call, gradient_like
from gristmill.ops.nvfp4_common import accumulator


def moe(*args: Any) -> torch.Tensor:
    call = Call(*args)
    dtype = call.hidden_states.dtype
    precise = accumulator(dtype)
    ids, weights = call.local_ids(), call.topk_weights.to(precise)
    total = torch.zeros_like(call.hidden_states, dtype=precise)
    for expert in range(call.experts):
        share, served, x = _served(call, ids, weights, expert, precise)
        gate, up = _gate_and_up(call, expert, x)
        h = call.act.apply(gate, up).to(dtype).to(precise)
        y = h @ call.w2[expert].to(precise).t()
        if call.w2_bias is not None:
            y = y + call.w2_bias[expert].to(precise)
        total = total + torch.where(served, share * y, 0.0)
    return total.to(dtype)


def moe_backward(dy: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    *given, weight_grad = args
    call = Call(*given)
    dtype = call.hidden_states.dtype
    precise = accumulator(dtype)
    ids, weights, d = call.local_ids(), call.topk_weights.to(precise), dy.to(precise)
    dx = torch.zeros_like(call.hidden_states, dtype=precise)
    dweights = torch.zeros_like(weights)
    trained: list[tuple[torch.Tensor, ...]] = []
    for expert in range(call.experts):
        share, served, x = _served(call, ids, weights, expert, precise)
        gate, up = _gate_and_up(call, expert, x)
        h = call.act.apply(gate, up).to(dtype).to(precise)
        dh = d @ call.w2[expert].to(precise)
        dshare = (dh * h).sum(-1, keepdim=True)
        if call.w2_bias is not None:
            dshare = dshare + (d @ call.w2_bias[expert].to(precise)).unsqueeze(-1)
        # Zeros where a token is another's: what this expert makes of it may be no number.
        both = torch.cat(call.act.backward(gate, up, share * dh), -1)
        both = torch.where(served, both, 0.0)
        dx = dx + torch.where(served, both @ call.w13[expert].to(precise), 0.0)
        dweights = torch.where(ids == expert, dshare, dweights)
        if weight_grad:
            own = torch.where(served, share * d, 0.0)
            h = torch.where(served, h, 0.0)
            trained.append((both.t() @ x, own.t() @ h, both.sum(0), own.sum(0)))
    return dx.to(dtype), dweights.to(call.topk_weights.dtype), *_stacked(call, trained, weight_grad)


def moe_backward_by_row(*args: Any) -> tuple[torch.Tensor, ...]:
    """With every token computed alone; the gradients of weights, which mix them, by all at once."""
    *given, weight_grad = args
    alone = by_row(_of_tokens, rows=(0, 1, 2, 3), results=("row", "row"))
    dx, dweights = alone(*given)
    if weight_grad:
        return dx, dweights, *moe_backward(*args)[2:]
    return dx, dweights, *(gradient_like(dx, None) for _ in range(4))


def _of_tokens(*args: Any) -> tuple[torch.Tensor, ...]:
    return moe_backward(*args, False)[:2]


def _stacked(
    call: Call, trained: list[tuple[torch.Tensor, ...]], weight_grad: bool
) -> list[torch.Tensor]:
    """The gradients of the weights and biases, put together from those of each expert."""
    found = []
    for place, one in enumerate((call.w13, call.w2, call.w13_bias, call.w2_bias)):
        if not weight_grad or one is None or not trained:
            found.append(gradient_like(call.hidden_states, one if weight_grad else None))
        else:
            found.append(torch.stack([each[place].to(one.dtype) for each in trained]))
    return found


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
    both = x @ call.w13[expert].to(x.dtype).t()
    if call.w13_bias is not None:
        both = both + call.w13_bias[expert].to(x.dtype)
    gate, up = both.chunk(2, -1)
    return gate, up
