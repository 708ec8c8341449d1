"""What ops over the experts of a mixture must answer, in fp64, whatever their weights are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from conformance_truth_core import BEFORE_ROUNDING, Truth, accumulator_of, unit

Tensor = torch.Tensor


@dataclass(frozen=True)
class Mixture:
    """A call: `w13` and `w2` give the values of one expert's matrices, in fp64."""

    x: Tensor
    weights: Tensor
    ids: Tensor
    experts: int
    w13: Callable[[int], Tensor]
    w2: Callable[[int], Tensor]
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    activation: str
    limit: float | None
    expert_map: Tensor | None
    alpha: float | None

    def places(self) -> Tensor:
        """The place of each entry of topk_ids among the experts that are here; -1 for none."""
        mapped = list(range(self.experts))
        if self.expert_map is not None:
            mapped = self.expert_map.tolist()

        def place(expert: int) -> int:
            found = mapped[expert] if 0 <= expert < len(mapped) else -1
            return found if 0 <= found < self.experts else -1

        places = [[place(expert) for expert in row] for row in self.ids.tolist()]
        return torch.tensor(places, dtype=torch.int64, device=self.ids.device).view(self.ids.shape)


class Expert(NamedTuple):
    """What one expert makes of every token, in fp64, with how far each may be off on the way.

    `low` and `high` are the ends of the range of the activated value, rounded; `h_off` the size
    of the terms that its error is made of, `slopes` its derivatives by gate and by up and
    `slopes_off` theirs.
    """

    w13: Tensor
    w2: Tensor
    low: Tensor
    high: Tensor
    h_off: Tensor
    slopes: tuple[Tensor, Tensor]
    slopes_off: tuple[Tensor, Tensor]


def activation_of(
    name: str, limit: float | None, gate: Tensor, up: Tensor, alpha: float | None = None
) -> Tensor:
    if limit is not None:
        gate = torch.minimum(gate, torch.full_like(gate, limit))
        up = torch.maximum(
            torch.minimum(up, torch.full_like(up, limit)), -torch.full_like(up, limit)
        )
    if name == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    if name == "gelu":
        return gate * 0.5 * (1 + torch.erf(gate / 2**0.5)) * up
    assert name == "swiglu_oai"
    return gate / (1 + torch.exp(-(1.702 if alpha is None else alpha) * gate)) * (up + 1)


def _expert(number: int, mixture: Mixture) -> Expert:
    x, w13, w2 = mixture.x, mixture.w13(number), mixture.w2(number)
    both, terms = x.double() @ w13.t(), x.double().abs() @ w13.abs().t()
    if mixture.w13_bias is not None:
        bias = mixture.w13_bias[number].double()
        both, terms = both + bias, terms + bias.abs()
    with torch.enable_grad():
        gate, up = (half.detach().requires_grad_() for half in both.chunk(2, -1))
        h = activation_of(mixture.activation, mixture.limit, gate, up, mixture.alpha)
        by_gate, by_up = torch.autograd.grad(h.sum(), (gate, up), create_graph=True)
        across = torch.autograd.grad(by_gate.sum(), (gate, up), retain_graph=True)
    off_gate, off_up = terms.chunk(2, -1)
    h, slopes = h.detach(), (by_gate.detach(), by_up.detach())
    size, size_by_up = h.abs(), slopes[1].abs()
    if mixture.activation == "gelu":
        # One and the error function cancel where gate is far below zero.
        below = -gate.detach().clamp(max=0)
        size, size_by_up = size + 2 * below * up.detach().abs(), size_by_up + below
    h_off = size + slopes[0].abs() * off_gate + slopes[1].abs() * off_up
    # The slope by gate is a sum of two that may cancel, the larger of them at most |factor|.
    factor = up.detach() + (mixture.activation == "swiglu_oai")
    slopes_off = (
        factor.abs() + slopes[0].abs() + across[0].abs() * off_gate + across[1].abs() * off_up,
        size_by_up + across[1].abs() * off_gate,
    )
    precise = accumulator_of(x.dtype)
    low = high = h
    if torch.finfo(x.dtype).eps > torch.finfo(precise).eps:
        off = BEFORE_ROUNDING * unit(precise) * h_off
        low, high = ((h + sign * off).to(x.dtype).double() for sign in (-1, 1))
    return Expert(w13, w2, low, high, h_off, slopes, slopes_off)


def forward(mixture: Mixture) -> list[Truth]:
    x, weights, w2_bias = mixture.x, mixture.weights.double(), mixture.w2_bias
    places = mixture.places()
    value, off, terms = (torch.zeros_like(x, dtype=torch.float64) for _ in range(3))
    for number in range(mixture.experts):
        share = (weights * (places == number)).sum(-1, keepdim=True)
        one = _expert(number, mixture)
        middle, half = (one.low + one.high) / 2, (one.high - one.low) / 2
        y, size = middle @ one.w2.t(), one.h_off @ one.w2.abs().t()
        if w2_bias is not None:
            y, size = y + w2_bias[number].double(), size + w2_bias[number].double().abs()
        value += share * y
        off += share.abs() * (half @ one.w2.abs().t())
        terms += share.abs() * size
    return [Truth(value - off, value + off, terms, accumulator_of(x.dtype))]


def backward(mixture: Mixture, dy: Tensor, *, weight_grad: bool = False) -> list[Truth]:
    """For hidden states and topk_weights; with `weight_grad` for w13, w2 and biases, too."""
    x, weights, w2_bias = mixture.x, mixture.weights.double(), mixture.w2_bias
    places, d = mixture.places(), dy.double()
    dx, dx_terms = (torch.zeros_like(x, dtype=torch.float64) for _ in range(2))
    dweights, off, terms = (torch.zeros_like(weights) for _ in range(3))
    precise = accumulator_of(x.dtype)
    trained: list[list[Truth]] = []
    for number in range(mixture.experts):
        mine = places == number
        share = (weights * mine).sum(-1, keepdim=True)
        one = _expert(number, mixture)
        dh, dh_off = d @ one.w2, d.abs() @ one.w2.abs()
        # Of the activation's gradient: each factor may be off in its own way.
        both = torch.cat([share * dh * slope for slope in one.slopes], -1)
        pairs = zip(one.slopes, one.slopes_off, strict=True)
        sizes = [share.abs() * (dh_off * slope.abs() + dh.abs() * far) for slope, far in pairs]
        served = mine.any(-1, keepdim=True)
        size_both = torch.cat(sizes, -1)
        dx += served * (both @ one.w13)
        dx_terms += served * (size_both @ one.w13.abs())
        middle, half = (one.low + one.high) / 2, (one.high - one.low) / 2
        dshare = (dh * middle).sum(-1, keepdim=True)
        size = (dh_off * middle.abs() + dh.abs() * one.h_off).sum(-1, keepdim=True)
        if w2_bias is not None:
            products = d * w2_bias[number].double()
            dshare = dshare + products.sum(-1, keepdim=True)
            size = size + products.abs().sum(-1, keepdim=True)
        dweights = torch.where(mine, dshare, dweights)
        off = torch.where(mine, (dh.abs() * half).sum(-1, keepdim=True), off)
        terms = torch.where(mine, size, terms)
        if weight_grad:
            own = share * d
            trained.append(_of_weights(x.double(), own, both, size_both, one, precise))
    return [
        Truth(dx, dx, dx_terms, precise),
        Truth(dweights - off, dweights + off, terms, precise),
        *_stacked(mixture, trained, precise),
    ]


def _of_weights(
    x: Tensor, own: Tensor, both: Tensor, sizes: Tensor, one: Expert, precise: torch.dtype
) -> list[Truth]:
    """Of one expert: dw13, dw2 and those of the biases. `own`: dy times what a token weighs."""
    middle, half = (one.low + one.high) / 2, (one.high - one.low) / 2
    dw13, dw2, off = both.t() @ x, own.t() @ middle, own.abs().t() @ half
    return [
        Truth(dw13, dw13, sizes.t() @ x.abs(), precise),
        # Few terms a sum: of `own` the product counts, and of h each of its two.
        Truth(dw2 - off, dw2 + off, own.abs().t() @ (one.h_off + 2 * middle.abs()), precise),
        Truth(both.sum(0), both.sum(0), sizes.sum(0), precise),
        Truth(own.sum(0), own.sum(0), own.abs().sum(0), precise),
    ]


def _stacked(mixture: Mixture, trained: list[list[Truth]], precise: torch.dtype) -> list[Truth]:
    """Of all experts; nothing for what is not there, or not trained."""
    found = []
    nothing = mixture.x.new_empty(0, dtype=torch.float64)
    inner, hidden = _inner(mixture), mixture.x.shape[1]
    there = (True, True, mixture.w13_bias is not None, mixture.w2_bias is not None)
    shapes = ((2 * inner, hidden), (hidden, inner), (2 * inner,), (hidden,))
    for place, present in enumerate(there):
        parts = [one[place] for one in trained] if present else []
        if not parts:
            found.append(Truth(nothing, nothing, nothing, precise))
            continue
        low, high, terms = (
            torch.stack([getattr(one, name) for one in parts]) for name in ("low", "high", "terms")
        )
        assert low.shape == (mixture.experts, *shapes[place])
        found.append(Truth(low, high, terms, precise))
    return found


def _inner(mixture: Mixture) -> int:
    return mixture.w13(0).shape[0] // 2 if mixture.experts else 0
