"""Training without logits: `loss="linear_cross_entropy"` on models of transformers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers
from tf_models import (
    VOCABULARY,
    in_precision,
    labels_of,
    loss_and_gradients,
    relative_error,
    tiny,
    tokens,
)
from torch.utils._python_dispatch import TorchDispatchMode

from gristmill.errors import GristmillError
from gristmill.integrations.transformers.forwards import own_forward
from gristmill.integrations.transformers.loss import patch_loss, unpatch_loss

JOINED = {
    "llama": "linear_cross_entropy",
    "gemma2": "linear_cross_entropy(softcap=5)",
    "qwen3_moe": "linear_cross_entropy",
    "gpt2": "linear_cross_entropy",
    "granite": "linear_cross_entropy(scale=0.333333)",
    "cohere": "linear_cross_entropy(scale=0.25)",
    "mixtral": "linear_cross_entropy",
}


def _patched(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    model = tiny(name, dtype, **changes)
    report = patch_loss(model, "linear_cross_entropy")
    assert [one.now for one in report.replaced] == [JOINED[name]], report
    assert not report.left
    return model


def _modern_bert(**changes: Any) -> Any:
    small = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
        "attn_implementation": "eager",
    }
    config = transformers.ModernBertConfig(**small | changes)
    torch.manual_seed(0)
    model = transformers.ModernBertForMaskedLM(config).train()
    torch.nn.init.normal_(model.decoder.bias)
    return model


@pytest.mark.parametrize("name", JOINED)
def test_fp32_tracks_the_model(name: str) -> None:
    own, model = tiny(name), _patched(name)
    for inputs in ({}, {"num_items_in_batch": torch.tensor(50)}, {"ignore_index": 7}):
        ids = tokens()
        labels = ids if "ignore_index" in inputs else labels_of(ids)
        expected, gradients = loss_and_gradients(own, ids, labels=labels, **inputs)
        value, found = loss_and_gradients(model, ids, labels=labels, **inputs)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=0.0)
        assert found.keys() == gradients.keys() == dict(own.named_parameters()).keys()
        errors = {key: relative_error(found[key], gradients[key]) for key in gradients}
        assert max(errors.values()) < 5e-6, errors


@pytest.mark.parametrize("name", JOINED)
def test_bf16_is_as_near_to_the_truth_as_the_model(name: str) -> None:
    own, model = tiny(name, torch.bfloat16), _patched(name, torch.bfloat16)
    ids = tokens(4, 24)
    truth, exact = loss_and_gradients(in_precision(own, torch.float32), ids)
    expected, gradients = loss_and_gradients(own, ids)
    value, found = loss_and_gradients(model, ids)
    rounding = 2.0**-8
    assert abs(value - truth) <= max(1.5 * abs(expected - truth), 1e-3 * truth)
    for key in gradients:
        theirs, ours = (relative_error(one[key], exact[key]) for one in (gradients, found))
        assert ours <= max(1.5 * theirs, rounding), (key, ours, theirs)


@pytest.mark.parametrize("how", ["config", "argument"])
def test_losses_of_routers_are_in_it(how: str) -> None:
    changes = {"output_router_logits": True} if how == "config" else {}
    inputs = {} if how == "config" else {"output_router_logits": True}
    own, model = tiny("qwen3_moe", **changes), _patched("qwen3_moe", **changes)
    ids = tokens()
    expected, gradients = loss_and_gradients(own, ids, **inputs)
    value, found = loss_and_gradients(model, ids, **inputs)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=0.0)
    assert max(relative_error(found[key], gradients[key]) for key in gradients) < 5e-6
    theirs, ours = (one(input_ids=ids, labels=ids, **inputs) for one in (own, model))
    assert [key for key in theirs if key != "logits"] == list(ours)
    torch.testing.assert_close(ours.aux_loss, theirs.aux_loss)
    assert float(theirs.aux_loss.detach()) > 0.1  # and it is none of the roundings above


def test_a_masked_language_model_with_a_bias_and_a_layer_before_its_head() -> None:
    own = _modern_bert()
    model = copy.deepcopy(own)
    report = patch_loss(model, "linear_cross_entropy")
    assert report.replaced[0].was == "decoder and ForMaskedLMLoss"
    ids = tokens()
    expected, gradients = loss_and_gradients(own, ids)
    value, found = loss_and_gradients(model, ids)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=0.0)
    assert "decoder.bias" in gradients
    assert max(relative_error(found[key], gradients[key]) for key in gradients) < 5e-6
    assert model(input_ids=ids, labels=ids).logits is None


def test_scale_softcap_and_bias_together() -> None:
    """A head that no config of today has, built on one that is near."""
    own = tiny("gemma2", tie_word_embeddings=False)
    own.lm_head.bias = torch.nn.Parameter(torch.randn(VOCABULARY))

    def scaled(logits: torch.Tensor) -> torch.Tensor:
        return logits * 0.37

    class Scaled(type(own)):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            logits = scaled(self.lm_head(self.model(input_ids).last_hidden_state))
            logits = 2.5 * torch.tanh(logits / 2.5)
            loss = None
            if labels is not None:
                loss = self.loss_function(logits, labels, VOCABULARY, **kwargs)
            output = transformers.modeling_outputs.CausalLMOutputWithPast
            return output(loss=loss, logits=logits)

    own.__class__ = Scaled
    model = copy.deepcopy(own)
    report = patch_loss(model, "linear_cross_entropy")
    assert report.replaced[0].now == "linear_cross_entropy(scale=0.37, softcap=2.5)"
    ids = tokens()
    expected, gradients = loss_and_gradients(own, ids)
    value, found = loss_and_gradients(model, ids)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=0.0)
    assert max(relative_error(found[key], gradients[key]) for key in gradients) < 5e-6


def test_labels_by_position_and_shifted_ones() -> None:
    own, model = tiny("llama"), _patched("llama")
    ids = tokens()
    names = ("input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds")
    by_place = [{"input_ids": ids}.get(name) for name in names] + [labels_of(ids)]
    output = model(*by_place)
    assert output.logits is None
    torch.testing.assert_close(output.loss, own(*by_place).loss)
    inputs = {"input_ids": ids, "labels": ids, "shift_labels": ids.flip(1)}
    torch.testing.assert_close(model(**inputs).loss, own(**inputs).loss)


def test_logits_are_made_wherever_somebody_could_want_them() -> None:
    model = _patched("llama")
    ids = tokens()
    inputs = {"input_ids": ids, "labels": ids}
    assert model(**inputs).logits is None
    assert model(input_ids=ids).logits.shape == (*ids.shape, VOCABULARY)
    with torch.no_grad():
        assert model(**inputs).logits is not None
    assert model(input_ids=ids, labels=ids[:, -4:], logits_to_keep=4).logits.shape[1] == 4
    assert len(model(**inputs, return_dict=False)) == 3  # loss, logits, cache
    kept = model.lm_head.register_forward_hook(lambda *_: None)
    assert model(**inputs).logits is not None
    kept.remove()
    assert model(**inputs).logits is None
    own = tiny("llama").eval()
    theirs, ours = own(**inputs), model.eval()(**inputs)
    assert torch.equal(ours.logits, theirs.logits)
    torch.testing.assert_close(ours.loss, theirs.loss)
    settings = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(model.generate(ids, **settings), own.generate(ids, **settings))


def test_what_came_after_the_patch_is_respected() -> None:
    ids = tokens()
    inputs = {"input_ids": ids, "labels": ids}
    own = tiny("llama", tie_word_embeddings=False)
    model = _patched("llama", tie_word_embeddings=False)
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.float().mean()
    output = model(**inputs)
    torch.testing.assert_close(output.loss, output.logits.mean())

    model = _patched("llama", tie_word_embeddings=False)

    class Wrapped(torch.nn.Module):  # as LoRA does it: the old head within, and something added
        def __init__(self, base_layer: torch.nn.Module) -> None:
            super().__init__()
            self.base_layer = base_layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base_layer(x) + x.sum(-1, keepdim=True) * torch.arange(VOCABULARY)

    model.lm_head, own.lm_head = Wrapped(model.lm_head), Wrapped(own.lm_head)
    torch.testing.assert_close(model(**inputs).loss, own(**inputs).loss)
    unpatch_loss(model)
    assert own_forward(model.lm_head.base_layer) is None
    assert "gristmill" not in model.lm_head.base_layer.__dict__


def test_a_changed_config_is_seen_when_patched_again() -> None:
    model = _patched("gemma2")
    model.config.final_logit_softcapping = 2.0
    report = patch_loss(model, "linear_cross_entropy")
    assert report.replaced[0].now == "linear_cross_entropy(softcap=2)"
    own = tiny("gemma2", final_logit_softcapping=2.0)
    ids = tokens()
    inputs = {"input_ids": ids, "labels": ids}
    torch.testing.assert_close(model(**inputs).loss, own(**inputs).loss)


class _Other(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


class _Again(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = x @ self.weight.T
        return product if self.bias is None else product + self.bias


def test_heads_are_judged_by_their_results() -> None:
    for kind, reason in ((_Other, "not those of a linear layer"), (_Again, None)):
        model = tiny("llama", tie_word_embeddings=False)
        model.lm_head.__class__ = kind
        report = patch_loss(model, "linear_cross_entropy")
        if reason is None:
            assert not report.left
        else:
            assert report.replaced[0].now == "cross_entropy"
            assert reason in report.left[0].reason
            assert model(input_ids=tokens(), labels=tokens()).logits is not None


def test_what_is_done_to_logits_and_is_neither_scale_nor_softcap() -> None:
    model = tiny("llama", num_hidden_layers=1)

    class Shifted(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            logits = self.lm_head(self.model(input_ids).last_hidden_state) + self.added
            loss = self.loss_function(logits, labels, VOCABULARY, **kwargs)
            output = transformers.modeling_outputs.CausalLMOutputWithPast
            return output(loss=loss, logits=logits)

    model.__class__ = Shifted
    reasons = {
        0.5: "neither a scale nor a softcap",
        torch.nn.Parameter(torch.ones(())): "weights of its own",
        torch.ones(VOCABULARY): "neither a scale nor a softcap",
        torch.arange(VOCABULARY) / 8: "not treat all logits of a token alike",
        torch.ones(2, 1, 1, 1): "other rows",
    }
    for added, reason in reasons.items():
        model.added = added
        report = patch_loss(model, "linear_cross_entropy")
        assert reason in report.left[-1].reason
        unpatch_loss(model)
        del model.added


def test_a_forward_that_forgets_its_loss_is_an_error_and_not_garbage() -> None:
    model = tiny("llama", num_hidden_layers=1)

    class Forgetful(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            logits = self.lm_head(self.model(input_ids).last_hidden_state)
            loss = self.loss_function(logits, labels, VOCABULARY) if self.remembers else None
            output = transformers.modeling_outputs.CausalLMOutputWithPast
            return output(loss=loss, logits=logits)

    model.__class__ = Forgetful
    model.remembers = True
    assert not patch_loss(model, "linear_cross_entropy").left
    model.remembers = False
    with pytest.raises(GristmillError, match="no loss_function"):
        model(input_ids=tokens(), labels=tokens())
    model.remembers = True
    assert model(input_ids=tokens(), labels=tokens()).loss is not None


class _Sizes(TorchDispatchMode):
    """The sizes of all tensors that ops give to each other; what is within an op is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        many = result if isinstance(result, (tuple, list)) else (result,)
        for one in many:
            if isinstance(one, torch.Tensor):
                self.largest = max(self.largest, one.numel())
        return result


def test_no_op_gives_a_tensor_of_tokens_by_vocabulary() -> None:
    ids = tokens(4, 64)
    for patched in (True, False):
        model = tiny("llama", vocab_size=5000, num_hidden_layers=1, tie_word_embeddings=False)
        if patched:
            patch_loss(model, "linear_cross_entropy")
        sizes = _Sizes()
        with sizes:
            model(input_ids=ids, labels=ids).loss.backward()
        # The largest that is allowed is the head itself: 5000 x 64, where logits are 256 x 5000.
        assert (sizes.largest <= model.lm_head.weight.numel()) == patched


@pytest.mark.alone
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe", "gpt2"])
def test_on_a_gpu_with_less_than_half_of_the_memory(name: str) -> None:
    sizes = {"vocab_size": 128256, "tie_word_embeddings": False}
    own = tiny(name, torch.bfloat16, **sizes).cuda()
    model = copy.deepcopy(own)
    patch_loss(model, "linear_cross_entropy")
    ids = tokens(128, 64).cuda()
    inputs = {"input_ids": ids, "labels": labels_of(ids)}
    results, peaks = [], []
    for one in (own, model):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = one(**inputs).loss
        loss.backward()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        results.append((loss.detach(), one.lm_head.weight.grad))
        del loss
        one.zero_grad(set_to_none=True)
    (expected, gradient), (value, found) = results
    torch.testing.assert_close(value, expected, rtol=1e-4, atol=0.0)
    assert relative_error(found, gradient) < 2.0**-7
    assert peaks[1] < 0.5 * peaks[0], peaks


def test_copies_pickles_and_both_at_once() -> None:
    model = _patched("gemma2")
    ids = tokens()
    inputs = {"input_ids": ids, "labels": labels_of(ids)}
    expected = model(**inputs).loss
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        output = other(**inputs)
        assert output.logits is None
        assert torch.equal(output.loss, expected)
        with torch.no_grad():
            other.lm_head.weight.mul_(3)
        assert not torch.equal(other(**inputs).loss, expected)
        assert torch.equal(model(**inputs).loss, expected)
        unpatch_loss(other)
        assert other(**inputs).logits is not None
        assert model(**inputs).logits is None


def test_gradient_checkpointing_and_autocast() -> None:
    own, model = tiny("llama"), _patched("llama")
    ids = tokens()
    _, gradients = loss_and_gradients(own, ids)
    model.gradient_checkpointing_enable()
    _, found = loss_and_gradients(model, ids)
    assert max(relative_error(found[key], gradients[key]) for key in gradients) < 5e-6
    with torch.autocast("cpu", torch.bfloat16):
        output = model(input_ids=ids, labels=ids)
        expected = own(input_ids=ids, labels=ids).loss
    assert output.loss.dtype == torch.float32
    torch.testing.assert_close(output.loss, expected, rtol=2e-3, atol=0.0)


def test_one_graph_for_model_and_loss() -> None:
    own = tiny("gemma2", num_hidden_layers=1, use_cache=False)
    model = _patched("gemma2", num_hidden_layers=1, use_cache=False)
    ids = tokens()
    expected, gradients = loss_and_gradients(own, ids)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    output = compiled(input_ids=ids, labels=labels_of(ids))
    assert output.logits is None
    output.loss.backward()
    torch.testing.assert_close(output.loss, expected, rtol=1e-6, atol=0.0)
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad, gradients[name]) < 5e-6, name
    assert model(input_ids=ids, labels=ids).logits is None  # and eager goes on


@pytest.mark.parametrize("how", ["cross_entropy", "linear_cross_entropy"])
def test_the_trainer_accumulates_gradients_as_ever(how: str, tmp_path: Any) -> None:
    pytest.importorskip("accelerate")
    data = [{"input_ids": tokens(1, 10 - k, seed=k)[0]} for k in range(8)]
    data = [{**one, "labels": one["input_ids"]} for one in data]

    def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        pad = torch.nn.utils.rnn.pad_sequence
        ids = pad([row["input_ids"] for row in rows], batch_first=True)
        labels = pad([row["labels"] for row in rows], batch_first=True, padding_value=-100)
        return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}

    trained = []
    for patched in (False, True):
        model = tiny("llama")
        if patched:
            patch_loss(model, how)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            seed=1,
        )
        trainer = transformers.Trainer(
            model=model, args=arguments, train_dataset=data, data_collator=padded
        )
        trainer.train()
        losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
        trained.append((losses, {k: v.detach().clone() for k, v in model.named_parameters()}))
        assert (
            model(**padded(data[:2])).get("logits") is None or how == "cross_entropy" or not patched
        )
    (theirs, weights), (ours, found) = trained
    assert len(ours) == 2
    assert ours == pytest.approx(theirs, rel=1e-5)
    # Adam divides by the size of gradients: rounding shows where these are next to nothing.
    assert max(relative_error(found[key], weights[key]) for key in weights) < 1e-4


def test_a_wrapped_model_is_patched_within() -> None:
    peft = pytest.importorskip("peft")
    model = tiny("llama")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(model, settings)
    report = patch_loss(wrapped, "linear_cross_entropy")
    assert [one.name for one in report.replaced] == ["base_model.model"]
    ids = tokens()
    output = wrapped(input_ids=ids, labels=ids)
    assert output.logits is None
    output.loss.backward()
    unpatch_loss(wrapped)
    torch.testing.assert_close(output.loss, wrapped(input_ids=ids, labels=ids).loss)


def test_lora_on_the_head_itself_makes_logits() -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(
        r=2, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    ids = tokens()
    torch.manual_seed(0)
    own = peft.get_peft_model(tiny("llama", tie_word_embeddings=False), settings)
    inner = tiny("llama", tie_word_embeddings=False)
    assert not patch_loss(inner, "linear_cross_entropy").left
    torch.manual_seed(0)
    before = peft.get_peft_model(inner, settings)
    output = before(input_ids=ids, labels=ids)
    assert output.logits is not None
    torch.testing.assert_close(output.loss, own(input_ids=ids, labels=ids).loss)
    report = patch_loss(own, "linear_cross_entropy")
    assert report.replaced[0].now == "cross_entropy"
    assert "lm_head" in report.left[0].reason


def test_nothing_is_run_or_copied_to_find_out() -> None:
    """A model too large for this machine, on the meta device."""
    config = transformers.LlamaConfig(vocab_size=128256, hidden_size=8192, num_hidden_layers=2)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    assert not patch_loss(model, "linear_cross_entropy").left
    assert all(parameter.is_meta for parameter in model.parameters())
