"""Weights in parts: state dicts of modules written as checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hand_made import Tensors, matrix, modelopt, same_bits
from safetensors.torch import load_file

from gristmill import nn
from gristmill.checkpoints import Checkpoint, QuantizationConfig, save_modelopt
from gristmill.errors import CheckpointError
from gristmill.formats.nvfp4 import NVFP4Tensor, quantize


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


class Block(torch.nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(64)
        self.up = nn.NVFP4Linear.from_linear(torch.nn.Linear(64, 48))
        self.head = torch.nn.Linear(48, 4, bias=False)
        self.experts = nn.NVFP4MoE.from_experts(
            normal(3, 32, 64),
            2 * normal(3, 32, 64),
            normal(3, 64, 32),
            w13_bias=normal(3, 64) if bias else None,
            w2_bias=normal(3, 64) if bias else None,
        )


@pytest.mark.parametrize("bias", [False, True])
def test_a_state_dict_there_and_back(tmp_path: Path, bias: bool) -> None:
    model = Block(bias)
    state = {f"m.{name}": tensor for name, tensor in model.state_dict().items()}
    save_modelopt(tmp_path, state)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["m.up.weight_scale_2"].shape == ()
    assert not any("w13" in name or "w2" in name for name in stored)
    assert same_bits(stored["m.head.weight"], model.head.weight.detach())
    config = QuantizationConfig.read(tmp_path)
    assert config is not None
    assert config.ignore == ("m.head",)

    checkpoint = Checkpoint(tmp_path)
    layers = [f"m.experts.{e}.{name}_proj" for e in range(3) for name in ("down", "gate", "up")]
    assert list(checkpoint.modules()) == [*layers, "m.up"]
    up = nn.NVFP4Linear.from_checkpoint(checkpoint, "m.up")
    experts = nn.NVFP4MoE.from_checkpoint(checkpoint, "m.experts")
    for one, other in ((up, model.up), (experts, model.experts)):
        states = one.state_dict(), other.state_dict()
        assert states[0].keys() == states[1].keys()
        assert all(same_bits(states[0][name], states[1][name]) for name in states[0])


def test_what_was_read_by_names_is_written_again(tmp_path: Path) -> None:
    """ModelOpt's own tensors, with a global scale of shape () or (1,), and layers in FP8."""
    parts = matrix(8, 32)
    other = modelopt("b", matrix(8, 32, 1))
    other["b.weight_scale_2"] = other["b.weight_scale_2"].reshape(1)
    fp8 = {"c.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "c.weight_scale": torch.ones(())}
    save_modelopt(tmp_path, modelopt("a", parts) | other | fp8, activations=True)
    stored = load_file(tmp_path / "model.safetensors")
    expected = modelopt("a", parts) | modelopt("b", matrix(8, 32, 1)) | fp8
    assert stored.keys() == expected.keys()
    assert all(same_bits(stored[name], expected[name]) for name in expected)


def test_unequal_rows_need_shards(tmp_path: Path) -> None:
    layer = nn.NVFP4Linear(32, 24)
    layer.weight_scale_2.copy_(torch.tensor([0.5] * 16 + [0.25] * 8))
    state = {f"a.qkv.{name}": tensor for name, tensor in layer.state_dict().items()}
    del state["a.qkv.bias"]
    with pytest.raises(CheckpointError, match=r"a\.qkv would have rows of different global scales"):
        save_modelopt(tmp_path, state)
    save_modelopt(tmp_path, state, shards={"a.qkv.weight": {"q": 16, "kv": 8}})
    fused = Checkpoint(tmp_path).fused(["a.q", "a.kv"])
    assert same_bits(fused.row_scale, layer.weight_scale_2)


@pytest.mark.parametrize("stem", ["a.b.", "a.experts.w13_"])
@pytest.mark.parametrize("missing", ["weight", "weight_scale", "weight_scale_2"])
def test_incomplete_parts(tmp_path: Path, stem: str, missing: str) -> None:
    parts = quantize(normal(2, 32, 64)) if "w13" in stem else quantize(normal(32, 64))
    state: Tensors = {
        f"{stem}weight": parts.codes,
        f"{stem}weight_scale": parts.scales,
        f"{stem}weight_scale_2": parts.global_scale,
    }
    save_modelopt(tmp_path / "whole", state)
    del state[f"{stem}{missing}"]
    with pytest.raises(
        CheckpointError,
        match=rf"save_modelopt: a weight in NVFP4 has the tensors {stem}weight, .*weight_scale_2; "
        rf"there is no {stem}{missing}$",
    ):
        save_modelopt(tmp_path, state)


@pytest.mark.parametrize("value", [torch.ones(2, 31), torch.ones(32), quantize(normal(2, 32))])
def test_a_bias_that_does_not_fit(tmp_path: Path, value: Any) -> None:
    parts = quantize(normal(2, 32, 64))
    state = {
        "a.experts.w2_weight": parts.codes,
        "a.experts.w2_weight_scale": parts.scales,
        "a.experts.w2_weight_scale_2": parts.global_scale,
        "a.experts.w2_bias": torch.ones(2, 32),
    }
    save_modelopt(tmp_path / "whole", state)
    with pytest.raises(CheckpointError, match=r"w2_bias must have shape \(2, 32\), got"):
        save_modelopt(tmp_path / "bad", {**state, "a.experts.w2_bias": value})
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a.weight": torch.ones(8, 16)}, r"a\.weight: .*codes must be a tensor of torch.uint8"),
        ({"a.weight_scale": torch.ones(8, 2)}, r"a\.weight: .*scales must be .*float32"),
        ({"a.weight_scale_2": torch.ones(5)}, r"a\.weight: .*global_scale must have shape \(\)"),
        ({"a": NVFP4Tensor(**matrix(8, 32))}, "a would be there twice"),
        ({"a.weight": NVFP4Tensor(**matrix(8, 32))}, r"there is no a\.weight$"),
        (modelopt("b.w13", matrix(8, 32)) | {"weight_scale_2": torch.ones(())}, "no weight and no"),
        (
            {name[2:]: tensor for name, tensor in modelopt("a", matrix(8, 32)).items()},
            "weight needs the name of a module before it, such as 'model",
        ),
        (
            {name.replace(".", ".w13_"): t for name, t in modelopt("a", matrix(8, 32)).items()},
            r"a\.w13_weight must be a stack of experts .* gate_proj and up_proj, got shape \(8, 32",
        ),
    ],
)
def test_parts_that_do_not_fit(tmp_path: Path, changes: Tensors, message: str) -> None:
    weights = modelopt("a", matrix(8, 32)) | changes
    with pytest.raises(CheckpointError, match=f"save_modelopt: .*{message}"):
        save_modelopt(tmp_path, weights)
    assert not list(tmp_path.iterdir())
