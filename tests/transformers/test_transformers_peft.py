"""LoRA adapters of PEFT on NVFP4 models."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tf_models import relative_error, tiny, tokens
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

peft = pytest.importorskip("peft")

from gristmill.errors import ArgumentError  # noqa: E402
from gristmill.formats.nvfp4 import dequantize  # noqa: E402
from gristmill.integrations.transformers.config import Nvfp4Config  # noqa: E402
from gristmill.integrations.transformers.linears import is_transposed  # noqa: E402
from gristmill.integrations.transformers.nvfp4 import quantize_modules  # noqa: E402
from gristmill.nn import NVFP4Linear  # noqa: E402

TARGETS = {"llama": ["q_proj", "down_proj"], "gpt2": ["c_attn"], "qwen3_moe": ["q_proj", "o_proj"]}


def config(name: str = "llama", **changes: Any) -> Any:
    return peft.LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": TARGETS[name], "task_type": "CAUSAL_LM"}
        | changes
    )


def pair(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A model in NVFP4, and a dense one with the same values."""
    dense = tiny(name, dtype)
    model = copy.deepcopy(dense)
    quantize_modules(model, lambda _, module: not hasattr(module, "gate_up_proj"))
    for key, module in model.named_modules():
        if isinstance(module, NVFP4Linear):
            old, values = dense.get_submodule(key), dequantize(module.weight4)
            old.weight.data.copy_(values.t() if is_transposed(old) else values)
    return model, dense


def with_adapters(model: Any, name: str, **changes: Any) -> Any:
    """The same random adapters, whatever the model; B is not zero."""
    wrapped = peft.get_peft_model(model, config(name, **changes))
    generator = torch.Generator().manual_seed(0)
    for key, weight in sorted(wrapped.named_parameters()):
        if "lora_" in key:
            weight.data = torch.randn(weight.shape, generator=generator).to(weight) * 0.2
    return wrapped


@pytest.mark.parametrize("name", sorted(TARGETS))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adapters_compute_and_train_as_on_a_dense_model(name: str) -> None:
    ours, theirs = (with_adapters(one, name) for one in pair(name))
    found = []
    for one in (ours, theirs):
        out = one(input_ids=tokens(), labels=tokens())
        out.loss.backward()
        found.append((out.logits.detach(), {k: p.grad for k, p in one.named_parameters()}))
    (logits, gradients), (wanted, truth) = found
    assert relative_error(logits, wanted) < 5e-6
    trained = {key for key, gradient in gradients.items() if gradient is not None}
    assert trained == {key for key in gradients if "lora_" in key}
    assert trained == {key for key, gradient in truth.items() if gradient is not None}
    for key in trained:
        assert relative_error(gradients[key], truth[key]) < 2e-5, key


def test_adapters_change_nothing_at_first_and_can_be_disabled() -> None:
    model = tiny("llama").eval()
    quantize_modules(model, True)
    ids = tokens()
    with torch.no_grad():
        before = model(input_ids=ids).logits
        wrapped = peft.get_peft_model(model, config())
        assert torch.equal(wrapped(input_ids=ids).logits, before)
        wrapped = with_adapters(wrapped.unload(), "llama")
        assert not torch.allclose(wrapped(input_ids=ids).logits, before, atol=1e-3)
        with wrapped.disable_adapter():
            assert torch.equal(wrapped(input_ids=ids).logits, before)


def test_dtypes_are_those_of_pefts_quantised_layers() -> None:
    model, dense = pair("llama", torch.bfloat16)
    ours = with_adapters(model, "llama")
    # Adapters of quantised layers are in fp32, and results in the dtype of the model.
    assert {p.dtype for n, p in ours.named_parameters() if "lora_" in n} == {torch.float32}
    theirs = with_adapters(dense, "llama")
    truth = copy.deepcopy(theirs).float()
    with torch.no_grad():
        found, usual, wanted = (one(input_ids=tokens()).logits for one in (ours, theirs, truth))
    assert found.dtype == torch.bfloat16
    assert relative_error(found, wanted) <= 1.5 * relative_error(usual, wanted)
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(input_ids=tokens(), labels=tokens()).loss.isfinite()


def test_dropout_is_that_of_the_adapter() -> None:
    model, _ = pair("llama")
    wrapped = with_adapters(model, "llama", lora_dropout=0.5).train()
    one, two = (wrapped(input_ids=tokens()).logits for _ in range(2))
    assert not torch.equal(one, two)
    wrapped.eval()
    one, two = (wrapped(input_ids=tokens()).logits for _ in range(2))
    assert torch.equal(one, two)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_all_linear_layers(name: str) -> None:
    def targets(model: Any) -> set[str]:
        wrapped = peft.get_peft_model(model, config(target_modules="all-linear"))
        keys = (key for key, _ in wrapped.named_parameters() if "lora_" in key)
        return {key.split(".lora_")[0] for key in keys}

    model = tiny(name)
    quantize_modules(model, [f"*{one}" for one in TARGETS[name]])  # some: both kinds are found
    assert targets(model) == targets(tiny(name))


_LATER = """
import sys
import warnings
import peft
sys.path.insert(0, sys.argv[1])
from tf_models import tiny
from gristmill.integrations.transformers.nvfp4 import quantize_modules

warnings.simplefilter("ignore")
settings = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
peft.get_peft_model(tiny("qwen3_moe"), peft.LoraConfig(**settings))
model = tiny("qwen3_moe")
quantize_modules(model, True)
wrapped = peft.get_peft_model(model, peft.LoraConfig(**settings))
print(sum(type(one).__name__ == "LoraNVFP4Linear" for one in wrapped.modules()))
"""


def test_all_linear_layers_after_peft_was_at_work() -> None:
    """By then its modules have imported by name what is wrapped for NVFP4 layers."""
    command = [sys.executable, "-c", _LATER, str(Path(__file__).parent)]
    done = subprocess.run(command, timeout=120, check=False, capture_output=True, text=True)
    assert done.stdout.strip() == "8", done.stderr


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_all_linear_layers_beside_experts() -> None:
    model = tiny("qwen3_moe")
    quantize_modules(model, True)
    wrapped = peft.get_peft_model(model, config(target_modules="all-linear"))
    layers = {key for key, one in wrapped.named_modules() if hasattr(one, "lora_A")}
    assert sum(key.endswith(("q_proj", "k_proj", "v_proj", "o_proj")) for key in layers) == 8
    wrapped(input_ids=tokens(), labels=tokens()).loss.backward()


def test_adapters_are_saved_and_loaded(tmp_path: Path) -> None:
    model, _ = pair("llama")
    bare = copy.deepcopy(model)
    wrapped = with_adapters(model, "llama").eval()
    wrapped.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("model*.safetensors"))
    read = peft.PeftModel.from_pretrained(bare, tmp_path).eval()
    with torch.no_grad():
        one, two = (each(input_ids=tokens()).logits for each in (wrapped, read))
    assert torch.equal(one, two)


def test_a_second_adapter() -> None:
    model, _ = pair("llama")
    wrapped = with_adapters(model, "llama")
    first = wrapped(input_ids=tokens()).logits
    wrapped.add_adapter("other", config(r=2))
    wrapped.set_adapter("other")
    assert not torch.equal(wrapped(input_ids=tokens()).logits, first)
    with pytest.raises(ArgumentError, match="use_dora=True reads the weight"):
        wrapped.add_adapter("third", config(use_dora=True))


def test_merging_is_refused() -> None:
    wrapped = with_adapters(pair("llama")[0], "llama")
    with pytest.raises(ArgumentError, match="merge: an adapter cannot be merged"):
        wrapped.merge_and_unload()
    with pytest.raises(ArgumentError, match="merge: an adapter cannot be merged"):
        wrapped.merge_adapter()


@pytest.mark.parametrize(
    "changes", [{"use_dora": True}, {"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}]
)
def test_starts_that_read_the_weight_are_refused(changes: dict[str, Any]) -> None:
    name = next(iter(changes))
    with pytest.raises(ArgumentError, match=f"{name}=.* reads the weight"):
        peft.get_peft_model(pair("llama")[0], config(**changes))


def test_dense_models_are_as_ever() -> None:
    wrapped = with_adapters(pair("llama")[1], "llama")
    layer = wrapped.base_model.model.model.layers[0].self_attn.q_proj
    assert type(layer).__module__ == "peft.tuners.lora.layer"
    assert wrapped.peft_config["default"]._custom_modules is None
    wrapped.merge_and_unload()


def test_preparing_for_training_and_checkpointing() -> None:
    model = tiny("llama", torch.bfloat16)
    quantize_modules(model, True)
    codes = model.model.layers[0].mlp.up_proj.weight.clone()
    model = peft.prepare_model_for_kbit_training(model)
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, codes)
    wrapped = with_adapters(model, "llama")
    wrapped.gradient_checkpointing_enable({"use_reentrant": False})
    wrapped(input_ids=tokens(), labels=tokens()).loss.backward()
    assert all(p.grad is not None for n, p in wrapped.named_parameters() if "lora_" in n)


def loaded(folder: Path) -> Any:
    tiny("llama").save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=Nvfp4Config())


def arguments(folder: Path) -> Any:
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )


def test_trainer_trains_adapters_of_a_loaded_model(tmp_path: Path) -> None:
    wrapped = peft.get_peft_model(loaded(tmp_path / "dense"), config())
    before = copy.deepcopy(wrapped.state_dict())
    data = [{"input_ids": row, "labels": row} for row in tokens(4)]
    trainer = Trainer(wrapped, arguments(tmp_path / "run"), train_dataset=data)
    trainer.train()
    changed = {
        key
        for key, value in wrapped.state_dict().items()
        if not torch.equal(value.float(), before[key].float())
    }
    assert changed
    assert all("lora_" in key for key in changed)
    trainer.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def test_trainer_refuses_a_loaded_model_without_adapters(tmp_path: Path) -> None:
    data = [{"input_ids": row, "labels": row} for row in tokens(2)]
    with pytest.raises(ValueError, match="adapters"):
        Trainer(loaded(tmp_path), arguments(tmp_path / "run"), train_dataset=data)


@pytest.mark.long
def test_peft_that_is_imported_later() -> None:
    script = (
        "import sys, torch\n"
        "from gristmill.integrations.transformers.nvfp4 import quantize_modules\n"
        "model = torch.nn.Sequential(torch.nn.Linear(32, 32))\n"
        "quantize_modules(model, True)\n"
        "quantize_modules(torch.nn.Sequential(torch.nn.Linear(32, 32)), True)\n"
        "assert 'peft' not in sys.modules\n"
        "import inspect, peft, pickle, copy\n"
        "wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=['0']))\n"
        "wrapped(torch.randn(2, 32)).sum().backward()\n"
        "layer = wrapped.base_model.model[0]\n"
        "assert layer.lora_B.default.weight.grad is not None\n"
        "assert 'NVFP4' in type(layer).__name__\n"
        "pickle.loads(pickle.dumps(layer))\n"
        "assert 'class LoraModel' in inspect.getsource(peft.tuners.lora.model)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], timeout=120, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
