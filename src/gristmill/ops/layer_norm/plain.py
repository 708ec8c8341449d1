"""The variants that run torch's own ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from gristmill.ops.layer_norm import semantics
from gristmill.ops.plain import laid_out
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant


def _unsupported(problem: Problem) -> str | None:
    if len({dtype for _, dtype in problem.dtypes}) > 1:
        return "torch's layer_norm takes one dtype for all tensors"
    if problem.layout.offset:
        return "torch's layer_norm has no weight_offset"
    if problem.rows == 0 or problem.dim("N") == 0:
        return "nothing to compute"
    return None


def _rounds_the_mean(problem: Problem) -> str | None:
    if problem.device.kind == "cpu":
        return "on a CPU torch rounds the mean, which a row far from zero does not forgive"
    return None


class Library(Variant):
    """torch.nn.functional.layer_norm."""

    name = "library"
    summary = "torch's own layer_norm"

    def supports(self, problem: Problem) -> str | None:
        return _unsupported(problem)

    def declines(self, problem: Problem) -> str | None:
        return _rounds_the_mean(problem)

    def bind(self, problem: Problem, config: None) -> Callable[..., Any]:
        if problem.op == "add_layer_norm":
            return laid_out(_library_add, semantics.outputs_add)
        return laid_out(_library_forward, semantics.outputs_forward)


class LibraryBackward(Variant):
    """torch's forward, for the statistics, and backward."""

    name = "library"
    summary = "torch's own layer_norm backward"

    def supports(self, problem: Problem) -> str | None:
        narrow = problem.dtype("x") in ("bfloat16", "float16")
        if problem.device.kind != "cuda" and narrow:
            return f"on {problem.device.kind} torch rounds the statistics to {problem.dtype('x')}"
        return _unsupported(problem)

    def declines(self, problem: Problem) -> str | None:
        return _rounds_the_mean(problem)

    def bind(self, problem: Problem, config: None) -> Callable[..., Any]:
        return laid_out(_library_backward, semantics.outputs_backward)


def _library_forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _library_add(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    out_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return _library_forward(total, weight, bias, eps, weight_offset, out_dtype), total


def _library_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    dsum: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    weight_grad: bool,
    bias_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape, wants = list(x.shape[-1:]), [True, weight_grad and weight is not None]
    x, dy = x.contiguous(), dy.contiguous()
    # Of the bias torch wants to know no more than that there is one, and its dtype.
    bias = None if bias_dtype is None else x.new_empty(shape, dtype=bias_dtype)
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, shape, weight, None, eps)
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dy, x, shape, mean, rstd, weight, bias, [*wants, bias is not None]
    )
    return (
        dx if dsum is None else dx + dsum,
        dweight if wants[1] else x.new_empty(0),
        dbias if bias is not None else x.new_empty(0),
    )
