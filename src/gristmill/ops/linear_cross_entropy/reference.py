"""Linear cross entropy in plain PyTorch: the semantics, and the truth in tests.

All logits are made at once. Products are summed in fp32 (fp64 for fp64); logits and their gradient
are rounded to x's dtype, as they are where torch's linear is followed by a cross entropy.
"""

from __future__ import annotations

from typing import Any

import torch

from gristmill.ops.cross_entropy import CROSS_ENTROPY, CROSS_ENTROPY_BACKWARD
from gristmill.ops.linear_cross_entropy.semantics import accumulator


def logits_of(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    precise = accumulator(x.dtype)
    logits = x.to(precise) @ weight.to(precise).t()
    if bias is not None:
        logits = logits + bias.to(precise)
    return logits.to(x.dtype)


def linear_cross_entropy(
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
) -> Any:
    options = (ignore_index, label_smoothing, z_loss, softcap, reduction, False)
    return CROSS_ENTROPY.reference(logits_of(x, weight, bias), target, class_weight, *options)


def linear_cross_entropy_backward(
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
    precise = accumulator(x.dtype)
    if dlse is not None:
        # Of ignored rows lse is 0, whatever their logits.
        dlse = torch.where(target == ignore_index, 0.0, dlse)
    dlogits = CROSS_ENTROPY_BACKWARD.reference(
        dloss,
        dlse,
        logits_of(x, weight, bias),
        target,
        stats,
        denominators,
        class_weight,
        ignore_index,
        label_smoothing,
        z_loss,
        softcap,
        reduction,
        0,
        0,
    )
    d = dlogits.to(precise)
    rows = d.reshape(target.numel(), weight.shape[0])
    dx, dweight, dbias = (x.new_empty((0,)) for _ in range(3))
    if x_grad:
        dx = (d @ weight.to(precise)).to(x.dtype)
    if weight_grad:
        dweight = (rows.t() @ x.to(precise).reshape(target.numel(), x.shape[-1])).to(x.dtype)
    if bias_grad:
        dbias = rows.sum(0).to(x.dtype)
    return dx, dweight, dbias
