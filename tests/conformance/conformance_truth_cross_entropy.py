"""What the cross entropy ops must answer, in fp64: tests/cross_entropy_exact.py as truths."""

from __future__ import annotations

from typing import Any

import cross_entropy_exact as exact
import torch
from conformance_truth_core import Truth, accumulator_of


def _truth(pair: exact.Pair, dtype: torch.dtype) -> Truth:
    value, terms = pair
    return Truth(value, value, terms, accumulator_of(dtype))


def _gradient(whole: exact.Pair, lost: exact.Pair, dtype: torch.dtype) -> Truth:
    """With or without probabilities that fp32 has no normal number for.

    The kernels' powers are zero there; with a large gradient of lse their products are not.
    """
    (value, terms), (least, _) = whole, lost
    low, high = torch.minimum(value, least), torch.maximum(value, least)
    return Truth(low, high, terms, accumulator_of(dtype))


def cross_entropy(logits: torch.Tensor, *rest: Any) -> list[Truth]:
    return [_truth(pair, logits.dtype) for pair in exact.forward(logits, *rest)]


def cross_entropy_one_pass(logits: torch.Tensor, *rest: Any) -> list[Truth]:
    loss, lse, gradient = exact.one_pass(logits, *rest)
    lost = exact.one_pass(logits, *rest, lost=True)[2]
    return [
        _truth(loss, logits.dtype),
        _truth(lse, logits.dtype),
        _gradient(gradient, lost, logits.dtype),
    ]


def cross_entropy_backward(dloss: torch.Tensor, dlse: Any, logits: Any, *rest: Any) -> list[Truth]:
    args = (dloss, dlse, logits, *rest)
    return [_gradient(exact.backward(*args), exact.backward(*args, lost=True), logits.dtype)]


def cross_entropy_shard(logits: torch.Tensor, *rest: Any) -> list[Truth]:
    value, terms = exact.shard(logits, *rest)
    unknown = exact.shard_unknown(logits, *rest[-2:])
    low, high = (torch.where(unknown, sign * torch.inf, value) for sign in (-1, 1))
    return [Truth(low, high, terms, accumulator_of(logits.dtype))]


def scale_gradient_(gradient: torch.Tensor, factor: torch.Tensor) -> list[Truth]:
    return [_truth(exact.scale(gradient, factor), gradient.dtype)]
