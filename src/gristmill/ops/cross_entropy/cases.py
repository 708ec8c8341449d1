"""Inputs for tests, benchmarks and the doctor, ordinary and nasty, and what a call must cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from gristmill.ops.cross_entropy import reference
from gristmill.ops.cross_entropy.semantics import accumulator
from gristmill.ops.examples import integers, normal, padded, unaligned
from gristmill.ops.op import Arguments, Case, Cost

_BF16, _FP16, _FP32, _FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
_IGNORE = -100
Lay = Callable[[torch.Tensor], torch.Tensor]


def forward_cost(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, *options: Any
) -> Cost:
    """Logits and targets are read; the few bytes written per row are counted."""
    numbers = accumulator(logits.dtype).itemsize
    rows = 4 if options[-2] == "none" else 3
    moved = _bytes(logits) + _bytes(target) + _bytes(weight) + rows * numbers * target.numel()
    return Cost(moved, 4 * logits.numel())


def one_pass_cost(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, *options: Any
) -> Cost:
    """Forward plus backward, without writing and reading stats."""
    forward = forward_cost(logits, target, weight, *options)
    stats = 2 * accumulator(logits.dtype).itemsize * target.numel()
    return Cost(forward.bytes - stats + _bytes(logits), 7 * logits.numel())


def backward_cost(
    dloss: torch.Tensor,
    dlse: torch.Tensor | None,
    logits: torch.Tensor,
    target: torch.Tensor,
    stats: torch.Tensor,
    denominators: torch.Tensor,
    weight: torch.Tensor | None,
    *options: Any,
) -> Cost:
    small = (target, stats, dlse, weight, dloss if dloss.dim() else None)
    return Cost(2 * _bytes(logits) + sum(_bytes(one) for one in small), 5 * logits.numel())


def shard_cost(logits: torch.Tensor, target: torch.Tensor, *options: Any) -> Cost:
    numbers = (4 if options[-1] else 3) * accumulator(logits.dtype).itemsize
    moved = _bytes(logits) + _bytes(target) + numbers * target.numel()
    return Cost(moved, 4 * logits.numel())


def scale_cost(gradient: torch.Tensor, factor: torch.Tensor) -> Cost:
    """With a factor that is not 1."""
    return Cost(2 * _bytes(gradient) + (_bytes(factor) if factor.dim() else 0), gradient.numel())


def forward_example(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Arguments:
    logits = normal(shape, dtype, device)
    return logits, _targets(shape, device), None, _IGNORE, 0.0, 0.0, None, "mean", False


def backward_example(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Arguments:
    logits = normal(shape, dtype, device)
    own = accumulator(dtype)
    dloss = torch.ones((), dtype=own, device=device)
    target = _targets(shape, device)
    count = max(1.0, float(target.numel()))
    denominators = torch.full((2,), count, dtype=own, device=device)
    # A reduction of a meta tensor imports sympy, which takes 0.2 s.
    stats = (
        torch.empty((*target.shape, 2), dtype=own, device=device)
        if logits.is_meta
        else reference.stats_of(logits, None)
    )
    options = (None, _IGNORE, 0.0, 0.0, None, "mean", 0, 0)
    return dloss, None, logits, target, stats, denominators, *options


def shard_example(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Arguments:
    """The second of two equal shards."""
    logits = normal(shape, dtype, device)
    classes = 2 * shape[-1]
    target = _targets((*shape[:-1], classes), device)
    return logits, target, shape[-1], classes, _IGNORE, None, False


def scale_example(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Arguments:
    gradient = normal(shape, dtype, device)
    return gradient, torch.full((), 0.5, dtype=accumulator(dtype), device=device)


@dataclass(frozen=True)
class Spread:
    """How one case differs from an ordinary one."""

    shape: tuple[int, ...] = (37, 256)
    dtype: torch.dtype = _BF16
    weight: torch.dtype | None = None
    target: torch.dtype = torch.int64
    ignored: float = 0.2  # how many of the rows
    ignore_index: int = _IGNORE
    smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    reduction: str = "mean"
    return_lse: bool = False
    size: float = 2.0
    lay: Lay | None = None
    lay_target: Lay | None = None
    fill: Lay | None = None
    dlse: bool = False
    shards: int = 1
    per_row: bool = True


def forward_cases() -> Iterator[Case]:
    for name, spread in _spreads().items():
        yield Case(name, partial(_forward, spread))


def one_pass_cases_() -> Iterator[Case]:
    for case in forward_cases():
        if case.name != "expanded rows":
            yield case


def backward_cases() -> Iterator[Case]:
    for name, spread in _spreads().items():
        yield Case(name, partial(_backward, spread))
    more = {
        "dlse": Spread(dlse=True, return_lse=True),
        "dlse beside z-loss": Spread(dlse=True, return_lse=True, z_loss=1e-2, reduction="none"),
        "dlse of some rows": Spread(dlse=True, return_lse=False),
        "first of three shards": Spread((9, 96), shards=3, reduction="sum"),
        "one of two shards, smoothing": Spread((9, 1000), shards=2, smoothing=0.1),
        "one of four shards, capped": Spread((9, 257), shards=4, softcap=5.0, z_loss=1e-3),
    }
    for name, spread in more.items():
        yield Case(name, partial(_backward, spread))
    yield Case("one gradient for all rows", partial(_backward, Spread(reduction="none"), one=True))


def shard_cases() -> Iterator[Case]:
    for name, spread in _spreads().items():
        usual = spread.reduction == "mean" and spread.weight is None and not spread.z_loss
        if usual and name != "7":
            for shards in (1, 3):
                own = replace(spread, shards=shards)
                yield Case(f"{name}, {shards} shards", partial(_shard, own))


def scale_cases() -> Iterator[Case]:
    for name, spread in _spreads().items():
        plain = spread.softcap is None and spread.weight is None and not spread.smoothing
        masked = name in ("masked classes", "one class left")
        if plain and not masked and name != "expanded rows":
            per_row = len(name) % 2 == 0
            yield Case(name, partial(_scale, replace(spread, per_row=per_row)))
    yield Case("ones", partial(_scale, Spread(per_row=False), factor=1.0))
    yield Case("zeros", partial(_scale, Spread(per_row=False), factor=0.0))


def _spreads() -> dict[str, Spread]:
    shapes = (
        (1, 4096),
        (3, 1),
        (5, 7),
        (64, 64),
        (4, 8, 1000),
        (2, 3, 4, 96),
        (7,),
        (9, 769),
        (8, 1024),
        (5, 2048),
        (130, 4096),
        (3, 16384),
        (2, 50257),
        (2, 65536),
        (2, 128256),
        (1, 151936),
        (1, 262144),
    )
    spreads = {"x".join(map(str, shape)): Spread(shape, ignored=0.0) for shape in shapes}
    for dtype in (_FP32, _FP16, _BF16, _FP64):
        for reduction in ("mean", "sum", "none"):
            spreads[f"{str(dtype)[6:]} {reduction}"] = Spread((19, 520), dtype, reduction=reduction)
        spreads[f"weights of {str(dtype)[6:]}"] = Spread((19, 520), weight=dtype)
    spreads |= {
        "0x64": Spread((0, 64), reduction="sum"),
        "0x64 none": Spread((0, 64), reduction="none"),
        "targets of 32 bits": Spread(target=torch.int32),
        "all rows ignored": Spread(ignored=1.0, reduction="sum"),
        "ignored rows, lse wanted": Spread(return_lse=True),
        "another ignore_index": Spread(ignore_index=5, reduction="sum"),
        "smoothing": Spread(smoothing=0.1),
        "smoothing all": Spread(smoothing=1.0, reduction="none"),
        "smoothing and weights": Spread((17, 520), _FP32, weight=_FP32, smoothing=0.2),
        "smoothing and weights, odd": Spread((17, 333), weight=_BF16, smoothing=0.2),
        "smoothing, odd": Spread((6, 50257), smoothing=0.1, reduction="none"),
        "z-loss": Spread(z_loss=1e-2),
        "z-loss and weights": Spread(z_loss=1e-2, weight=_FP32),
        "softcap": Spread(softcap=3.0),
        "softcap, long": Spread((4, 20000), softcap=30.0, smoothing=0.05, z_loss=1e-4),
        "everything": Spread(
            (3, 11, 700), _FP16, _FP32, torch.int32, smoothing=0.1, z_loss=1e-3, softcap=10.0
        ),
        "large values": Spread((9, 3000), _FP32, fill=lambda x: x * 1e3),
        "large offset": Spread((9, 3000), _FP32, fill=lambda x: x + 1e4, smoothing=0.1),
        "equal logits": Spread((9, 3000), fill=torch.ones_like),
        "certain": Spread((9, 3000), fill=_certain),
        "masked classes": Spread((9, 3000), fill=partial(_masked, keep=0.5)),
        "one class left": Spread((9, 4096), fill=partial(_masked, keep=0.0)),
        "row slices": Spread((17, 512), lay=partial(padded, extra=64)),
        "row slices, narrow": Spread((17, 512), lay=partial(padded, extra=3)),
        "unaligned": Spread((17, 1111), lay=unaligned),
        "unaligned long": Spread((3, 16384), lay=unaligned),
        "transposed rows": Spread(
            (6, 5, 256), lay=lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)
        ),
        "three levels": Spread(
            (2, 3, 4, 64), lay=lambda x: x.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)
        ),
        "columns strided": Spread((6, 96), lay=lambda x: x.t().contiguous().t()),
        "expanded rows": Spread((6, 96), lay=lambda x: x[:1].expand(6, 96)),
        "targets strided": Spread((6, 96), lay_target=lambda t: t.repeat_interleave(2)[::2]),
    }
    return spreads


def _masked(x: torch.Tensor, keep: float) -> torch.Tensor:
    """Minus infinity for most classes; the first stays, and so does at least one."""
    generator = torch.Generator().manual_seed(x.shape[-1])
    out = torch.rand(x.shape[-1], generator=generator) >= keep
    out[0] = False
    return x.masked_fill(out.to(x.device), -torch.inf)


def _certain(x: torch.Tensor) -> torch.Tensor:
    """The first class is all but sure."""
    x = x.clone()
    x[..., 0] = 40.0
    return x


def _rows(
    spread: Spread, device: torch.device | str, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Logits, targets (global ones, of all shards) and class weights."""
    generator = torch.Generator().manual_seed(seed)
    *leading, columns = spread.shape
    values = spread.size * torch.randn(spread.shape, generator=generator)
    if spread.fill is not None:
        values = spread.fill(values)
    logits = values.to(spread.dtype).to(device)
    logits = logits if spread.lay is None else spread.lay(logits)
    classes = columns * spread.shards
    target = torch.randint(0, classes, tuple(leading), generator=generator)
    if spread.fill is not None:
        target = torch.zeros_like(target)  # a class that nobody has masked
    out = torch.rand(target.shape, generator=generator) < spread.ignored
    target = torch.where(out, spread.ignore_index, target).to(spread.target).to(device)
    target = target if spread.lay_target is None else spread.lay_target(target)
    weight = None
    if spread.weight is not None:
        weight = (0.2 + torch.rand(columns, generator=generator)).to(spread.weight).to(device)
    return logits, target, weight


def _options(spread: Spread) -> tuple[Any, ...]:
    return (
        spread.ignore_index,
        spread.smoothing,
        spread.z_loss,
        spread.softcap,
        spread.reduction,
    )


def _forward(spread: Spread, device: torch.device | str, seed: int) -> Arguments:
    return *_rows(spread, device, seed), *_options(spread), spread.return_lse


def _backward(
    spread: Spread, device: torch.device | str, seed: int, *, one: bool = False
) -> Arguments:
    logits, target, weight = _rows(spread, device, seed)
    own, generator = accumulator(spread.dtype), torch.Generator().manual_seed(seed + 1)
    options: tuple[Any, ...] = (weight, *_options(spread))
    first = columns = 0
    if spread.shards > 1:
        # What the stats of all shards might be: those of this one, and a little more.
        first, columns = spread.shape[-1], spread.shape[-1] * spread.shards
        stats = reference.stats_of(logits, spread.softcap) + 1.0
        denominators = logits.new_full((2,), float(max(1, target.numel())), dtype=own)
        if spread.reduction != "mean":
            denominators = logits.new_empty(0, dtype=own)
    else:
        forward: tuple[Any, ...] = (logits, target, *options, spread.return_lse)
        _, _, denominators, stats = reference.cross_entropy(*forward)
    rows = target.shape if spread.reduction == "none" else ()
    dloss = (0.5 + torch.rand(rows, generator=generator)).to(own).to(device)
    if one:
        dloss = dloss.reshape(-1)[0].expand(rows)
    dlse = None
    if spread.dlse:
        dlse = torch.randn(target.shape, generator=generator).to(own).to(device)
        if not spread.return_lse:
            dlse = dlse.masked_fill(target == spread.ignore_index, 0.0)
    return dloss, dlse, logits, target, stats, denominators, *options, first, columns


def _shard(spread: Spread, device: torch.device | str, seed: int) -> Arguments:
    logits, target, _ = _rows(spread, device, seed)
    columns = spread.shape[-1]
    first = columns if spread.shards > 1 else 0
    sums = bool(spread.smoothing)
    classes = columns * spread.shards
    return logits, target, first, classes, spread.ignore_index, spread.softcap, sums


def _scale(
    spread: Spread, device: torch.device | str, seed: int, *, factor: float | None = None
) -> Arguments:
    gradient, target, _ = _rows(spread, device, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    rows = target.shape if spread.per_row else ()
    values = torch.rand(rows, generator=generator)
    values = torch.where(values < 0.3, 1.0, values)
    if factor is not None:
        values = torch.full(rows, factor)
    return gradient, values.to(accumulator(spread.dtype)).to(device)


def _targets(shape: tuple[int, ...], device: torch.device | str) -> torch.Tensor:
    if shape[-1] == 0:
        return torch.full(shape[:-1], _IGNORE, dtype=torch.int64, device=device)
    return integers(0, shape[-1], shape[:-1], torch.int64, device)


def _bytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()
