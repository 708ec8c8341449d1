"""The losses of transformers' models on `cross_entropy`, and how they are recognised."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
import transformers
from tf_models import (
    labels_of,
    loss_and_gradients,
    relative_error,
    tiny,
    tiny_from,
    tokens,
)
from transformers.loss import loss_utils

import gristmill
from gristmill.errors import ArgumentError
from gristmill.integrations.transformers.loss import patch_loss, unpatch_loss
from gristmill.integrations.transformers.loss_functions import (
    CausalLMLoss,
    Loss,
    MaskedLMLoss,
    TokenClassificationLoss,
)
from gristmill.integrations.transformers.loss_probe import asks_for_loss_function, find_kind


def _rows(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = 5 * torch.randn(3, 7, 40, generator=generator)
    labels = torch.randint(0, 40, (3, 7), generator=generator)
    labels[0, :4] = -100
    return logits.to(dtype), labels


def _value_and_gradient(loss: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    leaf = logits.clone().requires_grad_()
    value = loss(leaf, *args, **kwargs)
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "int items": {"num_items_in_batch": 9},
    "tensor items": {"num_items_in_batch": torch.tensor(13)},
    "ignored class": {"ignore_index": 5},
    "unknown": {"label_smoothing": 0.2, "reduction": "none", "position_ids": None},
    "shift_labels": {"shift_labels": _rows()[1].flip(0)},
    "flat shift_labels": {"shift_labels": _rows()[1].flip(0).flatten(), "labels": None},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("call", CALLS)
def test_losses_are_those_of_transformers(call: str, dtype: torch.dtype) -> None:
    logits, labels = _rows(dtype)
    given = {"labels": labels, "vocab_size": 40} | CALLS[call]
    if given.get("ignore_index") is not None:
        given["labels"] = labels.clamp(min=0)
    pairs = [(loss_utils.ForCausalLMLoss, CausalLMLoss())]
    if given["labels"] is not None:
        pairs.append((loss_utils.ForMaskedLMLoss, MaskedLMLoss()))
    for theirs, ours in pairs:
        expected, gradient = _value_and_gradient(theirs, logits, **given)
        value, found = _value_and_gradient(ours, logits, **given)
        assert value.dtype == expected.dtype == torch.float32
        assert found.dtype == dtype
        torch.testing.assert_close(value, expected, rtol=2e-6, atol=1e-6)
        rounding = max(torch.finfo(dtype).eps, 2.0**-23)
        assert relative_error(found, gradient) <= 2 * rounding


def test_rows_that_are_no_view_and_classes_that_are_not_the_last_dim() -> None:
    logits, labels = _rows()
    strided = torch.stack((logits, logits), 1)[:, 0]
    expected = loss_utils.ForMaskedLMLoss(logits, labels, 40)
    torch.testing.assert_close(MaskedLMLoss()(strided, labels, 40), expected)
    folded = logits.reshape(3, -1)  # transformers views them as rows of vocab_size
    torch.testing.assert_close(MaskedLMLoss()(folded, labels, 40), expected)


def test_a_causal_loss_without_labels_says_so() -> None:
    with pytest.raises(ArgumentError, match="labels or shift_labels"):
        CausalLMLoss()(_rows()[0], None, 40)


def test_logits_are_not_copied_to_fp32() -> None:
    logits, labels = _rows(torch.bfloat16)
    made: list[torch.dtype] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            result = func(*args, **kwargs or {})
            if isinstance(result, torch.Tensor) and result.numel() == logits.numel():
                made.append(result.dtype)
            return result

    with Watch():
        CausalLMLoss()(logits, labels, 40)
    assert made == []
    with Watch():
        loss_utils.ForCausalLMLoss(logits, labels, 40)
    assert torch.float32 in made


def _wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
    return loss_utils.ForCausalLMLoss(*args, **kwargs)


def _smoothed(logits: Any, labels: Any, vocab_size: int, **kwargs: Any) -> torch.Tensor:
    rows = logits.float().view(-1, vocab_size)
    return torch.nn.functional.cross_entropy(rows, labels.view(-1), label_smoothing=0.1)


def _deaf(
    logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **_: Any
) -> Any:
    return loss_utils.ForCausalLMLoss(logits, labels, vocab_size)


def _low(logits: Any, labels: Any, vocab_size: int, **kwargs: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.view(-1, vocab_size), labels.view(-1))


def test_losses_are_recognised_by_what_they_do() -> None:
    assert find_kind(loss_utils.ForCausalLMLoss) is CausalLMLoss
    assert find_kind(_wrapped) is CausalLMLoss
    assert find_kind(functools.partial(_wrapped, extra=1)) is CausalLMLoss
    assert find_kind(loss_utils.ForMaskedLMLoss) is MaskedLMLoss
    assert find_kind(loss_utils.ForTokenClassification) is TokenClassificationLoss
    assert find_kind(_smoothed) == "its results are not a cross entropy of tokens"
    assert find_kind(_deaf) == "it differs from ForCausalLMLoss in num_items_in_batch"
    assert find_kind(_low) == "it differs from ForMaskedLMLoss in logits of bf16"
    for other in ("ForSequenceClassification", "ForQuestionAnswering", "ForSegmentation"):
        assert isinstance(find_kind(loss_utils.LOSS_MAPPING[other]), str)


def test_probing_draws_no_random_numbers() -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    model = tiny("llama", num_hidden_layers=1)
    patch_loss(model, "linear_cross_entropy")
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe", "gpt2"])
def test_models_track_their_own_loss(name: str) -> None:
    own, model = tiny(name), tiny(name)
    report = patch_loss(model, "cross_entropy")
    assert [(one.was, one.now) for one in report.replaced] == [("ForCausalLMLoss", "cross_entropy")]
    assert not report.left
    ids = tokens()
    expected, gradients = loss_and_gradients(own, ids)
    value, found = loss_and_gradients(model, ids)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=0.0)
    assert found.keys() == gradients.keys()
    assert max(relative_error(found[key], gradients[key]) for key in gradients) < 3e-6
    theirs, ours = (one(input_ids=ids, labels=ids) for one in (own, model))
    assert ours.keys() == theirs.keys()
    assert torch.equal(ours.logits, theirs.logits)


def test_a_token_classifier_and_a_masked_language_model() -> None:
    ids = tokens()
    classifier = tiny_from(transformers.AutoModelForTokenClassification, "llama", num_labels=5)
    classifier.eval()  # its dropout would differ
    expected, gradients = loss_and_gradients(classifier, ids, labels=ids % 5)
    report = patch_loss(classifier, "linear_cross_entropy")
    assert report.replaced[0].was == "ForTokenClassification"
    assert "token classifier" in report.left[0].reason
    value, found = loss_and_gradients(classifier, ids, labels=ids % 5)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=0.0)
    assert max(relative_error(found[key], gradients[key]) for key in gradients) < 3e-6

    by_hand = tiny_from(transformers.AutoModelForMaskedLM, "bert")
    assert not asks_for_loss_function(by_hand)
    report = patch_loss(by_hand, "cross_entropy")
    assert not report.replaced
    assert "computes it by itself" in report.left[0].reason
    assert "_loss_function" not in by_hand.__dict__


def test_what_has_no_loss_is_said_to() -> None:
    assert "never asks" in patch_loss(tiny("llama").model, "cross_entropy").left[0].reason
    report = patch_loss(torch.nn.Linear(2, 3), "cross_entropy")
    assert "has no loss_function" in report.left[0].reason
    classifier = tiny_from(transformers.AutoModelForSequenceClassification, "llama")
    assert "not a cross entropy of tokens" in patch_loss(classifier, "cross_entropy").left[0].reason


def test_a_loss_that_the_user_has_set() -> None:
    model = tiny("llama", num_hidden_layers=1)
    model.loss_function = _smoothed
    report = patch_loss(model, "linear_cross_entropy")
    assert model.loss_function is _smoothed
    assert [(one.what, one.reason) for one in report.left] == [
        ("_smoothed", "its results are not a cross entropy of tokens")
    ]
    model.loss_function = _wrapped
    assert patch_loss(model, "cross_entropy").replaced[0].was == "_wrapped"
    assert isinstance(model.loss_function, CausalLMLoss)
    assert unpatch_loss(model).replaced[0].now == "_wrapped"
    assert model.loss_function is _wrapped
    del model._loss_function
    model._loss_function = torch.nn.CrossEntropyLoss()
    assert "module of its own" in patch_loss(model, "cross_entropy").left[0].reason


def test_a_module_in_the_place_of_the_property() -> None:
    """torch registers it as a child, and transformers never sees it: the loss is still its own."""
    model = tiny("llama", num_hidden_layers=1)
    model.loss_function = torch.nn.CrossEntropyLoss()
    assert patch_loss(model, "cross_entropy").replaced[0].was == "ForCausalLMLoss"
    assert isinstance(model.loss_function, CausalLMLoss)
    unpatch_loss(model)
    assert model.loss_function is loss_utils.ForCausalLMLoss


def test_twice_other_ways_and_back() -> None:
    model = tiny("llama", num_hidden_layers=1)
    before = dict(model.__dict__), dict(model.lm_head.__dict__)
    assert unpatch_loss(model) == gristmill.integrations.transformers.PatchReport()
    patch_loss(model, "cross_entropy")
    again = patch_loss(model, "cross_entropy")
    assert not again.replaced
    assert again.left[0].reason == "runs cross_entropy already"
    joined = patch_loss(model, "linear_cross_entropy")
    assert joined.replaced[0].now == "linear_cross_entropy"
    assert patch_loss(model, "linear_cross_entropy").left[0].reason.endswith("already")
    parted = patch_loss(model, "cross_entropy")
    assert [(one.was, one.now) for one in parted.replaced] == [
        ("linear_cross_entropy", "cross_entropy")
    ]
    assert model(input_ids=tokens(), labels=tokens()).logits is not None
    patch_loss(model, "linear_cross_entropy")
    back = unpatch_loss(model)
    assert back.replaced[0].now == "ForCausalLMLoss"
    assert (dict(model.__dict__), dict(model.lm_head.__dict__)) == before
    assert model.loss_function is loss_utils.ForCausalLMLoss


def test_models_around_and_within_models() -> None:
    model = tiny("llama", num_hidden_layers=1)

    class Around(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        @property
        def loss_function(self) -> Any:  # as PEFT's wrappers pass on what they do not have
            return self.inner.loss_function

    report = patch_loss(Around(), "cross_entropy")
    assert [one.name for one in report.replaced] == ["inner"]
    assert isinstance(model.loss_function, Loss)


def test_copies_and_pickles_carry_the_loss() -> None:
    model = tiny("gpt2", n_layer=1)
    patch_loss(model, "cross_entropy")
    ids = tokens()
    expected = model(input_ids=ids, labels=labels_of(ids)).loss
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(other.loss_function, CausalLMLoss)
        assert other.loss_function is not model.loss_function
        assert torch.equal(other(input_ids=ids, labels=labels_of(ids)).loss, expected)
        unpatch_loss(other)
        assert other.loss_function is loss_utils.ForCausalLMLoss
    assert isinstance(model.loss_function, CausalLMLoss)


def test_a_second_backward_pass_is_as_good_as_the_first() -> None:
    model = tiny("llama", num_hidden_layers=1)
    patch_loss(model, "cross_entropy")
    ids = tokens()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward(retain_graph=True)
    first = model.lm_head.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(model.lm_head.weight.grad, 2 * first)
