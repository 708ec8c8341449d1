"""Layers of vLLM without a model around them, on any rank, loaded as vLLM loads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from vllm import ir
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEConfig, RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig, RoutingMethodType
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm_models import compressed_tensors_config, modelopt_config

from gristmill.integrations.vllm import norms
from gristmill.integrations.vllm.quantization import GristmillNvfp4Config
from gristmill.nvfp4 import NVFP4Tensor

PRODUCERS = ("modelopt", "compressed-tensors")
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


@contextmanager
def rank(index: int = 0, of: int = 1, config: VllmConfig | None = None) -> Iterator[VllmConfig]:
    """Layers made and loaded in here belong to tensor-parallel rank `index` of `of`."""
    config = config or VllmConfig()
    places = ("vllm.model_executor.layers.linear", "vllm.model_executor.parameter")
    with (
        set_current_vllm_config(config),
        patch(f"{places[0]}.get_tensor_model_parallel_rank", lambda: index),
        patch(f"{places[0]}.get_tensor_model_parallel_world_size", lambda: of),
        patch(f"{places[1]}.get_tensor_model_parallel_rank", lambda: index),
        patch(f"{places[1]}.get_tensor_model_parallel_world_size", lambda: of),
    ):
        yield config


@contextmanager
def invariant_provider() -> Iterator[None]:
    """The provider of norms in here is the one that VLLM_BATCH_INVARIANT makes us register."""
    ops = (ir.ops.rms_norm, ir.ops.fused_add_rms_norm)
    before = [op.impls.pop(norms.PROVIDER, None) for op in ops]
    norms.register(*ops, supported=True, batch_invariant=True)
    try:
        yield
    finally:
        for op, implementation in zip(ops, before, strict=True):
            del op.impls[norms.PROVIDER]
            if implementation is not None:
                op.impls[norms.PROVIDER] = implementation


def quantization(producer: str, ignore: tuple[str, ...] = (), **more: Any) -> GristmillNvfp4Config:
    make = modelopt_config if producer == "modelopt" else compressed_tensors_config
    config = GristmillNvfp4Config.from_config(make(ignore, **more))
    config.packed_modules_mapping = FUSED
    return config


def tensors_of(producer: str, weight: NVFP4Tensor) -> dict[str, torch.Tensor]:
    """A matrix as a checkpoint of this producer has it."""
    if producer == "modelopt":
        return {
            "weight": weight.codes,
            "weight_scale": weight.scales,
            "weight_scale_2": weight.global_scale,
            "input_scale": torch.tensor(0.01),
        }
    return {
        "weight_packed": weight.codes,
        "weight_scale": weight.scales,
        "weight_global_scale": weight.global_scale.reciprocal().reshape(1),
        "input_global_scale": torch.tensor([100.0]),
    }


def load(layer: torch.nn.Module, producer: str, parts: Mapping[Any, NVFP4Tensor]) -> None:
    """Load each part into its shard (None: the whole layer), then let vLLM's hook run."""
    for shard, weight in parts.items():
        for name, tensor in tensors_of(producer, weight).items():
            parameter = getattr(layer, name)
            arguments = () if shard is None else (shard,)
            parameter.weight_loader(parameter, tensor, *arguments)
    layer.quant_method.process_weights_after_loading(layer)


def experts(
    config: GristmillNvfp4Config,
    *,
    num_experts: int,
    hidden: int,
    inner: int,
    top_k: int = 2,
    tp: tuple[int, int] = (0, 1),
    ep: tuple[int, int] = (0, 1),
    activation: str = "silu",
    has_bias: bool = False,
    prefix: str = "model.layers.0.mlp.experts",
    **more: Any,
) -> RoutedExperts:
    """The experts of one layer, as rank `tp` and `ep` has them, with nothing loaded."""
    parallel = FusedMoEParallelConfig(
        tp_size=tp[1],
        tp_rank=tp[0],
        ep_size=ep[1],
        ep_rank=ep[0],
        pcp_size=1,
        pcp_rank=0,
        dp_size=1,
        dp_rank=0,
        sp_size=1,
        use_ep=ep[1] > 1,
        all2all_backend="allgather_reducescatter",
        enable_eplb=False,
    )
    moe = FusedMoEConfig(
        num_experts=num_experts,
        experts_per_token=top_k,
        hidden_dim=hidden,
        intermediate_size=inner,
        num_local_experts=num_experts // ep[1],
        num_logical_experts=num_experts,
        activation=MoEActivation.from_str(activation),
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=parallel,
        in_dtype=torch.float32,
        has_bias=has_bias,
    )
    manager = ExpertMapManager(
        max_num_batched_tokens=64,
        top_k=top_k,
        global_num_experts=num_experts,
        num_redundant_experts=0,
        num_expert_group=None,
        moe_parallel_config=parallel,
        placement_strategy="linear",
        enable_eplb=False,
    )
    return RoutedExperts(prefix, torch.float32, moe, config, manager, **more)


def load_experts(
    layer: RoutedExperts,
    producer: str,
    gates: list[NVFP4Tensor],
    ups: list[NVFP4Tensor],
    downs: list[NVFP4Tensor],
    *,
    process: bool = True,
) -> None:
    """Load all experts, those of other ranks too, as vLLM does, then let its hook run."""
    for expert, matrices in enumerate(zip(gates, ups, downs, strict=True)):
        shards = (("w1", "w13"), ("w3", "w13"), ("w2", "w2"))
        for (shard, stack), weight in zip(shards, matrices, strict=True):
            for name, tensor in tensors_of(producer, weight).items():
                parameter = getattr(layer, f"{stack}_{name}")
                full_name = f"{layer.layer_name}.{stack}_{name}"
                parameter.weight_loader(
                    parameter, tensor, full_name, shard_id=shard, expert_id=expert
                )
    if process:
        layer.quant_method.process_weights_after_loading(layer)
