"""The block that the suite `end_to_end` runs: Llama's, in plain PyTorch, with pieces to exchange.

Norm, attention with grouped heads and rotary positions, norm, and a gated MLP or a mixture of
experts; for training also the final norm, the head and the loss. What implementations differ in is
in `Pieces` and in the layers that are handed in: everything else is the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-5
DTYPE = torch.bfloat16
_BASE = 500_000.0  # of the wave lengths of rotary positions, as in Llama 3


@dataclass(frozen=True)
class Sizes:
    """Of a block: `head` is the width of one of the `heads`, `groups` the heads of keys and values.

    `inner` is the width of the MLP, or of each of the `experts` if there are any, of which a
    token has `chosen`.
    """

    name: str
    hidden: int
    heads: int
    groups: int
    head: int
    inner: int
    vocabulary: int
    experts: int = 0
    chosen: int = 0

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """The shapes of a block's matrices: query, key and value are one, gate and up another."""
        attention = {
            "qkv": ((self.heads + 2 * self.groups) * self.head, self.hidden),
            "out": (self.hidden, self.heads * self.head),
        }
        if not self.experts:
            wide = {"gate_up": (2 * self.inner, self.hidden), "down": (self.hidden, self.inner)}
            return {**attention, **wide}
        return {
            **attention,
            "router": (self.experts, self.hidden),
            "w13": (self.experts, 2 * self.inner, self.hidden),
            "w2": (self.experts, self.hidden, self.inner),
        }


LLAMA = Sizes("llama-8b", 4096, 32, 8, 128, 14336, 128256)
QWEN = Sizes("qwen3-30b-a3b", 2048, 32, 4, 128, 768, 151936, experts=128, chosen=8)
# So small that a CPU runs them: to see that the suite works.
TINY = Sizes("tiny", 64, 4, 2, 16, 128, 512)
TINY_MIXTURE = Sizes("tiny-moe", 64, 4, 2, 16, 32, 512, experts=8, chosen=2)

Weights = Mapping[str, Tensor]
Router = Callable[[Tensor, int], tuple[Tensor, Tensor]]


class Rotary(NamedTuple):
    """Cosines and sines of the positions of tokens, (tokens, head)."""

    cos: Tensor
    sin: Tensor


class Cache(NamedTuple):
    """Keys and values of the tokens so far, (batch, groups, length, head); `position`: (1,)."""

    keys: Tensor
    values: Tensor
    position: Tensor


class Pieces(NamedTuple):
    """What one implementation does in its own way.

    norm(x, weight); add_norm(x, residual, weight) -> (norm of the sum, sum); gated(gate and up side
    by side) -> silu(gate) * up; loss(hidden states, weight of the head, targets) -> their mean;
    route(logits, count) -> (weights, ids); experts(x, weights, ids, w13, w2).
    """

    norm: Callable[[Tensor, Tensor], Tensor]
    add_norm: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    gated: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor, Tensor, Tensor], Tensor]
    route: Router
    experts: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Mlp(torch.nn.Module):
    """Two layers with a gate in between."""

    def __init__(self, pieces: Pieces, gate_up: torch.nn.Module, down: torch.nn.Module) -> None:
        super().__init__()
        self.pieces, self.gate_up, self.down = pieces, gate_up, down

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.pieces.gated(self.gate_up(x)))
        return result


class Experts(torch.nn.Module):
    """The weights of a mixture's experts, run by `Pieces.experts`."""

    def __init__(self, pieces: Pieces, w13: Tensor, w2: Tensor) -> None:
        super().__init__()
        self.pieces = pieces
        self.w13 = torch.nn.Parameter(w13, requires_grad=False)
        self.w2 = torch.nn.Parameter(w2, requires_grad=False)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return self.pieces.experts(x, weights, ids, self.w13, self.w2)


class Mixture(torch.nn.Module):
    """A router in 16 bits, and experts as they are given: called with tokens, weights and ids."""

    def __init__(
        self, sizes: Sizes, pieces: Pieces, router: torch.nn.Module, experts: torch.nn.Module
    ) -> None:
        super().__init__()
        self.pieces, self.router, self.experts = pieces, router, experts
        self.chosen = sizes.chosen

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, ids = self.pieces.route(self.router(tokens), self.chosen)
        result: Tensor = self.experts(tokens, weights, ids)
        return result.view(x.shape)


class Block(torch.nn.Module):
    """One block of a decoder; `layers` are its linear ones, "qkv" and "out", and its "mlp"."""

    def __init__(
        self, sizes: Sizes, pieces: Pieces, norms: Weights, layers: Mapping[str, torch.nn.Module]
    ) -> None:
        super().__init__()
        self.sizes, self.pieces = sizes, pieces
        self.norm1, self.norm2 = parameter(norms["norm1"]), parameter(norms["norm2"])
        self.qkv, self.out, self.mlp = layers["qkv"], layers["out"], layers["mlp"]

    def forward(
        self, x: Tensor, residual: Tensor | None, rotary: Rotary, cache: Cache | None
    ) -> tuple[Tensor, Tensor]:
        """(batch, tokens, hidden) twice: what the block adds, and what it is to be added to.

        With a cache x is a token of each sequence, and sees all of the cache; without one tokens
        see those before them.
        """
        if residual is None:
            hidden, residual = self.pieces.norm(x, self.norm1), x
        else:
            hidden, residual = self.pieces.add_norm(x, residual, self.norm1)
        attended = self._attended(self.qkv(hidden), rotary, cache)
        hidden, residual = self.pieces.add_norm(self.out(attended), residual, self.norm2)
        return self.mlp(hidden), residual

    def _attended(self, qkv: Tensor, rotary: Rotary, cache: Cache | None) -> Tensor:
        sizes = self.sizes
        heads = qkv.unflatten(-1, (-1, sizes.head)).transpose(1, 2)
        query, key, value = heads.split((sizes.heads, sizes.groups, sizes.groups), 1)
        query, key = rotated(query, rotary), rotated(key, rotary)
        if cache is not None:
            cache.keys.index_copy_(2, cache.position, key)
            cache.values.index_copy_(2, cache.position, value)
            key, value = cache.keys, cache.values
        result = F.scaled_dot_product_attention(
            query, key, value, is_causal=cache is None, enable_gqa=True
        )
        return result.transpose(1, 2).flatten(2)


class Trained(torch.nn.Module):
    """A block with the final norm, the head and the loss behind it."""

    def __init__(self, block: Block, norm: Tensor, head: Tensor) -> None:
        super().__init__()
        self.block, self.norm, self.head = block, parameter(norm), parameter(head)

    def forward(self, x: Tensor, rotary: Rotary, targets: Tensor) -> Tensor:
        hidden, residual = self.block(x, None, rotary, None)
        hidden, _ = self.block.pieces.add_norm(hidden, residual, self.norm)
        return self.block.pieces.loss(hidden, self.head, targets)


class TrainedBlock(torch.nn.Module):
    """A block alone: what the next one gets."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        hidden, residual = self.block(x, None, rotary, None)
        result: Tensor = hidden + residual
        return result


def rotated(x: Tensor, rotary: Rotary) -> Tensor:
    """(batch, heads, tokens, head) turned by their positions, as Hugging Face's Llama does it."""
    first, second = x.chunk(2, -1)
    return x * rotary.cos + torch.cat((-second, first), -1) * rotary.sin


def rotary_of(sizes: Sizes, positions: Tensor) -> Rotary:
    half = torch.arange(0, sizes.head, 2, device=positions.device) / sizes.head
    angles = positions[:, None] / _BASE**half
    angles = torch.cat((angles, angles), -1)
    return Rotary(angles.cos().to(DTYPE), angles.sin().to(DTYPE))


def parameter(tensor: Tensor) -> torch.nn.Parameter:
    """As it is if it is one; frozen otherwise."""
    if isinstance(tensor, torch.nn.Parameter):
        return tensor
    return torch.nn.Parameter(tensor, requires_grad=False)


def linear(weight: Tensor) -> torch.nn.Linear:
    """A layer over this very weight."""
    rows, columns = weight.shape
    layer = torch.nn.Linear(columns, rows, bias=False, device="meta")
    layer.weight = parameter(weight)
    return layer


def dense_block(sizes: Sizes, pieces: Pieces, weights: Weights) -> Block:
    """A block over these very weights, all of 16 bits."""
    mlp: torch.nn.Module
    if sizes.experts:
        experts = Experts(pieces, weights["w13"], weights["w2"])
        mlp = Mixture(sizes, pieces, linear(weights["router"]), experts)
    else:
        mlp = Mlp(pieces, linear(weights["gate_up"]), linear(weights["down"]))
    layers = {"qkv": linear(weights["qkv"]), "out": linear(weights["out"]), "mlp": mlp}
    return Block(sizes, pieces, weights, layers)


def random(shape: tuple[int, ...], generator: torch.Generator, size: float = 1.0) -> Tensor:
    made = torch.randn(shape, generator=generator, device=generator.device, dtype=DTYPE)
    return made.mul_(size)


def make_weights(sizes: Sizes, generator: torch.Generator) -> dict[str, Tensor]:
    """Of one block, such that numbers stay about 1 on their way through it."""
    made = {
        name: random(shape, generator, shape[-1] ** -0.5) for name, shape in sizes.weights.items()
    }
    for name in ("norm1", "norm2"):
        made[name] = random((sizes.hidden,), generator, 0.1) + 1
    return made
