"""Weights with every kind of code and scale in them, and what is asked of their packed selves."""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree

from gristmill.formats.nvfp4 import NVFP4Tensor, PackedNVFP4, packing

E4M3 = torch.float8_e4m3fn
SHAPES = [(1, 16), (63, 16), (64, 64), (65, 80), (128, 192), (130, 208)]


def weight(*shape: int, seed: int = 0, zeros: bool = True) -> NVFP4Tensor:
    """Any codes, any scales, of which a few are zero."""
    *stack, rows, columns = shape
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (*stack, rows, columns // 2), generator=generator).to(torch.uint8)
    scales = torch.randint(1, 127, (*stack, rows, columns // 16), generator=generator)
    if zeros:
        scales *= torch.rand(scales.shape, generator=generator) < 0.9
    row_scale = torch.rand((*stack, rows), generator=generator) + 0.5
    return NVFP4Tensor(codes, scales.to(torch.uint8).view(E4M3), row_scale)


def packed(q: NVFP4Tensor, *, pairs: bool = False) -> PackedNVFP4:
    """In fragments or pairs, stacks too."""
    layout = "pairs" if pairs else "fragments"
    parts = packing.pack(q.codes, q.scales, pairs=pairs)
    return PackedNVFP4(*parts, q.row_scale, layout, q.shape[-1])


def clone(q: NVFP4Tensor) -> NVFP4Tensor:
    return NVFP4Tensor(q.codes.clone(), q.scales.clone(), q.global_scale.clone())


def cleaned(q: NVFP4Tensor) -> torch.Tensor:
    """The codes with zeros beside scales of zero."""
    blocks = q.codes.unflatten(-1, (-1, 8))
    kept = q.scales.view(torch.uint8).unsqueeze(-1) != 0
    return (blocks * kept).flatten(-2)


def same(q: PackedNVFP4 | NVFP4Tensor, other: PackedNVFP4 | NVFP4Tensor) -> bool:
    pairs = zip(pytree.tree_leaves(q), pytree.tree_leaves(other), strict=True)
    return all(
        a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in pairs
    )
