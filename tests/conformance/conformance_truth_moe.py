"""What the ops over dense experts must answer, in fp64."""

from __future__ import annotations

from typing import Any

import torch
from conformance_truth_core import Truth, accumulator_of
from conformance_truth_experts import Mixture, backward, forward


def moe(*args: Any) -> list[Truth]:
    return forward(_mixture(args))


def moe_backward(dy: torch.Tensor, *args: Any) -> list[Truth]:
    *given, weight_grad = args
    truths = backward(_mixture(tuple(given)), dy, weight_grad=weight_grad)
    if weight_grad and not len(args[3]):
        # Of no experts there are no gradients, but they have a shape.
        precise = accumulator_of(args[0].dtype)
        for place, one in enumerate((args[3], args[4], args[5], args[6]), start=2):
            if one is not None:
                empty = one.double()
                truths[place] = Truth(empty, empty, empty, precise)
    return truths


def _mixture(args: tuple[Any, ...]) -> Mixture:
    x, weights, ids, w13, w2, w13_bias, w2_bias, activation, limit, expert_map, alpha = args
    return Mixture(
        x=x,
        weights=weights,
        ids=ids,
        experts=len(w13),
        w13=lambda number: w13[number].double(),
        w2=lambda number: w2[number].double(),
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        activation=activation,
        limit=limit,
        expert_map=expert_map,
        alpha=alpha,
    )
