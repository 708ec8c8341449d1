"""What producers call the parts of a weight, and which layers are run as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Names:
    """The tensors of one quantized layer, each below the name of its module.

    Attributes:
        producer: whose names these are.
        codes: uint8 ``(N, K / 2)``.
        scales: E4M3 ``(N, K / 16)``.
        global_scale: one fp32 value.
        divides: whether weights are divided by the global scale, or multiplied.
        input_scale: the same for the layer's input, where activations are quantized too.
    """

    producer: str
    codes: str
    scales: str
    global_scale: str
    divides: bool
    input_scale: str


MODELOPT = Names("modelopt", "weight", "weight_scale", "weight_scale_2", False, "input_scale")
COMPRESSED_TENSORS = Names(
    "compressed-tensors",
    "weight_packed",
    "weight_scale",
    "weight_global_scale",
    True,
    "input_global_scale",
)

# A layer that is run as one and stored as several. The first expert speaks for all of them.
FUSED: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
        "experts": ("experts.0.gate_proj", "experts.0.up_proj", "experts.0.down_proj"),
    }
)

# Gate, up and down of an expert: most models, and those after Mixtral.
EXPERTS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


def sibling(module: str, name: str) -> str:
    """``("a.b.qkv_proj", "q_proj")`` -> ``"a.b.q_proj"``."""
    parent, dot, _ = module.rpartition(".")
    return f"{parent}{dot}{name}"


def shards_of(module: str, fused: Mapping[str, Sequence[str]] = FUSED) -> list[str]:
    """The modules that a fused one is stored as; none for any other."""
    return [sibling(module, name) for name in fused.get(module.rpartition(".")[2], ())]
