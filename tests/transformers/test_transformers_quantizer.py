"""NVFP4 checkpoints by `from_pretrained` and `save_pretrained`: dense, ModelOpt's and
compressed-tensors' ones."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import hand_made
from safetensors.torch import load_file, save_file
from tf_models import tiny, tokens
from transformers import AutoModelForCausalLM

from gristmill.checkpoints import Checkpoint, save_modelopt
from gristmill.errors import ArgumentError, CheckpointError, DtypeError
from gristmill.formats.nvfp4.tensor import E4M3
from gristmill.integrations.transformers.config import Nvfp4Config
from gristmill.integrations.transformers.experts import NVFP4Experts
from gristmill.integrations.transformers.nvfp4 import left_quantized, quantize_modules
from gristmill.integrations.transformers.register import register
from gristmill.nn import NVFP4Linear

MODELS = ("llama", "qwen3_moe", "gpt2", "mixtral")
COMPRESSED = {**hand_made.COMPRESSED, "ignore": ["lm_head", "re:.*mlp.gate$"]}


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


def load(folder: Path, **options: Any) -> Any:
    """A model, and what was missing, unexpected or mismatched."""
    model, told = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", **options
    )
    return model, {key: value for key, value in told.items() if value}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=tokens()).logits
    return found


def quantised(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    model = tiny(name, dtype, **changes).eval()
    quantize_modules(model, True)
    return model


def rewritten(folder: Path, change: Any) -> None:
    """All tensors of a checkpoint of one file, through `change`."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def with_config(folder: Path, config: Any) -> None:
    content = json.loads((folder / "config.json").read_text())
    content.pop("quantization_config", None)
    if config is not None:
        content["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(content))


def as_compressed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """ModelOpt's names and factors as compressed-tensors has them."""
    owners = {key.removesuffix(".weight_scale_2") for key in tensors if key.endswith("_scale_2")}
    found = {}
    for key, value in tensors.items():
        owner, _, part = key.rpartition(".")
        if owner in owners and part == "weight":
            found[f"{owner}.weight_packed"] = value
        elif part == "weight_scale_2":
            found[f"{owner}.weight_global_scale"] = (1 / value).reshape(1)
            found[f"{owner}.input_global_scale"] = torch.ones(1)
        else:
            found[key] = value
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_dense_checkpoint_is_quantised_as_it_is_loaded(name: str, tmp_path: Path) -> None:
    dense = tiny(name).eval()
    dense.save_pretrained(tmp_path, max_shard_size="80KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model, told = load(tmp_path, quantization_config=Nvfp4Config())
    assert told == {}
    wanted = copy.deepcopy(dense)
    quantize_modules(wanted, True)
    assert torch.equal(logits(model), logits(wanted))
    kinds = {type(one) for one in model.modules()}
    assert (NVFP4Experts in kinds) == ("moe" in name or name == "mixtral")
    assert model.is_quantized
    assert model.quantization_method == "gristmill_nvfp4"
    assert not any(one.is_meta for one in model.state_dict().values())
    assert left_quantized(model) == ()  # loaded so, not patched


@pytest.mark.parametrize("name", MODELS)
def test_round_trip(name: str, tmp_path: Path) -> None:
    model = quantised(name)
    model.save_pretrained(tmp_path / "one")
    read, told = load(tmp_path / "one")
    assert told == {}
    assert torch.equal(logits(read), logits(model))
    # What was loaded is saved as what was quantised.
    read.save_pretrained(tmp_path / "two", max_shard_size="40KB")
    again, told = load(tmp_path / "two")
    assert told == {}
    assert torch.equal(logits(again), logits(model))
    first, second = (Checkpoint(tmp_path / one) for one in ("one", "two"))
    assert first.names() == second.names()
    assert first.config == second.config
    assert first.config is not None
    assert first.config.producer == "modelopt"
    assert not first.config.activations


def gpt_oss() -> Any:
    return transformers.GptOssConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
        pad_token_id=0,
    )


def test_experts_with_biases_in_alternate_rows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(gpt_oss(), attn_implementation="eager").eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(tmp_path / "dense")
    quantize_modules(model, True)
    assert isinstance(model.model.layers[1].mlp.experts, NVFP4Experts)
    on_load, told = load(tmp_path / "dense", quantization_config=Nvfp4Config())
    assert told == {}
    assert torch.equal(logits(on_load), logits(model))
    model.save_pretrained(tmp_path / "ours")
    read, told = load(tmp_path / "ours")
    assert told == {}
    assert torch.equal(logits(read), logits(model))


def test_saved_checkpoints_are_those_that_others_read(tmp_path: Path) -> None:
    model = quantised("mixtral")
    model.save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    name = "model.layers.1.block_sparse_moe.experts"
    w13, w2 = checkpoint.experts(name)
    ours = model.get_submodule("model.layers.1.mlp.experts")
    for stored, held in ((w13, ours.w13), (w2, ours.w2)):
        assert torch.equal(stored.codes, held.codes)
        assert torch.equal(stored.row_scale, held.row_scale)
    assert f"{name}.0.w1.weight_scale_2" in checkpoint
    assert checkpoint.tensor(f"{name}.0.w1.weight_scale_2").shape == ()
    # Every matrix is either in NVFP4 or listed.
    listed = checkpoint.config
    assert listed is not None
    modules = set(checkpoint.modules())
    for key in checkpoint.names():
        owner, _, part = key.rpartition(".")
        if part == "weight" and checkpoint.tensor(key).dim() > 1:
            assert listed.is_ignored(owner, {}) == (owner not in modules), owner


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_modelopt_checkpoints_by_our_writer(name: str, tmp_path: Path) -> None:
    model = quantised(name)
    weights = dict(model.state_dict())
    for layer in (0, 1):
        weights[f"model.layers.{layer}.self_attn.q_proj.input_scale"] = torch.tensor(0.5)
        weights[f"model.layers.{layer}.self_attn.k_proj.k_scale"] = torch.tensor(0.5)
    save_modelopt(tmp_path, weights, config=model.config.to_dict(), max_shard_bytes=2e4)
    read, told = load(tmp_path)
    assert told == {}
    assert torch.equal(logits(read), logits(model))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "mixtral"])
def test_compressed_tensors_are_taken_where_asked(name: str, tmp_path: Path) -> None:
    model = quantised(name)
    model.save_pretrained(tmp_path)
    rewritten(tmp_path, as_compressed)
    with_config(tmp_path, COMPRESSED)
    read, told = load(tmp_path, quantization_config=Nvfp4Config(act="fp8"))
    assert told == {}
    ours = read.get_submodule("model.layers.0.self_attn.q_proj")
    assert ours.act == "fp8"
    held = model.get_submodule("model.layers.0.self_attn.q_proj")
    assert torch.equal(ours.weight, held.weight)
    # One division each way.
    torch.testing.assert_close(ours.weight_scale_2, held.weight_scale_2, rtol=3e-7, atol=0)
    read.save_pretrained(tmp_path / "again")
    assert load(tmp_path / "again")[1] == {}


def test_compressed_tensors_are_left_to_transformers_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = quantised("llama", num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    rewritten(tmp_path, as_compressed)
    with_config(tmp_path, COMPRESSED)
    # Its own quantizer needs a package that is not here.
    with pytest.raises(ImportError, match="compressed"):
        load(tmp_path)
    registering = import_module("gristmill.integrations.transformers.register")
    monkeypatch.setattr(registering, "_state", dict(registering._state))
    register(compressed_tensors=True)
    read, told = load(tmp_path)
    assert told == {}
    assert type(read.model.layers[0].mlp.up_proj) is NVFP4Linear
    with_config(tmp_path, {**COMPRESSED, "format": "float-quantized"})
    with pytest.raises(ImportError, match="compressed"):
        load(tmp_path)


@pytest.mark.parametrize("told", [True, False])
def test_modelopt_that_speaks_in_a_file_of_its_own(told: bool, tmp_path: Path) -> None:
    model = quantised("qwen3_moe")
    model.save_pretrained(tmp_path)
    with_config(tmp_path, None)
    if told:
        content = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    read, missing = load(tmp_path, quantization_config=Nvfp4Config())
    assert missing == {}
    assert torch.equal(logits(read), logits(model))


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtypes(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """What is dense gets the dtype that was asked for, renamed or not."""
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    quantised(name, other).save_pretrained(tmp_path)
    model, _ = load(tmp_path, dtype=dtype)
    assert {one.dtype for one in model.parameters()} == {dtype}
    layer = model.get_submodule("model.layers.0.self_attn.q_proj")
    assert layer.weight.dtype == torch.uint8
    assert layer.weight_scale.dtype == torch.float8_e4m3fn
    assert layer.weight_scale_2.dtype == torch.float32
    assert logits(model).dtype == dtype


@pytest.mark.parametrize("device_map", [{"": "cpu"}, "auto"])
@pytest.mark.parametrize("stored", [True, False])
def test_device_maps(device_map: Any, stored: bool, tmp_path: Path) -> None:
    model = quantised("qwen3_moe") if stored else tiny("qwen3_moe").eval()
    model.save_pretrained(tmp_path)
    options = {} if stored else {"quantization_config": Nvfp4Config()}
    read, told = load(tmp_path, device_map=device_map, **options)
    assert told == {}
    assert torch.equal(logits(read), logits(quantised("qwen3_moe")))


def test_tied_embeddings(tmp_path: Path) -> None:
    model = quantised("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in Checkpoint(tmp_path)
    read, told = load(tmp_path)
    assert told == {}
    assert read.lm_head.weight is read.model.embed_tokens.weight
    assert torch.equal(logits(read), logits(model))


def test_some_modules_only(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    config = Nvfp4Config(modules="*.mlp.*", ignore=["model.layers.0"])
    model, told = load(tmp_path, quantization_config=config)
    assert told == {}
    names = {name for name, one in model.named_modules() if isinstance(one, NVFP4Linear)}
    assert names == {f"model.layers.1.mlp.{one}_proj" for one in ("gate", "up", "down")}
    model.save_pretrained(tmp_path / "some")
    again, told = load(tmp_path / "some")
    assert told == {}
    assert torch.equal(logits(again), logits(model))


def test_one_layer_of_dense_experts(tmp_path: Path) -> None:
    """Of experts that are stored in both ways, each comes as it is."""
    model = tiny("qwen3_moe").eval()
    quantize_modules(model, "model.layers.1.mlp.experts")
    model.save_pretrained(tmp_path)
    read, told = load(tmp_path)
    assert told == {}
    assert torch.equal(logits(read), logits(model))


def test_the_base_model_of_a_checkpoint(tmp_path: Path) -> None:
    from transformers import AutoModel

    model = quantised("llama")
    model.save_pretrained(tmp_path)
    body = AutoModel.from_pretrained(tmp_path, attn_implementation="eager")
    wanted = model.model(input_ids=tokens()).last_hidden_state
    assert torch.equal(body(input_ids=tokens()).last_hidden_state, wanted)
    body.save_pretrained(tmp_path / "body")
    whole, told = load(tmp_path / "body")
    assert set(told) == {"missing_keys"}
    assert set(told["missing_keys"]) == {"lm_head.weight"}
    found = whole.model(input_ids=tokens()).last_hidden_state
    assert torch.equal(found, wanted)


def test_missing_and_foreign_tensors_are_told(tmp_path: Path) -> None:
    quantised("llama").save_pretrained(tmp_path)
    name = "model.layers.0.mlp.up_proj"

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kept = {key: value for key, value in tensors.items() if not key.startswith(name)}
        return kept | {"model.layers.0.mlp.odd": torch.ones(3)}

    rewritten(tmp_path, change)
    _, told = load(tmp_path)
    assert set(told["missing_keys"]) == {f"{name}.weight"}
    assert set(told["unexpected_keys"]) == {"model.layers.0.mlp.odd"}


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("weight_scale", None, "there is no weight_scale"),
        ("weight", torch.zeros(96, 30, dtype=torch.uint8), "must be E4M3 of shape"),
        ("weight_scale", torch.full((96, 4), -1.0).to(E4M3), "neither negative nor NaN"),
        ("weight_scale_2", torch.tensor(-1.0), "must be finite and not negative"),
        ("weight_scale_2", torch.tensor(torch.nan), "must be finite and not negative"),
        ("weight_scale_2", torch.tensor(1.0).double(), "must be F32, got torch.float64"),
        ("weight_scale_2", torch.ones(3), "must be one value"),
    ],
)
def test_damaged_weights(part: str, value: Any, words: str, tmp_path: Path) -> None:
    quantised("llama").save_pretrained(tmp_path)
    name = f"model.layers.0.mlp.up_proj.{part}"

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors.pop(name)
        return tensors if value is None else tensors | {name: value}

    rewritten(tmp_path, change)
    # transformers only logs what its conversions raise.
    with pytest.raises(CheckpointError, match=words) as caught:
        load(tmp_path)
    assert f"{tmp_path / 'model.safetensors'}: model.layers.0.mlp.up_proj" in str(caught.value)


@pytest.mark.parametrize("number", ["99999999999", "9" * 400, "8", "03", "٣"])
def test_experts_that_the_model_has_not(number: str, tmp_path: Path) -> None:
    quantised("qwen3_moe").save_pretrained(tmp_path)
    old, new = (f"model.layers.0.mlp.experts.{one}." for one in ("3", number))
    rewritten(tmp_path, lambda one: {key.replace(old, new): part for key, part in one.items()})
    words = (
        rf"experts\.{number}\..* in the checkpoint is of none of the \d experts of model\.layers"
    )
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path)


@pytest.mark.parametrize("part", ["²", "1³", "①"])
@pytest.mark.parametrize("stored", [True, False])
def test_digits_that_are_no_numbers(part: str, stored: bool, tmp_path: Path) -> None:
    """transformers would raise a ValueError where it sorts the names."""
    (quantised("llama") if stored else tiny("llama")).save_pretrained(tmp_path)
    rewritten(tmp_path, lambda one: one | {f"model.layers.{part}.odd": torch.ones(1)})
    words = rf"model\.safetensors: model\.layers\.{part}\.odd has a part of digits"
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path, **({} if stored else {"quantization_config": Nvfp4Config()}))


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("weight_scale_2", lambda one: one - 1, "a global scale must be finite and not negative"),
        ("weight_scale_2", lambda one: one.double(), "must be F32"),
        ("weight_scale", lambda one: (-one.float()).to(E4M3), "block scales must be neither"),
        ("weight_scale", lambda one: one.float(), "must be E4M3"),
        ("weight", lambda one: one[:-1].clone(), "must be a matrix of U8 of shape"),
    ],
)
@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("qwen3_moe", "model.layers.0.mlp.experts.3.down_proj"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.3.w2"),
    ],
)
def test_a_damaged_expert_is_named(
    name: str,
    stored: str,
    part: str,
    change: Any,
    words: str,
    tmp_path: Path,
) -> None:
    """By its name in the checkpoint, as far as transformers does not rename it before."""
    quantised(name).save_pretrained(tmp_path)
    key = f"{stored}.{part}"
    rewritten(tmp_path, lambda one: one | {key: change(one[key])})
    owner = stored.replace("block_sparse_moe", "mlp")
    words = rf"model\.safetensors: {re.escape(owner)}\.{part}:? {words}"
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path)


@pytest.mark.parametrize(
    "value", [torch.zeros(31), torch.zeros(32, 1), torch.zeros(32, dtype=torch.int64)]
)
def test_a_damaged_bias_is_named(value: torch.Tensor, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(gpt_oss(), attn_implementation="eager").eval()
    quantize_modules(model, True)
    model.save_pretrained(tmp_path)
    owner = "model.layers.0.mlp.experts.1.down_proj"
    rewritten(tmp_path, lambda one: one | {f"{owner}.bias": value})
    words = rf"safetensors: {owner}\.bias must be floating-point numbers of shape \(32,\)"
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path)


def test_a_matrix_of_an_expert_that_is_there_twice(tmp_path: Path) -> None:
    """By the names of two kinds of models."""
    quantised("qwen3_moe").save_pretrained(tmp_path)
    old, new = (f"model.layers.0.mlp.experts.0.{one}." for one in ("down_proj", "w2"))
    rewritten(
        tmp_path,
        lambda one: (
            one | {key.replace(old, new): part.clone() for key, part in one.items() if old in key}
        ),
    )
    with pytest.raises(CheckpointError, match="in the checkpoint is of the same matrix as"):
        load(tmp_path)


def test_a_damaged_weight_in_one_of_several_files(tmp_path: Path) -> None:
    """The error names the file of the tensor, and the folder if a tensor of several is missing."""
    quantised("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    name = "model.layers.1.mlp.up_proj.weight_scale_2"
    files = {key: f"{1 + (key == name)}.safetensors" for key in tensors}
    index = {"metadata": {}, "weight_map": files}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    rest = {key: part for key, part in tensors.items() if key != name}
    lacking = {key: part for key, part in rest.items() if key != name[:-2]}
    for others, words in (
        (rest, f"{tmp_path / '2.safetensors'}: {name}: a global scale must be finite"),
        (lacking, f"{tmp_path}: {name.removesuffix('.weight_scale_2')}: there is no weight_scale"),
    ):
        save_file(others, tmp_path / "1.safetensors", metadata={"format": "pt"})
        save_file({name: torch.tensor(torch.nan)}, tmp_path / "2.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=re.escape(words)):
            load(tmp_path)


def test_other_formats_are_refused(tmp_path: Path) -> None:
    model = tiny("llama", num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    with_config(tmp_path, {"quant_method": "modelopt", "quant_algo": "FP8"})
    with pytest.raises(CheckpointError, match="quant_algo 'FP8' is not supported, only NVFP4"):
        load(tmp_path)
    with_config(tmp_path, {**COMPRESSED, "format": "float-quantized"})
    with pytest.raises(CheckpointError, match="format 'float-quantized'"):
        load(tmp_path, quantization_config=Nvfp4Config())
    with_config(tmp_path, {"quant_method": "fp8"})
    with pytest.raises(ValueError, match="Nvfp4Config"):
        load(tmp_path, quantization_config=Nvfp4Config())
    with_config(tmp_path, None)
    rewritten(
        tmp_path, lambda one: one | {"model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)}
    )
    with pytest.raises(CheckpointError, match=r"up_proj\.weight_scale .* not of one in NVFP4"):
        load(tmp_path, quantization_config=Nvfp4Config())


def as_fp8(tensors: dict[str, torch.Tensor], owner: str, scale: str) -> dict[str, torch.Tensor]:
    """A layer in FP8, whose values are wrong without its scale."""
    left = {name: one for name, one in tensors.items() if not name.startswith(f"{owner}.")}
    left[f"{owner}.weight"] = torch.randn(64, 64).to(E4M3)
    return left | {f"{owner}.{scale}": torch.tensor(0.01)}


@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize(
    ("name", "module"),
    [("llama", "self_attn.q_proj"), ("qwen3_moe", "mlp.experts.1.up_proj")],
)
def test_other_formats_beside_nvfp4_are_refused(
    name: str, module: str, scale: str, tmp_path: Path
) -> None:
    quantised(name).save_pretrained(tmp_path)
    owner = f"model.layers.0.{module}"
    rewritten(tmp_path, lambda tensors: as_fp8(tensors, owner, scale))
    with pytest.raises(CheckpointError, match=rf"safetensors: {owner}\.{scale} .* not of one in"):
        load(tmp_path)


def test_a_weight_without_its_global_scale_is_refused(tmp_path: Path) -> None:
    quantised("llama").save_pretrained(tmp_path)
    missing = "model.layers.0.self_attn.q_proj.weight_scale_2"
    rewritten(tmp_path, lambda one: {key: one[key] for key in one if key != missing})
    with pytest.raises(CheckpointError, match=r"q_proj\.weight_scale .* not of one in NVFP4"):
        load(tmp_path)


@pytest.mark.parametrize(
    "owner", ["vision_tower.blocks.0.fc1", "model.layers.61.eh_proj", "model.layers.61.mlp.up_proj"]
)
@pytest.mark.parametrize("kind", ["FP8", "NVFP4"])
def test_quantised_layers_that_the_model_has_not_are_left(
    kind: str, owner: str, tmp_path: Path
) -> None:
    model = quantised("llama")
    model.save_pretrained(tmp_path)

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if kind == "FP8":
            return as_fp8(tensors, owner, "weight_scale")
        own = "model.layers.0.mlp.up_proj."
        copies = {key: one.clone() for key, one in tensors.items() if key.startswith(own)}
        return tensors | {f"{owner}.{key.removeprefix(own)}": copies[key] for key in copies}

    rewritten(tmp_path, change)
    loaded, _ = load(tmp_path)
    assert torch.equal(logits(loaded), logits(model))


def test_layers_that_cannot_be_in_nvfp4_are_named(tmp_path: Path) -> None:
    quantised("llama", num_hidden_layers=1).save_pretrained(tmp_path)
    scale = {"model.embed_tokens.weight_scale_2": torch.ones(())}
    rewritten(tmp_path, lambda one: one | scale)
    with pytest.raises(CheckpointError, match=r"embed_tokens is in NVFP4.*it is a Embedding"):
        load(tmp_path)


def test_offloading_to_disk_is_refused(tmp_path: Path) -> None:
    tiny("llama", num_hidden_layers=1).save_pretrained(tmp_path)
    places = {"model": "cpu", "lm_head": "disk"}
    with pytest.raises(ArgumentError, match="device_map puts modules on disk"):
        load(tmp_path, quantization_config=Nvfp4Config(), device_map=places)


def test_wrong_configs() -> None:
    with pytest.raises(ArgumentError, match=r"Nvfp4Config: method"):
        Nvfp4Config(method="best")
    with pytest.raises(ArgumentError, match=r"Nvfp4Config: act"):
        Nvfp4Config(act="int8")
    with pytest.raises(DtypeError, match="ignore must hold patterns as str, got int"):
        Nvfp4Config(ignore=[3])  # type: ignore[list-item]


def test_configs_are_written_as_modelopts() -> None:
    content = json.loads(Nvfp4Config().to_json_string())
    assert content["quant_method"] == "modelopt"
    assert content["quant_algo"] == "W4A16_NVFP4"
    read = Nvfp4Config.from_dict(content)
    assert read.checkpoint is not None
    assert copy.deepcopy(read).checkpoint == read.checkpoint


def test_importing_the_package_imports_no_transformers() -> None:
    script = (
        "import sys, gristmill, gristmill.integrations.transformers, "
        "gristmill.integrations.transformers.register, gristmill.integrations.transformers.nvfp4\n"
        "sys.exit(any(name in sys.modules for name in ('transformers', 'peft', 'accelerate')))\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=120, check=False).returncode == 0
