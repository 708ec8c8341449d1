"""Small models of widths that the kernels of a GPU are made for, for both GPU runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm_models import TinyModel, tiny_llama, tiny_qwen3_moe, write_dense, write_modelopt

WIDTHS: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
}
KINDS = ("llama", "moe")
NORMS = {"ir_op_priority": {"rms_norm": ["gristmill"], "fused_add_rms_norm": ["gristmill"]}}
NVFP4 = {"quantization": "gristmill_nvfp4"}


def write_models(folder: Path) -> None:
    """Each kind as ModelOpt writes NVFP4, and with the same values in full."""
    models: dict[str, TinyModel] = {
        "llama": tiny_llama(**WIDTHS, intermediate_size=1024),
        "moe": tiny_qwen3_moe(**WIDTHS, **EXPERTS),
    }
    for kind, model in models.items():
        write_modelopt(model, folder / kind / "nvfp4")
        write_dense(model, folder / kind / "dense")


def options(folder: Path, kind: str, weights: str, norms: bool, **more: Any) -> dict[str, Any]:
    """Keyword arguments of `LLM`: compiled, with CUDA graphs, several of them on one GPU."""
    place: dict[str, Any] = {}
    if torch.cuda.is_available():
        place = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30}
    return {
        "model": str(folder / kind / weights),
        "dtype": "bfloat16",
        **place,
        **(NVFP4 if weights == "nvfp4" else {}),
        **(NORMS if norms else {}),
        **more,
    }


def random_prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 256, (length,), generator=generator).tolist()
