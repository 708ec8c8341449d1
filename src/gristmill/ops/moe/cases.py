"""Inputs for tests, benchmarks and the doctor, ordinary and nasty, and what a call must cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gristmill.ops.examples import normal, unaligned
from gristmill.ops.experts.cases import Spread, routed_example, sizes_of, spreads, tokens_of
from gristmill.ops.moe.semantics import Call
from gristmill.ops.op import Arguments, Case, Cost


def forward_cost(*args: Any) -> Cost:
    return _cost(Call(*args), 1)


def backward_cost(dy: torch.Tensor, *args: Any) -> Cost:
    *given, weight_grad = args
    call = Call(*given)
    cost = _cost(call, 3 if weight_grad else 2)
    if not weight_grad:
        return cost
    written = (call.w13.numel() + call.w2.numel()) * call.w13.element_size()
    rows = call.hidden_states.numel() * call.hidden_states.element_size()
    return Cost(cost.bytes - rows + written, cost.operations)


def _cost(call: Call, times: int) -> Cost:
    """Each expert once, or only as many as there are slots.

    A backward pass does all products twice, and once more for the gradients of weights.
    """
    x, slots = call.hidden_states, call.topk_ids.numel()
    each = 3 * call.intermediate * x.shape[1]
    used = each * min(slots, call.experts) * call.w13.element_size()
    moved = (1 + times) * x.numel() * x.element_size() + used
    return Cost(moved, times * 2 * slots * each)


def forward_example(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Arguments:
    rows, experts, topk, hidden, inner = sizes_of("moe", shape, 1)
    x = normal((rows, hidden), dtype, device)
    routing = routed_example(rows, experts, topk, dtype, device)
    # Values of the size that layers have.
    w13 = normal((experts, 2 * inner, hidden), dtype, device, max(hidden, 1) ** -0.5)
    w2 = normal((experts, hidden, inner), dtype, device, max(inner, 1) ** -0.5)
    return (x, *routing, w13, w2, None, None, "silu", None, None, None)


def backward_example(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Arguments:
    args = forward_example(shape, dtype, device)
    return normal(args[0].shape, dtype, device), *args, True


@dataclass(frozen=True)
class Dense(Spread):
    """How one case differs from an ordinary one, in its weights, too."""

    lay_weight: Callable[[torch.Tensor], torch.Tensor] | None = None
    frozen: bool = False  # weights are


def _spreads() -> dict[str, Dense]:
    found = {name: Dense(**vars(spread)) for name, spread in spreads().items()}
    return found | {
        "odd sizes": Dense(rows=20, hidden=37, inner=11, bias=torch.float32),
        "odd sizes, few": Dense(rows=1, hidden=37, inner=11),
        "multiples of four": Dense(rows=20, hidden=36, inner=12, x=torch.float32),
        "weights strided": Dense(rows=20, lay_weight=lambda one: one.repeat(1, 1, 2)[..., ::2]),
        "weights transposed": Dense(rows=20, lay_weight=lambda one: one.mT.contiguous().mT),
        "weights unaligned": Dense(rows=20, lay_weight=unaligned),
        "weights of one expert": Dense(rows=20, lay_weight=lambda one: one[:1].expand(one.shape)),
        "frozen": Dense(rows=20, frozen=True, bias=torch.float32),
        "frozen, few": Dense(rows=2, experts=9, frozen=True, x=torch.float16),
    }


def forward_cases() -> Iterator[Case]:
    for name, spread in _spreads().items():
        yield Case(name, partial(_forward, spread))


def backward_cases() -> Iterator[Case]:
    for name, spread in _spreads().items():
        yield Case(name, partial(_backward, spread))


def _forward(spread: Dense, device: torch.device | str, seed: int) -> Arguments:
    generator = torch.Generator().manual_seed(seed)
    tokens = tokens_of(spread, device, generator)

    def weight(rows: int, columns: int) -> torch.Tensor:
        drawn = torch.randn((spread.experts, rows, columns), generator=generator)
        made = (drawn * columns**-0.5).to(spread.x).to(device)
        return made if spread.lay_weight is None else spread.lay_weight(made)

    w13, w2 = weight(2 * spread.inner, spread.hidden), weight(spread.hidden, spread.inner)
    options = (spread.activation, spread.limit, tokens.expert_map, spread.alpha)
    return (tokens.x, tokens.topk_weights, tokens.topk_ids, w13, w2, *tokens.biases, *options)


def _backward(spread: Dense, device: torch.device | str, seed: int) -> Arguments:
    args = _forward(spread, device, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    dy = torch.randn((spread.rows, spread.hidden), generator=generator)
    return dy.to(spread.x).to(device), *args, not spread.frozen
