"""Tensors that examples of ops are made of: random ones, or on the meta device their metadata.

Torch's own functions would do there, too, but random ones import sympy (0.2 s) and arithmetic
imports Dynamo (0.7 s): more than all else that a warm-up from a full cache has to do.
"""

from __future__ import annotations

import torch

Device = torch.device | str


def is_meta(device: Device) -> bool:
    return torch.device(device).type == "meta"


def normal(
    shape: tuple[int, ...], dtype: torch.dtype, device: Device, size: float = 1.0
) -> torch.Tensor:
    """Normal numbers with `size` as their standard deviation."""
    if is_meta(device):
        return torch.empty(shape, dtype=dtype, device=device)
    drawn = torch.randn(shape, dtype=dtype, device=device)
    return drawn if size == 1.0 else drawn.mul_(size)


def integers(
    low: int,
    high: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: Device,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Whole numbers from `low` to below `high`."""
    if is_meta(device):
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.randint(low, high, shape, dtype=dtype, device=device, generator=generator)


def padded(x: torch.Tensor, extra: int) -> torch.Tensor:
    """`x` in the first columns of a wider tensor, whose others are zeros."""
    wide = x.new_zeros((*x.shape[:-1], x.shape[-1] + extra))
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def unaligned(x: torch.Tensor) -> torch.Tensor:
    """`x`, contiguous, one element after the beginning of its memory."""
    flat = x.new_zeros(x.numel() + 1)
    flat[1:] = x.reshape(-1)
    return flat[1:].view(x.shape)
