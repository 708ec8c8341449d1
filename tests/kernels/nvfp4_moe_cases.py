"""Mixtures of NVFP4 experts for the emulation, and what a kernel may answer to them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from emulated_host import EmulatedHost, Run
from exact import UNIT, Range

from gristmill.formats.nvfp4.tensor import NVFP4Tensor, dequantize
from gristmill.ops.experts.semantics import Activation, local_ids
from gristmill.ops.nvfp4_moe.problem import forward_problem
from gristmill.ops.nvfp4_moe.wgmma import Wgmma
from gristmill.ops.nvfp4_moe.wgmma_configs import ADD, Cut, MoeConfig, Product, products
from gristmill.select.device import KNOWN, Device
from gristmill.select.problem import Problem

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Few multiprocessors: a block that stays has unit after unit.
DEVICE = replace(KNOWN["sm_90a"], multiprocessors=3)
# Row groups, column groups, depth, stages, split, blocks.
SMALL: Cut = (1, 1, 2, 2, 1, 1)
GROUPS: Cut = (1, 2, 4, 2, 1, 1)
PLAIN = MoeConfig(SMALL, SMALL, 16)
APART = replace(PLAIN, added=False)
ADDING = MoeConfig(GROUPS, GROUPS, 16)
# One of each kind, by name.
CUTS = {
    "plain": PLAIN,
    "rows": MoeConfig((2, 1, 2, 3, 1, 1), (2, 1, 4, 3, 1, 1), 8, wide=False),
    "groups": MoeConfig(GROUPS, (1, 4, 8, 2, 1, 1), 8, wide=False),
    "rows and groups": MoeConfig((2, 2, 8, 2, 1, 1), (2, 2, 4, 2, 1, 1), 64),
    "split": MoeConfig((1, 1, 2, 2, 2, 1), (1, 2, 4, 2, 2, 1), 16),
    "rows, split": MoeConfig((2, 1, 2, 2, 2, 1), (1, 1, 2, 2, 3, 1), 32, wide=False),
    "split in 4": MoeConfig((1, 2, 4, 2, 4, 1), (2, 1, 2, 2, 2, 1), 64),
}
ROUTINGS: tuple[Literal["scan", "launch"], ...] = ("scan", "launch")
# Who puts slots in order, and whether the second product adds: not where slots are scanned.
WAYS: tuple[tuple[Literal["scan", "launch"], bool], ...] = (
    *(("scan", False), ("launch", True), ("launch", False)),
)


class Weight:
    """A stack of matrices: what kernels get of it, and its numbers in fp64."""

    def __init__(self, shape: tuple[int, int, int], pairs: bool, seed: int) -> None:
        experts, rows, columns = shape
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randint(0, 256, (experts, rows, columns // 2), generator=generator)
        # From 2^-2 to 4, and some that are zero.
        raw = torch.randint(0x28, 0x49, (experts, rows, columns // 16), generator=generator)
        raw = torch.where(torch.rand(raw.shape, generator=generator) < 0.1, 0, raw)
        row_scale = torch.rand((experts, rows), generator=generator) + 0.5
        weight = NVFP4Tensor(
            codes.to(torch.uint8),
            raw.to(torch.uint8).view(torch.float8_e4m3fn),
            row_scale / (4 * columns**0.5),
        )
        packed = weight.prepare("sm_90a", pairs=pairs)
        assert packed.layout == ("pairs" if pairs else "fragments")
        self.shape = shape
        self.parts = (packed.codes, packed.scales, packed.row_scale)
        self.values = dequantize(weight, torch.float64)
        self.sizes = self.values.abs()


# Packing takes longer than anything else here.
_weight = functools.lru_cache(maxsize=32)(Weight)


@dataclass(frozen=True)
class Mixture:
    """A call: sizes, dtypes, and how tokens are routed."""

    tokens: int = 5
    experts: int = 4
    topk: int = 2
    hidden: int = 80
    inner: int = 48
    x: torch.dtype = BF16
    activation: str = "silu"
    limit: float | None = None
    alpha: float | None = None
    w13_bias: torch.dtype | None = None
    w2_bias: torch.dtype | None = None
    weights: torch.dtype = F32
    ids: torch.dtype = torch.int32
    seed: int = 0

    def call(self, ids: torch.Tensor | None = None, expert_map: torch.Tensor | None = None) -> Call:
        """Random values of the size that layers have, on `ids`, or as they fall."""
        generator = torch.Generator().manual_seed(self.seed)
        wide = _weight((self.experts, 2 * self.inner, self.hidden), True, self.seed)
        back = _weight((self.experts, self.hidden, self.inner), False, self.seed + 1000)
        # NaN around x, which nobody may read.
        around = torch.full((self.tokens + 3, self.hidden + 24), float("nan"), dtype=self.x)
        x = around[: self.tokens, : self.hidden]
        x.copy_(torch.randn(x.shape, generator=generator))
        shares = torch.rand((self.tokens, self.topk), generator=generator) * 2 - 0.5
        if ids is None:
            scores = torch.rand(self.tokens, max(self.topk, self.experts), generator=generator)
            ids = scores.topk(self.topk, -1).indices % self.experts

        def bias(dtype: torch.dtype | None, width: int) -> torch.Tensor | None:
            values = torch.randn((self.experts, width), generator=generator) * 2
            return None if dtype is None else values.to(dtype)

        return Call(
            *(x, shares.to(self.weights), ids.to(self.ids), wide, back),
            *(bias(self.w13_bias, 2 * self.inner), bias(self.w2_bias, self.hidden)),
            Activation(self.activation, self.limit, self.alpha),
            expert_map,
        )


@dataclass(frozen=True)
class Call:
    """The tensors of a call."""

    x: torch.Tensor
    shares: torch.Tensor
    ids: torch.Tensor
    w13: Weight
    w2: Weight
    w13_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None
    act: Activation
    expert_map: torch.Tensor | None = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        parts = (*self.w13.parts, *self.w2.parts)
        biases = (self.w13_bias, self.w2_bias)
        options = (self.act.name, self.act.limit, self.expert_map, "fragments", self.act.alpha)
        return (self.x, self.shares, self.ids, *parts, *biases, *options)

    def some(self, tokens: slice | list[int]) -> Call:
        """The same of some of the tokens."""
        return replace(self, x=self.x[tokens], shares=self.shares[tokens], ids=self.ids[tokens])

    def problem(self, device: Device = DEVICE) -> Problem:
        problem = forward_problem(device, *self.arguments)
        assert Wgmma().supports(problem) is None
        return problem

    def run(
        self, host: EmulatedHost, config: MoeConfig, order: int = 0, device: Device = DEVICE
    ) -> Run:
        return host.run(Wgmma(), self.problem(device), config, self.arguments, order=order)

    def exact(self, config: MoeConfig) -> Range:
        """In fp64, with h rounded to x's dtype, and what experts give where that is kept so.

        Sums of fp32 may be off, so h may be what the next number rounds to; that goes on as a
        range.
        """
        # What an expert gives may be more than fp16 holds.
        narrow = not config.wide and self.x.dtype != F16 and not self._is_added(config)
        ids = local_ids(self.ids, self.expert_map, self.w13.shape[0])
        x, dtype = self.x.double(), self.x.dtype
        low = torch.zeros_like(x)
        high, size = low.clone(), low.clone()
        for slot, expert in enumerate(ids.flatten().tolist()):
            if expert < 0:
                continue
            token, j = divmod(slot, ids.shape[1])
            h = self._inner(x[token], expert)
            w2, w2_size = self.w2.values[expert], self.w2.sizes[expert]
            middle, off = (h.low + h.high) / 2, (h.high - h.low) / 2
            shift = 0.0 if self.w2_bias is None else self.w2_bias[expert].double()
            value = w2 @ middle + shift
            error = w2_size @ off + _slack(w2_size @ h.size(), len(middle))
            error = error + 2 * UNIT * value.abs()
            given = Range(value - error, value + error)
            if narrow:
                given = given.rounded(dtype)
            share = given.times(self.shares[token, j].double())
            share = share.widened(share.size() * 2 * UNIT)
            low[token] += share.low
            high[token] += share.high
            size[token] += share.size()
        return Range(low, high).widened(size * (2 * ids.shape[1] * UNIT))

    def _inner(self, x: torch.Tensor, expert: int) -> Range:
        both = self.w13.values[expert] @ x
        error = _slack(self.w13.sizes[expert] @ x.abs(), len(x))
        if self.w13_bias is not None:
            both = both + self.w13_bias[expert].double()
        error = error + 2 * UNIT * both.abs()
        gate, up = both.chunk(2)
        gate_error, up_error = error.chunk(2)
        h = self.act.apply(gate, up)
        # No activation here is steeper than 1.13, nor larger than gate.
        factor = up.abs() + 1
        h_error = 1.13 * gate_error * factor + gate.abs() * up_error
        h_error = h_error + 8 * UNIT * (1 + gate.abs()) * gate.abs() * factor
        return Range(h, h).widened(h_error).rounded(self.x.dtype)

    def products(self, config: MoeConfig) -> tuple[Product, Product]:
        tokens, hidden = self.x.shape
        inner = self.w2.shape[2]
        return products(config, tokens, self.ids.shape[1], hidden, inner, DEVICE)

    def _is_added(self, config: MoeConfig) -> bool:
        return self.products(config)[1].step == ADD

    def check(self, y: torch.Tensor, config: MoeConfig) -> None:
        assert y.dtype == self.x.dtype
        self.exact(config).check(y, f"{config}")


def _slack(size: torch.Tensor, columns: int) -> torch.Tensor:
    """How far sums in fp32 of so many products may be off, in any order."""
    return 2 * UNIT * (columns + 8) * size
