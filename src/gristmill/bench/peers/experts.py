"""The experts of a mixture, after the router: with NVFP4 weights, and with those of 16 bits.

What there is to beat: torch's grouped product over the same weights in 16 bits, which reads 3.6
times the bytes; Humming, which decodes such weights on the way; and vLLM's Marlin, the only one
that has the whole layer. The others are given tokens that are sorted or aligned already, and the
sums over a token's experts are left to the check: what is timed is two products and an activation.
Everybody has the weights once, in an order of their own, made when a model is first met.

With weights of 16 bits it is torch's grouped product again, and vLLM's layer in Triton.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gristmill.bench.experts.inputs import Experts, experts_of
from gristmill.bench.experts.truth import OAI_SLOPE, activate, combine
from gristmill.bench.peers.peer import Builders, Function, Part, Sets
from gristmill.errors import ArgumentError
from gristmill.formats.nvfp4 import NVFP4Tensor

TASK, DENSE_TASK = "nvfp4_moe", "moe"
_IDS = 2  # their position among the arguments
_T = TypeVar("_T")

grouped_mm: Callable[..., Tensor] = getattr(F, "grouped_mm", None) or torch._grouped_mm


def of_calls(sets: Sets, make: Callable[..., _T]) -> dict[int, _T]:
    """What `make` gives for the x and ids of each call, by the address of its ids."""
    return {args[_IDS].data_ptr(): make(args[0], args[_IDS]) for args in sets}


def _ours(sets: Sets) -> Function:
    from gristmill.ops.nvfp4_moe import moe_of

    return moe_of


def _ours_dense(sets: Sets) -> Function:
    from gristmill.ops.moe import MOE

    return MOE.run


# ------------------------------------------------------------------------------------------- torch


@dataclass(frozen=True)
class Sorted:
    """Tokens by their experts: x of each slot, where each expert's end, whose they are."""

    x: Tensor
    ends: Tensor
    expert: Tensor
    order: Tensor


def sort(x: Tensor, ids: Tensor, experts: int) -> Sorted:
    expert, order = torch.sort(ids.flatten().long(), stable=True)
    ends = torch.bincount(expert, minlength=experts).cumsum(0).int()
    return Sorted(x[order // ids.shape[1]], ends, expert, order)


def _grouped(sets: Sets) -> Function:
    experts, dtype = experts_of(sets[0]), sets[0][0].dtype
    if dtype != torch.bfloat16:
        raise ArgumentError(f"takes bfloat16 only, not {dtype}")
    w13, w2 = (weight.transpose(-2, -1) for weight in experts.dense)
    model, biases = experts.model, (experts.w13_bias, experts.w2_bias)
    ahead = of_calls(sets, lambda x, ids: sort(x, ids, model.experts))

    def layer(x: Tensor, shares: Tensor, ids: Tensor, *_: object) -> Tensor:
        by = ahead[ids.data_ptr()]
        both = grouped_mm(by.x, w13, offs=by.ends)
        if biases[0] is not None:
            both += biases[0].index_select(0, by.expert)
        h = activate(both, model.activation, model.limit)
        out = grouped_mm(h, w2, offs=by.ends)
        if biases[1] is not None:
            out += biases[1].index_select(0, by.expert)
        return out

    def finish(out: Tensor, x: Tensor, shares: Tensor, ids: Tensor, *_: object) -> Tensor:
        slots = torch.empty_like(out)
        slots[ahead[ids.data_ptr()].order] = out
        return combine(slots.view(*ids.shape, -1), shares)

    return Part(layer, finish)


# ----------------------------------------------------------------------------------------- humming


def align(ids: Tensor, block: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots by their experts, each expert's in whole blocks: slots, the experts of the blocks.

    The rest of a block is filled with the number of slots. Last: how many there are, with these.
    """
    flat = ids.flatten().long()
    counts = torch.bincount(flat, minlength=experts)
    blocks = (counts + block - 1) // block
    owner = torch.repeat_interleave(torch.arange(experts, device=ids.device), blocks)
    expert, order = torch.sort(flat, stable=True)
    first = (counts.cumsum(0) - counts)[expert]
    place = (blocks.cumsum(0) - blocks)[expert] * block
    place += torch.arange(len(flat), device=ids.device) - first
    slots = torch.full((len(owner) * block,), len(flat), device=ids.device)
    slots[place] = order
    total = torch.tensor(len(slots), device=ids.device)
    return slots.int(), owner.int(), total.int()


def _humming_layer(weight: NVFP4Tensor, bias: Tensor | None, dtype: torch.dtype) -> Any:
    from humming.layer import HummingLayer

    experts, rows, columns = weight.shape
    with torch.device(weight.device):
        layer = HummingLayer(
            shape_n=rows,
            shape_k=columns,
            weight_config={"quant_method": "modelopt", "quant_algo": "nvfp4"},
            num_experts=experts,
            has_bias=bias is not None,
            pad_n_to_multiple=256,
            pad_k_to_multiple=128,
            torch_dtype=dtype,
        )
    parts = {
        "weight": weight.codes,
        "weight_scale": weight.scales,
        "weight_scale_2": weight.global_scale.view(experts, 1),
    }
    layer.load_from_tensors(parts if bias is None else {**parts, "bias": bias})
    layer.transform()
    return layer


def _humming_activation(activation: str, limit: float | None) -> str:
    """The activation of a gate a and an up b in C++."""
    gate, up = "a", "b"
    if limit is not None:
        gate, up = f"fminf(a, {limit}f)", f"fminf(fmaxf(b, -{limit}f), {limit}f)"
    if activation == "swiglu_oai":
        return f"{gate} / (1.0f + __expf(-{OAI_SLOPE}f * {gate})) * ({up} + 1.0f)"
    if activation != "silu":
        raise ArgumentError(f"has no activation {activation!r} here")
    return f"{gate} / (1.0f + __expf(-{gate})) * {up}"


def _humming(sets: Sets) -> Function:
    from humming.forward import humming_forward, may_process_input
    from humming.tune import get_heuristics_config

    experts, x, ids = experts_of(sets[0]), sets[0][0], sets[0][_IDS]
    model, slots = experts.model, ids.numel()

    def layers() -> tuple[Any, Any]:
        return (
            _humming_layer(experts.w13, experts.w13_bias, x.dtype),
            _humming_layer(experts.w2, experts.w2_bias, x.dtype),
        )

    wide, back = experts.keep("humming", layers)
    impl = _humming_activation(model.activation, model.limit)
    # One kernel of each, for this size, instead of one for every size that there may be.
    tuned = [
        get_heuristics_config(one.humming_config, shape_m=slots, gemm_type="indexed")
        for one in (wide, back)
    ]
    blocks = [int(one["block_shape"][0]) for one in tuned]
    written = [json.dumps(one) for one in tuned]
    ahead = of_calls(sets, lambda _, ids: [align(ids, block, model.experts) for block in blocks])

    def product(at: int, layer: Any, inputs: Tensor, aligned: Any, topk: int) -> Any:
        slots_by, experts_by, total = aligned
        return humming_forward(
            layer.humming_config,
            inputs,
            layer.weight,
            weight_scale=layer.weight_scale,
            weight_scale_2=layer.weight_scale_2,
            bias=getattr(layer, "bias", None),
            sorted_ids=slots_by,
            expert_ids=experts_by,
            num_tokens_padded=total,
            locks=layer.locks,
            top_k=topk,
            valid_shape_m=slots,
            compute_config='{"gemm_type": "indexed"}',
            tuning_config=written[at],
        )

    def run(x: Tensor, shares: Tensor, ids: Tensor, *_: object) -> Any:
        first, second = ahead[ids.data_ptr()]
        both = product(0, wide, x, first, model.topk)
        h, _, _ = may_process_input(
            back.humming_config, both, activation_type="binary_split", activation_impl=impl
        )
        return product(1, back, h, second, 1)

    def finish(out: Tensor, x: Tensor, shares: Tensor, ids: Tensor, *_: object) -> Tensor:
        return combine(out.view(*ids.shape, -1), shares)

    return Part(run, finish)


# -------------------------------------------------------------------------------------------- vLLM


@dataclass(frozen=True)
class Marlin:
    """Weights, scales, global scales and biases of both products, in Marlin's order."""

    weights: tuple[Tensor, Tensor]
    scales: tuple[Tensor, Tensor]
    globals: tuple[Tensor, Tensor]
    biases: tuple[Tensor | None, Tensor | None]
    workspace: Tensor


def _marlin_weights(experts: Experts, dtype: torch.dtype) -> Marlin:
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_permute_bias
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import (
        prepare_nvfp4_moe_layer_for_marlin,
    )

    model, w13, w2 = experts.model, experts.w13, experts.w2
    layer: Any = torch.nn.Module()
    layer.num_experts, layer.hidden_size = model.experts, model.hidden
    layer.intermediate_size_per_partition, layer.params_dtype = model.inner, dtype
    made = prepare_nvfp4_moe_layer_for_marlin(
        layer=layer,
        w13=w13.codes,
        w13_scale=w13.scales,
        w13_scale_2=w13.global_scale.clone(),
        w2=w2.codes,
        w2_scale=w2.scales,
        w2_scale_2=w2.global_scale.clone(),
        is_act_and_mul=True,
    )
    biases: list[Tensor | None] = [None, None]
    if experts.w13_bias is not None and experts.w2_bias is not None:
        # Each half of w13 is padded, if H is no multiple of 128.
        whole = 64 if model.hidden % 128 == 0 else 128
        halves = experts.w13_bias.view(model.experts, 2, model.inner)
        padded = F.pad(halves, (0, -model.inner % whole)).flatten(1)
        biases = [marlin_permute_bias(bias.to(dtype)) for bias in (padded, experts.w2_bias)]
    return Marlin(
        (made[0], made[3]),
        (made[1], made[4]),
        (made[2], made[5]),
        (biases[0], biases[1]),
        layer.workspace,
    )


def _marlin_options(function: Function, activation: str, limit: float | None) -> dict[str, Any]:
    """The activation as this version of vLLM takes it; gate and up are halves, not interleaved."""
    from vllm.model_executor.layers.fused_moe import activation as there

    if activation == "silu" and limit is None:
        return {"activation": there.MoEActivation.SILU}
    if activation != "swiglu_oai" or limit is None:
        raise ArgumentError(f"has no activation {activation!r} with limit {limit}")
    named = {"activation": there.MoEActivation.SWIGLUOAI_UNINTERLEAVE}
    if "clamp_limit" in inspect.signature(function).parameters:
        more = {"clamp_limit": limit, "gemm1_alpha": OAI_SLOPE, "gemm1_beta": 1.0}
        return {**named, **more}
    config = there.ApplyMoEActivationConfig(clamp_limit=limit, alpha=OAI_SLOPE, beta=1.0)
    return {**named, "activation_config": config}


def _marlin(sets: Sets) -> Function:
    from vllm.scalar_type import scalar_types

    try:
        from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    except ImportError:  # where versions before 0.26 have it
        from vllm.model_executor.layers.fused_moe.fused_marlin_moe import fused_marlin_moe

    experts, dtype = experts_of(sets[0]), sets[0][0].dtype
    made = experts.keep("vllm", lambda: _marlin_weights(experts, dtype))
    options = _marlin_options(fused_marlin_moe, experts.model.activation, experts.model.limit)

    def layer(x: Tensor, shares: Tensor, ids: Tensor, *_: object) -> Any:
        return fused_marlin_moe(
            x,
            *made.weights,
            *made.biases,
            *made.scales,
            shares,
            ids,
            quant_type_id=scalar_types.float4_e2m1f.id,
            global_scale1=made.globals[0],
            global_scale2=made.globals[1],
            workspace=made.workspace,
            **options,
        )

    return layer


def _fused(sets: Sets) -> Function:
    from vllm.model_executor.layers.fused_moe import fused_experts

    model = experts_of(sets[0]).model
    if model.bias or model.activation != "silu" or model.limit is not None:
        raise ArgumentError("is asked for layers with silu and without biases only")

    def layer(x: Tensor, shares: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, *_: object) -> Any:
        return fused_experts(x, w13, w2, shares, ids)

    return layer


# By the names that recorded results have: torch_grouped_mm_bf16, humming, vllm_marlin_nvfp4.
BUILDERS: Builders = {
    "gristmill": {TASK: _ours, DENSE_TASK: _ours_dense},
    "torch": {task: {"grouped_mm_bf16": _grouped} for task in (TASK, DENSE_TASK)},
    "humming": {TASK: _humming},
    "vllm": {TASK: {"marlin_nvfp4": _marlin}, DENSE_TASK: {"fused_moe": _fused}},
}
