"""Inputs for tests, benchmarks and the doctor, ordinary and nasty, and what a call must cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gristmill.errors import ArgumentError
from gristmill.formats.nvfp4.tensor import BLOCK
from gristmill.ops.nvfp4_linear.cases import layout_on, packed_bytes, random_weight, sound_scales
from gristmill.ops.nvfp4_moe.semantics import Call
from gristmill.ops.op import Arguments, Case, Cost

_BF16, _FP16, _FP32, _FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def forward_cost(*args: Any) -> Cost:
    return _cost(Call(*args), 1)


def backward_cost(dy: torch.Tensor, *args: Any) -> Cost:
    return _cost(Call(*args), 2)


def _cost(call: Call, times: int) -> Cost:
    """Each expert once, or only as many as there are slots; backward does all products twice."""
    x, slots = call.hidden_states, call.topk_ids.numel()
    each = sum(packed_bytes(one.rows, one.columns) for one in (call.w13, call.w2))
    used = each * min(slots, call.experts)
    moved = (1 + times) * x.numel() * x.element_size() + used
    products = 3 * call.intermediate * x.shape[1]
    return Cost(moved, times * 2 * slots * products)


def sound(*args: Any) -> Arguments:
    """Arguments of random bytes, forward or backward, with scales that are some."""
    *_, w13_scales, _, _, w2_scales, _, _, _, _, _, _, layout = args
    for scales in (w13_scales, w2_scales):
        sound_scales(scales, layout)
    return args


def sizes_of(shape: tuple[int, ...]) -> tuple[int, int, int, int, int]:
    """M, E, k, H and I of an example: ``(M, H)`` or all of them.

    ``(M, H)`` has eight experts of which a token takes two, half as wide as the token.
    """
    if len(shape) == 2:
        rows, hidden = shape
        shape = (rows, 8, 2, hidden, -(-hidden // 2 // BLOCK) * BLOCK)
    if len(shape) != 5 or shape[3] % BLOCK or shape[4] % BLOCK:
        raise ArgumentError(
            f"nvfp4_moe: an example is (M, H) or (M, experts, topk, H, I) with H and I multiples "
            f"of {BLOCK}, got {shape}"
        )
    rows, experts, topk, hidden, inner = shape
    return rows, experts, topk, hidden, inner


def forward_example(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str,
    arch: str | None = None,
) -> Arguments:
    """In the layout of the device, or of an architecture, so that its own kernels are seen."""
    rows, experts, topk, hidden, inner = sizes_of(shape)
    x = torch.randn((rows, hidden), dtype=dtype, device=device)
    weights = torch.softmax(torch.randn((rows, topk), device=device), -1).to(dtype)
    # Distinct experts in each row, as a router picks them.
    first = torch.randint(0, max(experts, 1), (rows, 1), device=device)
    ids = (first + torch.arange(topk, device=device) * 3) % max(experts, 1)
    layout = layout_on(device, arch, stacked=True)
    w13 = random_weight((experts, 2 * inner, hidden), device, layout=layout)
    w2 = random_weight((experts, hidden, inner), device, layout=layout)
    return (x, weights, ids, *w13[:3], *w2[:3], None, None, "silu", None, None, layout)


def backward_example(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str,
    arch: str | None = None,
) -> Arguments:
    args = forward_example(shape, dtype, device, arch)
    return torch.randn(args[0].shape, dtype=dtype, device=device), *args


@dataclass(frozen=True)
class Spread:
    """How one case differs from an ordinary one."""

    rows: int = 9
    experts: int = 4
    topk: int = 2
    hidden: int = 64
    inner: int = 48
    x: torch.dtype = _BF16
    weights: torch.dtype = _FP32
    ids: torch.dtype = torch.int64
    bias: torch.dtype | None = None
    activation: str = "silu"
    limit: float | None = None
    layout: str = "rows"
    per_row: bool = False
    route: Callable[[torch.Tensor], torch.Tensor] | None = None
    mapped: tuple[int, ...] | None = None
    lay: Callable[[torch.Tensor], torch.Tensor] | None = None


def _spreads() -> dict[str, Spread]:
    shapes = (
        (1, 4, 1, 32, 16),
        (1, 8, 2, 64, 32),
        (2, 16, 4, 96, 80),
        (5, 1, 1, 48, 32),
        (13, 3, 3, 64, 48),
        (40, 8, 2, 128, 64),
        (7, 60, 8, 32, 16),
        (70, 16, 4, 32, 272),
        (0, 4, 2, 32, 16),
        (4, 4, 0, 32, 16),
        (4, 0, 2, 32, 16),
    )
    spreads = {
        f"{m} rows, {k} of {e} experts, {h} by {i}": Spread(m, e, k, h, i)
        for m, e, k, h, i in shapes
    }
    for x in (_FP32, _FP16, _BF16, _FP64):
        for activation in ("silu", "swiglu_oai", "gelu"):
            word = str(x).removeprefix("torch.")
            spreads[f"{activation} {word}"] = Spread(x=x, activation=activation)
            spreads[f"{activation} {word} limit"] = Spread(
                x=x, activation=activation, limit=0.5, bias=x
            )
    return spreads | {
        "one row": Spread(rows=1, topk=3, bias=_FP32),
        "bias fp32": Spread(bias=_FP32),
        "weights bf16, ids int32": Spread(weights=_BF16, ids=torch.int32),
        "tiles": Spread(layout="tiles", hidden=96, inner=144),
        "tiles, one row": Spread(rows=1, layout="tiles", experts=5),
        "per row": Spread(rows=30, per_row=True, bias=_BF16),
        "per row, tiles": Spread(rows=30, per_row=True, layout="tiles"),
        "fragments": Spread(layout="fragments", hidden=96, inner=144),
        "fragments, one row": Spread(rows=1, layout="fragments", experts=5),
        "fragments, per row": Spread(rows=30, per_row=True, layout="fragments", bias=_BF16),
        "fragments, small": Spread(layout="fragments", hidden=16, inner=16),
        "fragments, whole": Spread(rows=30, layout="fragments", hidden=128, inner=64, x=_FP16),
        "nobody": Spread(route=lambda ids: ids * 0 - 1),
        "nobody, one row": Spread(rows=1, route=lambda ids: ids * 0 - 1),
        "some missing": Spread(rows=20, route=_some_missing),
        "some missing, few": Spread(rows=2, experts=9, topk=4, route=_some_missing),
        "out of range": Spread(rows=20, route=lambda ids: ids * 3 - 4),
        "one expert for all": Spread(rows=20, route=lambda ids: ids * 0 + 2),
        "idle experts": Spread(rows=40, experts=16, route=lambda ids: ids % 5 * 3),
        "repeated": Spread(rows=20, topk=3, route=lambda ids: ids[:, :1].expand(ids.shape)),
        "repeated, few": Spread(rows=1, topk=3, route=lambda ids: ids * 0 + 1),
        "mapped": Spread(rows=20, mapped=(3, -1, 0, -1, 2, 1)),
        "mapped away": Spread(rows=20, mapped=(-1, -1, -1)),
        "mapped, few": Spread(rows=1, mapped=(3, -1, 0, -1, 2, 1)),
        "columns strided": Spread(lay=lambda x: x.t().contiguous().t()),
        "expanded rows": Spread(lay=lambda x: x[:1].expand(x.shape)),
    }


def forward_cases() -> Iterator[Case]:
    for name, spread in _spreads().items():
        yield Case(name, partial(_forward, spread))


def backward_cases() -> Iterator[Case]:
    for name, spread in _spreads().items():
        yield Case(name, partial(_backward, spread))


def _forward(spread: Spread, device: torch.device | str, seed: int) -> Arguments:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    x = normal(spread.rows, spread.hidden).to(spread.x).to(device)
    x = x if spread.lay is None else spread.lay(x)
    weights = torch.softmax(normal(spread.rows, spread.topk), -1).to(spread.weights).to(device)
    count = spread.experts if spread.mapped is None else len(spread.mapped)
    ids = normal(spread.rows, max(count, spread.topk)).argsort(-1)[:, : spread.topk]
    ids = ids if spread.route is None else spread.route(ids)
    wide = (spread.experts, 2 * spread.inner, spread.hidden)
    back = (spread.experts, spread.hidden, spread.inner)
    w13, w2 = (
        random_weight(
            shape,
            device,
            layout=spread.layout,
            generator=generator,
            per_row=spread.per_row,
        )
        for shape in (wide, back)
    )
    biases: list[torch.Tensor | None] = [None, None]
    if spread.bias is not None:
        biases = [normal(*shape[:2]).to(spread.bias).to(device) for shape in (wide, back)]
    mapped = None
    if spread.mapped is not None:
        mapped = torch.tensor(spread.mapped, dtype=torch.int32).to(device)
    routing = (weights, ids.to(spread.ids).to(device))
    options_given = (spread.activation, spread.limit, mapped, spread.layout)
    return (x, *routing, *w13[:3], *w2[:3], *biases, *options_given)


def _backward(spread: Spread, device: torch.device | str, seed: int) -> Arguments:
    args = _forward(spread, device, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    dy = torch.randn((spread.rows, spread.hidden), generator=generator)
    return dy.to(spread.x).to(device), *args


def _some_missing(ids: torch.Tensor) -> torch.Tensor:
    return torch.where((ids + torch.arange(len(ids)).unsqueeze(-1)) % 3 == 0, -1, ids)
