"""What ops over the experts of a mixture must answer, in fp64, whatever their weights are.

A variant that leaves products to torch rounds to the dtype of the hidden states, where that has 16
bits: gate and up before their bias, the activated value, what W2 makes of dy, the gradients of gate
and up, and what each slot adds to a result. Each of these roundings is counted by the size of what
is rounded (`units`, in roundings of that dtype).

The gradient of a gate or an up that is cut is zero: where it lies so close to the limit that its
own error decides on which side of it, both answers are right. That close is closer for those that
keep fp32 than for those that round to 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from conformance_truth_core import BEFORE_ROUNDING, Truth, accumulator_of, unit, walk

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
    inexact: bool = False  # the weights do not fit 16 bits, in which products take them

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

    def of(self, served: Tensor) -> Mixture:
        """As an expert sees it: zeros for the tokens of others, whatever those hold."""
        return replace(self, x=torch.where(served, self.x, 0.0))


@dataclass(frozen=True)
class Found:
    """A result as it adds up: its range, that of those who round on the way, and the errors' sizes.

    `terms` are counted in roundings of the accumulator, `units` in those of the hidden states.
    """

    low: Tensor
    high: Tensor
    rounded_low: Tensor
    rounded_high: Tensor
    terms: Tensor
    units: Tensor

    @classmethod
    def around(
        cls, value: Tensor, off: Tensor | float, terms: Tensor, units: Tensor | float
    ) -> Found:
        """The same range for all: `value` to within `off`."""
        low, high = value - off, value + off
        return cls(low, high, low, high, terms, torch.zeros_like(value) + units)

    @classmethod
    def product(
        cls, left: Tensor, jumps: list[Tensor], right: Tensor, terms: Tensor, units: Tensor
    ) -> Found:
        """``left @ right``, where any of the entries of `jumps` may have been added to `left`.

        The first of them for all, the second for those who round on the way.
        """
        value = left @ right
        low, high, rounded_low, rounded_high = (
            value + (jump @ right + sign * (jump.abs() @ right.abs())) / 2
            for jump in jumps
            for sign in (-1, 1)
        )
        return cls(low, high, rounded_low, rounded_high, terms, units)

    @staticmethod
    def each(function: Callable[..., Tensor], *founds: Found) -> Found:
        """What `function` makes of each part."""
        names = (one.name for one in fields(Found))
        return Found(*(function(*(getattr(one, name) for one in founds)) for name in names))

    def plus(self, other: Found) -> Found:
        return Found.each(torch.add, self, other)

    def truth(self, dtype: torch.dtype) -> Truth:
        precise = accumulator_of(dtype)
        if not _narrow(dtype):
            return Truth(self.low, self.high, self.terms, precise)
        return Truth(
            self.low,
            self.high,
            self.terms,
            precise,
            composed_terms=self.units + self.terms * (unit(precise) / unit(dtype)),
            composed_range=(self.rounded_low, self.rounded_high),
        )


def _rounding(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The size of what is rounded: below the smallest normal number steps get no smaller."""
    return torch.where(value == 0, 0.0, value.abs().clamp(min=torch.finfo(dtype).tiny))


class Expert(NamedTuple):
    """What one expert makes of every token, in fp64, with how far each may be off on the way.

    `low` and `high` are the ends of the range of the activated value, rounded; `h_off` the size
    of the terms that its error is made of, `slopes` its derivatives by gate, then by up, and
    `slopes_off` theirs; `h_units` and `slopes_units` the sizes of what is rounded to 16 bits.
    `jumps` is what the slopes change by on the other side of the limit, where gate or up may be
    there: for those who keep fp32, and for those who round.
    """

    w13: Tensor
    w2: Tensor
    low: Tensor
    high: Tensor
    h_off: Tensor
    h_units: Tensor
    slopes: Tensor
    slopes_off: Tensor
    slopes_units: Tensor
    jumps: list[Tensor]

    @property
    def middle(self) -> Tensor:
        return (self.low + self.high) / 2

    @property
    def half(self) -> Tensor:
        return (self.high - self.low) / 2


def _narrow(dtype: torch.dtype) -> bool:
    """Whether something is lost when a sum is rounded to this dtype."""
    return torch.finfo(dtype).eps > torch.finfo(accumulator_of(dtype)).eps


def activation_of(name: str, gate: Tensor, up: Tensor, alpha: float | None) -> Tensor:
    if name == "silu":
        return gate * torch.sigmoid(gate) * up
    if name == "gelu":
        return gate * 0.5 * (1 + torch.erf(gate / 2**0.5)) * up
    assert name == "swiglu_oai"
    return gate * torch.sigmoid((1.702 if alpha is None else alpha) * gate) * (up + 1)


def _expert(number: int, mixture: Mixture) -> Expert:
    x, w13, w2 = mixture.x, mixture.w13(number), mixture.w2(number)
    both, terms = x.double() @ w13.t(), x.double().abs() @ w13.abs().t()
    if x.numel():
        terms = torch.maximum(terms, walk(x, w13.t()))
    units = _rounding(both, x.dtype)
    if mixture.w13_bias is not None:
        bias = mixture.w13_bias[number].double()
        both, terms = both + bias, terms + bias.abs()
    precise = accumulator_of(x.dtype)
    limit = float("inf") if mixture.limit is None else mixture.limit
    # What is compared with the limit: gate from above, up from both sides.
    inner = both.shape[-1] // 2
    compared = torch.cat((both[:, :inner], both[:, inner:].abs()), -1)
    passes, away = (compared <= limit).double(), (compared - limit).abs()
    off = BEFORE_ROUNDING * unit(precise) * terms
    near = [away <= off, away <= off + (unit(x.dtype) * units if _narrow(x.dtype) else 0)]
    # What is cut for certain is not off at all.
    free = torch.maximum(passes, near[1].double())
    off_gate, off_up = (terms * free).chunk(2, -1)
    units_gate, units_up = (units * free).chunk(2, -1)
    with torch.enable_grad():
        gate = both[:, :inner].clamp(max=limit).requires_grad_()
        up = both[:, inner:].clamp(-limit, limit).requires_grad_()
        h = activation_of(mixture.activation, gate, up, mixture.alpha)
        by_gate, by_up = torch.autograd.grad(h.sum(), (gate, up), create_graph=True)
        across = torch.autograd.grad(by_gate.sum(), (gate, up), retain_graph=True)
    gate, up, h, by_gate, by_up = (one.detach() for one in (gate, up, h, by_gate, by_up))
    bent, twisted = (one.abs() for one in across)
    size, size_by_up = h.abs(), by_up.abs()
    if mixture.activation == "gelu":
        # One and the error function cancel where gate is far below zero.
        below = -gate.clamp(max=0)
        size, size_by_up = size + 2 * below * up.abs(), size_by_up + below
    h_off = size + by_gate.abs() * off_gate + by_up.abs() * off_up
    # Once rounded and once more: what was next to a tie goes the other way.
    h_units = 2 * _rounding(h, x.dtype) + by_gate.abs() * units_gate + by_up.abs() * units_up
    # The slope by gate is a sum of two that may cancel, the larger of them at most |factor|.
    factor = up + (mixture.activation == "swiglu_oai")
    off_by_gate = factor.abs() + by_gate.abs() + bent * off_gate + twisted * off_up
    slopes_off = torch.cat((off_by_gate, size_by_up + twisted * off_gate), -1)
    slopes_units = torch.cat((bent * units_gate + twisted * units_up, twisted * units_gate), -1)
    uncut = torch.cat((by_gate, by_up), -1)
    low = high = h
    if _narrow(x.dtype):
        off = BEFORE_ROUNDING * unit(precise) * h_off
        low, high = ((h + sign * off).to(x.dtype).double() for sign in (-1, 1))
    return Expert(
        w13=w13,
        w2=w2,
        low=low,
        high=high,
        h_off=h_off,
        h_units=h_units,
        slopes=passes * uncut,
        slopes_off=free * slopes_off,
        slopes_units=free * slopes_units,
        jumps=[one * (1 - 2 * passes) * uncut for one in near],
    )


def forward(mixture: Mixture) -> list[Truth]:
    x, weights, w2_bias = mixture.x, mixture.weights.double(), mixture.w2_bias
    places, nothing = mixture.places(), torch.zeros_like(x, dtype=torch.float64)
    found = Found.around(nothing, 0.0, nothing, 0.0)
    for number in range(mixture.experts):
        mine = places == number
        share, weighs = _shares(weights, mine)
        one = _expert(number, mixture.of(mine.any(-1, keepdim=True)))
        size = one.w2.abs().t()
        y, terms = one.middle @ one.w2.t(), one.h_off @ size
        units = _rounding(y, x.dtype) + one.h_units @ size
        if w2_bias is not None:
            y, terms = y + w2_bias[number].double(), terms + w2_bias[number].double().abs()
        off = weighs * (one.half @ size)
        found = found.plus(Found.around(share * y, off, weighs * terms, weighs * units))
    return [found.truth(x.dtype)]


def backward(mixture: Mixture, dy: Tensor, *, weight_grad: bool = False) -> list[Truth]:
    """For hidden states and topk_weights; with `weight_grad` for w13, w2 and biases, too."""
    x, weights, w2_bias = mixture.x, mixture.weights.double(), mixture.w2_bias
    places = mixture.places()
    nothing = torch.zeros_like(x, dtype=torch.float64)
    dx = Found.around(nothing, 0.0, nothing, 0.0)
    dweights, off, terms, units = (torch.zeros_like(weights) for _ in range(4))
    trained: list[list[Found]] = []
    for number in range(mixture.experts):
        mine = places == number
        share, weighs = _shares(weights, mine)
        served = mine.any(-1, keepdim=True)
        one, d = _expert(number, mixture.of(served)), torch.where(served, dy.double(), 0.0)
        dh, dh_off = d @ one.w2, d.abs() @ one.w2.abs()
        dh_units = _rounding(dh, x.dtype) + mixture.inexact * dh_off
        # Of the activation's gradient: each factor may be off in its own way.
        both = _Gradient.of(share, weighs, one, dh, dh_off, dh_units)
        dx = dx.plus(_of_tokens(served, both, one, mixture))
        dshare = (dh * one.middle).sum(-1, keepdim=True)
        size = (dh_off * one.middle.abs() + dh.abs() * one.h_off).sum(-1, keepdim=True)
        if w2_bias is not None:
            products = d * w2_bias[number].double()
            dshare = dshare + products.sum(-1, keepdim=True)
            size = size + products.abs().sum(-1, keepdim=True)
        rounded = (dh_units * one.middle.abs() + dh.abs() * one.h_units).sum(-1, keepdim=True)
        dweights = torch.where(mine, dshare, dweights)
        off = torch.where(mine, (dh.abs() * one.half).sum(-1, keepdim=True), off)
        terms = torch.where(mine, size, terms)
        units = torch.where(mine, rounded, units)
        if weight_grad:
            tokens = mixture.of(served).x
            trained.append(_of_weights(tokens, share * d, weighs * d.abs(), both, one))
    return [
        dx.truth(x.dtype),
        Found.around(dweights, off, terms, units).truth(x.dtype),
        *_stacked(mixture, trained),
    ]


def _shares(weights: Tensor, mine: Tensor) -> tuple[Tensor, Tensor]:
    """What each token weighs at an expert, and the size of the parts of that, if it has several."""
    share, weighs = (
        torch.where(mine, one, 0.0).sum(-1, keepdim=True) for one in (weights, weights.abs())
    )
    return share, weighs


class _Gradient(NamedTuple):
    """Of gate, then of up: as they are before they are rounded, `size` the sum of slots' sizes."""

    value: Tensor
    jumps: list[Tensor]
    size: Tensor
    terms: Tensor
    units: Tensor

    @classmethod
    def of(
        cls,
        share: Tensor,
        weighs: Tensor,
        one: Expert,
        dh: Tensor,
        dh_off: Tensor,
        dh_units: Tensor,
    ) -> _Gradient:
        dh, dh_off, dh_units = (torch.cat((each, each), -1) for each in (dh, dh_off, dh_units))
        slopes = one.slopes.abs()
        return cls(
            value=share * dh * one.slopes,
            jumps=[share * dh * jump for jump in one.jumps],
            size=weighs * dh.abs() * slopes,
            terms=weighs * (dh_off * slopes + dh.abs() * one.slopes_off),
            units=weighs * (dh_units * slopes + dh.abs() * one.slopes_units),
        )


def _of_tokens(served: Tensor, both: _Gradient, one: Expert, mixture: Mixture) -> Found:
    """What one expert adds to dx: rounded before it is a factor, and what comes of it again."""
    size = one.w13.abs()
    rounded = both.units + _rounding(both.size, mixture.x.dtype) + mixture.inexact * both.size
    units = rounded @ size + _rounding(both.value @ one.w13, mixture.x.dtype)
    found = Found.product(both.value, both.jumps, one.w13, both.terms @ size, units)
    return Found.each(lambda part: served * part, found)


def _of_weights(
    x: Tensor, own: Tensor, own_size: Tensor, both: _Gradient, one: Expert
) -> list[Found]:
    """Of one expert: dw13, dw2 and those of the biases. `own`: dy times what a token weighs."""
    jumps, h, dtype, x = [jump.t() for jump in both.jumps], one.middle.abs(), x.dtype, x.double()
    ones = torch.ones_like(x[:, :1])
    sums = Found.product(both.value.t(), jumps, ones, both.terms.t() @ ones, both.units.t() @ ones)
    return [
        Found.product(
            both.value.t(),
            jumps,
            x,
            both.terms.t() @ x.abs(),
            (both.units + _rounding(both.size, dtype)).t() @ x.abs(),
        ),
        # Few terms a sum: of `own` the product counts, and of h each of its two. Those who round
        # do so with h times what the token weighs.
        Found.around(
            own.t() @ one.middle,
            own.abs().t() @ one.half,
            own_size.t() @ (one.h_off + 2 * h),
            own_size.t() @ (one.h_units + _rounding(h, dtype)),
        ),
        Found.each(lambda part: part.squeeze(-1), sums),
        Found.around(own.sum(0), 0.0, own_size.sum(0), 0.0),
    ]


def _stacked(mixture: Mixture, trained: list[list[Found]]) -> list[Truth]:
    """Of all experts; nothing for what is not there, or not trained."""
    found = []
    dtype = mixture.x.dtype
    nothing = mixture.x.new_empty(0, dtype=torch.float64)
    inner, hidden = _inner(mixture), mixture.x.shape[1]
    there = (True, True, mixture.w13_bias is not None, mixture.w2_bias is not None)
    shapes = ((2 * inner, hidden), (hidden, inner), (2 * inner,), (hidden,))
    for place, present in enumerate(there):
        parts = [one[place] for one in trained] if present else []
        if not parts:
            found.append(Truth(nothing, nothing, nothing, accumulator_of(dtype)))
            continue
        whole = Found.each(lambda *each: torch.stack(each), *parts)
        assert whole.low.shape == (mixture.experts, *shapes[place])
        found.append(whole.truth(dtype))
    return found


def _inner(mixture: Mixture) -> int:
    return mixture.w13(0).shape[0] // 2 if mixture.experts else 0
