"""The CUDA variants of rms_norm, add_rms_norm and fused_add_rms_norm_."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gristmill.ops.norms.cuda import NormForward, Run, plan_add_norm, plan_norm
from gristmill.ops.norms.problem import Details
from gristmill.ops.rms_norm.semantics import epsilon, sum_dtype
from gristmill.ops.rows.config import RowConfig
from gristmill.ops.rows.problem import packed
from gristmill.ops.rows.variant import SCOPES
from gristmill.select.problem import Problem


class ForwardVariant(NormForward):
    def bind(self, problem: Problem, config: RowConfig) -> Callable[..., Any]:
        details: Details = problem.layout
        run = self.launcher(problem, config)
        return {
            "rms_norm": plan_rms_norm,
            "add_rms_norm": _plan_add_rms_norm,
            "fused_add_rms_norm_": _plan_fused_add,
        }[problem.op](run, details)


def plan_rms_norm(run: Run, details: Details) -> Callable[..., torch.Tensor]:
    norm = plan_norm(run, details)

    def plan(
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float | None,
        weight_offset: float,
        casting: str,
        out_dtype: torch.dtype | None,
    ) -> torch.Tensor:
        if eps is None:
            eps = epsilon(eps, x.dtype)
        return norm(x, weight, None, eps, weight_offset, out_dtype)

    return plan


def _plan_add_rms_norm(run: Run, details: Details) -> Callable[..., Any]:
    norm = plan_add_norm(run, details)

    def plan(
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float | None,
        weight_offset: float,
        casting: str,
        out_dtype: torch.dtype | None,
    ) -> Any:
        if eps is None:
            eps = epsilon(eps, sum_dtype(x, residual))
        return norm(x, residual, weight, None, eps, weight_offset, out_dtype)

    return plan


def _plan_fused_add(run: Run, details: Details) -> Callable[..., None]:
    copied, strided = details.copied, details.strided

    def plan(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float
    ) -> None:
        if strided:
            weight = packed(weight)
        if copied:
            y, total = packed(x), packed(residual)
            run(y, total, weight, None, y, total, eps, 0.0)
            x.copy_(y)
            residual.copy_(total)
            return
        run(x, residual, weight, None, x, residual, eps, 0.0)
        # Autograd must know that what it may have saved has changed.
        torch.autograd.graph.increment_version((x, residual))

    return plan


FORWARD_VARIANTS = tuple(ForwardVariant(name) for name in SCOPES)
