"""Patching does not depend on the modes in force, on wrappers, or on what others hold besides."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tf_models import llama_config, loss_and_gradients, relative_error, tiny, tokens
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

import gristmill
from gristmill.errors import ArgumentError
from gristmill.integrations.transformers import Nvfp4Config, norms
from gristmill.nn import NVFP4Linear


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: dict[str, Any] = {
    "another device": lambda: torch.device("meta"),
    "bf16 by default": lambda: default_dtype(torch.bfloat16),
    "fp16 by default": lambda: default_dtype(torch.float16),
    "fp64 by default": lambda: default_dtype(torch.float64),
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_in_force_do_not_matter(mode: str) -> None:
    """The default device of many scripts is a GPU; here it is one whose values nobody can read."""
    model = tiny("gemma2", num_hidden_layers=1)
    wanted = gristmill.patch(copy.deepcopy(model), loss="linear_cross_entropy")
    with MODES[mode]():
        assert gristmill.patch(model, loss="linear_cross_entropy") == wanted
    assert not wanted.left


@pytest.mark.parametrize("how", ["cross_entropy", "linear_cross_entropy"])
def test_a_patched_model_runs_on_the_meta_device(how: str) -> None:
    model = tiny("llama", num_hidden_layers=1)
    gristmill.patch(model, loss=how)
    ids = tokens().to("meta")
    output = model.to("meta")(input_ids=ids, labels=ids)
    output.loss.backward()
    assert model.model.norm.weight.grad.is_meta


def test_many_layer_norms_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's keeps its shape in a tuple, of which each has its own; hooks belong to each, too."""
    looked: list[nn.Module] = []
    usual = norms.recognise
    monkeypatch.setattr(norms, "recognise", lambda one: looked.append(one) or usual(one))
    model = tiny("gpt2", n_layer=3)
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(model, hooks.ModelHook())
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            hooks.add_hook_to_module(module, hooks.ModelHook())
    assert len(gristmill.patch(model, loss=None).replaced) == 7
    assert len(looked) == 1


def without_one_token(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **kwargs: Any
) -> torch.Tensor:
    """As losses do that know of a padding token."""
    return ForCausalLMLoss(logits, labels.masked_fill(labels == 90, -100), vocab_size, **kwargs)


def test_a_loss_that_treats_a_special_token_otherwise_is_left() -> None:
    model = tiny("llama", num_hidden_layers=1, eos_token_id=[2, 90])
    model.loss_function = without_one_token
    (left,) = gristmill.patch(model, norms=False).left
    assert left.reason == "it differs from ForCausalLMLoss in special tokens"
    assert model.loss_function is without_one_token


def test_unpatching_after_somebody_set_another_loss() -> None:
    model = tiny("llama", num_hidden_layers=1)
    gristmill.patch(model, loss="linear_cross_entropy")
    model.loss_function = without_one_token
    gristmill.unpatch(model)
    held = [name for one in model.modules() for name in vars(one) if name.startswith("gristmill")]
    assert held == []
    assert "forward" not in vars(model)
    assert model.loss_function is without_one_token


class MaskedColumns(transformers.LlamaForCausalLM):
    """Rows of the head beyond the vocabulary are never to be predicted."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        output = self.model(input_ids=input_ids, **kwargs)
        logits = self.lm_head(output.last_hidden_state)
        logits[..., 90:] = -10.0
        loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def test_a_model_that_masks_some_logits_goes_on_to_make_them() -> None:
    model = MaskedColumns(llama_config(num_hidden_layers=1)).train()
    ids = tokens()
    wanted, gradients = loss_and_gradients(model, ids)
    report = gristmill.patch(model, norms=False, loss="linear_cross_entropy")
    assert [one.reason for one in report.left] == ["it does not treat all logits of a token alike"]
    found, ours = loss_and_gradients(model, ids)
    torch.testing.assert_close(found, wanted)
    for name, gradient in gradients.items():
        assert relative_error(ours[name], gradient) < 1e-5


@pytest.mark.parametrize("wrap", [torch.compile, nn.Sequential, lambda model: model])
def test_wrappers_do_not_change_what_is_quantised(wrap: Any) -> None:
    model = tiny("llama", num_hidden_layers=1)
    report = gristmill.patch(wrap(model), norms=False, loss=None, nvfp4=True)
    assert len(report.replaced) == 7
    assert [(one.what, one.reason) for one in report.left] == [("Linear", "the output head")]
    assert type(model.lm_head) is nn.Linear


def test_a_quantised_model_in_a_wrapper_is_saved_as_one(tmp_path: Path) -> None:
    model = tiny("llama", num_hidden_layers=1).eval()
    gristmill.patch(nn.Sequential(model), norms=False, loss=None, nvfp4=True)
    model.save_pretrained(tmp_path)
    gristmill.integrations.transformers.register()
    read = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager"
    ).eval()
    assert isinstance(read.model.layers[0].mlp.up_proj, NVFP4Linear)
    assert torch.equal(read(input_ids=tokens()).logits, model(input_ids=tokens()).logits)


def test_models_of_one_config_stay_apart(tmp_path: Path) -> None:
    """A config is told of the quantisation, which must not reach others that were made of it."""
    config = llama_config(num_hidden_layers=1)
    one, other = (transformers.LlamaForCausalLM(config) for _ in range(2))
    gristmill.patch(one, norms=False, loss=None, nvfp4=True)
    for held in (config, other.config):
        assert not hasattr(held, "quantization_config")
        assert not getattr(held, "_is_quantized", False)
    other.save_pretrained(tmp_path)
    assert "quantization_config" not in (tmp_path / "config.json").read_text()
    # And it is one config still, that the model and its layers share.
    held = {id(module.config) for module in one.modules() if hasattr(module, "config")}
    assert held == {id(one.config)}
    one.set_attn_implementation("sdpa")
    assert one.model.layers[0].self_attn.config._attn_implementation == "sdpa"


def test_adapters_that_are_there_are_not_quantised() -> None:
    peft = pytest.importorskip("peft")
    options = {"target_modules": ["q_proj"], "modules_to_save": ["up_proj"], "r": 16}
    model = peft.get_peft_model(tiny("llama", num_hidden_layers=1), peft.LoraConfig(**options))
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    report = gristmill.patch(model, norms=False, loss=None, nvfp4=True)
    kinds = set("kvo") | {"gate", "down"}
    assert {one.name.rpartition(".")[2] for one in report.replaced} == {
        f"{kind}_proj" for kind in kinds
    }
    assert {name for name, one in model.named_parameters() if one.requires_grad} == trained
    reasons = {one.name.partition("layers.0.")[2]: one.reason for one in report.left}
    assert "adapter" in reasons["self_attn.q_proj.lora_A.default"]
    assert "adapter" in reasons["self_attn.q_proj.base_layer"]
    assert "PEFT trains" in reasons["mlp.up_proj.modules_to_save.default"]
    model(input_ids=tokens(), labels=tokens()).loss.backward()


def test_labels_that_do_not_fit() -> None:
    model = tiny("llama", num_hidden_layers=1)
    gristmill.patch(model)
    with pytest.raises(ArgumentError, match=r"labels must be .* \(2, 12\), got \(2, 5\)"):
        model(input_ids=tokens(), labels=tokens()[:, :5])


def test_a_module_that_stands_in_two_places_is_quantised_in_both() -> None:
    shared = nn.Linear(32, 32)
    model = nn.ModuleDict({"one": nn.Sequential(shared, nn.ReLU()), "two": nn.ModuleList([shared])})
    (replaced,) = gristmill.patch(model, norms=False, loss=None, nvfp4=True).replaced
    assert replaced.name == "one.0"
    assert isinstance(model["one"][0], NVFP4Linear)
    assert model["two"][0] is model["one"][0]


def test_layers_that_checkpoints_join_are_stored_one_by_one(tmp_path: Path) -> None:
    """HRM's checkpoints have gate, q, k and v in one matrix; codes cannot be joined so."""
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = transformers.HrmTextConfig(**sizes, **heads, pad_token_id=0, use_cache=False)
    dense = transformers.HrmTextForCausalLM(config).eval()
    dense.save_pretrained(tmp_path / "dense")
    loaded = transformers.HrmTextForCausalLM.from_pretrained(
        tmp_path / "dense", quantization_config=Nvfp4Config()
    )
    gristmill.patch(dense, norms=False, loss=None, nvfp4=True)
    wanted = dense(input_ids=tokens()).logits
    for number, model in enumerate((dense, loaded)):
        folder = tmp_path / str(number)
        model.save_pretrained(folder)
        read = transformers.HrmTextForCausalLM.from_pretrained(
            folder, quantization_config=Nvfp4Config()
        )
        read.save_pretrained(folder / "again")
        again, told = transformers.HrmTextForCausalLM.from_pretrained(
            folder / "again", quantization_config=Nvfp4Config(), output_loading_info=True
        )
        assert not told["missing_keys"]
        assert not told["unexpected_keys"]
        for one in (model, read, again):
            torch.testing.assert_close(one.eval()(input_ids=tokens()).logits, wanted)
