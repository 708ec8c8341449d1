"""Arguments for the experts of a model: weights made once, then calls that differ in their tokens.

Weights of a model do not fit in memory twice, and all sizes M share them. What keeps calls from
finding experts in the L2 cache is that the next call takes others (`routing`).

Codes and block scales are all that there are. Global scales are powers of two, one for each matrix:
so bf16 holds every value of a weight exactly, and what a pipeline in bf16 adds to its error is
nothing but its own roundings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch

from gristmill.bench.experts.models import Model
from gristmill.bench.experts.routing import distinct, draw
from gristmill.bench.experts.truth import Truth
from gristmill.formats.nvfp4 import NVFP4Tensor, PackedNVFP4, dequantize
from gristmill.ops.nvfp4_linear.cases import packed_bytes
from gristmill.ops.op import Arguments, Cost
from gristmill.ops.registry import OPS
from gristmill.select.copies import rotation_count
from gristmill.select.device import device_of

# The op over dense weights; the other one's are packed.
DENSE = "moe"
# So many calls at least, so that no single draw decides; of many tokens each is like the others.
LEAST_CALLS, FEW_CALLS, MANY_TOKENS = 4, 2, 512

_T = TypeVar("_T")


@dataclass(eq=False)
class Experts:
    """The weights of a model on a device, as a checkpoint has them, and biases of `dtype`.

    `kept`: what implementations have made of them, by name; gone when the weights are.
    """

    model: Model
    w13: NVFP4Tensor
    w2: NVFP4Tensor
    dtype: torch.dtype
    w13_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def packed(self) -> tuple[PackedNVFP4, PackedNVFP4]:
        """As our kernels read them; where that is by rows, these are the checkpoint's."""
        return self.keep("packed", lambda: (self.w13.prepare(pairs=True), self.w2.prepare()))

    @property
    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Their values; bf16 holds all of them exactly."""
        return self.keep(
            "dense", lambda: (dequantize(self.w13, self.dtype), dequantize(self.w2, self.dtype))
        )

    def keep(self, name: str, make: Callable[[], _T]) -> _T:
        """What `make` gives for these weights, made once for all sizes."""
        if name not in self.kept:
            self.kept[name] = make()
        made: _T = self.kept[name]
        return made

    def call(self, op: str, x: torch.Tensor, shares: torch.Tensor, ids: torch.Tensor) -> Arguments:
        """The positional arguments of an op."""
        options = (self.w13_bias, self.w2_bias, self.model.activation, self.model.limit)
        args: Arguments = (x, shares, ids, *self.dense, *options) if op == DENSE else ()
        if not args:
            w13, w2 = self.packed
            parts = (w13.codes, w13.scales, w13.row_scale, w2.codes, w2.scales, w2.row_scale)
            args = (x, shares, ids, *parts, *options, None, w2.layout)
        _LIVE[args[3].data_ptr()] = self
        return OPS[op].bind_arguments(*args)


# By the address of w13, packed or dense; of those that somebody holds.
_LIVE: WeakValueDictionary[int, Experts] = WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class Calls:
    """One problem: the calls that are timed in turn, what one costs, and what it should give.

    The cost is the mean over the calls. Bytes: the experts that have a token, x and y. Operations:
    both products of every slot.
    """

    sets: list[Arguments]
    cost: Cost
    truth: Truth


def make_experts(model: Model, dtype: torch.dtype, device: torch.device) -> Experts:
    """The same numbers on every run, drawn on the device."""
    generator = torch.Generator(device).manual_seed(20)
    w13 = _weight(model.experts, 2 * model.inner, model.hidden, generator)
    w2 = _weight(model.experts, model.hidden, model.inner, generator)

    def bias(weight: NVFP4Tensor) -> torch.Tensor | None:
        if not model.bias:
            return None
        drawn = torch.randn(weight.shape[:2], generator=generator, device=device)
        return drawn.mul_(0.5).to(dtype)

    return Experts(model, w13, w2, dtype, bias(w13), bias(w2))


def experts_of(args: Arguments) -> Experts:
    """Whose weights are among the arguments."""
    return _LIVE[args[3].data_ptr()]


def _weight(experts: int, rows: int, columns: int, generator: torch.Generator) -> NVFP4Tensor:
    """Values of the size that layers have; every other expert's are twice as large."""
    device = generator.device

    def drawn(low: int, high: int, width: int) -> torch.Tensor:
        made = torch.empty((experts, rows, width), dtype=torch.uint8, device=device)
        for some in made.split(32):  # all of them may be more than 2^31
            some.random_(low, high, generator=generator)
        return made

    codes = drawn(0, 256, columns // 2)
    # From 2^-3 to 448, as in the op's examples.
    scales = drawn(0x20, 0x7F, columns // 16).view(torch.float8_e4m3fn)
    size = 2.0 ** round(math.log2(1 / (400 * columns**0.5)))
    scale = size * (1 + torch.arange(experts, device=device) % 2).float()
    return NVFP4Tensor(codes, scales, scale)


def make_calls(experts: Experts, op: str, tokens: int, routing: str) -> Calls:
    """Calls of so many tokens, enough of them to keep the L2 cold."""
    model, dtype, device = experts.model, experts.dtype, experts.w13.device
    each = expert_bytes(model, dtype, dense=op == DENSE)
    count = calls_at(model, tokens, each, device)
    generator = torch.Generator(device).manual_seed(21)
    ids = draw(routing, count, tokens, model.experts, model.topk, generator)
    sets = []
    for chosen in ids:
        x = torch.randn((tokens, model.hidden), generator=generator, device=device).to(dtype)
        scores = torch.randn(chosen.shape, generator=generator, device=device)
        # In fp32 and int32, as routers give them.
        shares = torch.softmax(scores, -1)
        sets.append(experts.call(op, x, shares, chosen.int()))
    moved = round(mean(distinct(ids)) * each) + 2 * tokens * model.hidden * dtype.itemsize
    cost = Cost(moved, 2 * tokens * model.topk * model.parameters)
    x, shares, chosen, *_ = sets[0]
    biases = (experts.w13_bias, experts.w2_bias)
    weights = (experts.w13, experts.w2, *biases, model.activation, model.limit)
    return Calls(sets, cost, Truth(x, shares, chosen, *weights))


def calls_at(model: Model, tokens: int, each: int, device: torch.device) -> int:
    """How many calls take turns, with `each` bytes an expert."""
    if device.type != "cuda":
        return 2
    least = FEW_CALLS if tokens >= MANY_TOKENS else LEAST_CALLS
    read = min(model.experts, tokens * model.topk) * each
    return max(least, rotation_count(read, device_of(device).l2_bytes))


def expert_bytes(model: Model, dtype: torch.dtype, *, dense: bool = False) -> int:
    """What an expert has to read: both matrices, packed or of `dtype`, and the biases of that."""
    biases = (2 * model.inner + model.hidden) * dtype.itemsize if model.bias else 0
    if dense:
        return model.parameters * dtype.itemsize + biases
    wide = packed_bytes(2 * model.inner, model.hidden)
    return wide + packed_bytes(model.hidden, model.inner) + biases
