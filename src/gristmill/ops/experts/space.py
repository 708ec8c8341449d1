"""Kinds of calls of mixtures of experts: those of common models, one option at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

# Experts, chosen ones, hidden and inner size.
MODELS = (
    *((8, 2, 4096, 14336), (256, 8, 7168, 2048), (128, 8, 2048, 768), (128, 8, 4096, 1536)),
    *((32, 4, 2880, 2880), (128, 4, 2880, 2880), (160, 8, 5120, 1536), (384, 8, 7168, 2048)),
    *((16, 1, 5120, 8192), (64, 6, 2048, 1408), (8, 2, 64, 64), (128, 1, 2048, 768)),
    *((64, 1, 1024, 1024), (64, 2, 1024, 1024)),
)
LINES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384)


class Options(NamedTuple):
    """What a kernel of experts depends on besides sizes."""

    ids: torch.dtype = torch.int32
    mapped: torch.dtype | None = None
    weights: torch.dtype = torch.float32
    bias: torch.dtype | None = None
    activation: str = "silu"


def options(dtype: torch.dtype) -> Iterator[Options]:
    for weights in dict.fromkeys((torch.float32, dtype)):
        for ids in (torch.int32, torch.int64):
            for mapped in (None, torch.int32):
                yield Options(ids, mapped, weights)
    for activation in ("silu", "gelu", "swiglu_oai"):
        for bias in dict.fromkeys((None, dtype, torch.float32)):
            yield Options(bias=bias, activation=activation)
            yield Options(bias=bias, activation=activation, mapped=torch.int32)


def values(
    option: Options, args: tuple[Any, ...], names: tuple[str, ...], model: Sequence[int]
) -> tuple[Any, ...]:
    """`args` of an example with the values that `option` asks for."""
    experts, _, hidden, inner = model
    found = dict(zip(names, args, strict=True))
    found["topk_weights"] = torch.empty_like(found["topk_weights"], dtype=option.weights)
    found["topk_ids"] = torch.empty_like(found["topk_ids"], dtype=option.ids)
    found["activation"] = option.activation
    if option.mapped is not None:
        found["expert_map"] = torch.empty(2 * experts, dtype=option.mapped, device="meta")
    if option.bias is not None:
        for name, width in (("w13_bias", 2 * inner), ("w2_bias", hidden)):
            found[name] = torch.empty((experts, width), dtype=option.bias, device="meta")
    return tuple(found.values())
