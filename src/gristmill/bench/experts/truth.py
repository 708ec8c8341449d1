"""What experts should give: in fp64 for some tokens, and by a pipeline in 16 bits for all.

In fp64 all tokens of a large batch would take longer than everything that is timed, and a few
tokens have as many values as an error needs. What is wrong elsewhere shows against the pipeline,
which is the layer as one writes it in torch: the weights in the dtype of x, gate and up rounded to
it, the activation in it, the result of each expert, and their weighted sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from gristmill.bench.check import WrongResultError, check_lines
from gristmill.bench.precision import precision
from gristmill.formats.nvfp4 import NVFP4Tensor, dequantize

# Tokens that are computed in fp64.
TOKENS = 16
# A pipeline in bf16 is off by 0.4% of a row's norm; one wrong expert of eight by far more.
LIMIT = 0.03
OAI_SLOPE = 1.702


class Truth:
    """What a call should give."""

    def __init__(
        self,
        x: torch.Tensor,
        shares: torch.Tensor,
        ids: torch.Tensor,
        w13: NVFP4Tensor,
        w2: NVFP4Tensor,
        w13_bias: torch.Tensor | None,
        w2_bias: torch.Tensor | None,
        activation: str,
        limit: float | None,
    ) -> None:
        count = min(TOKENS, len(x))
        self.tokens = torch.linspace(0, len(x) - 1, count, device=x.device).round().long()
        self.pipeline = layer(
            *(x, shares, ids, w13, w2, w13_bias, w2_bias, activation, limit), dtype=x.dtype
        )
        x, shares, ids = (each[self.tokens] for each in (x, shares, ids))
        self.exact = layer(
            *(x, shares, ids, w13, w2, w13_bias, w2_bias, activation, limit), dtype=torch.float64
        )
        self.told = {
            f"pipeline_{name}": value
            for name, value in precision(self.pipeline[self.tokens], self.exact).items()
        }
        check_lines(self.pipeline[self.tokens], self.exact.to(x.dtype), limit=LIMIT)

    def precision(self, outputs: Any) -> dict[str, float | None]:
        """How far a result is from fp64, beside how far the pipeline is."""
        if not isinstance(outputs, torch.Tensor) or outputs.shape != self.pipeline.shape:
            return dict(self.told)
        return {**precision(outputs[self.tokens], self.exact), **self.told}

    def check(self, outputs: Any, *, coarse: bool = False) -> float:
        """The largest relative error of a row or column; WrongResultError if it is too large."""
        if not isinstance(outputs, torch.Tensor):
            raise WrongResultError(f"gives {type(outputs).__name__} instead of a tensor")
        error = check_lines(outputs, self.pipeline, limit=LIMIT)
        exact = self.exact.to(outputs.dtype)
        return max(error, check_lines(outputs[self.tokens], exact, limit=LIMIT))


def layer(
    x: torch.Tensor,
    shares: torch.Tensor,
    ids: torch.Tensor,
    w13: NVFP4Tensor,
    w2: NVFP4Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    activation: str,
    limit: float | None,
    *,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The layer in `dtype`, expert by expert; what each gives is rounded to it, and their sum."""
    slots = torch.zeros((*ids.shape, x.shape[1]), dtype=dtype, device=x.device)
    for expert, token, place in _by_expert(ids):
        wide, back = (
            dequantize(NVFP4Tensor(w.codes[expert], w.scales[expert], w.row_scale[expert]), dtype)
            for w in (w13, w2)
        )
        both = x[token].to(dtype) @ wide.t()
        if w13_bias is not None:
            both = both + w13_bias[expert].to(dtype)
        out = activate(both, activation, limit) @ back.t()
        if w2_bias is not None:
            out = out + w2_bias[expert].to(dtype)
        slots[token, place] = out
    return combine(slots, shares)


def activate(both: torch.Tensor, activation: str, limit: float | None) -> torch.Tensor:
    """Of gate and up side by side, as torch computes it: each step rounded to the dtype."""
    gate, up = both.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "swiglu_oai":
        return gate * torch.sigmoid(OAI_SLOPE * gate) * (up + 1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate)) * up


def combine(slots: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """The weighted sum over each token's experts, ``(M, k, H)`` to ``(M, H)``, rounded once."""
    exact = torch.float64 if slots.dtype == torch.float64 else torch.float32
    total = torch.zeros((len(slots), slots.shape[-1]), dtype=exact, device=slots.device)
    for place in range(slots.shape[1]):
        total += slots[:, place].to(exact) * shares[:, place, None].to(exact)
    return total.to(slots.dtype)


def _by_expert(ids: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Each expert that has tokens, these, and at which of their places it stands."""
    flat = ids.flatten().long()
    order = flat.argsort(stable=True)
    experts, counts = flat.unique(return_counts=True)
    first = 0
    for expert, count in zip(experts.tolist(), counts.tolist(), strict=True):
        slots = order[first : first + count]
        first += count
        if expert >= 0:
            yield expert, slots // ids.shape[1], slots % ids.shape[1]
