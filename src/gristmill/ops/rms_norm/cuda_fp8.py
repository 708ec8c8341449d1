"""The CUDA variants of rms_norm_fp8 and add_rms_norm_fp8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gristmill.ops.norm_fp8.cuda import Plan, plan_fp8
from gristmill.ops.norms.cuda import NormForward
from gristmill.ops.rms_norm.semantics import epsilon, sum_dtype
from gristmill.ops.rows.config import RowConfig
from gristmill.ops.rows.variant import SCOPES
from gristmill.select.problem import Problem

Tensor = torch.Tensor


class Fp8Variant(NormForward):
    def bind(self, problem: Problem, config: RowConfig) -> Callable[..., Any]:
        norm = plan_fp8(self.launcher(problem, config), problem.layout)
        return {"rms_norm_fp8": _plan_forward, "add_rms_norm_fp8": _plan_add}[problem.op](norm)


def _plan_forward(norm: Plan) -> Callable[..., Any]:
    def plan(
        x: Tensor,
        weight: Tensor | None,
        scale: Tensor | None,
        eps: float | None,
        weight_offset: float,
        casting: str,
        amax: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        eps = epsilon(eps, x.dtype)
        y, _, row_scale, largest = norm(x, None, weight, None, scale, eps, weight_offset, amax)
        return y, row_scale, largest

    return plan


def _plan_add(norm: Plan) -> Callable[..., Any]:
    def plan(
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        scale: Tensor | None,
        eps: float | None,
        weight_offset: float,
        casting: str,
        amax: bool,
    ) -> Any:
        eps = epsilon(eps, sum_dtype(x, residual))
        return norm(x, residual, weight, None, scale, eps, weight_offset, amax)

    return plan


FP8_VARIANTS = tuple(Fp8Variant(name) for name in SCOPES)
