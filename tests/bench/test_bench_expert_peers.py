"""The peers of mixtures of experts: torch's grouped product, and the others by stand-ins."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from gristmill.bench.experts.inputs import Calls, Experts, make_calls, make_experts
from gristmill.bench.experts.models import Model
from gristmill.bench.experts.truth import activate, combine, layer
from gristmill.bench.peers import PEERS, Part
from gristmill.bench.peers.experts import align, sort
from gristmill.errors import ArgumentError
from gristmill.formats.nvfp4 import NVFP4Tensor, dequantize

CPU = torch.device("cpu")
SILU = Model("silu", 8, 3, 64, 48)
OAI = Model("oai", 6, 2, 192, 80, bias=True, activation="swiglu_oai", limit=0.5)
FOUR = SimpleNamespace(id=4711)


def built(model: Model, peer: str, op: str = "nvfp4_moe", tokens: int = 20) -> Any:
    """The weights, calls and what the peer's one builder gives for them."""
    experts = make_experts(model, torch.bfloat16, CPU)
    calls = make_calls(experts, op, tokens, "skewed")
    (builder,) = PEERS[peer].implementations(op).values()
    return experts, calls, builder(calls.sets)


def judged(experts: Experts, calls: Calls, function: Any) -> None:
    """Right on every call, twice."""
    biases, model = (experts.w13_bias, experts.w2_bias), experts.model
    rest = (experts.w13, experts.w2, *biases, model.activation, model.limit)
    for args in (*calls.sets, calls.sets[0]):
        outputs = function(*args)
        if isinstance(function, Part):
            outputs = function.finish(outputs, *args)
        x, shares, ids, *_ = args
        right = layer(x, shares, ids, *rest, dtype=torch.float64)
        error = (outputs.double() - right).norm() / right.norm()
        assert float(error) < 0.01


# ------------------------------------------------------------------------------------------- torch


@pytest.mark.parametrize("op", ["nvfp4_moe", "moe"])
@pytest.mark.parametrize("model", [SILU, OAI], ids=lambda model: model.name)
def test_the_grouped_product_computes_the_layer(model: Model, op: str) -> None:
    experts, calls, function = built(model, "torch", op)
    judged(experts, calls, function)
    # What is timed gives a row for each slot: the sum is not in it.
    assert function(*calls.sets[0]).shape == (20 * model.topk, model.hidden)


def test_the_grouped_product_takes_one_dtype() -> None:
    experts = make_experts(SILU, torch.float16, CPU)
    calls = make_calls(experts, "nvfp4_moe", 2, "uniform")
    (builder,) = PEERS["torch"].implementations("nvfp4_moe").values()
    with pytest.raises(ArgumentError, match=r"takes bfloat16 only, not torch\.float16"):
        builder(calls.sets)


def test_tokens_by_their_experts() -> None:
    x = torch.arange(3.0).unsqueeze(-1)
    by = sort(x, torch.tensor([[3, 0], [0, 1], [3, 1]]), 5)
    assert by.x.flatten().tolist() == [0, 1, 1, 2, 0, 2]
    assert by.expert.tolist() == [0, 0, 1, 1, 3, 3]
    assert by.ends.tolist() == [2, 4, 4, 6, 6]
    assert by.ends.dtype == torch.int32


def test_slots_in_whole_blocks() -> None:
    slots, owner, total = align(torch.tensor([[3, 0], [0, 1], [3, 0]]), 2, 5)
    assert slots.tolist() == [1, 2, 5, 6, 3, 6, 0, 4]
    assert owner.tolist() == [0, 0, 1, 3]
    assert total.item() == 8
    assert {one.dtype for one in (slots, owner, total)} == {torch.int32}


# ------------------------------------------------------------------------------------------ others


def modules(monkeypatch: pytest.MonkeyPatch, contents: dict[str, dict[str, Any]]) -> None:
    """Stand-ins for modules, by their names, with these names in them."""
    for name, inside in contents.items():
        path = name.split(".")
        for end in range(1, len(path) + 1):
            whole = ".".join(path[:end])
            module = sys.modules.get(whole) if end < len(path) else None
            module = module or ModuleType(whole)
            for what, value in {"__path__": [], **(inside if end == len(path) else {})}.items():
                monkeypatch.setattr(module, what, value, raising=False)
            monkeypatch.setitem(sys.modules, whole, module)
            if end > 1:
                parent = sys.modules[".".join(path[: end - 1])]
                monkeypatch.setattr(parent, path[end - 1], module, raising=False)


def humming(monkeypatch: pytest.MonkeyPatch) -> None:
    class HummingLayer(torch.nn.Module):
        def __init__(self, **options: Any) -> None:
            super().__init__()
            assert options.pop("weight_config") == {
                "quant_method": "modelopt",
                "quant_algo": "nvfp4",
            }
            assert (options["pad_n_to_multiple"], options["pad_k_to_multiple"]) == (256, 128)
            self.options, self.locks = options, torch.zeros(4)
            self.humming_config: Any = None

        def load_from_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
            assert ("bias" in tensors) == self.options["has_bias"]
            experts, rows = self.options["num_experts"], self.options["shape_n"]
            assert tensors["weight"].shape == (experts, rows, self.options["shape_k"] // 2)
            assert tensors["weight_scale_2"].shape == (experts, 1)
            for name, tensor in tensors.items():
                setattr(self, name, torch.nn.Parameter(tensor, requires_grad=False))

        def transform(self) -> None:
            self.humming_config = (self.options["shape_n"], self.options["shape_k"])

    def get_heuristics_config(config: Any, *, shape_m: int, gemm_type: str) -> dict[str, Any]:
        assert (shape_m % 20, gemm_type) == (0, "indexed")
        return {"block_shape": [4 if config[0] == 192 else 2, 64, 64]}

    def humming_forward(config: Any, x: Any, weight: Any, **given: Any) -> torch.Tensor:
        assert json.loads(given["compute_config"]) == {"gemm_type": "indexed"}
        block = json.loads(given["tuning_config"])["block_shape"][0]
        values = NVFP4Tensor(weight.data, given["weight_scale"].data, given["weight_scale_2"][:, 0])
        dense = dequantize(values)
        slots, owner = given["sorted_ids"], given["expert_ids"].repeat_interleave(block)
        assert len(slots) == len(owner) == given["num_tokens_padded"]
        topk, count = given["top_k"], given["valid_shape_m"]
        out = torch.zeros((count, dense.shape[1]))
        for slot, expert in zip(slots.tolist(), owner.tolist(), strict=True):
            if slot < count:
                out[slot] = dense[expert] @ x[slot // topk].float()
                if given["bias"] is not None:
                    out[slot] += given["bias"][expert].float()
        return out.to(x.dtype)

    def may_process_input(config: Any, both: Any, **given: Any) -> tuple[Any, None, None]:
        assert given["activation_type"] == "binary_split"
        oai = "1.702f" in given["activation_impl"]
        assert ("fminf" in given["activation_impl"]) == oai
        h = activate(both, "swiglu_oai" if oai else "silu", 0.5 if oai else None)
        return h, None, None

    contents: dict[str, dict[str, Any]] = {
        "humming.layer": {"HummingLayer": HummingLayer},
        "humming.forward": {
            "humming_forward": humming_forward,
            "may_process_input": may_process_input,
        },
        "humming.tune": {"get_heuristics_config": get_heuristics_config},
    }
    modules(monkeypatch, contents)


def marlin(monkeypatch: pytest.MonkeyPatch, *, newer: bool = False) -> None:
    def prepare_nvfp4_moe_layer_for_marlin(layer: Any, is_act_and_mul: bool, **given: Any) -> Any:
        assert is_act_and_mul
        sizes = (layer.num_experts, layer.intermediate_size_per_partition, layer.hidden_size)
        assert given["w2"].shape == (sizes[0], sizes[2], sizes[1] // 2)
        layer.workspace = torch.zeros(4, dtype=torch.int32)
        parts = [given[name] for name in ("w13", "w13_scale", "w13_scale_2")]
        return *parts, *(given[name] for name in ("w2", "w2_scale", "w2_scale_2"))

    def computed(args: Any, given: Any, activation: str, limit: float | None) -> torch.Tensor:
        x, w13, w2, b13, b2, s13, s2, shares, ids = args
        assert given["quant_type_id"] == FOUR.id
        assert (shares.dtype, ids.dtype) == (torch.float32, torch.int32)
        if b13 is not None:  # padded, and in another order: here the other way round
            halves = b13.flip(-1).view(len(b13), 2, -1)
            assert halves.shape[-1] == 128
            assert not halves[..., 80:].any()
            b13, b2 = halves[..., :80].flatten(1), b2.flip(-1)
        weights = (
            NVFP4Tensor(w13, s13, given["global_scale1"]),
            NVFP4Tensor(w2, s2, given["global_scale2"]),
        )
        return layer(x, shares, ids, *weights, b13, b2, activation, limit, dtype=x.dtype)

    def of(given: Any) -> tuple[str, float | None]:
        if given["activation"] == "silu":
            return "silu", None
        assert given["activation"] == "packed"
        told = given["activation_config"] if newer else SimpleNamespace(**given)
        alpha, beta = (
            (told.alpha, told.beta) if newer else (given["gemm1_alpha"], given["gemm1_beta"])
        )
        assert (alpha, beta) == (1.702, 1.0)
        return "swiglu_oai", told.clamp_limit

    def fused_marlin_moe(*args: Any, clamp_limit: Any = None, **given: Any) -> torch.Tensor:
        return computed(args, given, *of({**given, "clamp_limit": clamp_limit}))

    def newer_fused_marlin_moe(*args: Any, **given: Any) -> torch.Tensor:
        return computed(args, given, *of(given))

    function = newer_fused_marlin_moe if newer else fused_marlin_moe
    names = SimpleNamespace(SILU="silu", SWIGLUOAI_UNINTERLEAVE="packed")
    layers = "vllm.model_executor.layers"
    there = "experts.marlin_moe" if newer else "fused_marlin_moe"
    monkeypatch.setitem(sys.modules, f"{layers}.fused_moe.experts.marlin_moe", None)
    contents: dict[str, dict[str, Any]] = {
        "vllm.scalar_type": {"scalar_types": SimpleNamespace(float4_e2m1f=FOUR)},
        f"{layers}.quantization.utils.marlin_utils": {
            "marlin_permute_bias": lambda bias: bias.flip(-1)
        },
        f"{layers}.quantization.utils.marlin_utils_fp4": {
            "prepare_nvfp4_moe_layer_for_marlin": prepare_nvfp4_moe_layer_for_marlin
        },
        f"{layers}.fused_moe.activation": {
            "MoEActivation": names,
            "ApplyMoEActivationConfig": SimpleNamespace,
        },
        f"{layers}.fused_moe.{there}": {"fused_marlin_moe": function},
    }
    modules(monkeypatch, contents)


def newer_marlin(monkeypatch: pytest.MonkeyPatch) -> None:
    marlin(monkeypatch, newer=True)


@pytest.mark.parametrize("model", [SILU, OAI], ids=lambda model: model.name)
@pytest.mark.parametrize(
    "stand_in", [humming, marlin, newer_marlin], ids=lambda one: str(one.__name__)
)
def test_adapters_hand_over_weights_and_tokens(
    stand_in: Callable[[pytest.MonkeyPatch], None], model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    experts, calls, function = built(model, "humming" if stand_in is humming else "vllm")
    judged(experts, calls, function)
    # Of other calls over the same weights only what belongs to these is made.
    before = {name: id(made) for name, made in experts.kept.items()}
    more = make_calls(experts, "nvfp4_moe", 40, "uniform")
    name = "humming" if stand_in is humming else "vllm"
    (builder,) = PEERS[name].implementations("nvfp4_moe").values()
    judged(experts, more, builder(more.sets))
    assert {name: id(made) for name, made in experts.kept.items()} == before


def test_vllms_layer_over_dense_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = make_experts(SILU, torch.bfloat16, CPU)

    def fused_experts(x: Any, w13: Any, w2: Any, shares: Any, ids: Any) -> torch.Tensor:
        assert torch.equal(w13, experts.dense[0])
        assert torch.equal(w2, experts.dense[1])
        slots = torch.stack(
            [
                torch.stack([w2[e] @ activate(w13[e] @ row, "silu", None) for e in of.tolist()])
                for row, of in zip(x, ids, strict=True)
            ]
        )
        return combine(slots, shares)

    modules(monkeypatch, {"vllm.model_executor.layers.fused_moe": {"fused_experts": fused_experts}})
    calls = make_calls(experts, "moe", 5, "uniform")
    (builder,) = PEERS["vllm"].implementations("moe").values()
    judged(experts, calls, builder(calls.sets))
    with pytest.raises(ArgumentError, match="with silu and without biases only"):
        built(OAI, "vllm", "moe")


def test_what_a_peer_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = Model("odd", 4, 2, 64, 48, activation="gelu")
    humming(monkeypatch)
    with pytest.raises(ArgumentError, match="has no activation 'gelu'"):
        built(odd, "humming")
    marlin(monkeypatch)
    with pytest.raises(ArgumentError, match="has no activation 'gelu'"):
        built(odd, "vllm")
