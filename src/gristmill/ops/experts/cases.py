"""Inputs that calls over experts have in common, ordinary and nasty: tokens, routing, biases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gristmill.errors import ArgumentError
from gristmill.ops.examples import is_meta, normal

_BF16, _FP16, _FP32, _FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
Lay = Callable[[torch.Tensor], torch.Tensor]


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
    alpha: float | None = None
    route: Lay | None = None
    mapped: tuple[int, ...] | None = None
    lay: Lay | None = None  # how hidden states lie
    lay_routing: Lay | None = None  # how topk_ids and topk_weights lie


class Tokens(NamedTuple):
    """What a call has beside its weights."""

    x: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    biases: tuple[torch.Tensor | None, torch.Tensor | None]
    expert_map: torch.Tensor | None


def sizes_of(op: str, shape: tuple[int, ...], multiple: int) -> tuple[int, int, int, int, int]:
    """M, E, k, H and I of an example: ``(M, H)`` or all of them.

    ``(M, H)`` has eight experts of which a token takes two, half as wide as the token.
    """
    if len(shape) == 2:
        rows, hidden = shape
        shape = (rows, 8, 2, hidden, -(-hidden // 2 // multiple) * multiple)
    if len(shape) != 5 or shape[3] % multiple or shape[4] % multiple:
        sizes = "" if multiple == 1 else f" with H and I multiples of {multiple}"
        raise ArgumentError(
            f"{op}: an example is (M, H) or (M, experts, topk, H, I){sizes}, got {shape}"
        )
    rows, experts, topk, hidden, inner = shape
    return rows, experts, topk, hidden, inner


def routed_example(
    rows: int, experts: int, topk: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """topk_weights and topk_ids: distinct experts in each row, as a router picks them."""
    if is_meta(device):
        ids = torch.empty((rows, topk), dtype=torch.int32, device=device)
        return normal((rows, topk), dtype, device), ids
    weights = torch.softmax(torch.randn((rows, topk), device=device), -1).to(dtype)
    first = torch.randint(0, max(experts, 1), (rows, 1), dtype=torch.int32, device=device)
    others = torch.arange(topk, dtype=torch.int32, device=device) * 3
    return weights, (first + others) % max(experts, 1)


def tokens_of(spread: Spread, device: torch.device | str, generator: torch.Generator) -> Tokens:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    x = normal(spread.rows, spread.hidden).to(spread.x).to(device)
    x = x if spread.lay is None else spread.lay(x)
    weights = torch.softmax(normal(spread.rows, spread.topk), -1).to(spread.weights).to(device)
    count = spread.experts if spread.mapped is None else len(spread.mapped)
    ids = normal(spread.rows, max(count, spread.topk)).argsort(-1)[:, : spread.topk]
    ids = (ids if spread.route is None else spread.route(ids)).to(spread.ids).to(device)
    if spread.lay_routing is not None:
        weights, ids = spread.lay_routing(weights), spread.lay_routing(ids)
    first = second = mapped = None
    if spread.bias is not None:
        first = normal(spread.experts, 2 * spread.inner).to(spread.bias).to(device)
        second = normal(spread.experts, spread.hidden).to(spread.bias).to(device)
    if spread.mapped is not None:
        mapped = torch.tensor(spread.mapped, dtype=torch.int32).to(device)
    return Tokens(x, weights, ids, (first, second), mapped)


def spreads() -> dict[str, Spread]:
    """The cases that weights of every kind have."""
    shapes = (
        (1, 4, 1, 32, 16),
        (1, 8, 2, 64, 32),
        (2, 16, 4, 96, 80),
        (5, 1, 1, 48, 32),
        (13, 3, 3, 64, 48),
        (40, 8, 2, 128, 64),
        (7, 60, 8, 32, 16),
        (70, 16, 4, 32, 272),
        (3, 24, 10, 64, 32),
        (33, 12, 10, 64, 32),
        (65, 6, 1, 64, 32),
        (0, 4, 2, 32, 16),
        (4, 4, 0, 32, 16),
        (4, 0, 2, 32, 16),
    )
    found = {
        f"{m} rows, {k} of {e} experts, {h} by {i}": Spread(m, e, k, h, i)
        for m, e, k, h, i in shapes
    }
    for x in (_FP32, _FP16, _BF16, _FP64):
        word = str(x).removeprefix("torch.")
        for activation in ("silu", "swiglu_oai", "gelu"):
            found[f"{activation} {word}"] = Spread(x=x, activation=activation)
            found[f"{activation} {word} limit"] = Spread(
                x=x, activation=activation, limit=0.5, bias=x
            )
        found[f"alpha {word}"] = Spread(x=x, activation="swiglu_oai", limit=0.7, alpha=0.6)
    return found | _routings() | _layouts()


def _routings() -> dict[str, Spread]:
    def one(expert: int) -> Lay:
        return lambda ids: ids * 0 + expert

    return {
        "nobody": Spread(route=one(-1)),
        "nobody, one row": Spread(rows=1, route=one(-1)),
        "some missing": Spread(rows=20, route=_some_missing),
        "some missing, few": Spread(rows=2, experts=9, topk=4, route=_some_missing),
        "out of range": Spread(rows=20, route=lambda ids: ids * 3 - 4),
        "one expert for all": Spread(rows=20, route=one(2)),
        "one expert beyond a tile": Spread(rows=301, topk=1, hidden=32, inner=16, route=one(3)),
        "the only expert, twice": Spread(rows=151, experts=1, hidden=32, inner=16, route=one(0)),
        "skewed": Spread(rows=150, experts=16, hidden=32, inner=16, route=_skewed),
        "idle experts": Spread(rows=40, experts=16, route=lambda ids: ids % 5 * 3),
        "repeated": Spread(rows=20, topk=3, route=lambda ids: ids[:, :1].expand(ids.shape)),
        "repeated, few": Spread(rows=1, topk=3, route=one(1)),
        "mapped": Spread(rows=20, mapped=(3, -1, 0, -1, 2, 1)),
        "mapped away": Spread(rows=20, mapped=(-1, -1, -1)),
        "mapped out of range": Spread(rows=20, mapped=(4, 2, 7, -5, 0, 1)),
        "mapped, few": Spread(rows=1, mapped=(3, -1, 0, -1, 2, 1)),
    }


def _layouts() -> dict[str, Spread]:
    def spread_out(values: torch.Tensor) -> torch.Tensor:
        wide = values.new_zeros((values.shape[0], 2 * values.shape[1] + 1))
        wide[:, 1::2] = values
        return wide[:, 1::2]

    def columns_first(values: torch.Tensor) -> torch.Tensor:
        return values.t().contiguous().t()

    return {
        "one row": Spread(rows=1, topk=3, bias=_FP32),
        "bias float32": Spread(bias=_FP32),
        "bias float16": Spread(bias=_FP16),
        "bias bfloat16, x float32": Spread(bias=_BF16, x=_FP32),
        "bias float64": Spread(bias=_FP64),
        "weights bf16, ids int32": Spread(weights=_BF16, ids=torch.int32),
        "weights float16": Spread(weights=_FP16),
        "weights float64": Spread(weights=_FP64),
        "columns strided": Spread(lay=columns_first),
        "expanded rows": Spread(lay=lambda x: x[:1].expand(x.shape)),
        "routing strided": Spread(rows=20, lay_routing=spread_out, ids=torch.int32),
        "routing transposed": Spread(rows=20, lay_routing=columns_first),
        "routing expanded": Spread(rows=20, lay_routing=lambda one: one[:1].expand(one.shape)),
    }


def _some_missing(ids: torch.Tensor) -> torch.Tensor:
    return torch.where((ids + torch.arange(len(ids)).unsqueeze(-1)) % 3 == 0, -1, ids)


def _skewed(ids: torch.Tensor) -> torch.Tensor:
    """Half of the tokens on two experts."""
    return torch.where((torch.arange(len(ids)) % 2 == 0).unsqueeze(-1), ids % 2, ids)


def other_experts(ids: torch.Tensor, experts: int, count: int) -> list[torch.Tensor]:
    """`ids`, and so many in all that name other experts, as often as these do.

    All lie in memory as `ids` do: plans are made for that. An id that takes no part stays.
    """
    step = max(1, experts // count)
    there = (ids >= 0) & (ids < experts)
    moved = [torch.where(there, (ids + step * at) % experts, ids) for at in range(1, count)]
    return [ids, *(_laid_like(ids, one) for one in moved)]


def _laid_like(like: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`values` with the strides of `like`, also where those leave gaps or have rows be one."""
    place = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    whole = tuple(slice(0, 1) if step == 0 else slice(None) for step in like.stride())
    place[whole] = values[whole]
    return place
