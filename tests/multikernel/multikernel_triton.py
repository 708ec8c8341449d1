"""A Triton kernel beside torch's own op; imported only where there is a GPU for it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside)
    tl.store(out + at, total, mask=inside)


def add_triton(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, y, out, x.numel(), BLOCK)
    return out


def add_in_pieces(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As slow as can be: a launch for each row."""
    return torch.stack([one + other for one, other in zip(x, y, strict=True)])
