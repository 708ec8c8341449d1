"""The variants that never hold all logits: block by block through torch's matmul and our kernels.

The loss and its gradient of each block are those of `cross_entropy`, whose variants are chosen as
for any other call. The size of the blocks bounds the memory that they take, so it follows from the
call alone and not from a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gristmill.ops.cross_entropy import CROSS_ENTROPY, CROSS_ENTROPY_BACKWARD
from gristmill.ops.launch import dense
from gristmill.ops.linear_cross_entropy import chunks, semantics
from gristmill.ops.linear_cross_entropy.chunks import Blocks, ranges
from gristmill.ops.linear_cross_entropy.products import linear_into, product_into
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant


class Chunked(Variant):
    """The forward: blocks of whole rows, one after the other."""

    name = "chunked"
    summary = "logits of some rows at a time, by torch's matmul and cross_entropy"

    def supports(self, problem: Problem) -> str | None:
        return None

    def bind(self, problem: Problem, config: None) -> Callable[..., Any]:
        return partial(_forward, chunks.forward_blocks(problem.layout).rows)


class ChunkedBackward(Variant):
    """The backward: the logits of each block are made again, and turned into their gradient."""

    name = "chunked"
    summary = "logits and their gradient block by block, by torch's matmul and cross_entropy"

    def supports(self, problem: Problem) -> str | None:
        return None

    def bind(self, problem: Problem, config: None) -> Callable[..., Any]:
        return partial(_backward, backward_blocks(problem))


def backward_blocks(problem: Problem) -> Blocks:
    """The blocks of a backward pass, as large as memory allows."""
    # With class weights, blocks hold whole rows. Without dweight, whole rows need no sum over
    # blocks.
    whole_rows = "class_weight" in problem.flags or "dweight" not in problem.flags
    return chunks.backward_blocks(problem.layout, whole_rows=whole_rows)


def _forward(
    most: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    chunk_rows: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    (classes, columns), count = weight.shape, math.prod(target.shape)
    rows, targets = x.reshape(count, columns), target.reshape(count)
    precise = semantics.accumulator(x.dtype)
    each, lse = (x.new_empty(target.shape, dtype=precise) for _ in range(2))
    stats = x.new_empty((*target.shape, 2), dtype=precise)
    logits = _matrix(x.new_empty(min(most, count) * _pitch(classes)), min(most, count), classes)
    # Of each row without its z_loss, which has a denominator of its own.
    options = (class_weight, ignore_index, label_smoothing, 0.0, softcap, "none", False)
    for part in ranges(count, most):
        block = logits[: part.stop - part.start]
        linear_into(block, rows[part], weight, bias)
        losses, sums, _, found = CROSS_ENTROPY.run(block, targets[part], *options)
        each.view(-1)[part] = losses
        lse.view(-1)[part] = sums
        stats.view(-1, 2)[part] = found
    del logits
    loss, denominators = reduced(
        each, lse, target, class_weight, classes, ignore_index, z_loss, reduction
    )
    return loss, lse, denominators, stats


def reduced(
    each: torch.Tensor,
    lse: torch.Tensor,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    classes: int,
    ignore_index: int,
    z_loss: float,
    reduction: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of all rows from that of each, without its z_loss; and the denominators."""
    # lse of ignored rows is 0, and so is their part of this.
    squares = z_loss * lse * lse if z_loss > 0 else None
    if reduction == "none":
        return each if squares is None else each + squares, each.new_empty((0,))
    if reduction == "sum":
        total = each.sum()
        return total if squares is None else total + squares.sum(), each.new_empty((0,))
    counted = target != ignore_index
    count = counted.sum().to(each.dtype)
    weights = count
    if class_weight is not None:
        # A target that is no class spoils its own row; the others keep their denominator.
        wrong = (target < 0) | (target >= classes)
        place = torch.where(wrong, 0, target).long()
        found = class_weight.to(each.dtype)[place] if classes else torch.ones_like(each)
        weights = torch.where(counted, torch.where(wrong, 1.0, found), 0.0).sum()
    loss = each.sum() / weights
    if squares is not None:
        loss = loss + squares.sum() / count
    return loss, torch.stack((weights, count))


def _backward(
    most: Blocks,
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    dloss: torch.Tensor,
    dlse: torch.Tensor | None,
    stats: torch.Tensor,
    denominators: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    chunk_rows: int | None,
    x_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tensors = (x, weight, target, bias, class_weight, dloss, dlse, stats, denominators)
    options = (ignore_index, label_smoothing, z_loss, softcap, reduction)
    results = semantics.outputs_backward(
        *tensors, *options, chunk_rows, x_grad, weight_grad, bias_grad
    )
    (classes, columns), count = weight.shape, math.prod(target.shape)
    if not count or not classes:
        for result in results:
            result.zero_()
        return results
    rows, targets, sums = x.reshape(count, columns), target.reshape(count), stats.reshape(count, 2)
    # A gradient for each row, or one for all.
    by_row = dloss.reshape(count) if reduction == "none" else None
    of_lse = None
    if dlse is not None:
        # Of ignored rows lse is 0, whatever their logits.
        of_lse = torch.where(target == ignore_index, 0.0, dlse).reshape(count)
    memory = x.new_empty(min(most.rows, count) * _pitch(min(most.classes, classes)))

    def gradient(part: slice, span: slice) -> torch.Tensor:
        """Of the logits of some rows and some classes."""
        height, width = part.stop - part.start, span.stop - span.start
        logits = _matrix(memory, height, width)
        linear_into(logits, rows[part], weight[span], None if bias is None else bias[span])
        shard = (0, 0) if width == classes else (span.start, classes)
        found: torch.Tensor = CROSS_ENTROPY_BACKWARD.run(
            dloss if by_row is None else by_row[part],
            None if of_lse is None else of_lse[part],
            logits,
            targets[part],
            sums[part],
            denominators,
            class_weight,
            *options,
            *shard,
        )
        return found

    dx, dweight, dbias = (dense(result) for result in results)
    dweight_sum = _sum_of(dweight, several=weight_grad and most.rows < count)
    dbias_sum = _sum_of(dbias, several=True)
    for part in ranges(count, most.rows):
        lines = dx.view(count, columns)[part] if x_grad else dx
        lines_sum = _sum_of(lines, several=x_grad and most.classes < classes)
        for span in ranges(classes, most.classes):
            dlogits = gradient(part, span)
            if x_grad:
                product_into(lines_sum, dlogits, weight[span], add=span.start > 0)
            if weight_grad:
                product_into(dweight_sum[span], dlogits.t(), rows[part], add=part.start > 0)
            if bias_grad:
                found = dlogits.sum(0, dtype=dbias_sum.dtype)
                dbias_sum[span] = found if part.start == 0 else dbias_sum[span] + found
            del dlogits  # before the next one is made
        if lines_sum is not lines:
            lines.copy_(lines_sum)
    for result, made in zip(results, (dx, dweight_sum, dbias_sum), strict=True):
        if result is not made:
            result.copy_(made)
    return results


def _pitch(classes: int) -> int:
    """From one row of logits to the next: 16 bytes or more, which matmuls want of their results."""
    return -(-classes // 8) * 8


def _matrix(memory: torch.Tensor, rows: int, classes: int) -> torch.Tensor:
    pitch = _pitch(classes)
    return memory[: rows * pitch].view(rows, pitch)[:, :classes]


def _sum_of(result: torch.Tensor, *, several: bool) -> torch.Tensor:
    """Where a result is summed up: in fp32 (fp64) where several blocks add to it."""
    precise = semantics.accumulator(result.dtype)
    if not several or result.dtype == precise:
        return result
    return torch.empty(result.shape, dtype=precise, device=result.device)
