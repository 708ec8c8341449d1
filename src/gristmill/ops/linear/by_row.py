"""`linear` and `matmul` with every row of the result computed alone, whatever its batch.

The other matrix is converted once; of a stack each member is, into a matrix of its own.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from gristmill.ops.by_row import by_row
from gristmill.ops.linear import reference, semantics


def linear(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Any:
    return _linear(x, weight.to(_precise(x)), *rest)


def linear_with_pre(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Any:
    return _linear_with_pre(x, weight.to(_precise(x)), *rest)


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    result = a.new_empty(semantics.result_shape(a, b))
    if not result.numel():
        return result
    leading, (rows, depth), columns = result.shape[:-2], a.shape[-2:], b.shape[-1]
    count = torch.Size(leading).numel()
    stack = a.expand(*leading, rows, depth).reshape(count, rows, depth)
    others = b.expand(*leading, depth, columns)
    lines = result.view(count, rows, columns)
    matrix = torch.empty((depth, columns), dtype=_precise(a), device=b.device)
    for index, place in enumerate(itertools.product(*map(range, leading))):
        if index == 0 or any(others.stride()[:-2]):
            matrix.copy_(others[place])
        lines[index] = _matmul(stack[index], matrix)
    return result


def _precise(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _product(a: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    return torch.matmul(a.to(matrix.dtype), matrix).to(a.dtype)


_linear = by_row(reference.linear, rows=(0,))
_linear_with_pre = by_row(reference.linear_with_pre, rows=(0,), results=("row", "row"))
_matmul = by_row(_product, rows=(0,))
