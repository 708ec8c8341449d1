"""Tiny models of random weights, written as NVFP4 checkpoints of both producers and as dense ones.

The global scales of q, k and v differ by a factor of ten, and so do those of gate and up: whoever
takes one for all of them gets other numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gristmill.nvfp4 import NVFP4Tensor, dequantize, quantize

VOCABULARY = 256
PROMPTS = [[7, 3, 250, 41, 98, 5, 17, 6, 200, 33, 121, 9], [11, 2, 64, 190, 77], [1]]

COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = {
    **COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "intermediate_size": 256,
}
QWEN3_MOE = {
    **COMMON,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
SPREAD = {
    "q_proj": 0.08,
    "k_proj": 0.3,
    "v_proj": 0.02,
    "o_proj": 0.1,
    "gate_proj": 0.3,
    "up_proj": 0.03,
    "down_proj": 0.1,
}


@dataclass
class TinyModel:
    """A config, its NVFP4 matrices by module name, and its dense tensors by full name."""

    config: dict[str, Any]
    quantized: dict[str, NVFP4Tensor] = field(default_factory=dict)
    dense: dict[str, torch.Tensor] = field(default_factory=dict)

    def dequantized(self) -> dict[str, torch.Tensor]:
        matrices = {f"{name}.weight": dequantize(w) for name, w in self.quantized.items()}
        return {**self.dense, **matrices}

    def ignored(self) -> list[str]:
        gates = [name.removesuffix(".weight") for name in self.dense if ".mlp.gate." in name]
        return ["lm_head", *gates]


def tiny_llama(**changes: Any) -> TinyModel:
    """`changes` are entries of its config."""
    return _tiny({**LLAMA, **changes}, "model.layers.{}.mlp")


def tiny_qwen3_moe(**changes: Any) -> TinyModel:
    config = {**QWEN3_MOE, **changes}
    experts = range(config["num_experts"])
    return _tiny(config, *(f"model.layers.{{}}.mlp.experts.{e}" for e in experts))


def with_one_scale(model: TinyModel, parts: Sequence[str]) -> TinyModel:
    """`model` for a loader that takes the largest global scale of `parts` for all of them."""
    quantized = dict(model.quantized)
    for name in model.quantized:
        stem, _, last = name.rpartition(".")
        if last in parts:
            largest = max(model.quantized[f"{stem}.{part}"].global_scale for part in parts)
            weight = model.quantized[name]
            quantized[name] = NVFP4Tensor(weight.codes, weight.scales, largest)
    return TinyModel(model.config, quantized, model.dense)


def write_dense(model: TinyModel, folder: Path) -> Path:
    """The same values without quantization."""
    return _write(folder, model.config, model.dequantized())


def write_modelopt(
    model: TinyModel,
    folder: Path,
    *,
    legacy: bool = False,
    kv_scales: tuple[float, float] | None = None,
) -> Path:
    """As ModelOpt exports W4A4.

    `legacy` keeps its config in hf_quant_config.json alone; `kv_scales` are those of an FP8 cache.
    """
    tensors = dict(model.dense)
    more: dict[str, Any] = {}
    if kv_scales:
        more["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "dynamic": False}
        for layer in range(model.config["num_hidden_layers"]):
            for which, scale in zip("kv", kv_scales, strict=True):
                name = f"model.layers.{layer}.self_attn.{which}_proj.{which}_scale"
                tensors[name] = torch.tensor(scale)
    for name, weight in model.quantized.items():
        tensors[f"{name}.weight"] = weight.codes
        tensors[f"{name}.weight_scale"] = weight.scales
        tensors[f"{name}.weight_scale_2"] = weight.global_scale
        tensors[f"{name}.input_scale"] = torch.tensor(0.01)
    config = dict(model.config)
    if not legacy:
        config["quantization_config"] = modelopt_config(model.ignored(), **more)
    folder = _write(folder, config, tensors)
    (folder / "hf_quant_config.json").write_text(json.dumps(hf_quant_config(model.ignored())))
    return folder


def write_compressed_tensors(model: TinyModel, folder: Path) -> Path:
    """As llm-compressor writes NVFP4 weights and activations."""
    tensors = dict(model.dense)
    for name, weight in model.quantized.items():
        tensors[f"{name}.weight_packed"] = weight.codes
        tensors[f"{name}.weight_scale"] = weight.scales
        tensors[f"{name}.weight_global_scale"] = weight.global_scale.reciprocal().reshape(1)
        tensors[f"{name}.input_global_scale"] = torch.tensor([100.0])
    config = {**model.config, "quantization_config": compressed_tensors_config(model.ignored())}
    return _write(folder, config, tensors)


def modelopt_config(ignore: Sequence[str], **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "ignore": list(ignore),
        "producer": {"name": "modelopt", "version": "0.39.0"},
        **more,
    }


def hf_quant_config(ignore: Sequence[str], **more: Any) -> dict[str, Any]:
    return {
        "producer": {"name": "modelopt", "version": "0.29.0"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": list(ignore),
            **more,
        },
    }


def compressed_tensors_config(ignore: Sequence[str], **more: Any) -> dict[str, Any]:
    values = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
    }
    group = {
        "targets": ["Linear"],
        "weights": {**values, "dynamic": False},
        "input_activations": {**values, "dynamic": "local"},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "quantization_status": "compressed",
        **more,
    }


def log_probabilities(folder: Path, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Of every next token, (length, vocabulary), by Hugging Face's own model in fp32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    with torch.no_grad():
        return [
            model(torch.tensor([list(sequence)])).logits[0].float().log_softmax(-1)
            for sequence in sequences
        ]


def _tiny(config: dict[str, Any], *mlps: str) -> TinyModel:
    generator = torch.Generator().manual_seed(1)
    model = TinyModel(config)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std

    hidden, head = config["hidden_size"], config["head_dim"]
    model.dense["model.embed_tokens.weight"] = normal(VOCABULARY, hidden, std=1.0)
    model.dense["lm_head.weight"] = normal(VOCABULARY, hidden, std=0.1)
    model.dense["model.norm.weight"] = 1 + normal(hidden, std=0.1)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            model.dense[f"{prefix}.{norm}.weight"] = 1 + normal(hidden, std=0.1)
        for name, rows, columns in _matrices(config, prefix, [mlp.format(layer) for mlp in mlps]):
            spread = SPREAD[name.rpartition(".")[2]]
            model.quantized[name] = quantize(normal(rows, columns, std=spread))
        if config["model_type"] == "qwen3_moe":
            experts = config["num_experts"]
            model.dense[f"{prefix}.mlp.gate.weight"] = normal(experts, hidden, std=0.5)
            for norm in ("q_norm", "k_norm"):
                model.dense[f"{prefix}.self_attn.{norm}.weight"] = 1 + normal(head, std=0.1)
    return model


def _matrices(
    config: dict[str, Any], prefix: str, mlps: Sequence[str]
) -> Iterator[tuple[str, int, int]]:
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    yield f"{prefix}.self_attn.q_proj", queries, hidden
    yield f"{prefix}.self_attn.k_proj", keys, hidden
    yield f"{prefix}.self_attn.v_proj", keys, hidden
    yield f"{prefix}.self_attn.o_proj", hidden, queries
    for mlp in mlps:
        yield f"{mlp}.gate_proj", inner, hidden
        yield f"{mlp}.up_proj", inner, hidden
        yield f"{mlp}.down_proj", hidden, inner


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
