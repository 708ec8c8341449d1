"""Linear layers and experts of models, quantised to NVFP4 in place."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
import transformers
from tf_models import relative_error, tiny, tiny_from, tokens

from gristmill.errors import ArgumentError, DtypeError
from gristmill.formats.nvfp4 import dequantize, quantize
from gristmill.integrations.transformers.experts import Layout, NVFP4Experts, layout_of
from gristmill.integrations.transformers.linears import is_transposed
from gristmill.integrations.transformers.nvfp4 import left_quantized, quantize_modules
from gristmill.nn import NVFP4Linear

MODELS = ("llama", "gemma2", "qwen3_moe", "gpt2", "mixtral")


def dequantized(dense: Any, quantised: Any) -> Any:
    """`dense` with the values that `quantised` has in NVFP4 in its own layers."""
    twin = copy.deepcopy(dense)
    for name, module in quantised.named_modules():
        old = twin.get_submodule(name)
        if isinstance(module, NVFP4Linear):
            values = dequantize(module.weight4)
            old.weight.data.copy_(values.t() if is_transposed(old) else values)
        elif isinstance(module, NVFP4Experts):
            old.gate_up_proj.data.copy_(dequantize(module.w13))
            old.down_proj.data.copy_(dequantize(module.w2))
    return twin


def logits(model: Any, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=tokens(), **inputs).logits
    return found


@pytest.mark.parametrize("name", MODELS)
def test_results_are_those_of_the_rounded_weights(name: str) -> None:
    dense = tiny(name).eval()
    model = copy.deepcopy(dense)
    report = quantize_modules(model, True)
    assert report.replaced
    truth = dequantized(dense, model)
    assert relative_error(logits(model), logits(truth)) < 2e-6
    assert relative_error(logits(model), logits(dense)) > 1e-3  # it was quantised at all


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_results_in_bf16(name: str) -> None:
    dense = tiny(name, torch.bfloat16).eval()
    model = copy.deepcopy(dense)
    quantize_modules(model, True)
    in_bf16 = dequantized(dense, model)
    truth = logits(copy.deepcopy(in_bf16).float())
    # A weight in NVFP4 is not rounded to bf16 on its way, its twin is: ours may be nearer.
    assert relative_error(logits(model), truth) <= 1.5 * relative_error(logits(in_bf16), truth)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt2"])
def test_gradients_pass_through(name: str) -> None:
    dense = tiny(name)
    model = copy.deepcopy(dense)
    quantize_modules(model, True)
    truth = dequantized(dense, model)
    found: list[dict[str, torch.Tensor]] = []
    for one in (model, truth):
        one(input_ids=tokens(), labels=tokens()).loss.backward()
        found.append({n: p.grad for n, p in one.named_parameters() if p.grad is not None})
    ours, theirs = found
    assert set(ours) == set(dict(model.named_parameters()))
    for key, gradient in ours.items():
        assert relative_error(gradient, theirs[key]) < 1e-5, key


def test_report_names_what_was_replaced_and_what_was_left() -> None:
    model = tiny("llama", hidden_size=64, intermediate_size=104)
    report = quantize_modules(model, True)
    replaced = {one.name: (one.was, one.now) for one in report.replaced}
    assert replaced["model.layers.0.self_attn.q_proj"] == (
        "Linear",
        "NVFP4Linear(in_features=64, out_features=64, bias=False)",
    )
    left = {one.name: one.reason for one in report.left}
    assert left["lm_head"] == "the output head"
    assert left["model.layers.1.mlp.down_proj"] == "its 104 columns are not a multiple of 16"
    again = quantize_modules(model, True)
    assert not again.replaced
    reasons = {one.reason for one in again.left if one.name in replaced}
    assert reasons == {"already in NVFP4"}
    assert {one.name for one in left_quantized(model)} == set(replaced)
    assert "dense Linear is gone" in left_quantized(model)[0].reason
    assert left_quantized(tiny("llama")) == ()


def test_patterns_and_functions_choose() -> None:
    model = tiny("llama")
    report = quantize_modules(model, ["*.mlp.*", "lm_head"])
    assert {one.name for one in report.replaced} == {
        *(f"model.layers.{n}.mlp.{p}_proj" for n in (0, 1) for p in ("gate", "up", "down")),
        "lm_head",
    }
    asked: list[str] = []

    def second(name: str, module: torch.nn.Module) -> bool:
        asked.append(name)
        return ".1." in name

    report = quantize_modules(tiny("llama"), second)
    assert all(one.name.startswith("model.layers.1.") for one in report.replaced)
    assert len(report.replaced) == 7
    assert "model.layers.0.self_attn.q_proj" in asked
    assert "model.norm" not in asked


def test_heads_and_routers_are_left_by_default() -> None:
    model = tiny_from(transformers.AutoModelForSequenceClassification, "llama", num_labels=16)
    left = {one.name: one.reason for one in quantize_modules(model, True).left}
    assert left == {"score": "a head: outside of the base model"}
    gated = torch.nn.ModuleDict({"gate": torch.nn.Linear(32, 4), "up": torch.nn.Linear(32, 32)})
    report = quantize_modules(gated, True)
    assert [one.name for one in report.replaced] == ["up"]
    assert [one.reason for one in report.left] == ["a router or gate, by its name"]
    assert len(quantize_modules(gated, "gate").replaced) == 1


def test_tied_weights_are_left() -> None:
    model = tiny("llama", tie_word_embeddings=True)
    report = quantize_modules(model, "lm_head")
    assert not report.replaced
    assert [one.reason for one in report.left] == [
        "its weight is shared with another module (tied)"
    ]
    pair = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    pair[1].weight = pair[0].weight
    assert len(quantize_modules(pair, True).left) == 2


def test_a_module_in_two_places_is_exchanged_in_both() -> None:
    one = torch.nn.Linear(32, 32)
    model = torch.nn.Sequential(one, torch.nn.ReLU(), one)
    assert len(quantize_modules(model, True).replaced) == 1
    assert model[0] is model[2]
    assert isinstance(model[0], NVFP4Linear)


class Odd(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Reader(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.inside.weight


def _with_own_forward() -> torch.nn.Module:
    layer = torch.nn.Linear(16, 16)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    return layer


def _with_buffer() -> torch.nn.Module:
    layer = torch.nn.Linear(16, 16)
    layer.register_buffer("mask", torch.ones(16))
    return layer


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (lambda: Odd(16, 16), "a subclass of Linear, which may do something else"),
        (lambda: torch.nn.Linear(16, 16, device="meta"), "its weight is on the meta device"),
        (lambda: torch.nn.Linear(16, 16, dtype=torch.complex64), "dtype complex64"),
        (lambda: torch.nn.utils.weight_norm(torch.nn.Linear(16, 16)), "weight_g"),
        (_with_own_forward, "its forward was exchanged by another library"),
        (_with_buffer, "it holds more than its weights: mask"),
        (Reader, "Reader reads its weight directly"),
        (lambda: torch.nn.MultiheadAttention(16, 2), "MultiheadAttention reads its weight"),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_cannot_be_exchanged_is_left(module: Any, reason: str) -> None:
    model = torch.nn.Sequential(module())
    before = [(name, type(one)) for name, one in model.named_modules()]
    report = quantize_modules(model, True)
    assert not report.replaced
    assert reason in report.left[0].reason
    assert [(name, type(one)) for name, one in model.named_modules()] == before


def test_what_a_model_wants_in_fp32_is_left() -> None:
    config = transformers.T5Config(
        vocab_size=96, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2
    )
    model = transformers.T5ForConditionalGeneration(config)
    left = {one.name: one.reason for one in quantize_modules(model, ["*.wo", "*.wi"]).left}
    assert set(left.values()) <= {
        "the model wants it in fp32",
        "T5DenseActDense reads its weight directly",
    }
    assert "encoder.block.0.layer.1.DenseReluDense.wo" in left
    ids = tokens()
    assert model(input_ids=ids, decoder_input_ids=ids).logits.isfinite().all()


def test_modes_hooks_and_biases_are_kept() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 48)).eval()
    old = model[0]
    bias = old.bias
    seen: list[str] = []
    handle = old.register_forward_hook(lambda *_: seen.append("after"))
    old.register_forward_pre_hook(lambda *_: seen.append("before"))
    quantize_modules(model, True)
    assert model[0].bias is bias
    assert not model[0].training
    model(torch.randn(2, 32))
    handle.remove()
    model(torch.randn(2, 32))
    assert seen == ["before", "after", "before"]


def test_dense_weights_are_freed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from gristmill.integrations.transformers import linears

    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
    alive = [weakref.ref(layer.weight) for layer in model]
    seen: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        gc.collect()
        seen.append(sum(one() is not None for one in alive))
        return quantize(*args, **kwargs)

    monkeypatch.setattr(linears, "quantize", counted)
    quantize_modules(model, True)
    gc.collect()
    assert seen == [4, 3, 2, 1]
    assert not any(one() is not None for one in alive)


def test_copies_and_pickles() -> None:
    model = tiny("qwen3_moe").eval()
    quantize_modules(model, True)
    wanted = logits(model)
    assert torch.equal(logits(copy.deepcopy(model)), wanted)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    assert torch.equal(logits(read), wanted)
    assert left_quantized(read) == left_quantized(model)


def test_compiles_into_one_graph() -> None:
    model = tiny("qwen3_moe", num_hidden_layers=1).eval()
    quantize_modules(model, True)
    wanted = logits(model, use_cache=False)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert relative_error(logits(compiled, use_cache=False), wanted) < 2e-6


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_compiles_with_inductor(name: str) -> None:
    model = tiny(name).eval()
    quantize_modules(model, True)
    wanted = logits(model, use_cache=False)
    compiled = torch.compile(model, fullgraph=True)
    assert relative_error(logits(compiled, use_cache=False), wanted) < 1e-5


def test_generates_with_a_static_cache() -> None:
    model = tiny("llama").eval()
    quantize_modules(model, True)
    ids = tokens(1, 6)
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    usual = model.generate(ids, **settings)
    static = model.generate(ids, cache_implementation="static", disable_compile=True, **settings)
    assert torch.equal(usual, static)


# Experts.


def _gpt_oss() -> torch.nn.Module:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = transformers.GptOssConfig(
        hidden_size=32, intermediate_size=48, num_local_experts=4, num_experts_per_tok=2
    )
    config._experts_implementation = "eager"
    return _filled(GptOssExperts(config))


def _deepseek(**changes: Any) -> torch.nn.Module:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts

    config = transformers.DeepseekV3Config(
        hidden_size=32, moe_intermediate_size=48, n_routed_experts=4, **changes
    )
    config._experts_implementation = "eager"
    return _filled(DeepseekV3Experts(config))


def _filled(experts: Any) -> Any:
    torch.manual_seed(0)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    return experts.eval()


@pytest.mark.parametrize(
    ("make", "activation"),
    [
        (_gpt_oss, "swiglu_oai"),
        (_deepseek, "silu"),
        (lambda: _deepseek(hidden_act="gelu"), "gelu"),
    ],
)
def test_experts_of_several_kinds(make: Any, activation: str) -> None:
    dense = make()
    layout = layout_of(dense)
    assert isinstance(layout, Layout)
    assert layout.activation.name == activation
    block = torch.nn.ModuleDict({"experts": copy.deepcopy(dense)})
    assert [one.was for one in quantize_modules(block, True).replaced] == [type(dense).__name__]
    ours = block["experts"]
    # The dense ones, with the values that were kept.
    w13, w2 = dequantize(ours.w13), dequantize(ours.w2)
    half = w13.shape[1] // 2
    if layout.interleaved:
        w13 = torch.stack((w13[:, :half], w13[:, half:]), 2).flatten(1, 2)
    if layout.transposed:
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    dense.gate_up_proj.data.copy_(w13)
    dense.down_proj.data.copy_(w2)
    hidden = 2 * torch.randn(9, 32)
    ids = torch.rand(9, 4).argsort(1)[:, :2]
    weights = torch.rand(9, 2)
    with torch.no_grad():
        wanted = dense(hidden, ids, weights)
        assert relative_error(ours(hidden, ids, weights), wanted) < 2e-6
        assert ours(hidden[:0], ids[:0], weights[:0]).shape == (0, 32)


def test_the_trial_leaves_experts_and_random_numbers_alone() -> None:
    experts = _gpt_oss()
    before = copy.deepcopy(experts.state_dict())
    attributes = dict(experts.__dict__)
    state = torch.get_rng_state()
    layout_of(experts)
    assert torch.equal(torch.get_rng_state(), state)
    assert experts.__dict__ == attributes
    assert all(torch.equal(value, before[key]) for key, value in experts.state_dict().items())


class Limited(torch.nn.Module):
    """Experts whose forward is none that gristmill has, by one of its parts."""

    def __init__(self, odd: str) -> None:
        super().__init__()
        self.num_experts, self.odd = 4, odd
        self.gate_up_proj = torch.nn.Parameter(torch.randn(4, 64, 32))
        self.down_proj = torch.nn.Parameter(torch.randn(4, 32, 32))

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
        functional = torch.nn.functional
        out = torch.zeros_like(hidden_states)
        for token, (ids, weights) in enumerate(zip(top_k_index, top_k_weights, strict=True)):
            for expert, weight in zip(ids, weights, strict=True):
                x = hidden_states[token] * (weight if self.odd == "before" else 1)
                gate, up = (self.gate_up_proj[expert] @ x).chunk(2)
                if self.odd == "tanh":
                    inner = functional.gelu(gate, approximate="tanh") * up
                elif self.odd == "limit":
                    inner = functional.silu(gate).clamp(max=300.0) * up
                else:
                    inner = functional.silu(gate) * up
                y = self.down_proj[expert] @ inner
                out[token] += y * (1 if self.odd == "before" else weight)
        return out


@pytest.mark.parametrize("odd", ["tanh", "limit", "before"])
def test_experts_that_compute_something_else_are_left(odd: str) -> None:
    assert isinstance(layout_of(Limited("")), Layout)
    assert "none of the activations" in str(layout_of(Limited(odd)))


def test_experts_of_odd_sizes_are_left() -> None:
    config = transformers.DeepseekV3Config(
        hidden_size=40, moe_intermediate_size=48, n_routed_experts=4
    )
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts

    assert layout_of(DeepseekV3Experts(config)) == "its 40 inputs are not a multiple of 16"


# Wrong arguments.


def test_wrong_arguments() -> None:
    model = tiny("llama", num_hidden_layers=1)
    with pytest.raises(ArgumentError, match=r"'\*\.nothing' matches no linear layer.*q_proj"):
        quantize_modules(model, "*.nothing")
    with pytest.raises(DtypeError, match=r"which must be True, patterns of names.*got int"):
        quantize_modules(model, 3)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="patterns as str, got int"):
        quantize_modules(model, [3])  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match="method"):
        quantize_modules(model, True, method="best")
    with pytest.raises(ArgumentError, match="act"):
        quantize_modules(model, True, act="int8")
    with pytest.raises(DtypeError, match=r"model must be a torch\.nn\.Module, got str"):
        quantize_modules("model", True)  # type: ignore[arg-type]
    assert quantize_modules(model, False).replaced == ()
    assert all(type(one) is not NVFP4Linear for one in model.modules())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_on_a_gpu_results_are_those_of_the_rounded_weights(name: str) -> None:
    dense = tiny(name, torch.bfloat16).eval().cuda()
    model = copy.deepcopy(dense)
    quantize_modules(model, True)
    twin = dequantized(dense, model)
    ids = tokens().cuda()
    with torch.no_grad():
        truth = copy.deepcopy(twin).float()(input_ids=ids).logits
        ours, theirs = model(input_ids=ids).logits, twin(input_ids=ids).logits
    assert relative_error(ours, truth) <= 1.5 * relative_error(theirs, truth)


@pytest.mark.gpu
def test_on_a_gpu_generates_compiled_and_captured() -> None:
    model = tiny("llama", torch.bfloat16).eval().cuda()
    quantize_modules(model, True)
    ids = tokens(1, 6).cuda()
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    usual = model.generate(ids, **settings)
    # By default transformers compiles the decoding step with mode="reduce-overhead" then.
    static = model.generate(ids, cache_implementation="static", **settings)
    assert torch.equal(usual, static)
