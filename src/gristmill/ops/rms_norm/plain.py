"""The variants that run torch's own ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from gristmill.ops.plain import laid_out
from gristmill.ops.rms_norm import semantics
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant


class Library(Variant):
    """torch.nn.functional.rms_norm."""

    name = "library"
    summary = "torch's own rms_norm"

    def supports(self, problem: Problem) -> str | None:
        types = {dtype for name, dtype in problem.dtypes}
        if len(types) > 1:
            return "torch's rms_norm takes one dtype for all tensors"
        if "llama" in problem.flags:
            return "torch's rms_norm rounds once"
        if problem.layout.offset:
            return "torch's rms_norm has no weight_offset"
        if problem.rows == 0 or problem.dim("N") == 0:
            return "nothing to compute"
        return None

    def bind(self, problem: Problem, config: None) -> Callable[..., Any]:
        if problem.op == "add_rms_norm":
            return laid_out(_library_add, semantics.outputs_add)
        return laid_out(_library_forward, semantics.outputs_forward)


class LibraryBackward(Variant):
    """torch's fused forward, for the statistics, and backward."""

    name = "library"
    summary = "torch's own fused rms_norm backward"

    def supports(self, problem: Problem) -> str | None:
        if problem.device.kind != "cuda":
            return f"torch has no fused rms_norm backward on {problem.device.kind}"
        if not hasattr(torch.ops.aten, "_fused_rms_norm_backward"):
            return f"torch {torch.__version__} has no fused rms_norm backward"
        if len({dtype for _, dtype in problem.dtypes}) > 1:
            return "torch's rms_norm takes one dtype for all tensors"
        if problem.layout.offset:
            return "torch's rms_norm has no weight_offset"
        if problem.rows == 0 or problem.dim("N") == 0:
            return "nothing to compute"
        return None

    def bind(self, problem: Problem, config: None) -> Callable[..., Any]:
        return laid_out(_library_backward, semantics.outputs_backward)


def _library_forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float | None,
    weight_offset: float,
    casting: str,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, semantics.epsilon(eps, x.dtype))


def _library_add(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float | None,
    weight_offset: float,
    casting: str,
    out_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return _library_forward(total, weight, eps, weight_offset, casting, out_dtype), total


def _library_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    dsum: torch.Tensor | None,
    eps: float | None,
    weight_offset: float,
    weight_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape, want = list(x.shape[-1:]), weight_grad and weight is not None
    x, dy = x.contiguous(), dy.contiguous()
    _, rstd = torch.ops.aten._fused_rms_norm(x, shape, weight, semantics.epsilon(eps, x.dtype))
    dx, dweight = torch.ops.aten._fused_rms_norm_backward(dy, x, shape, rstd, weight, [True, want])
    return dx if dsum is None else dx + dsum, dweight if want else x.new_empty(0)
