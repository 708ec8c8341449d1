"""The quantization method `gristmill_nvfp4`: which checkpoints it takes, which layers it leaves."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsKVCacheMethod,
)
from vllm.model_executor.layers.quantization.modelopt import ModelOptKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import WeightsMapper
from vllm_layers import FUSED, PRODUCERS, quantization, rank
from vllm_models import compressed_tensors_config, hf_quant_config, modelopt_config

from gristmill.errors import CheckpointError
from gristmill.integrations.vllm import adapter
from gristmill.integrations.vllm.linear_method import GristmillNvfp4LinearMethod
from gristmill.integrations.vllm.quantization import (
    NAME,
    GristmillNvfp4Config,
    register_nvfp4_methods,
)
from gristmill.settings import reload_settings

KV_SCHEME = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
}


@pytest.fixture(params=["", "norms", "norms,nvfp4"])
def wanted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """GRISTMILL_VLLM."""
    monkeypatch.setenv("GRISTMILL_VLLM", request.param)
    reload_settings()
    yield request.param
    monkeypatch.undo()
    reload_settings()


def fp8_group() -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    return {"targets": ["re:.*o_proj"], "weights": weights, "format": "float-quantized"}


def mixed_groups() -> dict[str, Any]:
    config = compressed_tensors_config(["lm_head"], format="mixed-precision")
    config["config_groups"]["group_0"]["format"] = "nvfp4-pack-quantized"
    config["config_groups"]["group_1"] = fp8_group()
    return config


TAKEN = {
    "modelopt": modelopt_config(["lm_head"]),
    "modelopt_fp4": modelopt_config(["lm_head"], quant_method="modelopt_fp4"),
    "lower case": modelopt_config(["lm_head"], quant_algo="nvfp4"),
    "weights only": modelopt_config(["lm_head"], quant_algo="W4A16_NVFP4"),
    "legacy": {"quant_method": "modelopt_fp4", **hf_quant_config(["lm_head"])},
    "compressed-tensors": compressed_tensors_config(["lm_head"]),
}
LEFT = {
    "FP8": modelopt_config([], quant_algo="FP8"),
    "MXFP8": modelopt_config([], quant_algo="MXFP8"),
    "mixed precision": modelopt_config([], quant_algo="MIXED_PRECISION"),
    "AWQ": modelopt_config([], quant_algo="NVFP4_AWQ"),
    "a second kind": modelopt_config([], config_groups={"group_1": fp8_group()}),
    "blocks of 32": modelopt_config([], group_size=32),
    "legacy FP8": {"quant_method": "modelopt", **hf_quant_config([], quant_algo="FP8")},
    "compressed-tensors FP8": compressed_tensors_config([], format="float-quantized"),
    "compressed-tensors mixed": mixed_groups(),
    "GPTQ": {"quant_method": "gptq", "bits": 4, "group_size": 128},
}


@pytest.mark.parametrize("kind", TAKEN)
@pytest.mark.parametrize("asked", [None, NAME, "modelopt_fp4", "compressed-tensors"])
def test_takes_what_is_asked_for_and_nothing_else(
    kind: str, asked: str | None, wanted: str
) -> None:
    should = asked == NAME or (asked is None and "nvfp4" in wanted)
    got = GristmillNvfp4Config.override_quantization_method(TAKEN[kind], asked)
    assert got == (NAME if should else None)


@pytest.mark.parametrize("kind", LEFT)
@pytest.mark.parametrize("asked", [None, NAME])
def test_leaves_what_it_has_no_layers_for(kind: str, asked: str | None, wanted: str) -> None:
    assert GristmillNvfp4Config.override_quantization_method(LEFT[kind], asked) is None


@pytest.mark.parametrize("wanted", ["nvfp4"], indirect=True)
def test_says_why_it_leaves_one(wanted: str, caplog: pytest.LogCaptureFixture) -> None:
    config = modelopt_config([], quant_algo="W4A8_NVFP4_FP8")
    with caplog.at_level(logging.WARNING, "gristmill"):
        for _ in range(3):
            assert GristmillNvfp4Config.override_quantization_method(config, None) is None
    (line,) = [record.message for record in caplog.records if record.name == "gristmill"]
    assert "left to vLLM" in line
    assert "W4A8_NVFP4_FP8" in line


@pytest.mark.parametrize("wanted", ["nvfp4"], indirect=True)
@pytest.mark.parametrize("asked", [None, NAME])
def test_takes_the_same_when_results_must_not_depend_on_the_batch(
    asked: str | None,
    wanted: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with caplog.at_level(logging.WARNING, "gristmill"):
        assert GristmillNvfp4Config.override_quantization_method(TAKEN["modelopt"], asked) == NAME
        config = GristmillNvfp4Config.from_config(modelopt_config([], quant_method=NAME))
    assert config.checkpoint.producer == "modelopt"
    assert caplog.messages == []


def test_a_mistake_in_the_settings_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gristmill.settings._current", None)
    monkeypatch.setenv("GRISTMILL_VLLM", "nvfp5")
    assert GristmillNvfp4Config.override_quantization_method(TAKEN["modelopt"], None) is None
    assert GristmillNvfp4Config.override_quantization_method(TAKEN["modelopt"], NAME) == NAME


def test_a_vllm_without_what_the_layers_need_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lost = "register_weight_loader_v2_supported_method"
    monkeypatch.delattr(f"vllm.model_executor.layers.linear.{lost}")
    monkeypatch.delitem(sys.modules, "gristmill.integrations.vllm.compat")
    with caplog.at_level(logging.WARNING, "gristmill"):
        assert GristmillNvfp4Config.override_quantization_method(TAKEN["modelopt"], NAME) is None
    assert f"lacks a name that the NVFP4 layers need (cannot import name '{lost}'" in caplog.text


def test_registering_may_be_repeated() -> None:
    register_nvfp4_methods()
    register_nvfp4_methods()
    assert get_quantization_config(NAME) is GristmillNvfp4Config


@pytest.mark.parametrize("kind", TAKEN)
def test_configs_of_each_kind_are_understood(kind: str) -> None:
    config = GristmillNvfp4Config.from_config(dict(TAKEN[kind]))
    producer = kind if kind in PRODUCERS else "modelopt"
    assert config.get_name() == NAME
    assert config.checkpoint.producer == producer
    assert config.checkpoint.is_ignored("lm_head")
    assert config.checkpoint.activations == (kind != "weights only")


@pytest.mark.parametrize(
    ("source", "producer"),
    [
        (modelopt_config(["lm_head"], quant_method=NAME), "modelopt"),
        ({"quant_method": NAME, "ignore": ["lm_head"]}, "modelopt"),
        (compressed_tensors_config(["lm_head"], quant_method=NAME), "compressed-tensors"),
    ],
)
def test_checkpoints_may_name_it_themselves(source: dict[str, Any], producer: str) -> None:
    assert GristmillNvfp4Config.override_quantization_method(source, None) is None
    config = GristmillNvfp4Config.from_config(source)
    assert config.checkpoint.producer == producer
    assert config.checkpoint.ignore == ("lm_head",)


def test_others_are_refused_with_the_reason() -> None:
    with pytest.raises(CheckpointError, match="quant_algo 'FP8' is not supported"):
        GristmillNvfp4Config.from_config(modelopt_config([], quant_algo="FP8"))


def test_it_survives_a_pickle_where_no_plugin_ran() -> None:
    blob = pickle.dumps(quantization("compressed-tensors", ("lm_head", "re:.*gate$")))
    program = (
        "import pickle, sys; config = pickle.loads(sys.stdin.buffer.read());"
        "print(config.get_name(), config.checkpoint.ignore, config.packed_modules_mapping)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], input=blob, capture_output=True, check=True
    )
    last = answer.stdout.decode().strip().splitlines()[-1]
    assert last == f"{NAME} ('lm_head', 're:.*gate$') {FUSED}"


@pytest.mark.parametrize(
    ("producer", "ignore", "prefix", "ignored"),
    [
        ("modelopt", "model.layers.0.mlp.down_proj", "model.layers.0.mlp.down_proj", True),
        ("modelopt", "model.layers.0.mlp.down_proj", "model.layers.10.mlp.down_proj", False),
        ("modelopt", "model.layers.0.self_attn*", "model.layers.0.self_attn.o_proj", True),
        ("modelopt", "*.mlp.gate", "model.layers.3.mlp.gate", True),
        ("modelopt", "*.mlp.gate", "model.layers.3.mlp.gate_up_proj", False),
        ("compressed-tensors", "re:.*mlp[.]gate$", "model.layers.3.mlp.gate", True),
        ("compressed-tensors", "re:.*mlp[.]gate$", "model.layers.3.mlp.gate_up_proj", False),
        (
            "compressed-tensors",
            "re:.*self_attn[.][qkv]_proj",
            "model.layers.3.self_attn.qkv_proj",
            True,
        ),
        ("compressed-tensors", "lm_head", "model.layers.3.self_attn.qkv_proj", False),
    ],
)
def test_ignored_names(producer: str, ignore: str, prefix: str, ignored: bool) -> None:
    with rank():
        layer = ReplicatedLinear(16, 16, bias=False, prefix=prefix)
        method = quantization(producer, (ignore,)).get_quant_method(layer, prefix)
    assert isinstance(method, UnquantizedLinearMethod if ignored else GristmillNvfp4LinearMethod)


def test_a_fused_layer_ignored_in_part_is_refused() -> None:
    with rank():
        layer = ReplicatedLinear(16, 16, bias=False, prefix="qkv_proj")
        config = quantization("compressed-tensors", ("re:.*[.]k_proj",))
        with pytest.raises(CheckpointError, match="quantized in part"):
            config.get_quant_method(layer, "model.layers.0.self_attn.qkv_proj")


def test_ignored_names_follow_the_model() -> None:
    config = quantization("modelopt", ("vision.blocks.0*", "lm_head", "re:^vision.*"))
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"vision.": "visual."}))
    mapped = ("visual.blocks.0*", "visual.blocks.0.*", "lm_head", "re:^vision.*")
    assert config.checkpoint.ignore == mapped


def test_patterns_of_a_whole_tower_follow_the_model() -> None:
    """As ModelOpt writes them; the mapper's prefixes end in a dot, the pattern does not."""
    config = quantization("modelopt", ("lm_head", "model.visual*"))
    prefixes = {"model.visual.": "visual.", "model.": "language_model.model."}
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix=prefixes))
    assert config.checkpoint.is_ignored("visual.blocks.0.attn.qkv", {})
    assert not config.checkpoint.is_ignored("language_model.model.layers.0.mlp.down_proj")


@pytest.mark.parametrize(
    ("prefix", "ignored"),
    [
        ("mtp.fc", True),
        ("model.mtp.fc", True),
        ("mtp.fc2", False),
        ("vision_tower.blocks.0.fc1", True),
        ("model.vision_model.layers.0.fc1", True),
        ("model.layers.0.mlp.down_proj", False),
    ],
)
def test_what_modelopt_never_quantises(prefix: str, ignored: bool) -> None:
    with rank():
        layer = ReplicatedLinear(16, 16, bias=False, prefix=prefix)
        method = quantization("modelopt").get_quant_method(layer, prefix)
        assert isinstance(method, UnquantizedLinearMethod) == ignored
        other = quantization("compressed-tensors").get_quant_method(layer, prefix)
        assert isinstance(other, GristmillNvfp4LinearMethod)


@pytest.mark.parametrize(
    ("platform", "reason"),
    [
        ({"is_cuda": False, "is_cpu": False}, "runs on CUDA GPUs and CPUs"),
        (
            {"is_cuda": True, "has_device_capability": False},
            "needs a GPU of compute capability 8.0",
        ),
    ],
)
def test_other_platforms_are_left_to_vllm(
    platform: dict[str, bool],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = {"is_cuda": False, "is_cpu": False, "has_device_capability": True, **platform}
    fake = mock.Mock(**{f"{name}.return_value": value for name, value in given.items()})
    monkeypatch.setattr(adapter, "_platform", lambda: fake)
    with caplog.at_level(logging.WARNING, "gristmill"):
        assert GristmillNvfp4Config.override_quantization_method(TAKEN["modelopt"], NAME) is None
    assert reason in caplog.text


def test_models_whose_experts_have_no_method_are_left_to_vllm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    take = GristmillNvfp4Config.override_quantization_method
    with caplog.at_level(logging.WARNING, "gristmill"):
        gpt = SimpleNamespace(model_type="gpt_oss")
        assert take(TAKEN["modelopt"], NAME, hf_config=gpt) is None
    assert "gpt_oss: its experts have biases" in caplog.text
    assert take(TAKEN["modelopt"], NAME, hf_config=SimpleNamespace(model_type="llama")) == NAME


def test_no_exception_reaches_vllm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> bool:
        raise adapter.declined("has lost something")

    monkeypatch.setattr(adapter, "is_batch_invariant", broken)
    with caplog.at_level(logging.WARNING, "gristmill"):
        assert GristmillNvfp4Config.override_quantization_method(TAKEN["modelopt"], NAME) is None
    assert "has lost something" in caplog.text


def test_the_head_is_not_quantised() -> None:
    with rank():
        head = object.__new__(ParallelLMHead)
        assert quantization("modelopt").get_quant_method(head, "lm_head") is None


def test_scales_of_the_kv_cache_are_vllms_business() -> None:
    """Attention gets vLLM's own method for each producer, with what that reads of the config."""
    attention = object.__new__(Attention)
    modelopt = quantization("modelopt", kv_cache_scheme=KV_SCHEME)
    assert isinstance(modelopt.get_quant_method(attention, "attn"), ModelOptKVCacheMethod)
    assert modelopt.kv_cache_scheme is None
    latent = object.__new__(MLAAttention)
    assert isinstance(modelopt.get_quant_method(latent, "attn"), ModelOptKVCacheMethod)
    heads = {"total_num_heads": 4, "total_num_kv_heads": 2}
    compressed = quantization("compressed-tensors", kv_cache_scheme=KV_SCHEME, **heads)
    assert compressed.get_quant_method(latent, "attn") is None
    method = compressed.get_quant_method(attention, "attn")
    assert isinstance(method, CompressedTensorsKVCacheMethod)
    assert method.quant_config.kv_cache_scheme == KV_SCHEME
    assert (method.quant_config.total_num_heads, method.quant_config.total_num_kv_heads) == (4, 2)
