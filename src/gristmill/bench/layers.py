"""The weights of linear layers that benchmarks are about: N x K, by the models that have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Layer = tuple[int, int]

# Query, key and value in one; output; gate and up in one; down: what an inference engine runs.
MODELS: Mapping[str, tuple[Layer, ...]] = {
    "llama3_8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "llama3_70b": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
    "qwen3_32b": ((10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600)),
    # The two down-projections of attention in one, its query, its output; w13 and w2 of an expert.
    "deepseek_v3": ((2112, 7168), (24576, 1536), (7168, 16384), (4096, 7168), (7168, 2048)),
}
# From small to large, for a first look.
FEW: tuple[Layer, ...] = ((4096, 4096), (8192, 8192), (28672, 4096), (57344, 8192))
SETS: Mapping[str, tuple[Layer, ...]] = {"few": FEW, **MODELS}


def products(tokens: Sequence[int], layers: Sequence[Layer]) -> tuple[tuple[int, int, int], ...]:
    """M x N x K of these layers at these numbers of tokens, layer by layer."""
    return tuple((rows, *layer) for layer in layers for rows in tokens)
