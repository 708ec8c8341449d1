"""`gristmill.patch` on whole models: what they give, how they train, and what stays as it was."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tf_models import (
    CAUSAL,
    in_precision,
    labels_of,
    loss_and_gradients,
    relative_error,
    tiny,
    tokens,
)
from torch import nn

import gristmill
from gristmill.errors import ArgumentError, DtypeError
from gristmill.integrations.transformers import Left, PatchReport, Replaced


def patched_copy(model: Any, **options: Any) -> Any:
    copied = copy.deepcopy(model)
    gristmill.patch(copied, **options)
    return copied


@pytest.mark.parametrize("name", CAUSAL)
def test_logits_loss_and_gradients_in_fp32(name: str) -> None:
    model, ids = tiny(name), tokens()
    patched = patched_copy(model)
    with torch.no_grad():
        logits, wanted = patched(input_ids=ids).logits, model(input_ids=ids).logits
    torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)
    loss, gradients = loss_and_gradients(patched, ids)
    true_loss, truth = loss_and_gradients(model, ids)
    torch.testing.assert_close(loss, true_loss, rtol=1e-6, atol=1e-6)
    assert gradients.keys() == truth.keys()
    for parameter, gradient in truth.items():
        assert relative_error(gradients[parameter], gradient) < 1e-5, parameter


@pytest.mark.parametrize("name", CAUSAL)
def test_loss_and_gradients_in_bf16_are_as_near_to_the_truth(name: str) -> None:
    """The truth is the model of the same weights in fp32; one rounding of bf16 is allowed."""
    model, ids = tiny(name, torch.bfloat16), tokens()
    true_loss, truth = loss_and_gradients(in_precision(model, torch.float32), ids)
    their_loss, theirs = loss_and_gradients(model, ids)
    loss, ours = loss_and_gradients(patched_copy(model), ids)
    assert loss.dtype == their_loss.dtype
    allowed = max(1.5 * float((their_loss - true_loss).abs()), 2.0**-8 * float(true_loss))
    assert float((loss - true_loss).abs()) <= allowed
    for parameter, gradient in truth.items():
        error = relative_error(ours[parameter], gradient)
        assert error <= max(1.5 * relative_error(theirs[parameter], gradient), 2.0**-8), parameter


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_tracks_the_unpatched_model(name: str, dtype: torch.dtype) -> None:
    model = tiny(name, dtype)
    patched = patched_copy(model)
    losses, ours = train(model), train(patched)
    assert losses[-1] < 0.8 * losses[0]
    tolerance = 1e-4 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(ours, losses, rtol=tolerance, atol=0)


def train(model: Any, steps: int = 20) -> torch.Tensor:
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        ids = tokens(seed=step % 2)
        optimiser.zero_grad()
        loss = model(input_ids=ids, labels=labels_of(ids)).loss
        loss.backward()
        optimiser.step()
        losses.append(loss.detach().float())
    return torch.stack(losses)


@pytest.mark.parametrize("name", CAUSAL)
def test_everything_else_stays(name: str) -> None:
    model = tiny(name)
    ran: list[str] = []
    norm = next(m for m in model.modules() if "Norm" in type(m).__name__)
    norm.register_forward_hook(lambda *_: ran.append("hook"))
    parameters = list(model.named_parameters())
    state = {key: value.clone() for key, value in model.state_dict().items()}
    classes = [(key, type(module)) for key, module in model.named_modules()]
    model.eval()
    gristmill.patch(model)
    after = list(model.named_parameters())
    assert [key for key, _ in after] == [key for key, _ in parameters]
    assert all(one is other for (_, one), (_, other) in zip(after, parameters, strict=True))
    assert [(key, type(module)) for key, module in model.named_modules()] == classes
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert not any(module.training for module in model.modules())
    model(input_ids=tokens())
    assert ran == ["hook"]


def test_twice_is_once_and_unpatching_gives_back_the_bits() -> None:
    model, ids = tiny("llama", torch.bfloat16), tokens()
    before = [set(vars(module)) for module in model.modules()]
    logits = model(input_ids=ids).logits
    loss, gradients = loss_and_gradients(model, ids)
    first = gristmill.patch(model)
    assert len([one for one in first.replaced if "rms_norm" in one.now]) == 5
    state = [dict(vars(module)) for module in model.modules()]
    second = gristmill.patch(model)
    assert not second.replaced
    assert {one.name for one in second.left} >= {one.name for one in first.replaced}
    assert all("already" in one.reason for one in second.left)
    assert [vars(module).keys() for module in model.modules()] == [one.keys() for one in state]
    given_back = gristmill.unpatch(model)
    assert {one.name for one in given_back.replaced} == {one.name for one in first.replaced}
    assert [set(vars(module)) for module in model.modules()] == before
    assert torch.equal(model(input_ids=ids).logits, logits)
    again, same = loss_and_gradients(model, ids)
    assert torch.equal(again, loss)
    assert all(torch.equal(same[key], gradient) for key, gradient in gradients.items())
    assert gristmill.unpatch(model) == PatchReport()


def test_only_what_is_asked_for() -> None:
    model = tiny("llama")
    assert all("rms_norm" in one.now for one in gristmill.patch(model, loss=None).replaced)
    gristmill.unpatch(model)
    assert not any("norm" in one.now for one in gristmill.patch(model, norms=False).replaced)
    assert gristmill.patch(nn.Linear(4, 4), loss=None) == PatchReport()


def test_a_copy_is_its_own() -> None:
    model, ids = tiny("llama"), tokens()
    gristmill.patch(model)
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.data.zero_()
    with torch.no_grad():
        assert float(copied(input_ids=ids).logits.abs().max()) == 0
        assert float(model(input_ids=ids).logits.abs().max()) > 0
    gristmill.unpatch(copied)
    assert all("already" in one.reason for one in gristmill.patch(model).left)
    assert gristmill.patch(copied).replaced


def test_pickled_whole() -> None:
    model, ids = tiny("gemma2"), tokens()
    gristmill.patch(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
        loaded.model.norm.weight.data.fill_(-1.0)
        assert float(loaded(input_ids=ids).logits.abs().max()) == 0
    assert not gristmill.patch(loaded).replaced
    assert gristmill.unpatch(loaded).replaced


@pytest.mark.parametrize("name", CAUSAL)
def test_saved_and_loaded(name: str, tmp_path: Path) -> None:
    """What is saved is what an unpatched model saves; what is loaded is no longer patched."""
    model, ids = tiny(name), tokens()
    patched = patched_copy(model)
    patched.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    assert gristmill.unpatch(loaded) == PatchReport()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    assert gristmill.patch(loaded).replaced


def test_gradient_checkpointing() -> None:
    model, ids = tiny("llama"), tokens()
    gristmill.patch(model)
    loss, gradients = loss_and_gradients(model, ids)
    model.gradient_checkpointing_enable()
    again, same = loss_and_gradients(model, ids)
    assert torch.equal(again, loss)
    assert all(relative_error(same[key], one) < 1e-6 for key, one in gradients.items())


def test_dtype_changed_after_patching() -> None:
    model, ids = tiny("llama"), tokens()
    patched = patched_copy(model).to(torch.bfloat16)
    model = model.to(torch.bfloat16)
    truth = in_precision(model, torch.float32)(input_ids=ids).logits
    got, wanted = patched(input_ids=ids).logits, model(input_ids=ids).logits
    assert got.dtype == wanted.dtype == torch.bfloat16
    error = relative_error(wanted, truth)
    assert relative_error(got, truth) <= max(1.5 * error, 2.0**-8)


def test_generating() -> None:
    model = tiny("llama").eval()
    patched = patched_copy(model)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(tokens(), **options)
    assert torch.equal(patched.generate(tokens(), **options), wanted)


def graph_of(model: Any, ids: torch.Tensor) -> list[str]:
    """gristmill's ops in the one graph of a forward pass with a loss; its loss is checked."""
    found: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        found.extend(
            str(node.target) for node in graph.graph.nodes if "gristmill" in str(node.target)
        )
        return graph

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    loss = compiled(input_ids=ids, labels=labels_of(ids)).loss
    torch.testing.assert_close(loss, model(input_ids=ids, labels=labels_of(ids)).loss)
    return found


def test_one_graph() -> None:
    model = tiny("llama")
    gristmill.patch(model)
    ops = graph_of(model, tokens())
    assert ops.count("gristmill.rms_norm.default") == 5
    assert any("cross_entropy" in op for op in ops)


@pytest.mark.long
@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("loss", ["cross_entropy", "linear_cross_entropy"])
def test_compiled_by_inductor(name: str, loss: str) -> None:
    """Whole, with gradients. Experts by `batched_mm`: transformers' default does not compile."""
    model, ids = tiny(name), tokens()
    if name == "qwen3_moe":
        model.set_experts_implementation("batched_mm")
    true_loss, truth = loss_and_gradients(model, ids)
    gristmill.patch(model, loss=loss)
    compiled = torch.compile(model, fullgraph=True)
    got = compiled(input_ids=ids, labels=labels_of(ids)).loss
    got.backward()
    torch.testing.assert_close(got.detach(), true_loss, rtol=1e-5, atol=1e-5)
    for key, parameter in model.named_parameters():
        assert relative_error(parameter.grad, truth[key]) < 1e-4, key


def test_patching_what_is_compiled_already() -> None:
    model, ids = tiny("llama"), tokens()
    graphs: list[Any] = []
    compiled = torch.compile(
        model.model, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph
    )
    compiled(input_ids=ids)
    gristmill.patch(model)
    compiled(input_ids=ids)
    assert len(graphs) == 2
    assert "gristmill.rms_norm" in graphs[1].code


def test_trainer(tmp_path: Path) -> None:
    """Two steps with gradient accumulation, against the unpatched model."""

    def run(model: Any) -> tuple[float, Any]:
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        data = [{"input_ids": row, "labels": row} for row in tokens(batch=8)]
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
        return trainer.train().training_loss, dict(model.named_parameters())

    model = tiny("llama")
    patched = patched_copy(model)
    loss, parameters = run(patched)
    true_loss, truth = run(model)
    assert loss == pytest.approx(true_loss, rel=1e-5)
    for key, parameter in truth.items():
        torch.testing.assert_close(parameters[key], parameter, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"norms": 1}, DtypeError, "patch: norms must be True or False, got 1"),
        ({"loss": "mse"}, ArgumentError, "patch: loss must be one of .* got 'mse'"),
        ({"loss": True}, ArgumentError, "patch: loss must be one of .* got True"),
        ({"nvfp4": 3}, ArgumentError, "patch: nvfp4 must be None, True, a pattern"),
        ({"nvfp4": []}, ArgumentError, "patch: nvfp4 must be"),
        ({"nvfp4": [""]}, ArgumentError, "patch: nvfp4 must be"),
        ({"nvfp4": nn.Linear}, ArgumentError, "patch: nvfp4 must be"),
    ],
)
def test_wrong_options_change_nothing(options: Any, error: type, match: str) -> None:
    model = nn.Sequential(nn.LayerNorm(4))
    with pytest.raises(error, match=match):
        gristmill.patch(model, **options)
    assert "gristmill" not in vars(model[0])


@pytest.mark.parametrize("model", [nn.LayerNorm, "llama", None, 3])
def test_what_is_no_model(model: Any) -> None:
    for function in (gristmill.patch, gristmill.unpatch):
        with pytest.raises(DtypeError, match=f"{function.__name__}: model must be an instance"):
            function(model)


def test_the_report_in_the_documents() -> None:
    page = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text(encoding="utf-8")
    shown = page.partition("```text\n")[2].partition("\n```")[0]
    assert str(gristmill.patch(tiny("llama"))) == shown


def test_reports_in_words() -> None:
    one = Replaced("layers.0.norm", "LayerNorm", "layer_norm(eps=1e-05)")
    report = PatchReport((one,), (Left("", "Model", "has no loss"),))
    assert str(report) == (
        "replaced (1):\n  layers.0.norm  LayerNorm -> layer_norm(eps=1e-05)\n"
        "left (1):\n  (the model)  Model: has no loss"
    )
    many = PatchReport(
        tuple(
            Replaced(f"blocks.{block}.experts.{expert}.norm2", "A", "b")
            for block in (0, 1, 2, 5)
            for expert in (3, 7)
        )
    )
    assert str(many) == "replaced (8):\n  blocks.{0-2,5}.experts.{3,7}.norm2  A -> b"
    assert str(PatchReport()) == "nothing was replaced"
    assert (report + report).replaced == (one, one)
