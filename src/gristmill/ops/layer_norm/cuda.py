"""The CUDA variants of layer_norm, add_layer_norm, these into FP8, and layer_norm_backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gristmill.ops.norm_fp8.cuda import plan_fp8
from gristmill.ops.norms.cuda import NormForward, plan_add_norm, plan_norm
from gristmill.ops.norms.cuda_backward import NormBackward
from gristmill.ops.rows.config import RowConfig
from gristmill.ops.rows.variant import SCOPES
from gristmill.select.problem import Problem


class ForwardVariant(NormForward):
    floats = 4  # of Moments, reductions.cuh

    def bind(self, problem: Problem, config: RowConfig) -> Callable[..., Any]:
        plan = plan_norm if problem.op == "layer_norm" else plan_add_norm
        return plan(self.launcher(problem, config), problem.layout)


class Fp8Variant(ForwardVariant):
    def bind(self, problem: Problem, config: RowConfig) -> Callable[..., Any]:
        norm = plan_fp8(self.launcher(problem, config), problem.layout)
        if problem.op == "add_layer_norm_fp8":
            return norm

        def plan(x: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            y, _, row_scale, largest = norm(x, None, *others)
            return y, row_scale, largest

        return plan


class BackwardVariant(NormBackward):
    floats = 6  # of MomentsAndProducts

    def bind(
        self, problem: Problem, config: RowConfig
    ) -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        gradients = self.plan(problem, config)

        def plan(
            dy: torch.Tensor,
            x: torch.Tensor,
            weight: torch.Tensor | None,
            dsum: torch.Tensor | None,
            eps: float,
            weight_offset: float,
            weight_grad: bool,
            bias_dtype: torch.dtype | None,
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            dx, dweight, dbias = gradients(dy, x, weight, dsum, eps, weight_offset, bias_dtype)
            if dbias is None:
                dbias = torch.empty(0, dtype=x.dtype, device=x.device)
            return dx, dweight, dbias

        return plan


FORWARD_VARIANTS = tuple(ForwardVariant(name) for name in SCOPES)
FP8_VARIANTS = tuple(Fp8Variant(name) for name in SCOPES)
BACKWARD_VARIANTS = tuple(BackwardVariant(name) for name in SCOPES)
