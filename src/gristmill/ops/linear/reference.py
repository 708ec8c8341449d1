"""`linear` and `matmul` in plain PyTorch: the semantics, the kernel for anything, the truth.

Products, sums, bias and activation in fp32, or fp64 for fp64 inputs; one rounding, at the end.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    return activated(_affine(x, weight, bias), activation).to(x.dtype)


def linear_with_pre(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    h = _affine(x, weight, bias)
    return activated(h, activation).to(x.dtype), h.to(x.dtype)


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    precise = torch.promote_types(a.dtype, torch.float32)
    return torch.matmul(a.to(precise), b.to(precise)).to(a.dtype)


def activated(h: torch.Tensor, activation: str | None) -> torch.Tensor:
    """The activation of h, in a tensor of its own."""
    if activation == "relu":
        return torch.relu(h)
    if activation == "silu":
        return F.silu(h)
    if activation == "gelu":
        return F.gelu(h)
    if activation == "gelu_tanh":
        return F.gelu(h, approximate="tanh")
    return h


def _affine(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    precise = torch.promote_types(x.dtype, torch.float32)
    h = torch.matmul(x.to(precise), weight.to(precise).t())
    return h if bias is None else h + bias.to(precise)
