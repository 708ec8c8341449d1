"""The CUDA variants of rms_norm_backward."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gristmill.ops.norms.cuda_backward import NormBackward
from gristmill.ops.rms_norm.semantics import epsilon
from gristmill.ops.rows.config import RowConfig
from gristmill.ops.rows.variant import SCOPES
from gristmill.select.problem import Problem


class BackwardVariant(NormBackward):
    floats = 2

    def bind(
        self, problem: Problem, config: RowConfig
    ) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        gradients = self.plan(problem, config)

        def plan(
            dy: torch.Tensor,
            x: torch.Tensor,
            weight: torch.Tensor | None,
            dsum: torch.Tensor | None,
            eps: float | None,
            weight_offset: float,
            weight_grad: bool,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            if eps is None:
                eps = epsilon(eps, x.dtype)
            dx, dweight, _ = gradients(dy, x, weight, dsum, eps, weight_offset, None)
            return dx, dweight

        return plan


BACKWARD_VARIANTS = tuple(BackwardVariant(name) for name in SCOPES)
