"""A rank's part of a linear cross entropy whose classes are spread over the ranks of groups.

Logits of some rows and of this rank's classes are held at a time, and made anew for the gradient,
which is summed up in fp32 (fp64 for fp64) and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gristmill.distributed.vocab_parallel import (
    Options,
    by_row,
    gather_numbers,
    rounded,
    shard_numbers,
)
from gristmill.ops.cross_entropy import CROSS_ENTROPY_BACKWARD
from gristmill.ops.linear_cross_entropy import chunks
from gristmill.ops.linear_cross_entropy.problem import Sizes
from gristmill.ops.linear_cross_entropy.products import linear_into, product_into
from gristmill.ops.linear_cross_entropy.semantics import accumulator


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    groups: Sequence[dist.ProcessGroup],
    options: Options,
    chunk_rows: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss of each row in fp64 without z_loss, lse (0 for ignored rows), and stats."""
    (classes, columns), count = weight.shape, math.prod(target.shape)
    rows, targets = x.reshape(count, columns), target.reshape(count)
    most = chunks.forward_blocks(_sizes(x, weight, count, chunk_rows)).rows
    found = [
        shard_numbers(_logits(rows[part], weight, bias), targets[part], options)
        for part in chunks.ranges(count, most)
    ]
    numbers = 4 if options.label_smoothing > 0 else 3
    own = torch.cat(found) if found else x.new_empty((0, numbers), dtype=accumulator(x.dtype))
    told = gather_numbers(own, classes, groups, options)
    each, lse, stats = by_row(told, target, options._replace(z_loss=0.0, return_lse=False))
    return each, rounded(lse, own.dtype), rounded(stats, own.dtype)


def backward(
    tensors: tuple[Any, ...],
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    options: Options,
    chunk_rows: int | None,
    wanted: tuple[bool, bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """This rank's part of the gradients of x, weight and bias, of those that are wanted.

    `tensors` are x, weight, target and bias; `gradients` that of the loss, stats and denominators.
    """
    x, weight, target, bias = tensors
    dloss, stats, denominators = gradients
    (_, columns), count = weight.shape, math.prod(target.shape)
    rows, targets, sums = x.reshape(count, columns), target.reshape(count), stats.reshape(count, 2)
    by_each = dloss.reshape(count) if options.reduction == "none" else None
    precise = accumulator(x.dtype)
    x_grad, weight_grad, bias_grad = wanted
    lines = [rows.new_empty((0, columns))]
    dweight = torch.zeros_like(weight, dtype=precise) if weight_grad else None
    dbias = x.new_zeros(weight.shape[:1], dtype=precise) if bias_grad else None
    most = chunks.backward_blocks(_sizes(x, weight, count, chunk_rows), whole_rows=True).rows
    more = (*options[2:7], options.first_class, options.classes)
    for part in chunks.ranges(count, most):
        dlogits = _gradient(
            dloss if by_each is None else by_each[part],
            _logits(rows[part], weight, bias),
            targets[part],
            sums[part],
            denominators,
            more,
        )
        if x_grad:
            lines.append(_product(dlogits, weight))
        if dweight is not None:
            dweight = _added(dweight, dlogits.t(), rows[part])
        if dbias is not None:
            dbias = dbias + dlogits.sum(0, dtype=precise)
    return (
        torch.cat(lines).view(x.shape) if x_grad else None,
        None if dweight is None else dweight.to(weight.dtype),
        None if dbias is None else dbias.to(x.dtype),
    )


def _gradient(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    stats: torch.Tensor,
    denominators: torch.Tensor,
    more: tuple[Any, ...],
) -> torch.Tensor:
    """Of the logits of some rows."""
    tensors = (dloss, None, logits, target, stats, denominators, None)
    found: torch.Tensor = CROSS_ENTROPY_BACKWARD.call_in_backward(tensors, (*tensors, *more))
    return found


def _sizes(x: torch.Tensor, weight: torch.Tensor, count: int, chunk_rows: int | None) -> Sizes:
    kind = "cuda" if x.is_cuda else "cpu"
    return Sizes(count, weight.shape[0], weight.shape[1], x.dtype, chunk_rows, kind)


def _logits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return torch.nn.functional.linear(x, weight, bias)
    logits = x.new_empty((x.shape[0], weight.shape[0]))
    linear_into(logits, x, weight, bias)
    return logits


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b``, rounded once."""
    if torch.compiler.is_compiling():
        return a @ b
    product = a.new_empty((a.shape[0], b.shape[1]))
    product_into(product, a, b, add=False)
    return product


def _added(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``total + a @ b``, in the memory of total where nobody is tracing."""
    if not torch.compiler.is_compiling():
        product_into(total, a, b, add=True)
        return total
    if a.dtype == total.dtype:
        return total + a @ b
    if a.is_cuda:
        return total + torch.mm(a, b, out_dtype=total.dtype)
    return total + a.to(total.dtype) @ b.to(total.dtype)
