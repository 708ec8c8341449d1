"""A call of a LayerNorm op as the chooser and the kernels see it.

`quantised` is what a norm into FP8 adds: scaling and amax.
"""

from __future__ import annotations

from typing import Any

import torch

from gristmill.ops.norms import problem
from gristmill.ops.norms.semantics import sum_dtype
from gristmill.ops.rows.problem import like
from gristmill.select.device import Device
from gristmill.select.problem import Problem


def forward_problem(
    device: Device,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    out_dtype: torch.dtype | None,
    *,
    op: str = "layer_norm",
    **quantised: Any,
) -> Problem:
    tensors = (x, None, like(x, out_dtype or x.dtype), None)
    return problem.forward_problem(
        op, device, tensors, weight, bias, weight_offset, held=x.dtype, centered=True, **quantised
    )


def add_problem(
    device: Device,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    out_dtype: torch.dtype | None,
    *,
    op: str = "add_layer_norm",
    **quantised: Any,
) -> Problem:
    held = sum_dtype(x, residual)
    tensors = (x, residual, like(x, out_dtype or x.dtype), like(x, held))
    return problem.forward_problem(
        op, device, tensors, weight, bias, weight_offset, held=held, centered=True, **quantised
    )


def backward_problem(
    device: Device,
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    dsum: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    weight_grad: bool,
    bias_dtype: torch.dtype | None,
) -> Problem:
    return problem.backward_problem(
        "layer_norm_backward",
        device,
        dy,
        x,
        weight,
        dsum,
        weight_offset,
        weight_grad,
        bias_dtype,
        centered=True,
    )
