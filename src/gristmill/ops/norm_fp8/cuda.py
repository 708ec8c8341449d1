"""The plans of norms into FP8 on CUDA: the kernel is that of the norms (kernels/cuda/norm.cu)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gristmill.ops import launch
from gristmill.ops.norm_fp8.semantics import FP8, SMALLEST_SCALE
from gristmill.ops.norms.cuda import Run
from gristmill.ops.norms.problem import Details
from gristmill.ops.norms.semantics import sum_dtype
from gristmill.ops.rows.problem import packed

Tensor = torch.Tensor
# Over x, residual, weight, bias, scale, eps, weight_offset and amax; gives y, the sum, the scales
# and amax. The sum is None without a residual.
Plan = Callable[..., tuple[Tensor, Tensor | None, Tensor, Tensor]]


def plan_fp8(run: Run, details: Details) -> Plan:
    """A plan that makes the outputs, and calls `run`, which launches."""
    copied, strided = details.copied, details.strided
    empty = details.layout.rows == 0 or details.layout.columns == 0

    def plan(
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        scale: Tensor | None,
        eps: float,
        weight_offset: float,
        amax: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        if strided:
            weight, bias = packed(weight), packed(bias)
        y = torch.empty_like(x, dtype=FP8)
        total = None
        if residual is not None:
            total = torch.empty_like(x, dtype=sum_dtype(x, residual))
        shape = (0,) if scale is not None else (*x.shape[:-1], 1)
        row_scale = torch.empty(shape, dtype=torch.float32, device=x.device)
        # The kernel only ever raises it.
        largest = torch.zeros(() if amax else 0, dtype=torch.float32, device=x.device)
        if empty:
            return y, total, row_scale.fill_(SMALLEST_SCALE), largest
        options = eps, weight_offset, row_scale if scale is None else scale, largest
        if not copied:
            run(x, residual, weight, bias, y, total, *options)
            return y, total, row_scale, largest
        dense, dense_total = launch.dense(y), None if total is None else launch.dense(total)
        run(packed(x), packed(residual), weight, bias, dense, dense_total, *options)
        if dense is not y:
            y.copy_(dense)
        if total is not None and dense_total is not None and dense_total is not total:
            total.copy_(dense_total)
        return y, total, row_scale, largest

    return plan


def scaling_of(scale: Tensor | None) -> str:
    """What the kernel calls it."""
    return "PER_ROW" if scale is None else "GIVEN"
