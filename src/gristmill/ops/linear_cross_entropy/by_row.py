"""Linear cross entropy with every row computed alone: rows that do not depend on the batch.

The weight is converted once. What is made of all rows (a loss of them all, the gradients of weight
and bias) is made of all rows at once.
"""

from __future__ import annotations

from typing import Any

import torch

from gristmill.ops.by_row import Kinds, by_row
from gristmill.ops.linear_cross_entropy import reference
from gristmill.ops.linear_cross_entropy.semantics import accumulator


def _kinds(*args: Any) -> Kinds:
    reduction = args[9]
    return "row" if reduction == "none" else "whole", "row", "whole", "row"


_forward = by_row(reference.linear_cross_entropy, rows=(0, 2), results=_kinds)
_backward = by_row(
    reference.linear_cross_entropy_backward,
    rows=(0, 2, 5, 6, 7),
    results=("row", "whole", "whole"),
)


def linear_cross_entropy(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Any:
    return _forward(x, weight.to(accumulator(x.dtype)), *rest)


def linear_cross_entropy_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    dloss: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *options, x_grad, weight_grad, bias_grad = rest
    own = [x, weight.to(accumulator(x.dtype)), target, bias, class_weight]
    whole = [*own, dloss, *options, False, weight_grad, bias_grad]
    _, dweight, dbias = reference.linear_cross_entropy_backward(*whole)
    dx = x.new_empty((0,))
    if x_grad:
        each = dloss.expand(target.shape)
        dx, _, _ = _backward(*own, each, *options, True, False, False)
    return dx, dweight, dbias
