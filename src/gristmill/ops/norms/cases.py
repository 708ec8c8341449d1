"""Inputs of norms, ordinary and nasty: what the cases of RMSNorm and LayerNorm are made from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gristmill.ops.examples import normal, padded, unaligned
from gristmill.ops.op import Arguments

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

SHAPES = (
    (1, 4096),
    (3, 1),
    (5, 7),
    (64, 64),
    (33, 128),
    (4, 8, 1000),
    (2, 3, 4, 96),
    (7,),
    (0, 64),
    (9, 769),
    (8, 1024),
    (5, 2048),
    (3, 5120),
    (200, 4096),
    (300, 8192),
    (2, 16384),
    (140, 16400),
    (2, 50257),
    (3, 65536),
    (2, 131080),
    (1, 262144),
    (2, 262143),
)


class Spread:
    """How one case differs from an ordinary one."""

    def __init__(
        self,
        shape: tuple[int, ...] = (37, 256),
        x: torch.dtype = BF16,
        weight: torch.dtype | None = BF16,
        bias: torch.dtype | None = BF16,
        residual: torch.dtype | None = None,
        eps: float | None = 1e-6,
        offset: float = 0.0,
        casting: str = "once",
        out: torch.dtype | None = None,
        lay: Callable[[torch.Tensor], torch.Tensor] | None = None,
        fill: Callable[[torch.Tensor], torch.Tensor] | None = None,
        dsum: bool = False,
        weight_grad: bool = True,
        bias_grad: bool = True,
        expanded: bool = False,
        expanded_scalar: bool = False,
    ) -> None:
        self.shape, self.x, self.residual = shape, x, residual or x
        self.weight, self.bias = weight, bias
        self.eps, self.offset, self.casting, self.out = eps, offset, casting, out
        self.lay, self.fill, self.dsum = lay, fill, dsum
        self.weight_grad, self.bias_grad = weight_grad, bias_grad
        self.expanded, self.expanded_scalar = expanded, expanded_scalar


def spreads_of_all_norms() -> dict[str, Spread]:
    """Shapes, layouts and sizes of values."""
    return {"x".join(map(str, shape)): Spread(shape) for shape in SHAPES} | {
        "offset": Spread(offset=1.0),
        "eps large": Spread(eps=10.0),
        "eps zero": Spread(eps=0.0),
        "large values": Spread(x=FP32, fill=lambda x: x * 1e15),
        "small values": Spread(x=FP32, eps=1e-30, fill=lambda x: x * 1e-12),
        "zeros": Spread(fill=torch.zeros_like),
        "outlier": Spread((6, 4096), fill=lambda x: x.index_fill(-1, _index(x), 3e4)),
        "row slices": Spread((17, 512), lay=lambda x: padded(x, 64)),
        "row slices, narrow": Spread((17, 512), lay=lambda x: padded(x, 3)),
        "unaligned": Spread((17, 512), lay=unaligned),
        "unaligned long": Spread((3, 16384), lay=unaligned),
        "transposed rows": Spread(
            (6, 5, 256), lay=lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)
        ),
        "heads of a fused qkv": Spread((4, 6, 128), lay=_heads),
        "three levels": Spread((2, 3, 4, 64), lay=_three_levels),
        "columns strided": Spread((6, 96), lay=lambda x: x.t().contiguous().t()),
        "expanded rows": Spread((6, 96), lay=lambda x: x[:1].expand(6, 96)),
    }


def name_of(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def beside_strided(
    make: Callable[..., Arguments], device: torch.device | str, seed: int
) -> Arguments:
    """Rows of one tensor have to be copied, those of the other are contiguous and unaligned."""
    first, second, *rest = make(Spread((17, 512)), device, seed)
    return unaligned(first), second.t().contiguous().t(), *rest


def spread_tensors(
    spread: Spread, device: torch.device | str, seed: int, *dtypes: torch.dtype
) -> list[Any]:
    """Row tensors of these dtypes, then weight and bias."""
    generator = torch.Generator().manual_seed(seed)
    tensors: list[Any] = []
    for index, dtype in enumerate(dtypes):
        values = torch.randn(spread.shape, generator=generator)
        if index == 0 and spread.fill is not None:
            values = spread.fill(values)
        values = values.to(dtype).to(device)
        tensors.append(spread.lay(values) if spread.lay is not None else values)
    for affine in (spread.weight, spread.bias):
        values = torch.randn(spread.shape[-1:], generator=generator)
        tensors.append(None if affine is None else values.to(affine).to(device))
    return tensors


def expanded_as_asked(spread: Spread, dy: torch.Tensor) -> torch.Tensor:
    """A gradient, expanded as autograd may hand it over."""
    if spread.expanded:
        return dy[:1].expand(dy.shape)
    if spread.expanded_scalar:
        return dy.reshape(-1)[0].expand(dy.shape)
    return dy


def random_tensors(
    device: torch.device | str, dtype: torch.dtype, *shapes: tuple[int, ...]
) -> list[torch.Tensor]:
    return [normal(shape, dtype, device) for shape in shapes]


def bytes_of(*tensors: torch.Tensor | None) -> int:
    return sum(one.numel() * one.element_size() for one in tensors if one is not None)


def _index(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([x.shape[-1] // 3], device=x.device)


def _heads(x: torch.Tensor) -> torch.Tensor:
    wide = x.new_zeros((x.shape[0], 3, *x.shape[1:]))
    wide[:, 1] = x
    return wide[:, 1]


def _three_levels(x: torch.Tensor) -> torch.Tensor:
    return x.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)
