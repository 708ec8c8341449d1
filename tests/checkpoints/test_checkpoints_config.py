"""What quantization_config and hf_quant_config.json say, and which modules are ignored."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hand_made import COMPRESSED, HF_QUANT, MODELOPT

from gristmill.checkpoints import QuantizationConfig
from gristmill.errors import CheckpointError


def changed(config: dict[str, Any], *path: str, to: Any) -> dict[str, Any]:
    """A copy with one value set."""
    result = copy.deepcopy(config)
    inner = result
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return result


GROUP = ("config_groups", "group_0")


def test_modelopt() -> None:
    config = QuantizationConfig.from_dict(MODELOPT)
    assert config == QuantizationConfig("modelopt", True, 16, ("lm_head",), (), None)


def test_compressed_tensors() -> None:
    config = QuantizationConfig.from_dict(COMPRESSED)
    assert config == QuantizationConfig(
        "compressed-tensors", False, 16, ("lm_head",), ("Linear",), None
    )


def test_hf_quant_config() -> None:
    expected = QuantizationConfig("modelopt", True, 16, ("lm_head",), (), "fp8")
    assert QuantizationConfig.from_hf_quant_config(HF_QUANT) == expected
    # What vLLM hands over when it has read that file.
    assert QuantizationConfig.from_dict({**HF_QUANT, "quant_method": "modelopt"}) == expected


@pytest.mark.parametrize("name", ["W4A16_NVFP4", "w4a16_nvfp4"])
def test_weight_only_by_name(name: str) -> None:
    assert not QuantizationConfig.from_dict(changed(MODELOPT, "quant_algo", to=name)).activations
    hf = changed(HF_QUANT, "quantization", "quant_algo", to=name)
    assert not QuantizationConfig.from_hf_quant_config(hf).activations


def test_weight_only_where_no_group_has_activations() -> None:
    bare = changed(MODELOPT, *GROUP, "input_activations", to=None)
    assert not QuantizationConfig.from_dict(bare).activations
    bare["config_groups"]["group_1"] = copy.deepcopy(MODELOPT["config_groups"]["group_0"])
    assert QuantizationConfig.from_dict(bare).activations
    no_groups = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    assert QuantizationConfig.from_dict(no_groups).activations
    with_inputs = changed(COMPRESSED, *GROUP, "input_activations", to={"num_bits": 4})
    assert QuantizationConfig.from_dict(with_inputs).activations


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        (None, None),
        ({"dynamic": False, "num_bits": 8, "type": "float"}, "fp8"),
        ({"num_bits": 8, "type": "int"}, "int8"),
        ({"num_bits": 4, "type": "float"}, "float4"),
    ],
)
def test_the_kv_cache(scheme: Any, expected: str | None) -> None:
    for config in (MODELOPT, COMPRESSED):
        with_cache = changed(config, "kv_cache_scheme", to=scheme)
        assert QuantizationConfig.from_dict(with_cache).kv_cache == expected


@pytest.mark.parametrize("algorithm", [None, "", "NVFP4"])
def test_the_kv_cache_of_hf_quant_config(algorithm: str | None) -> None:
    config = changed(HF_QUANT, "quantization", "kv_cache_quant_algo", to=algorithm)
    kv_cache = QuantizationConfig.from_hf_quant_config(config).kv_cache
    assert kv_cache == ("nvfp4" if algorithm else None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "quant_method must be 'modelopt' or 'compressed-tensors', got None"),
        ({"quant_method": "gptq"}, "got 'gptq'"),
        ({"quant_method": "modelopt"}, "quant_algo is missing"),
        (changed(MODELOPT, "quant_algo", to="FP8"), "quant_algo 'FP8' is not supported, only"),
        (changed(MODELOPT, "quant_algo", to="MXFP4"), "quant_algo 'MXFP4' is not supported"),
        (changed(MODELOPT, "quant_algo", to="MIXED_PRECISION"), "'MIXED_PRECISION' is not supp"),
        (changed(MODELOPT, "quant_algo", to="NVFP4_AWQ"), "multiplied by pre_quant_scale"),
        (changed(MODELOPT, "group_size", to=32), "group_size must be 16, got 32"),
        (changed(MODELOPT, *GROUP, "weights", "group_size", to=32), "'group_0': group_size must"),
        (changed(MODELOPT, "ignore", to="lm_head"), "ignore must be a list of strings"),
        (changed(MODELOPT, "ignore", to=[1]), "ignore must be a list of strings"),
        (
            changed(MODELOPT, *GROUP, "weights", "num_bits", to=8),
            "weights of 8 bits and type 'float'",
        ),
        (changed(MODELOPT, "config_groups", to=[1]), "config_groups must map names to objects"),
        (changed(COMPRESSED, "config_groups", to={}), "there are no config_groups"),
        (changed(COMPRESSED, "format", to="pack-quantized"), "has format 'pack-quantized'"),
        (changed(COMPRESSED, *GROUP, "format", to="float-quantized"), "has format 'float-quant"),
        (changed(COMPRESSED, *GROUP, "weights", "num_bits", to=8), "weights of 8 bits and type 'f"),
        (
            changed(COMPRESSED, *GROUP, "weights", "type", to="int"),
            "weights of 4 bits and type 'in",
        ),
        (changed(COMPRESSED, *GROUP, "weights", "group_size", to=32), "group_size must be 16, got"),
        (changed(COMPRESSED, *GROUP, "weights", "strategy", to="group"), "has strategy 'group'"),
        (changed(COMPRESSED, *GROUP, "weights", "symmetric", to=False), "has symmetric False"),
        (changed(COMPRESSED, *GROUP, "weights", to=None), "weights of None bits"),
        (changed(COMPRESSED, "transform_config", to={"groups": 1}), "transform_config are not sup"),
    ],
)
def test_what_is_not_supported(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"quantization_config: .*{message}"):
        QuantizationConfig.from_dict(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"producer": 1}, r"there is no 'quantization' in it, got \['producer'\]"),
        (changed(HF_QUANT, "quantization", "quant_algo", to="FP8"), "quant_algo 'FP8' is not"),
        (changed(HF_QUANT, "quantization", "group_size", to=128), "group_size must be 16, got 128"),
        (changed(HF_QUANT, "quantization", "exclude_modules", to=3), "exclude_modules must be a l"),
    ],
)
def test_what_is_not_supported_in_hf_quant_config(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"hf_quant_config.json: {message}"):
        QuantizationConfig.from_hf_quant_config(config)


def test_reading_a_folder(tmp_path: Path) -> None:
    assert QuantizationConfig.read(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert QuantizationConfig.read(tmp_path) is None
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(HF_QUANT))
    assert QuantizationConfig.read(tmp_path) == QuantizationConfig.from_hf_quant_config(HF_QUANT)
    # config.json goes first.
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": COMPRESSED}))
    assert QuantizationConfig.read(tmp_path) == QuantizationConfig.from_dict(COMPRESSED)


def test_the_config_of_a_text_model(tmp_path: Path) -> None:
    """Models of several parts may say it there; what is said above goes first."""
    text = {"text_config": {"quantization_config": COMPRESSED}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(HF_QUANT))
    (tmp_path / "config.json").write_text(json.dumps(text))
    assert QuantizationConfig.read(tmp_path) == QuantizationConfig.from_dict(COMPRESSED)
    (tmp_path / "config.json").write_text(json.dumps({**text, "quantization_config": MODELOPT}))
    assert QuantizationConfig.read(tmp_path) == QuantizationConfig.from_dict(MODELOPT)
    for nothing in ({}, None, {"quantization_config": None}):
        (tmp_path / "config.json").write_text(json.dumps({"text_config": nothing}))
        expected = QuantizationConfig.from_hf_quant_config(HF_QUANT)
        assert QuantizationConfig.read(tmp_path) == expected


@pytest.mark.parametrize(
    "text",
    ["{", "[1]", '{"quantization_config": 3}', '{"text_config": {"quantization_config": 3}}'],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        QuantizationConfig.read(tmp_path)


def test_an_error_in_a_file_names_it(tmp_path: Path) -> None:
    config = changed(MODELOPT, "quant_algo", to="FP8")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(CheckpointError, match=r"config\.json: .*'FP8'"):
        QuantizationConfig.read(tmp_path)


def ignoring(*patterns: str, producer: str = "modelopt") -> QuantizationConfig:
    return QuantizationConfig(producer, False, ignore=patterns)


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("lm_head", ["lm_head", "language_model.lm_head"], ["lm_head2", "model.lm_heads"]),
        ("model.layers.1", ["model.layers.1.mlp.up_proj"], ["model.layers.11.mlp.up_proj"]),
        ("self_attn", ["model.layers.3.self_attn.o_proj"], ["model.self_attn2.o_proj"]),
        ("model.layers.0.mlp.gate", ["model.layers.0.mlp.gate"], ["model.layers.0.mlp.gate_proj"]),
        ("*router*", ["model.layers.0.router.w"], ["model.layers.0.route.w"]),
        ("model.vision*", ["model.vision.a", "model.vision_tower.b"], ["model.visio.a"]),
        ("mtp.*", ["mtp.layers.0.up_proj", "mtp"], ["model.mtpx"]),
        ("model.layers.[01].*", ["model.layers.1.up_proj"], ["model.layers.2.up_proj"]),
        ("re:.*\\.down_proj$", ["a.down_proj"], ["a.up_proj", "a.down_proj.x"]),
        ("re:model", ["model.a"], ["a.model"]),
    ],
)
def test_ignored_by_modelopt(pattern: str, yes: list[str], no: list[str]) -> None:
    config = ignoring(pattern)
    assert all(config.is_ignored(name) for name in yes)
    assert not any(config.is_ignored(name) for name in no)


def test_names_of_compressed_tensors_are_whole() -> None:
    config = ignoring("lm_head", "re:.*router", producer="compressed-tensors")
    assert config.is_ignored("lm_head")
    assert config.is_ignored("a.router.b")
    assert not config.is_ignored("language_model.lm_head")


@pytest.mark.parametrize("producer", ["modelopt", "compressed-tensors"])
def test_fused_modules_are_asked_through_their_shards(producer: str) -> None:
    attention = [f"l.0.self_attn.{part}_proj" for part in "qkv"]
    config = ignoring(*attention, "l.0.mlp.gate_up_proj", producer=producer)
    assert config.is_ignored("l.0.self_attn.qkv_proj")
    assert not config.is_ignored("l.1.self_attn.qkv_proj")
    assert config.is_ignored("l.0.mlp.gate_up_proj")
    part = ignoring(*attention[:2], producer=producer)
    with pytest.raises(
        CheckpointError,
        match=r"qkv_proj would be quantized in part: .*k_proj left out, .*v_proj no",
    ):
        part.is_ignored("l.0.self_attn.qkv_proj")
    assert part.is_ignored("l.0.self_attn.q_proj")
    mapping = {"in_proj": ["a", "b"]}
    both = ignoring("x.a", "x.b", producer=producer)
    assert both.is_ignored("x.in_proj", fused=mapping)
    assert not both.is_ignored("x.in_proj")


def test_experts_are_asked_through_the_first_of_them() -> None:
    names = [f"l.0.mlp.experts.{e}.{part}_proj" for e in (0, 1) for part in ("gate", "up", "down")]
    for config in (ignoring(*names), ignoring("re:.*experts.*"), ignoring("l.0.mlp.experts.*")):
        assert config.is_ignored("l.0.mlp.experts")
    assert not ignoring(*names).is_ignored("l.1.mlp.experts")


def test_targets() -> None:
    def aiming(*targets: str) -> QuantizationConfig:
        return QuantizationConfig("compressed-tensors", False, targets=targets)

    assert not aiming("Linear").is_ignored("a.b")
    assert not aiming().is_ignored("a.b")
    experts = aiming("re:.*mlp.experts.*")
    assert experts.is_ignored("l.0.self_attn.o_proj")
    assert experts.is_ignored("l.0.self_attn.qkv_proj")
    assert not experts.is_ignored("l.0.mlp.experts.0.up_proj")
    assert not experts.is_ignored("l.0.mlp.experts")
    with pytest.raises(CheckpointError, match="in part"):
        aiming("a.q_proj").is_ignored("a.qkv_proj")


def test_a_bad_expression_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"ignore: 're:\(' cannot be compiled"):
        ignoring("re:(").is_ignored("a")


@pytest.mark.parametrize("given", [None, 3, "modelopt", [], ["quantization"]], ids=str)
def test_what_is_no_object_is_named(given: Any) -> None:
    for parse in (QuantizationConfig.from_dict, QuantizationConfig.from_hf_quant_config):
        with pytest.raises(CheckpointError, match=r"^here must be an object, got "):
            parse(given, "here")
