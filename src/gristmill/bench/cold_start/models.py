"""The model that the suite `cold_start` starts: layers of the shapes of Llama 3 8B, in two forms.

Attention itself is other libraries': its place is taken by the query as it is. All layers of a
model are alike, so two of them call every kernel that 32 do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import gristmill
from gristmill import nvfp4

EPS = 1e-5
LAYERS = 2

Shapes = Mapping[str, Sequence[tuple[int, ...]]]


@dataclass(frozen=True)
class Sizes:
    """`decode` and `prefill`: the numbers of tokens in a step, which is then one of either kind."""

    hidden: int
    attention: int  # rows of query, key and value together
    inner: int
    vocabulary: int
    decode: tuple[int, ...]
    prefill: tuple[int, ...]

    @property
    def weights(self) -> tuple[tuple[int, int], ...]:
        """N x K: query, key and value in one; output; gate and up in one; down."""
        return (
            (self.attention, self.hidden),
            (self.hidden, self.hidden),
            (2 * self.inner, self.hidden),
            (self.hidden, self.inner),
        )

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.decode + self.prefill


LLAMA = Sizes(4096, 6144, 14336, 128256, decode=(1, 16, 64), prefill=(1024, 4096))


class Serving:
    """NVFP4 weights, one pass forward, as an inference engine runs it.

    A step of decoding wants logits of every token, one of prefill those of the last.
    """

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes = sizes
        self._table = _random((sizes.vocabulary, sizes.hidden), device)
        self._norms = _random((2 * LAYERS + 1, sizes.hidden), device)
        self._checkpoints = [
            [checkpoint(shape, device) for shape in sizes.weights] for _ in range(LAYERS)
        ]
        self._weights: list[list[nvfp4.PackedNVFP4]] = []
        self._ids = {
            rows: torch.randint(sizes.vocabulary, (rows,), device=device) for rows in sizes.tokens
        }

    @staticmethod
    def needs(sizes: Sizes) -> Shapes:
        """What is to be warmed up: the shapes of each op."""
        norms = [(rows, sizes.hidden) for rows in sizes.tokens]
        products = [(rows, *weight) for weight in sizes.weights for rows in sizes.tokens]
        heads = dict.fromkeys((*sizes.decode, 1))
        return {
            "rms_norm": norms,
            "fused_add_rms_norm_": norms,
            "nvfp4_linear": products,
            "linear": [(rows, sizes.vocabulary, sizes.hidden) for rows in heads],
        }

    def run_torch(self) -> None:
        """What is torch's in a step, so that the first step finds torch ready."""
        for rows in self.sizes.tokens:
            hidden = self._embedded(rows)
            wide = hidden.new_zeros((rows, 2 * self.sizes.inner))
            _gated(wide)
            self._attended(hidden.new_zeros((rows, self.sizes.attention)))
            F.linear(self._last(hidden), self._table)

    def prepare(self) -> None:
        """Weights from the order of checkpoints into that of kernels."""
        self._weights = [
            [weight.prepare(in_place=True) for weight in layer] for layer in self._checkpoints
        ]
        self._checkpoints = []

    def run(self) -> list[torch.Tensor]:
        """A step of each size."""
        return [self._step(rows) for rows in self.sizes.tokens]

    def _step(self, rows: int) -> torch.Tensor:
        residual = self._embedded(rows)
        hidden = gristmill.rms_norm(residual, self._norms[0], EPS)
        for index, (qkv, out, gate_up, down) in enumerate(self._weights):
            if index:
                self._add_norm(hidden, residual, 2 * index)
            attended = self._attended(nvfp4.linear(hidden, qkv))
            hidden = nvfp4.linear(attended, out)
            self._add_norm(hidden, residual, 2 * index + 1)
            hidden = nvfp4.linear(_gated(nvfp4.linear(hidden, gate_up)), down)
        self._add_norm(hidden, residual, 2 * LAYERS)
        return gristmill.linear(self._last(hidden), self._table)

    def _add_norm(self, hidden: torch.Tensor, residual: torch.Tensor, norm: int) -> None:
        gristmill.fused_add_rms_norm_(hidden, residual, self._norms[norm], EPS)

    def _embedded(self, rows: int) -> torch.Tensor:
        return F.embedding(self._ids[rows], self._table)

    def _attended(self, qkv: torch.Tensor) -> torch.Tensor:
        return qkv[:, : self.sizes.hidden].contiguous()

    def _last(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if len(hidden) in self.sizes.decode else hidden[-1:]


class Training:
    """Weights of 16 bits, forward and backward; norms and the loss are gristmill's modules."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self._device = sizes, device
        self._table = _parameter((sizes.vocabulary, sizes.hidden), device)
        self._weights = [
            [_parameter(shape, device) for shape in sizes.weights] for _ in range(LAYERS)
        ]
        self._norms = self._norms_of(gristmill.nn.RMSNorm)
        self._torch_norms = self._norms_of(torch.nn.RMSNorm)

    @staticmethod
    def needs(sizes: Sizes) -> Shapes:
        norms = [(rows, sizes.hidden) for rows in sizes.prefill]
        losses = [(rows, sizes.vocabulary) for rows in sizes.prefill]
        return {
            "rms_norm": norms,
            "rms_norm_backward": norms,
            "cross_entropy": losses,
            "cross_entropy_backward": losses,
        }

    def run_torch(self) -> None:
        """The same step with torch's own norms and loss."""
        for rows in self.sizes.prefill:
            self._step(rows, self._torch_norms, F.cross_entropy)

    def _norms_of(self, kind: type[torch.nn.RMSNorm]) -> list[torch.nn.RMSNorm]:
        count, width = 2 * LAYERS + 1, self.sizes.hidden
        dtype = torch.bfloat16
        return [kind(width, EPS, device=self._device, dtype=dtype) for _ in range(count)]

    def prepare(self) -> None:
        """Nothing: the weights are torch's."""

    def run(self) -> list[torch.Tensor]:
        loss = gristmill.nn.CrossEntropyLoss()
        return [self._step(rows, self._norms, loss) for rows in self.sizes.prefill]

    def _step(
        self, rows: int, norms: Sequence[torch.nn.Module], loss: Callable[..., Any]
    ) -> torch.Tensor:
        ids = torch.randint(self.sizes.vocabulary, (rows + 1,), device=self._device)
        hidden = F.embedding(ids[:-1], self._table)
        for index, (qkv, out, gate_up, down) in enumerate(self._weights):
            normed = norms[2 * index](hidden)
            attended = F.linear(normed, qkv)[:, : self.sizes.hidden]
            hidden = hidden + F.linear(attended, out)
            normed = norms[2 * index + 1](hidden)
            hidden = hidden + F.linear(_gated(F.linear(normed, gate_up)), down)
        value: torch.Tensor = loss(F.linear(norms[-1](hidden), self._table), ids[1:])
        value.backward()
        return value.detach()


FORMS: Mapping[str, type[Serving] | type[Training]] = {"serving": Serving, "training": Training}


def _gated(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def _random(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    # Small enough that nothing overflows on its way through the layers.
    size: float = shape[-1] ** -0.5
    return torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(size)


def _parameter(shape: tuple[int, ...], device: torch.device) -> torch.nn.Parameter:
    return torch.nn.Parameter(_random(shape, device))


def checkpoint(shape: tuple[int, int], device: torch.device) -> nvfp4.NVFP4Tensor:
    """A weight as checkpoints have it, of random codes."""
    rows, columns = shape
    codes = torch.randint(256, (rows, columns // 2), dtype=torch.uint8, device=device)
    scales = torch.ones((rows, columns // 16), device=device).to(torch.float8_e4m3fn)
    size = torch.tensor(0.3 * columns**-0.5, device=device)
    return nvfp4.NVFP4Tensor(codes, scales, size)
