"""Norms of many kinds, and modules that look like norms and are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.deberta.modeling_deberta import DebertaLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

SIZE = 48


class Norm(nn.Module):
    """A base for the classes below: a weight, and an eps by an unusual name."""

    def __init__(self, size: int = SIZE, small: float = 1e-5):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))
        self.small = small


class HiddenName(Norm):
    """An RMSNorm whose class, weight and eps are called otherwise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, True) + self.small) * self.scale).to(x)


class HardCodedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(SIZE))
        self.beta = nn.Parameter(torch.zeros(SIZE))

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        wide = hidden.float()
        centred = wide - wide.mean(-1, keepdim=True)
        y = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-3)
        return (y * self.gamma.float() + self.beta.float()).to(hidden.dtype)


class BufferNorm(nn.Module):
    """Its weight is a buffer, and belongs to no optimiser."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(SIZE))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (SIZE,), self.weight, self.eps)


class EpsOnDeviation(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x / (x.square().mean(-1, keepdim=True).sqrt() + self.small)


class ClampedNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * F.normalize(x, dim=-1, eps=self.small) * SIZE**0.5


class UnbiasedNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        variance = x.var(-1, keepdim=True)
        return self.scale * (x - x.mean(-1, keepdim=True)) * torch.rsqrt(variance + self.small)


class DetachedNorm(Norm):
    """As an RMSNorm, but for its gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x * torch.rsqrt(x.square().mean(-1, True) + self.small).detach()


class NoisyNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.rms_norm(x, (SIZE,), self.scale, self.small)
        return y + torch.randn_like(y) if self.training else y


class CalmNorm(Norm):
    """Something else in evaluation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.rms_norm(x, (SIZE,), self.scale, self.small)
        return y if self.training else 2 * y


class PairNorm(Norm):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.rms_norm(x, (SIZE,), self.scale, self.small), x


class InPlaceNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x *= torch.rsqrt(x.square().mean(-1, keepdim=True) + self.small)
        return x * self.scale


class GatedNorm(Norm):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        y = F.rms_norm(x, (SIZE,), self.scale, self.small)
        return y if gate is None else y * gate


class EitherNorm(Norm):
    """Channels last in three dims, second in four: only the first is a norm over the last dim."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() < 4:
            return F.layer_norm(x, (SIZE,), self.scale, None, self.small)
        return F.layer_norm(x.movedim(1, -1), (SIZE,), self.scale, None, self.small).movedim(-1, 1)


class HalfNorm(Norm):
    """Squares and means in the input's own dtype: right in fp32 alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.small))


class UnitLength(nn.Module):
    """Not called a norm, but near one."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.norm(dim=-1, keepdim=True).clamp_min(self.eps)


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gamma


# What each is recognised as.
NORMS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "llama": (lambda: LlamaRMSNorm(SIZE, 1e-5), "rms_norm(eps=1e-05, casting='llama')"),
    "qwen3": (lambda: Qwen3RMSNorm(SIZE), "rms_norm(eps=1e-06, casting='llama')"),
    "gemma": (lambda: GemmaRMSNorm(SIZE), "rms_norm(eps=1e-06, weight_offset=1.0)"),
    "gemma2": (lambda: Gemma2RMSNorm(SIZE), "rms_norm(eps=1e-06, weight_offset=1.0)"),
    "gemma3": (lambda: Gemma3RMSNorm(SIZE), "rms_norm(eps=1e-06, weight_offset=1.0)"),
    "t5": (lambda: T5LayerNorm(SIZE), "rms_norm(eps=1e-06, casting='llama')"),
    "cohere": (lambda: CohereLayerNorm(SIZE), "layer_norm(eps=1e-05)"),
    "olmo": (lambda: OlmoLayerNorm(SIZE), "layer_norm(eps=1e-05)"),
    "nemotron": (lambda: NemotronLayerNorm1P(SIZE), "layer_norm(eps=1e-05, weight_offset=1.0)"),
    "deberta": (lambda: DebertaLayerNorm(SIZE, 1e-7), "layer_norm(eps=1e-07)"),
    "layer": (lambda: nn.LayerNorm(SIZE), "layer_norm(eps=1e-05)"),
    "layer_12": (lambda: nn.LayerNorm(SIZE, eps=1e-12), "layer_norm(eps=1e-12)"),
    "layer_no_bias": (lambda: nn.LayerNorm(SIZE, bias=False), "layer_norm(eps=1e-05)"),
    "layer_plain": (
        lambda: nn.LayerNorm(SIZE, elementwise_affine=False),
        "layer_norm(eps=1e-05)",
    ),
    "layer_dims": (lambda: nn.LayerNorm((4, SIZE // 4)), "layer_norm(eps=1e-05)"),
    "rms": (lambda: nn.RMSNorm(SIZE), "rms_norm(eps=None)"),
    "rms_eps": (lambda: nn.RMSNorm(SIZE, eps=3e-4), "rms_norm(eps=0.0003)"),
    "rms_zero": (lambda: nn.RMSNorm(SIZE, eps=0.0), "rms_norm(eps=0.0)"),
    "rms_dims": (
        lambda: nn.RMSNorm((4, SIZE // 4), eps=1e-6, elementwise_affine=False),
        "rms_norm(eps=1e-06)",
    ),
    "hidden_name": (HiddenName, "rms_norm(eps=1e-05)"),
    "hard_coded": (HardCodedNorm, "layer_norm(eps=0.001)"),
    "buffer": (BufferNorm, "rms_norm(eps=1e-06)"),
}

# What each is left for: part of the reason.
NOT_NORMS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "eps_on_deviation": (EpsOnDeviation, "treats eps otherwise"),
    "clamped": (ClampedNorm, "eps is not found"),
    "unbiased": (UnbiasedNorm, "no RMSNorm or LayerNorm of its input"),
    "detached": (DetachedNorm, "its gradient"),
    "noisy": (NoisyNorm, "no RMSNorm or LayerNorm of its input"),
    "calm": (CalmNorm, "something else in evaluation"),
    "pair": (PairNorm, "no tensor but tuple"),
    "in_place": (InPlaceNorm, "changes its input"),
    "gated": (GatedNorm, "a second argument (gate)"),
    "either": (EitherNorm, "whose end is not the last dim"),
    "group": (lambda: nn.GroupNorm(1, SIZE), "fails: RuntimeError"),
    "batch": (lambda: nn.BatchNorm1d(SIZE), "a buffer of one number (num_batches_tracked)"),
    "instance": (lambda: nn.InstanceNorm2d(SIZE), "no RMSNorm or LayerNorm of its input"),
    "heads": (lambda: CohereLayerNorm((4, SIZE)), "the shape (4, 48)"),
    "one_column": (lambda: nn.LayerNorm(1), "a single column"),
    "unit_length": (UnitLength, "no RMSNorm or LayerNorm of its input"),
    "local": (lambda: nn.LocalResponseNorm(2), "no RMSNorm or LayerNorm of its input"),
}


def with_weights(make: Callable[[], nn.Module], *, seed: int = 0) -> nn.Module:
    """The module, its weights random."""
    generator = torch.Generator().manual_seed(seed)
    module = make()
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.is_floating_point():
            tensor.data += 0.3 * torch.randn(tensor.shape, generator=generator)
    return module
