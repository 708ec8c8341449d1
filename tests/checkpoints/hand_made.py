"""Checkpoints as their producers write them: raw names, through no code of ours."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gristmill.checkpoints import Checkpoint
from gristmill.errors import CheckpointError
from gristmill.formats.nvfp4 import NVFP4Tensor

Tensors = dict[str, torch.Tensor]

MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "config_groups": {
        "group_0": {
            "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "input_activations": {
                "dynamic": False,
                "num_bits": 4,
                "type": "float",
                "group_size": 16,
            },
            "targets": ["Linear"],
        }
    },
    "ignore": ["lm_head"],
    "producer": {"name": "modelopt", "version": "0.35.0"},
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "tensor_group",
                "group_size": 16,
                "symmetric": True,
                "dynamic": False,
            },
            "input_activations": None,
            "targets": ["Linear"],
        }
    },
    "ignore": ["lm_head"],
}
HF_QUANT = {
    "producer": {"name": "modelopt", "version": "0.23.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    },
}


def matrix(rows: int, columns: int, seed: int = 0, scale: float = 0.01) -> dict[str, torch.Tensor]:
    """The parts of some weight: every byte and every non-negative finite scale may occur."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns // 2), generator=generator).to(torch.uint8)
    scales = torch.randint(0, 127, (rows, columns // 16), generator=generator).to(torch.uint8)
    return {
        "codes": codes,
        "scales": scales.view(torch.float8_e4m3fn),
        "global_scale": torch.tensor(scale),
    }


def modelopt(module: str, parts: Tensors) -> Tensors:
    return {
        f"{module}.weight": parts["codes"],
        f"{module}.weight_scale": parts["scales"],
        f"{module}.weight_scale_2": parts["global_scale"],
        f"{module}.input_scale": torch.tensor(0.5),
    }


def compressed(module: str, parts: Tensors) -> Tensors:
    return {
        f"{module}.weight_packed": parts["codes"],
        f"{module}.weight_scale": parts["scales"],
        f"{module}.weight_global_scale": (1 / parts["global_scale"]).reshape(1),
    }


def write(folder: Path, tensors: Tensors, config: Any = MODELOPT, **metadata: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", **metadata})
    if config is not None:
        content = {"model_type": "llama", "quantization_config": config}
        (folder / "config.json").write_text(json.dumps(content))
    return folder


def write_shards(folder: Path, *shards: Tensors, config: Any = MODELOPT) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(
            one.contiguous().reshape(-1).view(torch.uint8),
            other.contiguous().reshape(-1).view(torch.uint8),
        )
    )


PRODUCERS = pytest.mark.parametrize(
    ("name", "config"), [(modelopt, MODELOPT), (compressed, COMPRESSED)]
)
Namer = Callable[[str, Tensors], Tensors]


def is_made_of(weight: NVFP4Tensor, *parts: Tensors) -> bool:
    """Codes and scales below each other, and every row with the global scale of its part."""
    rows = [part["global_scale"].expand(len(part["codes"])) for part in parts]
    return (
        same_bits(weight.codes, torch.cat([part["codes"] for part in parts]))
        and same_bits(
            weight.scales.view(torch.uint8),
            torch.cat([part["scales"].view(torch.uint8) for part in parts]),
        )
        and same_bits(weight.row_scale, torch.cat(rows))
    )


def whole(folder: Path) -> Path:
    return write(folder, modelopt("a", matrix(16, 32)))


def read(path: Path) -> Any:
    return Checkpoint(path).linear("a")


def experts(*numbers: str, inner: int = 32) -> Tensors:
    tensors: Tensors = {}
    for number in numbers:
        for part in ("gate_proj", "up_proj"):
            tensors |= modelopt(f"m.experts.{number}.{part}", matrix(inner, 64))
        tensors |= modelopt(f"m.experts.{number}.down_proj", matrix(64, inner))
    return tensors


def assert_rejected(path: Path, words: str, what: Callable[[Path], Any] = read) -> None:
    """Check that `what` fails at once, with a short error that names the file."""
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match=words) as caught:
        what(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 2000
    assert time.perf_counter() - start < 5
