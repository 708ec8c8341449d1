"""A mixture of dense experts in plain PyTorch: the semantics, and the kernel for anything."""

from __future__ import annotations

from typing import Any

import torch

from gristmill.ops.by_row import by_row
from gristmill.ops.experts import reference
from gristmill.ops.experts.reference import Matrix
from gristmill.ops.moe.semantics import Call, gradient_like


def moe(*args: Any) -> torch.Tensor:
    call = Call(*args)
    return reference.forward(call, *_matrices(call))


def moe_backward(dy: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    *given, weight_grad = args
    call = Call(*given)
    trained: list[tuple[torch.Tensor, ...]] = []
    wanted = trained if weight_grad else None
    dx, dweights = reference.backward(dy, call, *_matrices(call), wanted)
    return dx, dweights, *_stacked(call, trained, weight_grad)


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


def _matrices(call: Call) -> tuple[Matrix, Matrix]:
    w13, w2 = call.w13, call.w2
    return lambda expert, dtype: w13[expert].to(dtype), lambda expert, dtype: w2[expert].to(dtype)
