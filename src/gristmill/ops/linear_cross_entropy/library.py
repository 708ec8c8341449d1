"""The variants that run torch's own linear_cross_entropy, where torch has it.

It knows neither z_loss nor softcap, and on its chunked path neither label smoothing nor int32
targets. It gives no lse: without class weights that is the loss plus the target's logit, and NaN
where that is -inf: if all logits are, or with an infinite loss. Its loss has x's dtype, which in 16
bits is too few for a loss, and for the lse that a gradient starts from. It does not return a row's
largest logit either: stats are lse and exp(the rounding error of lse).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from gristmill.ops.autograd import recording
from gristmill.ops.linear_cross_entropy import chunks
from gristmill.ops.linear_cross_entropy.chunked import reduced
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

_TORCH: Callable[..., torch.Tensor] | None = getattr(F, "linear_cross_entropy", None)


class Library(Variant):
    """Both directions: what is computed is the problem's op."""

    name = "library"
    summary = "torch.nn.functional.linear_cross_entropy, in chunks of rows"

    def supports(self, problem: Problem) -> str | None:
        if _TORCH is None:
            return f"torch {torch.__version__} has no linear_cross_entropy"
        if problem.dtype("x") not in ("float32", "float64"):
            return f"its loss has x's dtype, too few bits in {problem.dtype('x')}"
        if problem.dtype("target") != "int64":
            return f"takes int64 targets in chunks, not {problem.dtype('target')}"
        unknown = {"class_weight": "class weights without lse", "smoothing": "label smoothing"}
        for flag, what in {**unknown, "z_loss": "z_loss", "softcap": "softcap"}.items():
            if flag in problem.flags:
                return f"knows no {what}"
        if "dlse" in problem.flags:
            return "its lse has no gradient"
        if not problem.rows or not problem.dim("V"):
            return "nothing to compute"
        return None

    def bind(self, problem: Problem, config: None) -> Callable[..., Any]:
        rows = chunks.forward_blocks(problem.layout).rows
        run = _backward if problem.op == "linear_cross_entropy_backward" else _forward

        return partial(run, rows)


def _losses(
    rows: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    ignore_index: int,
) -> torch.Tensor:
    """Of each row, by torch, which keeps no promise for targets out of range: those are ignored."""
    assert _TORCH is not None
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows, chunking_method=None)
    outside = (target < 0) | (target >= weight.shape[0])
    # torch multiplies the gradients of ignored rows by 0: NaN if the row is not finite.
    x = x.masked_fill((target == ignore_index).unsqueeze(-1), 0.0)
    return _TORCH(
        x.reshape(target.numel(), x.shape[-1]),
        weight,
        torch.where(outside, ignore_index, target).reshape(-1),
        linear_bias=bias,
        reduction="none",
        ignore_index=ignore_index,
        options=options,
    ).view(target.shape)


def _spoiled(target: torch.Tensor, classes: int, ignore_index: int) -> torch.Tensor:
    """Where a target is out of range and not ignored."""
    return ((target < 0) | (target >= classes)) & (target != ignore_index)


def _forward(
    rows: int,
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
    classes = weight.shape[0]
    each = _losses(rows, x, weight, target, bias, ignore_index)
    place = target.clamp(0, classes - 1)
    logit = (x * weight[place]).sum(-1)
    if bias is not None:
        logit = logit + bias[place]
    ignored = target == ignore_index
    each = torch.where(_spoiled(target, classes, ignore_index), math.nan, each)
    each = torch.where(ignored, 0.0, each)  # torch has NaN where their logits are not finite
    lse = torch.where(ignored, 0.0, each + logit)
    loss, denominators = reduced(each, lse, target, None, classes, ignore_index, 0.0, reduction)
    lost = torch.where(logit.abs() > each, (logit - lse) + each, (each - lse) + logit)
    stats = torch.stack((lse, torch.where(ignored, 0.0, lost.exp())), -1)
    return loss, lse, denominators, stats


def _backward(
    rows: int,
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
    each = dloss.expand(target.shape)
    if reduction == "mean":
        each = each / denominators[0]
    spoiled = _spoiled(target, weight.shape[0], ignore_index)
    each = torch.where(spoiled, math.nan, each)
    # Rows that take no part: a mean over none of them has an infinite gradient to hand out.
    ignored = target == ignore_index
    each = torch.where(ignored, 0.0, each)
    with recording():
        h, w = x.detach().requires_grad_(x_grad), weight.detach().requires_grad_(weight_grad)
        b = None if bias is None else bias.detach().requires_grad_(bias_grad)
        # torch multiplies what their logits give by 0, and makes NaN of a vocabulary that is masked
        # as a whole: if no row takes part, neither does the bias.
        own_bias = None if b is None else torch.where(ignored.all(), 0.0, b)
        losses = _losses(rows, h, w, target, own_bias, ignore_index)
    leaves = [leaf for leaf in (h, w, b) if leaf is not None and leaf.requires_grad]
    grads = torch.autograd.grad(losses, leaves, each) if leaves else ()
    found = iter([_laid_like(leaf, one) for leaf, one in zip(leaves, grads, strict=True)])
    dx, dweight, dbias = (
        next(found) if needed else x.new_empty((0,)) for needed in (x_grad, weight_grad, bias_grad)
    )
    if x_grad:
        dx.masked_fill_(ignored.unsqueeze(-1), 0.0)
    return dx, dweight, dbias


def _laid_like(leaf: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """With the strides that the op promises, which torch's gradients need not have."""
    promised = torch.empty_like(leaf, requires_grad=False)
    return gradient if gradient.stride() == promised.stride() else promised.copy_(gradient)
