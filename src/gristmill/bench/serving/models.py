"""The models that the suite `vllm` serves: configs alone, since vLLM makes up weights for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA_8B: dict[str, Any] = {
    **_COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
QWEN3_30B_A3B: dict[str, Any] = {
    **_COMMON,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}
# So small that a CPU serves it: to see that the suite works.
TINY: dict[str, Any] = {
    **LLAMA_8B,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
}
MODELS = {"llama-8b": LLAMA_8B, "qwen3-30b-a3b": QWEN3_30B_A3B}
KNOWN = {**MODELS, "tiny": TINY}

# As ModelOpt's checkpoints say of themselves; heads and routers stay dense.
NVFP4: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "W4A16_NVFP4",
    "group_size": 16,
    "kv_cache_scheme": None,
    "ignore": ["lm_head", "*.mlp.gate"],
    "producer": {"name": "modelopt", "version": "0.30"},
}


def write_config(folder: Path, name: str, *, nvfp4: bool) -> None:
    """The whole of what vLLM needs to make the model, with `load_format="dummy"`."""
    config = {**KNOWN[name], **({"quantization_config": NVFP4} if nvfp4 else {})}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def weight_bytes(config: Mapping[str, Any], *, nvfp4: bool) -> int:
    """What the weights take: NVFP4 is 9 bits for each value of a linear layer, all else 16."""
    hidden: int = config["hidden_size"]
    head: int = config["head_dim"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    attention = hidden * head * (2 * heads + 2 * groups)
    inside = 3 * hidden * inner * config.get("num_experts", 1)
    linears: int = config["num_hidden_layers"] * (attention + inside)
    dense: int = 2 * config["vocab_size"] * hidden
    return 2 * dense + (linears * 9 // 16 if nvfp4 else 2 * linears)


def kv_cache_bytes(config: Mapping[str, Any], tokens: int) -> int:
    """What keys and values of so many tokens take, in 16 bits."""
    width: int = config["num_key_value_heads"] * config["head_dim"]
    layers: int = config["num_hidden_layers"]
    return 2 * 2 * layers * width * tokens
