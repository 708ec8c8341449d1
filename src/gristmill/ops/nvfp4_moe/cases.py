"""Inputs for tests, benchmarks and the doctor, ordinary and nasty, and what a call must cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from gristmill.formats.nvfp4.tensor import BLOCK, FRAGMENTS, ROWS, TILES
from gristmill.ops.examples import normal
from gristmill.ops.experts.cases import (
    Spread,
    other_experts,
    routed_example,
    sizes_of,
    spreads,
    tokens_of,
)
from gristmill.ops.nvfp4_linear.cases import layout_on, packed_bytes, random_weight, sound_scales
from gristmill.ops.nvfp4_moe.semantics import Call
from gristmill.ops.op import Arguments, Case, Cost

_BF16, _FP16 = torch.bfloat16, torch.float16
_CALLS = 16  # that take turns when one is timed


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
    *_, w13_scales, _, _, w2_scales, _, _, _, _, _, _, layout, _ = args
    for scales in (w13_scales, w2_scales):
        sound_scales(scales, layout)
    return args


def elsewhere(*args: Any) -> list[Arguments]:
    """Forward calls over other experts of the same stacks, as far as there are others."""
    call = Call(*args)
    experts = call.experts if call.expert_map is None else len(call.expert_map)
    count = min(_CALLS, max(1, experts // max(1, call.topk_ids.numel())))
    others = other_experts(call.topk_ids, max(1, experts), count)
    return [tuple(call._replace(topk_ids=ids)) for ids in others]


def forward_example(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str,
    arch: str | None = None,
) -> Arguments:
    """In the layout of the device, or of an architecture, so that its own kernels are seen."""
    rows, experts, topk, hidden, inner = sizes_of("nvfp4_moe", shape, BLOCK)
    x = normal((rows, hidden), dtype, device)
    routing = routed_example(rows, experts, topk, dtype, device)
    layout = layout_on(device, arch, stacked=True)
    w13 = random_weight((experts, 2 * inner, hidden), device, layout=layout, pairs=True)
    w2 = random_weight((experts, hidden, inner), device, layout=layout)
    return (x, *routing, *w13[:3], *w2[:3], None, None, "silu", None, None, layout, None)


def backward_example(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str,
    arch: str | None = None,
) -> Arguments:
    args = forward_example(shape, dtype, device, arch)
    return normal(args[0].shape, dtype, device), *args


@dataclass(frozen=True)
class Packed(Spread):
    """How one case differs from an ordinary one, in its weights, too."""

    layout: str = ROWS
    per_row: bool = False


def _spreads() -> dict[str, Packed]:
    found = {name: Packed(**vars(spread)) for name, spread in spreads().items()}
    for layout in (TILES, FRAGMENTS):
        found |= {
            layout: Packed(layout=layout, hidden=96, inner=144),
            f"{layout}, one row": Packed(rows=1, layout=layout, experts=5),
            f"{layout}, per row": Packed(rows=30, per_row=True, layout=layout, bias=_BF16),
            f"{layout}, small": Packed(layout=layout, hidden=16, inner=16),
            f"{layout}, fp16": Packed(rows=30, layout=layout, hidden=128, inner=64, x=_FP16),
            f"{layout}, fp64": Packed(layout=layout, x=torch.float64, bias=torch.float64),
            f"{layout}, gpt-oss": Packed(
                rows=17, layout=layout, bias=_BF16, activation="swiglu_oai", limit=7.0, alpha=1.702
            ),
            f"{layout}, mapped": replace(found["mapped"], layout=layout, inner=80),
            f"{layout}, skewed": replace(found["skewed"], layout=layout),
        }
    return found | {"per row": Packed(rows=30, per_row=True, bias=_BF16)}


def forward_cases() -> Iterator[Case]:
    for name, spread in _spreads().items():
        yield Case(name, partial(_forward, spread))


def backward_cases() -> Iterator[Case]:
    for name, spread in _spreads().items():
        yield Case(name, partial(_backward, spread))


def _forward(spread: Packed, device: torch.device | str, seed: int) -> Arguments:
    generator = torch.Generator().manual_seed(seed)
    tokens = tokens_of(spread, device, generator)
    wide = (spread.experts, 2 * spread.inner, spread.hidden)
    back = (spread.experts, spread.hidden, spread.inner)
    w13, w2 = (
        random_weight(
            shape,
            device,
            layout=spread.layout,
            generator=generator,
            per_row=spread.per_row,
            pairs=shape is wide,
        )
        for shape in (wide, back)
    )
    weights = (*w13[:3], *w2[:3], *tokens.biases)
    options = (spread.activation, spread.limit, tokens.expert_map, spread.layout, spread.alpha)
    return (tokens.x, tokens.topk_weights, tokens.topk_ids, *weights, *options)


def _backward(spread: Packed, device: torch.device | str, seed: int) -> Arguments:
    args = _forward(spread, device, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    dy = torch.randn((spread.rows, spread.hidden), generator=generator)
    return dy.to(spread.x).to(device), *args
