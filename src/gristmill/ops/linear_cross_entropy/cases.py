"""Inputs for tests, benchmarks and the doctor, ordinary and nasty, and what a call must cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from gristmill.errors import ArgumentError
from gristmill.ops.examples import integers, normal, padded, unaligned
from gristmill.ops.linear_cross_entropy import reference, semantics
from gristmill.ops.op import Arguments, Case, Cost

_BF16, _FP16, _FP32, _FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def forward_cost(
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
) -> Cost:
    """Inputs once, losses, lse and stats once, the product; logits need not move."""
    rows, (classes, columns) = math.prod(target.shape), weight.shape
    size = semantics.accumulator(x.dtype).itemsize
    written = 3 * rows + (rows if reduction == "none" else 1) + (2 if reduction == "mean" else 0)
    read = _read(x, weight, target, bias, class_weight)
    return Cost(read + written * size, 2 * rows * classes * columns)


def backward_cost(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    dloss: torch.Tensor,
    dlse: torch.Tensor | None,
    stats: torch.Tensor,
    denominators: torch.Tensor,
    *rest: Any,
) -> Cost:
    """Inputs once, gradients once; one product makes the logits, one each of dx and dweight."""
    x_grad, weight_grad, bias_grad = rest[-3:]
    rows, (classes, columns) = math.prod(target.shape), weight.shape
    read = _read(x, weight, target, bias, class_weight, dloss, dlse, stats, denominators)
    written = x_grad * x.numel() + weight_grad * weight.numel() + bias_grad * classes
    products = 1 + x_grad + weight_grad
    return Cost(read + written * x.element_size(), 2 * products * rows * classes * columns)


def _read(*tensors: torch.Tensor | None) -> int:
    return sum(one.numel() * one.element_size() for one in tensors if one is not None)


def sizes_of(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """M, V and K of an example: ``(M, K)`` has as many classes as columns, ``(M, V, K)`` any."""
    if len(shape) not in (2, 3):
        raise ArgumentError(f"linear_cross_entropy: an example is (M, K) or (M, V, K), got {shape}")
    return shape[0], shape[-2] if len(shape) == 3 else shape[-1], shape[-1]


def forward_example(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Arguments:
    rows, classes, columns = sizes_of(shape)
    x = normal((rows, columns), dtype, device)
    weight = normal((classes, columns), dtype, device, max(1, columns) ** -0.5)
    target = integers(0, max(1, classes), (rows,), torch.int64, device)
    return x, weight, target, None, None, -100, 0.0, 0.0, None, "mean", None


def backward_example(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Arguments:
    x, weight, target, *rest = forward_example(shape, dtype, device)
    precise = semantics.accumulator(dtype)
    rows = x.shape[0]
    # Plausible stats: the largest logit is 8. The cases have exact ones.
    total = max(1, weight.shape[0]) * math.exp(0.5 - 8.0)
    stats = torch.tensor((8.0, total), dtype=precise, device=device).expand(rows, 2).contiguous()
    counts = torch.full((2,), float(rows), dtype=precise, device=device)
    dloss = torch.ones((), dtype=precise, device=device)
    tensors = (x, weight, target, None, None, dloss, None, stats, counts)
    return *tensors, *rest[2:], True, True, False


@dataclass(frozen=True)
class Spread:
    """How one case differs from an ordinary one."""

    leading: tuple[int, ...] = (9,)
    classes: int = 50
    columns: int = 24
    x: torch.dtype = _BF16
    target: torch.dtype = torch.int64
    bias: bool = False
    class_weight: torch.dtype | None = None
    options: dict[str, Any] = field(default_factory=dict)
    lay: Callable[[torch.Tensor], torch.Tensor] | None = None
    lay_weight: Callable[[torch.Tensor], torch.Tensor] | None = None
    fill: Callable[[torch.Tensor], torch.Tensor] | None = None
    pick: Callable[[torch.Tensor], torch.Tensor] | None = None
    grads: tuple[bool, bool, bool] = (True, True, True)
    dlse: bool = False
    expanded: bool = False


_ALL = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0}


def _spreads() -> dict[str, Spread]:
    shapes = (
        ((1,), 64, 32),
        ((), 48, 16),
        ((3,), 1, 16),
        ((7,), 5, 1),
        ((2, 3), 33, 40),
        ((2, 1, 4), 130, 96),
        ((0,), 16, 32),
        ((2, 0), 16, 32),
        ((4,), 24, 0),
        ((33,), 1031, 64),
        ((5,), 2500, 48),
    )
    spreads = {
        f"{'x'.join(map(str, leading)) or 'vector'} by {classes}x{columns}": Spread(
            leading, classes, columns, options={"reduction": "mean" if all(leading) else "sum"}
        )
        for leading, classes, columns in shapes
    }
    for x in (_FP32, _FP16, _BF16, _FP64):
        for reduction in semantics.REDUCTIONS:
            options = {"reduction": reduction}
            spreads[f"{_word(x)} {reduction}"] = Spread(x=x, bias=True, options=options)
            spreads[f"{_word(x)} {reduction} all options"] = Spread(
                x=x, bias=True, class_weight=_FP32, options={**_ALL, **options}, pick=_some_ignored
            )
            spreads[f"{_word(x)} {reduction} in chunks"] = Spread(
                (11,), 1500, x=x, bias=True, options={"chunk_rows": 2, **options}
            )
    return spreads | {
        "int32": Spread(target=torch.int32, pick=_some_ignored),
        "chunks of one": Spread((6,), 3000, options={"chunk_rows": 1}, pick=_some_ignored),
        "chunks of four, all options": Spread(
            (2, 5), 2049, x=_FP32, bias=True, options={**_ALL, "chunk_rows": 4}, dlse=True
        ),
        "chunks, weighted": Spread(
            (7,), class_weight=_BF16, options={**_ALL, "chunk_rows": 3}, dlse=True
        ),
        "chunks, x frozen": Spread(
            (9,), 1200, options={"chunk_rows": 2}, grads=(False, True, False)
        ),
        "chunks, weight frozen": Spread(
            (9,), 1200, bias=True, options={"chunk_rows": 2}, grads=(True, False, True)
        ),
        "a chunk for all": Spread(options={"chunk_rows": 1000}),
        "smoothing": Spread(options={"label_smoothing": 0.2}),
        "smoothing of one": Spread(x=_FP32, options={"label_smoothing": 1.0}),
        "z_loss": Spread(options={"z_loss": 1e-2}, pick=_some_ignored),
        "softcap": Spread(options={"softcap": 3.0}),
        "class weights": Spread(class_weight=_FP32, pick=_some_ignored),
        "class weights, smoothing": Spread(
            x=_FP32, class_weight=_FP64, options={"label_smoothing": 0.3}
        ),
        "another ignore_index": Spread(
            options={"ignore_index": 3, "reduction": "sum"}, pick=lambda t: t % 5
        ),
        "lse used": Spread(dlse=True, pick=_some_ignored),
        "bias alone": Spread(bias=True, grads=(False, False, True)),
        "x alone": Spread(grads=(True, False, False)),
        "weight alone": Spread(x=_FP32, grads=(False, True, False)),
        "expanded dloss": Spread(options={"reduction": "none"}, expanded=True),
        "row slices": Spread((17,), columns=64, lay=lambda x: padded(x, 8)),
        "transposed rows": Spread((6, 5), lay=lambda x: x.transpose(0, 1)),
        "columns strided": Spread((6,), lay=_columns_first),
        "expanded rows": Spread((6,), lay=lambda x: x[:1].expand(x.shape)),
        "unaligned": Spread((6,), lay=unaligned, lay_weight=unaligned),
        "weight strided": Spread(lay_weight=_columns_first),
        "weight of a larger one": Spread(lay_weight=lambda w: padded(w, 8), bias=True),
        "weight expanded": Spread(lay_weight=lambda w: w[:1].expand(w.shape)),
        "large logits": Spread(x=_FP32, fill=lambda x: x * 6),
        "large logits, capped": Spread(fill=lambda x: x * 60, options={"softcap": 30.0}),
        "zeros": Spread(fill=torch.zeros_like),
        "targets in strides": Spread((12,), pick=lambda t: t.repeat_interleave(2)[::2]),
        "every target the same": Spread((40,), pick=lambda t: t * 0 + 7),
        "one row counted": Spread(pick=_one_counted),
    }


def forward_cases() -> Iterator[Case]:
    for name, spread in _spreads().items():
        yield Case(name, partial(_forward, spread))


def backward_cases() -> Iterator[Case]:
    for name, spread in _spreads().items():
        yield Case(name, partial(_backward, spread))


def _forward(spread: Spread, device: torch.device | str, seed: int) -> Arguments:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    x = drawn(*spread.leading, spread.columns)
    x = (x if spread.fill is None else spread.fill(x)).to(spread.x).to(device)
    weight = drawn(spread.classes, spread.columns) * 2 / max(1, spread.columns) ** 0.5
    weight = weight.to(spread.x).to(device)
    bias = drawn(spread.classes).to(spread.x).to(device) if spread.bias else None
    class_weight = None
    if spread.class_weight is not None:
        class_weight = torch.rand(spread.classes, generator=generator) + 0.25
        class_weight = class_weight.to(spread.class_weight).to(device)
    x = x if spread.lay is None else spread.lay(x)
    weight = weight if spread.lay_weight is None else spread.lay_weight(weight)
    target = torch.randint(0, spread.classes, x.shape[:-1], generator=generator)
    target = target if spread.pick is None else spread.pick(target)
    options: dict[str, Any] = {
        "ignore_index": -100,
        "label_smoothing": 0.0,
        "z_loss": 0.0,
        "softcap": None,
        "reduction": "mean",
        "chunk_rows": None,
        **spread.options,
    }
    target = target.to(spread.target).to(device)
    return x, weight, target, bias, class_weight, *options.values()


def _backward(spread: Spread, device: torch.device | str, seed: int) -> Arguments:
    x, weight, target, bias, class_weight, *options = _forward(spread, device, seed)
    tensors = (x, weight, target, bias, class_weight)
    _, _, denominators, stats = reference.linear_cross_entropy(*tensors, *options)
    generator = torch.Generator().manual_seed(seed + 1)

    def drawn(shape: torch.Size) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(stats.dtype).to(device)

    each = options[4] == "none"
    dloss = drawn(target.shape if each else torch.Size())
    if spread.expanded:
        dloss = dloss.reshape(-1)[0].expand(target.shape)
    dlse = drawn(target.shape) if spread.dlse else None
    x_grad, weight_grad, bias_grad = spread.grads
    grads = (x_grad, weight_grad, bias_grad and bias is not None)
    return *tensors, dloss, dlse, stats, denominators, *options, *grads


def _some_ignored(target: torch.Tensor) -> torch.Tensor:
    ignored = torch.arange(target.numel()).view(target.shape) % 3 == 1
    return torch.where(ignored, -100, target)


def _one_counted(target: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(target.numel()) == 2, target, -100)


def _columns_first(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


def _word(value: Any) -> str:
    return str(value).removeprefix("torch.")
