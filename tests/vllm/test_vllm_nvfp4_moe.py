"""NVFP4 experts of vLLM: what they load, what they compute, what they refuse."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from vllm.config import LoadConfig, VllmConfig
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm_layers import PRODUCERS, experts, load_experts, quantization, rank, tensors_of

from gristmill.errors import ArgumentError, CheckpointError
from gristmill.formats.nvfp4.tensor import PackedNVFP4
from gristmill.integrations.vllm.moe_method import GristmillNvfp4MoeMethod
from gristmill.integrations.vllm.weights import HELD
from gristmill.nvfp4 import NVFP4Tensor, dequantize, quantize

EXPERTS, HIDDEN, INNER, TOP_K, ROWS = 6, 64, 96, 2, 7
SIZES = {"num_experts": EXPERTS, "hidden": HIDDEN, "inner": INNER, "top_k": TOP_K}
Matrices = tuple[list[NVFP4Tensor], list[NVFP4Tensor], list[NVFP4Tensor]]


@pytest.fixture(autouse=True)
def _no_leftovers() -> None:
    """A runner of an earlier test would keep its name."""
    gc.collect()


@pytest.fixture(scope="module")
def matrices() -> Matrices:
    """Gate, up and down of every expert, with scales that differ in each."""
    generator = torch.Generator().manual_seed(0)

    def some(rows: int, columns: int, std: float) -> list[NVFP4Tensor]:
        return [
            quantize(torch.randn(rows, columns, generator=generator) * std * (1 + expert))
            for expert in range(EXPERTS)
        ]

    return some(INNER, HIDDEN, 0.2), some(INNER, HIDDEN, 0.02), some(HIDDEN, INNER, 0.1)


def routed(top_k: int = TOP_K) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(ROWS, HIDDEN, generator=generator)
    weights, ids = torch.rand(ROWS, EXPERTS, generator=generator).topk(top_k)
    return x, weights, ids.int()


def silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def exact(
    matrices: Matrices,
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    activate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = silu,
) -> torch.Tensor:
    gates, ups, downs = ([dequantize(w, torch.float64) for w in stack] for stack in matrices)
    rows = []
    for row, row_weights, row_ids in zip(x.double(), weights.double(), ids.tolist(), strict=True):
        chosen = zip(row_weights, row_ids, strict=True)
        rows.append(sum(w * (downs[e] @ activate(gates[e] @ row, ups[e] @ row)) for w, e in chosen))
    return torch.stack(rows)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


def run(layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = layer.forward_modular(x, weights, ids)
    return y


@pytest.mark.parametrize("producer", PRODUCERS)
def test_each_matrix_of_each_expert_keeps_its_scale(producer: str, matrices: Matrices) -> None:
    call = routed()
    with rank():
        layer = experts(quantization(producer), **SIZES)
        assert isinstance(layer.quant_method, GristmillNvfp4MoeMethod)
        load_experts(layer, producer, *matrices)
        close(run(layer, *call), exact(matrices, *call))


@pytest.mark.parametrize("producer", PRODUCERS)
def test_tensor_parallel_ranks_sum_to_the_whole(producer: str, matrices: Matrices) -> None:
    call = routed()
    total = torch.zeros(ROWS, HIDDEN)
    for index in range(2):
        with rank(index, of=2):
            layer = experts(quantization(producer), tp=(index, 2), **SIZES)
            load_experts(layer, producer, *matrices)
            assert layer.w2_weight_row_scale.shape == (EXPERTS, HIDDEN)
            total += run(layer, *call)
    close(total, exact(matrices, *call))


@pytest.mark.parametrize("producer", PRODUCERS)
def test_expert_parallel_ranks_sum_to_the_whole(producer: str, matrices: Matrices) -> None:
    call = routed()
    total = torch.zeros(ROWS, HIDDEN)
    for index in range(2):
        with rank():
            layer = experts(quantization(producer), ep=(index, 2), **SIZES)
            load_experts(layer, producer, *matrices)
            assert layer.w2_weight_row_scale.shape == (EXPERTS // 2, HIDDEN)
            total += run(layer, *call)
    close(total, exact(matrices, *call))


@pytest.mark.parametrize(
    ("name", "more", "activate"),
    [
        ("silu", {"swiglu_limit": 0.5}, lambda g, u: silu(g.clamp(max=0.5), u.clamp(-0.5, 0.5))),
        ("gelu", {}, lambda g, u: F.gelu(g) * u),
        (
            "swigluoai_uninterleave",
            {"swiglu_limit": 0.5, "swiglu_alpha": 1.702, "swiglu_beta": 1.0},
            lambda g, u: (
                g.clamp(max=0.5)
                * torch.sigmoid(1.702 * g.clamp(max=0.5))
                * (u.clamp(-0.5, 0.5) + 1)
            ),
        ),
        (
            "swigluoai_uninterleave",
            {"swiglu_limit": 9.0, "swiglu_alpha": 0.75, "swiglu_beta": 1.0},
            lambda g, u: (
                g.clamp(max=9.0) * torch.sigmoid(0.75 * g.clamp(max=9.0)) * (u.clamp(-9, 9) + 1)
            ),
        ),
    ],
)
def test_activations(name: str, more: dict[str, float], activate: Any, matrices: Matrices) -> None:
    call = routed()
    with rank():
        layer = experts(quantization("modelopt"), activation=name, **SIZES, **more)
        load_experts(layer, "modelopt", *matrices)
        close(run(layer, *call), exact(matrices, *call, activate))


def test_router_weights_on_the_input(matrices: Matrices) -> None:
    x, weights, ids = routed(top_k=1)
    with rank():
        layer = experts(
            quantization("modelopt"),
            apply_router_weight_on_input=True,
            **{**SIZES, "top_k": 1},
        )
        load_experts(layer, "modelopt", *matrices)
        got = run(layer, x, weights, ids)
    close(got, exact(matrices, x * weights, torch.ones_like(weights), ids))


def test_it_is_one_node_of_a_full_graph(matrices: Matrices) -> None:
    with rank():
        layer = experts(quantization("modelopt"), **SIZES)
        load_experts(layer, "modelopt", *matrices)
        called: list[Any] = []

        def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
            called.extend(n.target for n in graph.graph.nodes if n.op == "call_function")
            return graph

        compiled = torch.compile(run, fullgraph=True, backend=backend, dynamic=True)
        call = routed()
        torch.testing.assert_close(compiled(layer, *call), run(layer, *call))
    assert called == [torch.ops.gristmill.nvfp4_moe_gemm]


@pytest.mark.parametrize("producer", PRODUCERS)
def test_weights_live_once(producer: str, matrices: Matrices) -> None:
    with rank():
        layer = experts(quantization(producer), **SIZES)
        loaded = {name: p.data_ptr() for name, p in layer.named_parameters() if p.dim() == 3}
        load_experts(layer, producer, *matrices)
    kept = {name: p.data_ptr() for name, p in layer.named_parameters() if p.dim() == 3}
    assert kept == loaded
    runner = getattr(layer, HELD).runner
    assert isinstance(runner.w13, PackedNVFP4)
    assert sum(p.nbytes for p in layer.parameters()) == runner.w13.nbytes + runner.w2.nbytes


def test_processing_twice_changes_nothing(matrices: Matrices) -> None:
    call = routed()
    with rank():
        layer = experts(quantization("modelopt"), **SIZES)
        load_experts(layer, "modelopt", *matrices)
        before, runner_id = run(layer, *call), getattr(layer, HELD).runner_id
        layer.quant_method.process_weights_after_loading(layer)
        assert getattr(layer, HELD).runner_id == runner_id
        assert torch.equal(run(layer, *call), before)


def test_weights_are_reloaded_in_place(matrices: Matrices) -> None:
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )

    gates, ups, downs = matrices
    other = ups, gates, downs
    call = routed()
    with rank():
        layer = experts(quantization("modelopt"), **SIZES)
        model = torch.nn.Sequential(layer)
        record_metadata_for_reloading(model)
        load_experts(layer, "modelopt", *matrices)
        addresses = {name: p.data_ptr() for name, p in layer.named_parameters()}
        initialize_layerwise_reload(model)
        load_experts(layer, "modelopt", *other, process=False)
        finalize_layerwise_reload(model, None)
        assert {name: p.data_ptr() for name, p in layer.named_parameters()} == addresses
        close(run(layer, *call), exact(other, *call))


@pytest.mark.parametrize("missing", ["w13_weight", "w13_weight_scale", "w2_weight_scale_2"])
def test_what_a_reload_does_not_bring_is_named(missing: str, matrices: Matrices) -> None:
    """vLLM gives the layer new memory for each reload; whatever was there before is in it."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )

    with rank():
        layer = experts(quantization("modelopt"), **SIZES)
        model = torch.nn.Sequential(layer)
        record_metadata_for_reloading(model)
        load_experts(layer, "modelopt", *matrices)
        initialize_layerwise_reload(model)
        getattr(layer, missing).weight_loader = lambda *others, **named: None
        load_experts(layer, "modelopt", *matrices, process=False)
        with pytest.raises(CheckpointError, match=rf"experts\.{missing}: "):
            finalize_layerwise_reload(model, None)


def test_real_weights_after_dummy_ones(matrices: Matrices) -> None:
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )

    call = routed()
    with rank(config=VllmConfig(load_config=LoadConfig(load_format="dummy"))):
        layer = experts(quantization("modelopt"), **SIZES)
        model = torch.nn.Sequential(layer)
        record_metadata_for_reloading(model)
        layer.quant_method.process_weights_after_loading(layer)
        initialize_layerwise_reload(model)
        load_experts(layer, "modelopt", *matrices, process=False)
        finalize_layerwise_reload(model, None)
        close(run(layer, *call), exact(matrices, *call))


def test_experts_that_were_never_loaded_are_named(matrices: Matrices) -> None:
    gates, ups, downs = matrices
    with rank():
        layer = experts(quantization("modelopt"), prefix="model.layers.7.mlp.experts", **SIZES)
        with pytest.raises(CheckpointError, match=r"layers\.7\..*w13_weight_scale_2: 2 of 12 were"):
            load_experts(layer, "modelopt", gates[:-1], ups[:-1], downs[:-1])


@pytest.mark.parametrize("stack", ["w13", "w2"])
def test_global_scales_of_another_dtype_are_named(stack: str) -> None:
    with rank():
        layer = experts(quantization("modelopt"), **SIZES)
        parameter = getattr(layer, f"{stack}_weight_scale_2")
        given = torch.ones((), dtype=torch.bfloat16)
        message = rf"experts\.{stack}_weight_scale_2: the checkpoint has torch\.bfloat16 in the"
        with pytest.raises(CheckpointError, match=message):
            parameter.weight_loader(parameter, given, "w2.weight_scale_2", "w2", 0)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("weight", lambda t: t[:48]),
        ("weight", lambda t: t[:, :16]),
        ("weight", lambda t: torch.cat([t, t])),
        ("weight", lambda t: t[None]),
        ("weight", lambda t: t[0, 0]),
        ("weight_scale", lambda t: t[0, 0]),
        ("weight_scale", lambda t: t.T),
        ("weight_scale_2", lambda t: t.repeat(2)),
    ],
)
@pytest.mark.parametrize(("shard", "stack"), [("w1", "w13"), ("w2", "w2")])
def test_tensors_of_another_shape_are_named(
    stack: str, shard: str, name: str, change: Any, matrices: Matrices
) -> None:
    """vLLM's loader would leave the rest of the expert as it was, or fill it with one value."""
    source = matrices[0][0] if shard == "w1" else matrices[2][0]
    given = change(tensors_of("modelopt", source)[name])
    with rank():
        layer = experts(quantization("modelopt"), **SIZES)
        parameter = getattr(layer, f"{stack}_{name}")
        message = rf"experts\.{stack}_{name}: the checkpoint has shape .* in the place of "
        with pytest.raises(CheckpointError, match=message):
            parameter.weight_loader(parameter, given, f"{stack}_{name}", shard, 0)


@pytest.mark.parametrize("producer", PRODUCERS)
def test_codes_that_were_never_loaded_are_named(producer: str, matrices: Matrices) -> None:
    codes = "weight" if producer == "modelopt" else "weight_packed"
    with rank():
        layer = experts(quantization(producer), **SIZES)
        parameter = getattr(layer, f"w13_{codes}")
        untouched = parameter[3, INNER:].clone()
        load_experts(layer, producer, *matrices, process=False)
        parameter.data[3, INNER:] = untouched
        with pytest.raises(CheckpointError, match=rf"experts\.w13_{codes}: 1 of 12 were never"):
            layer.quant_method.process_weights_after_loading(layer)


def test_experts_of_one_tensor_are_loaded_at_once(matrices: Matrices) -> None:
    """As models do whose checkpoints have all experts in one tensor."""
    call = routed()
    with rank():
        layer = experts(quantization("modelopt"), **SIZES)
        load_experts(layer, "modelopt", *matrices, process=False)
        for shard, stack, weights in zip(
            ("w1", "w3", "w2"), ("w13", "w13", "w2"), matrices, strict=True
        ):
            for name in ("weight", "weight_scale"):
                parameter = getattr(layer, f"{stack}_{name}")
                given = [tensors_of("modelopt", weight)[name] for weight in weights]
                whole = torch.stack([one.view(torch.uint8) for one in given]).view(given[0].dtype)
                parameter.weight_loader(parameter, whole, f"{stack}_{name}", shard, 0)
        layer.quant_method.process_weights_after_loading(layer)
        close(run(layer, *call), exact(matrices, *call))


def test_damaged_scales_are_refused(matrices: Matrices) -> None:
    gates, ups, downs = matrices
    bad = [
        NVFP4Tensor(w.codes, (-w.scales.float()).to(w.scales.dtype), w.global_scale) for w in downs
    ]
    with rank():
        layer = experts(quantization("compressed-tensors"), **SIZES)
        with pytest.raises(CheckpointError, match=r"experts\.w2_weight_scale: .*negative"):
            load_experts(layer, "compressed-tensors", gates, ups, bad)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"activation": "swigluoai"},
            "the activation 'swigluoai' is not supported; there are: silu",
        ),
        ({"activation": "gelu_tanh"}, "the activation 'gelu_tanh' is not supported"),
        (
            {"activation": "swigluoai_uninterleave", "swiglu_alpha": 1.0, "swiglu_beta": 0.5},
            "swiglu_beta is 0.5; .* supported with 1.0",
        ),
        (
            {"activation": "swigluoai_uninterleave", "swiglu_beta": 1.0},
            "'swigluoai_uninterleave' needs a swiglu_alpha, got none",
        ),
        ({"has_bias": True}, "experts with biases are not supported"),
        ({"apply_router_weight_on_input": True}, "every token has 2"),
        ({"hidden": 72}, "the hidden size is 72; NVFP4 needs a multiple of 16"),
        ({"tp": (0, 4)}, "intermediate size of 96 leaves 24 for each of 4 ranks"),
    ],
)
def test_what_is_not_supported_is_said(change: dict[str, Any], message: str) -> None:
    with rank(), pytest.raises(ArgumentError, match=f"mlp.experts: .*{message}"):
        experts(quantization("modelopt"), **{**SIZES, **change})


@pytest.mark.parametrize(
    "ignore", ["model.layers.0.mlp.experts*", "model.layers.0.mlp", "re:.*experts.*_proj$"]
)
def test_ignored_experts_are_vllms_own(ignore: str) -> None:
    with rank():
        layer = experts(quantization("modelopt", (ignore,)), **SIZES)
    assert isinstance(layer.quant_method, UnquantizedFusedMoEMethod)


def test_experts_ignored_in_part_are_refused() -> None:
    with rank(), pytest.raises(CheckpointError, match=r"quantized in part: .*down_proj left out"):
        experts(quantization("compressed-tensors", ("re:.*down_proj$",)), **SIZES)
