"""NVFP4 experts of vLLM, on a runner for each layer.

Each expert's gate, up and down have a global scale of their own in the checkpoint; they become one
for each row, so gate and up may differ.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.nn import Parameter

from gristmill.errors import ArgumentError
from gristmill.integrations.vllm import compat, warm
from gristmill.integrations.vllm.norms import PROVIDER
from gristmill.integrations.vllm.weights import (
    HELD,
    NAMES,
    Loading,
    check_columns,
    empty_weight,
    input_scales,
    install,
    is_loaded,
    take,
)
from gristmill.runners import Nvfp4MoeRunner

# vLLM's activations in ours. Its "swigluoai" has gate and up in alternate rows.
ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "swigluoai_uninterleave": "swiglu_oai"}
SWIGLU_BETA = 1.0  # what is added to up, fixed in ours

DROP = "run this model without gristmill_nvfp4 (and without nvfp4 in GRISTMILL_VLLM)"

# What vLLM's loader of experts wants to know of a scale.
BLOCKS = compat.FusedMoeWeightScaleSupported.BLOCK.value
TENSOR = compat.FusedMoeWeightScaleSupported.TENSOR.value


class GristmillNvfp4MoeMethod(compat.FusedMoEMethodBase):  # type: ignore[misc]
    """Experts as `producer` writes them; activations of 16 or 32 bits, never quantised.

    vLLM routes, runs shared experts and reduces over ranks itself; this is the part between.

    Args:
        producer: "modelopt" or "compressed-tensors".
        prefix: the layer's name in the model, which also names its runner.
        moe: vLLM's configuration of the layer.
    """

    def __init__(self, producer: str, prefix: str, moe: Any) -> None:
        super().__init__(moe)
        self.names = NAMES[producer]
        self.prefix = prefix or "experts without a name"
        self.loading = Loading(self.prefix, self.names, "w13_", "w2_")
        self.dummy = compat.has_dummy_weights()
        if not moe.is_act_and_mul:
            raise ArgumentError(f"{self.prefix}: experts without a gate are not supported; {DROP}")
        if moe.has_bias:
            raise ArgumentError(f"{self.prefix}: experts with biases are not supported; {DROP}")

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        inner = intermediate_size_per_partition
        whole = inner * self.moe.moe_parallel_config.tp_size
        check_columns(self.prefix, "the hidden size", hidden_size, hidden_size)
        check_columns(self.prefix, "the intermediate size", inner, whole)
        self.activation = _activation(self.prefix, layer)
        _check_router_weights(self.prefix, layer, self.moe.experts_per_token)
        layer.num_experts = num_experts
        layer.params_dtype = params_dtype
        loader = extra_weight_attrs.get("weight_loader")
        for stack, rows, columns, scales_of_each, on_disk in (
            ("w13_", 2 * inner, hidden_size, (2,), (whole, hidden_size)),
            ("w2_", hidden_size, inner, (), (hidden_size, whole)),
        ):
            codes, scales = empty_weight(num_experts, rows, columns)
            factors = torch.empty(num_experts, *scales_of_each, dtype=torch.float32)
            for name, data, kind in (
                (self.names.codes, codes, ""),
                (self.names.scales, scales, BLOCKS),
                (self.names.global_scale, factors, TENSOR),
            ):
                wanted = _wanted_scale
                if kind != TENSOR:
                    matrix = (on_disk[0], on_disk[1] * data.shape[-1] // columns)
                    wanted = functools.partial(_wanted_matrix, num_experts, matrix)
                checked = self.loading.checked(layer, stack + name, loader, data.dtype, wanted)
                _register(layer, stack + name, data, checked, kind)
            layer.register_parameter(stack + self.names.input_scale, input_scales())
        self.loading.mark(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        if not is_loaded(layer, self.names, "w13_"):
            return
        # Once: what comes after that, by a reload, is real.
        dummy, self.dummy = self.dummy, False
        self.loading.processed = True
        weights = {}
        for stack, parts in (("w13_", 2), ("w2_", 1)):
            rows = getattr(layer, stack + self.names.codes).shape[-2]
            weights[stack] = take(
                layer,
                self.prefix,
                self.names,
                [rows // parts] * parts,
                stack=stack,
                dummy=dummy,
            )
        make = functools.partial(
            Nvfp4MoeRunner,
            activation=self.activation,
            limit=None if self.activation == "gelu" else _swiglu(layer, "swiglu_limit"),
            expert_map=layer.expert_map,
            alpha=_swiglu(layer, "swiglu_alpha") if self.activation == "swiglu_oai" else None,
        )
        name = f"vllm experts {self.prefix}"
        held = install(layer, self.names, weights, make, name, paired="w13_")
        warm.expect_experts(
            held.runner,
            self.moe.experts_per_token,
            compat.serving(PROVIDER),
            invariant=held.invariant,
        )

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if layer.apply_router_weight_on_input:
            x = x * topk_weights.to(x.dtype)
            topk_weights = torch.ones_like(topk_weights)
        held = getattr(layer, HELD)
        y: torch.Tensor = torch.ops.gristmill.nvfp4_moe_gemm(
            x, topk_weights, topk_ids, held.runner_id, held.width
        )
        return y

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None  # it is for vLLM's own kernels

    @property
    def topk_indices_dtype(self) -> torch.dtype:
        return torch.int32

    def uses_weight_scale_2_pattern(self) -> bool:
        return True

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *others: Any, **named: Any
    ) -> tuple[int, int]:
        return hidden_size, intermediate_size_per_partition


def _register(layer: Any, name: str, data: torch.Tensor, loader: Any, kind: str) -> None:
    parameter: Any = Parameter(data, requires_grad=False)
    parameter.weight_loader = loader
    if kind:
        parameter.quant_method = kind
    layer.register_parameter(name, parameter)


def _wanted_matrix(
    num_experts: int, matrix: tuple[int, int], shape: tuple[int, ...], *part: Any, **named: Any
) -> str | None:
    """The shape of one expert's codes or block scales, or those of all experts of this rank."""
    return None if shape in (matrix, (num_experts, *matrix)) else f"{matrix}"


def _wanted_scale(shape: tuple[int, ...], *part: Any, **named: Any) -> str | None:
    return None if math.prod(shape) == 1 else "one value"


def _activation(prefix: str, layer: Any) -> str:
    given = layer.activation
    name = str(getattr(given, "value", given))
    if name not in ACTIVATIONS:
        raise ArgumentError(
            f"{prefix}: the activation {name!r} is not supported; there are: "
            f"{', '.join(ACTIVATIONS)}; {DROP}"
        )
    ours = ACTIVATIONS[name]
    if ours != "swiglu_oai":
        return ours
    beta = _swiglu(layer, "swiglu_beta")
    if beta != SWIGLU_BETA:
        raise ArgumentError(
            f"{prefix}: swiglu_beta is {beta}; the activation {name!r} is supported with "
            f"{SWIGLU_BETA}"
        )
    if _swiglu(layer, "swiglu_alpha") is None:
        raise ArgumentError(f"{prefix}: the activation {name!r} needs a swiglu_alpha, got none")
    return ours


def _swiglu(layer: Any, name: str) -> float | None:
    """`swiglu_limit`, `swiglu_alpha` or `swiglu_beta`, which older layers do not have."""
    value = getattr(layer, name, None)
    if value is None:
        value = getattr(layer.moe_config, name, None)
    return None if value is None else float(value)


def _check_router_weights(prefix: str, layer: Any, experts_per_token: int) -> None:
    if layer.apply_router_weight_on_input and experts_per_token != 1:
        raise ArgumentError(
            f"{prefix}: the router's weight can be applied to the input of one expert only, and "
            f"every token has {experts_per_token}"
        )
