"""Who runs the block of the suite `end_to_end`, and what each of them does in its own way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import gristmill
from gristmill.bench.end_to_end.model import EPS, Pieces
from gristmill.bench.peers.experts import grouped_mm
from gristmill.bench.results import OURS


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _norm(total, weight), total


def _gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


def _loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    # In fp32, as training code does it: in bf16 torch's gradients would be off by some percent.
    logits = F.linear(hidden, head).float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _route(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    chosen, ids = logits.float().topk(count, -1)
    return chosen.softmax(-1), ids


def _experts(x: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """By torch's grouped product: tokens in the order of their experts, and back. Reads nothing
    back to the host."""
    expert, order = ids.flatten().sort(stable=True)
    every = torch.arange(w13.shape[0], device=x.device, dtype=expert.dtype)
    ends = torch.searchsorted(expert, every, right=True).int()
    rows = x[order // ids.shape[1]]
    inner = _gated(grouped_mm(rows, w13.transpose(-2, -1), offs=ends))
    made = grouped_mm(inner, w2.transpose(-2, -1), offs=ends)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    slots = made[places].unflatten(0, ids.shape).float()
    result: Tensor = (slots * weights.unsqueeze(-1)).sum(1).to(x.dtype)
    return result


TORCH = Pieces(_norm, _add_norm, _gated, _loss, _route, _experts)


def _our_norm(x: Tensor, weight: Tensor) -> Tensor:
    return gristmill.rms_norm(x, weight, EPS)


def _our_add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return gristmill.add_rms_norm(x, residual, weight, EPS)


def _our_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    loss = gristmill.cross_entropy(F.linear(hidden, head), targets, one_pass=True)
    assert isinstance(loss, Tensor), "a pair only if the log-sum-exp is asked for"
    return loss


def _our_linear_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    return gristmill.linear_cross_entropy(hidden, head, targets)


def _our_route(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return gristmill.topk_router(logits, count)


def _our_experts(x: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    return gristmill.moe(x, weights, ids, w13, w2)


GRISTMILL = TORCH._replace(
    norm=_our_norm,
    add_norm=_our_add_norm,
    loss=_our_loss,
    route=_our_route,
    experts=_our_experts,
)
GRISTMILL_LINEAR = GRISTMILL._replace(loss=_our_linear_loss)


def liger(*, linear_loss: bool = False) -> Pieces:
    """Liger's functions for training, with everything in fp32 and rounded once in its norms."""
    from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction
    from liger_kernel.transformers import functional

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        y: Tensor = functional.liger_rms_norm(x, weight, EPS, casting_mode="gemma")
        return y

    def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y, total = functional.liger_fused_add_rms_norm(
            x, residual, weight, EPS, casting_mode="gemma"
        )
        return y, total

    def gated(both: Tensor) -> Tensor:
        rows: Tensor = LigerFusedGateUpSiLUMulFunction.apply(both.flatten(0, -2))
        return rows.view(*both.shape[:-1], -1)

    def loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        rows, classes = hidden.flatten(0, -2), targets.flatten()
        value: Tensor
        if linear_loss:
            value = functional.liger_fused_linear_cross_entropy(rows, head, classes)
        else:
            value = functional.liger_cross_entropy(F.linear(rows, head), classes)
        return value

    return TORCH._replace(norm=norm, add_norm=add_norm, gated=gated, loss=loss)


@dataclass(frozen=True)
class Implementation:
    """One way to run the block: `pieces` is asked for them when they are needed."""

    name: str
    peer: str
    pieces: Callable[[], Pieces]
    compiled: bool = False
    nvfp4: bool = False

    @property
    def is_ours(self) -> bool:
        return self.peer == OURS


_EAGER = Implementation("eager", "eager", lambda: TORCH)
_INDUCTOR = Implementation("inductor", "inductor", lambda: TORCH, compiled=True)
_OURS = Implementation("gristmill", OURS, lambda: GRISTMILL)
_COMPILED = Implementation("gristmill_compiled", OURS, lambda: GRISTMILL, compiled=True)
_LIGER = Implementation("liger", "liger", liger)

# The first of each is what the others are held against.
TRAINING_BLOCK = (_EAGER, _INDUCTOR, _OURS, _COMPILED, _LIGER)
TRAINING = (
    *TRAINING_BLOCK,
    Implementation("gristmill_linear_loss", OURS, lambda: GRISTMILL_LINEAR),
    Implementation("liger_linear_loss", "liger", lambda: liger(linear_loss=True)),
)
DECODING = (
    *(_EAGER, _INDUCTOR, _OURS, _COMPILED),
    Implementation("gristmill_nvfp4", OURS, lambda: GRISTMILL, nvfp4=True),
    Implementation("gristmill_nvfp4_compiled", OURS, lambda: GRISTMILL, compiled=True, nvfp4=True),
)
