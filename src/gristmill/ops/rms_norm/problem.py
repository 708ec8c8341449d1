"""A call of an RMSNorm op as the chooser and the kernels see it.

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
    eps: float | None,
    weight_offset: float,
    casting: str,
    out_dtype: torch.dtype | None,
    *,
    op: str = "rms_norm",
    **quantised: Any,
) -> Problem:
    tensors = (x, None, like(x, out_dtype or x.dtype), None)
    return problem.forward_problem(
        op,
        device,
        tensors,
        weight,
        None,
        weight_offset,
        held=x.dtype,
        centered=False,
        casting=casting,
        **quantised,
    )


def add_problem(
    device: Device,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float | None,
    weight_offset: float,
    casting: str,
    out_dtype: torch.dtype | None,
    *,
    op: str = "add_rms_norm",
    **quantised: Any,
) -> Problem:
    held = sum_dtype(x, residual)
    tensors = (x, residual, like(x, out_dtype or x.dtype), like(x, held))
    return problem.forward_problem(
        op,
        device,
        tensors,
        weight,
        None,
        weight_offset,
        held=held,
        centered=False,
        casting=casting,
        **quantised,
    )


def fused_add_problem(
    device: Device, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> Problem:
    # The norm is taken from the unrounded sum, and rounded to the weight's dtype.
    return problem.forward_problem(
        "fused_add_rms_norm_",
        device,
        (x, residual, x, residual),
        weight,
        None,
        0.0,
        held=torch.float32,
        centered=False,
        casting="weight",
    )


def backward_problem(
    device: Device,
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    dsum: torch.Tensor | None,
    eps: float | None,
    weight_offset: float,
    weight_grad: bool,
) -> Problem:
    return problem.backward_problem(
        "rms_norm_backward",
        device,
        dy,
        x,
        weight,
        dsum,
        weight_offset,
        weight_grad,
        centered=False,
    )
