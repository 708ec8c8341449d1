"""Inputs for tests, benchmarks and the doctor, ordinary and nasty, and what a call must cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from gristmill.ops.op import Arguments, Case, Cost

_BF16, _FP16, _FP32, _FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def forward_cost(x: torch.Tensor, weight: torch.Tensor | None, *options: Any) -> Cost:
    out = options[-1] or x.dtype
    moved = x.numel() * (x.element_size() + out.itemsize) + _bytes(weight)
    return Cost(moved, 4 * x.numel())


def add_cost(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, *options: Any
) -> Cost:
    out = options[-1] or x.dtype
    total = torch.promote_types(x.dtype, residual.dtype)
    each = x.element_size() + residual.element_size() + out.itemsize + total.itemsize
    return Cost(x.numel() * each + _bytes(weight), 5 * x.numel())


def fused_add_cost(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> Cost:
    each = 2 * x.element_size() + 2 * residual.element_size()
    return Cost(x.numel() * each + _bytes(weight), 5 * x.numel())


def backward_cost(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    dsum: torch.Tensor | None,
    *options: Any,
) -> Cost:
    moved = x.numel() * (dy.element_size() + 2 * x.element_size())
    moved += _bytes(dsum) + _bytes(weight) * (2 if options[-1] else 1)
    return Cost(moved, 11 * x.numel())


def forward_example(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Arguments:
    x, weight = _tensors(device, dtype, shape, shape[-1:])
    return x, weight, 1e-6, 0.0, "once", None


def add_example(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Arguments:
    x, residual, weight = _tensors(device, dtype, shape, shape, shape[-1:])
    return x, residual, weight, 1e-6, 0.0, "once", None


def fused_add_example(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Arguments:
    x, residual, weight = _tensors(device, dtype, shape, shape, shape[-1:])
    return x, residual, weight, 1e-6


def backward_example(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Arguments:
    dy, x, weight = _tensors(device, dtype, shape, shape, shape[-1:])
    return dy, x, weight, None, 1e-6, 0.0, True


def forward_cases() -> Iterator[Case]:
    for name, spread in _spreads().items():
        yield Case(name, partial(_forward, spread))


def add_cases() -> Iterator[Case]:
    for name, spread in _spreads().items():
        yield Case(name, partial(_add, spread))
    for x, residual in ((_BF16, _FP32), (_FP32, _BF16), (_FP16, _BF16)):
        spread = Spread(x=x, residual=residual, weight=_FP32)
        yield Case(f"residual {str(residual)[6:]} x {str(x)[6:]}", partial(_add, spread))
    yield Case("unaligned beside strided columns", partial(_beside_strided, _add))


def fused_add_cases() -> Iterator[Case]:
    for name, spread in _spreads().items():
        if spread.casting == "once" and spread.out is None and name != "expanded rows":
            yield Case(name, partial(_fused_add, spread))
    yield Case("unaligned beside strided columns", partial(_beside_strided, _fused_add))


def backward_cases() -> Iterator[Case]:
    for name, spread in _spreads().items():
        if spread.casting == "once" and spread.out is None:
            yield Case(name, partial(_backward, spread))
    yield Case("dsum", partial(_backward, Spread(dsum=True)))
    yield Case("dsum long", partial(_backward, Spread((140, 16384), dsum=True)))
    yield Case("frozen weight", partial(_backward, Spread(weight_grad=False)))
    yield Case("expanded dy", partial(_backward, Spread(expanded=True)))
    yield Case("expanded dy, all dims", partial(_backward, Spread(expanded_scalar=True)))
    yield Case("unaligned beside strided columns", partial(_beside_strided, _backward))


class Spread:
    """How one case differs from an ordinary one."""

    def __init__(
        self,
        shape: tuple[int, ...] = (37, 256),
        x: torch.dtype = _BF16,
        weight: torch.dtype | None = _BF16,
        residual: torch.dtype | None = None,
        eps: float | None = 1e-6,
        offset: float = 0.0,
        casting: str = "once",
        out: torch.dtype | None = None,
        lay: Callable[[torch.Tensor], torch.Tensor] | None = None,
        fill: Callable[[torch.Tensor], torch.Tensor] | None = None,
        dsum: bool = False,
        weight_grad: bool = True,
        expanded: bool = False,
        expanded_scalar: bool = False,
    ) -> None:
        self.shape, self.x, self.weight, self.residual = shape, x, weight, residual or x
        self.eps, self.offset, self.casting, self.out = eps, offset, casting, out
        self.lay, self.fill, self.dsum, self.weight_grad = lay, fill, dsum, weight_grad
        self.expanded, self.expanded_scalar = expanded, expanded_scalar


def _spreads() -> dict[str, Spread]:
    shapes = (
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
    spreads = {"x".join(map(str, shape)): Spread(shape) for shape in shapes}
    for x in (_FP32, _FP16, _BF16, _FP64):
        for weight in (_FP32, _BF16, _FP16, None):
            name = f"x {str(x)[6:]} weight {str(weight).removeprefix('torch.')}"
            spreads[name] = Spread((19, 520), x=x, weight=weight)
            spreads[f"{name} llama"] = Spread((19, 520), x=x, weight=weight, casting="llama")
    for out in (_FP32, _BF16, _FP16):
        spreads[f"out {str(out)[6:]}"] = Spread(out=out)
        spreads[f"out {str(out)[6:]} llama"] = Spread(out=out, casting="llama")
    spreads |= {
        "offset": Spread(offset=1.0),
        "offset llama": Spread(offset=1.0, casting="llama"),
        "eps none": Spread(eps=None, fill=lambda x: x * 1e-4),
        "eps large": Spread(eps=10.0),
        "eps zero": Spread(eps=0.0),
        "large values": Spread(x=_FP32, fill=lambda x: x * 1e15),
        "small values": Spread(x=_FP32, eps=1e-30, fill=lambda x: x * 1e-12),
        "zeros": Spread(fill=torch.zeros_like),
        "outlier": Spread((6, 4096), fill=lambda x: x.index_fill(-1, _index(x), 3e4)),
        "row slices": Spread((17, 512), lay=lambda x: _padded(x, 64)),
        "row slices, narrow": Spread((17, 512), lay=lambda x: _padded(x, 3)),
        "unaligned": Spread((17, 512), lay=_unaligned),
        "unaligned long": Spread((3, 16384), lay=_unaligned),
        "transposed rows": Spread(
            (6, 5, 256), lay=lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)
        ),
        "heads of a fused qkv": Spread((4, 6, 128), lay=_heads),
        "three levels": Spread((2, 3, 4, 64), lay=_three_levels),
        "columns strided": Spread((6, 96), lay=lambda x: x.t().contiguous().t()),
        "expanded rows": Spread((6, 96), lay=lambda x: x[:1].expand(6, 96)),
    }
    return spreads


def _index(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([x.shape[-1] // 3], device=x.device)


def _padded(x: torch.Tensor, extra: int) -> torch.Tensor:
    wide = x.new_zeros((*x.shape[:-1], x.shape[-1] + extra))
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def _unaligned(x: torch.Tensor) -> torch.Tensor:
    flat = x.new_zeros(x.numel() + 1)
    flat[1:] = x.reshape(-1)
    return flat[1:].view(x.shape)


def _heads(x: torch.Tensor) -> torch.Tensor:
    wide = x.new_zeros((x.shape[0], 3, *x.shape[1:]))
    wide[:, 1] = x
    return wide[:, 1]


def _three_levels(x: torch.Tensor) -> torch.Tensor:
    return x.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)


def _forward(spread: Spread, device: torch.device | str, seed: int) -> Arguments:
    x, weight = _spread_tensors(spread, device, seed, (spread.x,))
    return x, weight, spread.eps, spread.offset, spread.casting, spread.out


def _add(spread: Spread, device: torch.device | str, seed: int) -> Arguments:
    x, residual, weight = _spread_tensors(spread, device, seed, (spread.x, spread.residual))
    return x, residual, weight, spread.eps, spread.offset, spread.casting, spread.out


def _fused_add(spread: Spread, device: torch.device | str, seed: int) -> Arguments:
    return *_add(spread, device, seed)[:3], 1e-6 if spread.eps is None else spread.eps


def _backward(spread: Spread, device: torch.device | str, seed: int) -> Arguments:
    x, dy, dsum, weight = _spread_tensors(spread, device, seed, (spread.x,) * 3)
    if spread.expanded:
        dy = dy[:1].expand(dy.shape)
    if spread.expanded_scalar:
        dy = dy.reshape(-1)[0].expand(dy.shape)
    weight_grad = spread.weight_grad and weight is not None
    return dy, x, weight, dsum if spread.dsum else None, spread.eps, spread.offset, weight_grad


def _beside_strided(
    make: Callable[..., Arguments], device: torch.device | str, seed: int
) -> Arguments:
    """Rows of one tensor have to be copied, those of the other are contiguous and unaligned."""
    first, second, *rest = make(Spread((17, 512)), device, seed)
    return _unaligned(first), second.t().contiguous().t(), *rest


def _spread_tensors(
    spread: Spread, device: torch.device | str, seed: int, dtypes: tuple[torch.dtype, ...]
) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    tensors: list[Any] = []
    for index, dtype in enumerate(dtypes):
        values = torch.randn(spread.shape, generator=generator)
        if index == 0 and spread.fill is not None:
            values = spread.fill(values)
        values = values.to(dtype).to(device)
        tensors.append(spread.lay(values) if spread.lay is not None else values)
    weight = None
    if spread.weight is not None:
        weight = torch.randn(spread.shape[-1:], generator=generator).to(spread.weight).to(device)
    return [*tensors, weight]


def _tensors(
    device: torch.device | str, dtype: torch.dtype, *shapes: tuple[int, ...]
) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]


def _bytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()
