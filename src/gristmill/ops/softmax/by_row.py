"""The softmax ops with every row computed alone, for where rows must not depend on the batch.

A causal row is computed as a shorter row. Its hidden columns are then filled: with zeros or minus
infinity, with NaN if the result is NaN, with zeros in a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gristmill.ops.by_row import each_alone
from gristmill.ops.softmax import reference
from gristmill.ops.softmax.semantics import EVERYTHING, causal_offset

_NOBODY = float("-inf")


def softmax(x: torch.Tensor, causal: int, scale: float, mask: torch.Tensor | None) -> torch.Tensor:
    return _forward(reference.softmax, 0.0, x, causal, scale, mask)


def log_softmax(
    x: torch.Tensor, causal: int, scale: float, mask: torch.Tensor | None
) -> torch.Tensor:
    return _forward(reference.log_softmax, _NOBODY, x, causal, scale, mask)


def softmax_backward(dy: torch.Tensor, y: torch.Tensor, causal: int, scale: float) -> torch.Tensor:
    return _backward(reference.softmax_backward, dy, y, causal, scale)


def log_softmax_backward(
    dy: torch.Tensor, y: torch.Tensor, causal: int, scale: float
) -> torch.Tensor:
    return _backward(reference.log_softmax_backward, dy, y, causal, scale)


def _forward(
    function: Callable[..., torch.Tensor],
    hidden: float,
    x: torch.Tensor,
    causal: int,
    scale: float,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    def row(x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return function(x, EVERYTHING, scale, mask)

    rows = (x, None if mask is None else mask.expand(x.shape))
    return _each(row, hidden, torch.nan, rows, causal)


def _backward(
    function: Callable[..., torch.Tensor],
    dy: torch.Tensor,
    y: torch.Tensor,
    causal: int,
    scale: float,
) -> torch.Tensor:
    def row(y: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        return function(dy, y, EVERYTHING, scale)

    return _each(row, 0.0, 0.0, (y, dy), causal)


def _each(
    function: Callable[..., torch.Tensor],
    hidden: float,
    hidden_if_nan: float,
    tensors: tuple[torch.Tensor, torch.Tensor | None],
    causal: int,
) -> torch.Tensor:
    """`function` of each row's columns that are seen, and `hidden` for the others.

    These are `hidden_if_nan` where the row's result is NaN.
    """
    first = tensors[0]
    if not first.numel():
        return torch.empty_like(first)
    columns = first.shape[-1]
    queries, offset = 1, columns - 1
    if causal != EVERYTHING:
        queries = first.shape[-2]
        offset = causal_offset(causal, queries, columns)

    def alone(index: int, *rows: torch.Tensor | None) -> list[torch.Tensor]:
        seen = min(max(index % queries + offset + 1, 0), columns)
        parts = [None if row is None else row[:, :seen].contiguous() for row in rows]
        if seen == columns:
            return [function(*parts)]
        result = first.new_full((1, columns), hidden)
        if seen:
            result[:, :seen] = function(*parts)
            result[:, seen:] = torch.where(result[:, :1].isnan(), hidden_if_nan, hidden)
        return [result]

    (result,) = each_alone(alone, tensors, first.shape[:-1])
    return result
