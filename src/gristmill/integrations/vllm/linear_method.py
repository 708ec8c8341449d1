"""NVFP4 linear layers of vLLM, on a runner each.

A fused layer (q, k and v; gate and up) has a global scale for each of its parts in the checkpoint.
They become one for each output row, so what runs is what the checkpoint says, where a single scale
for the whole layer would be wrong for all parts but one.
"""

from __future__ import annotations

from typing import Any

import torch

from gristmill.integrations.vllm import compat, warm
from gristmill.integrations.vllm.norms import PROVIDER
from gristmill.integrations.vllm.weights import (
    HELD,
    NAMES,
    check_columns,
    checked_loader,
    empty_global_scales,
    empty_weight,
    input_scales,
    install,
    is_loaded,
    take,
)
from gristmill.runners import Nvfp4LinearRunner


@compat.register_weight_loader_v2_supported_method
class GristmillNvfp4LinearMethod(compat.LinearMethodBase):  # type: ignore[misc]
    """Weights as `producer` writes them; activations of 16 or 32 bits, never quantised.

    Args:
        producer: "modelopt" or "compressed-tensors".
        prefix: the layer's name in the model, which also names its runner.
    """

    def __init__(self, producer: str, prefix: str) -> None:
        self.names = NAMES[producer]
        self.prefix = prefix or "a layer without a name"
        self.dummy = compat.has_dummy_weights()

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        columns, rows = input_size_per_partition, sum(output_partition_sizes)
        check_columns(self.prefix, "its input", columns, input_size)
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition = columns
        layer.output_size_per_partition = rows
        loader = extra_weight_attrs.get("weight_loader")
        codes, scales = empty_weight(rows, columns)
        for name, data in ((self.names.codes, codes), (self.names.scales, scales)):
            parameter = compat.ModelWeightParameter(
                data=data,
                input_dim=1,
                output_dim=0,
                weight_loader=checked_loader(self.prefix, loader, data.dtype),
            )
            layer.register_parameter(name, parameter)
        data = empty_global_scales(len(output_partition_sizes))
        layer.register_parameter(
            self.names.global_scale,
            compat.PerTensorScaleParameter(
                data=data, weight_loader=checked_loader(self.prefix, loader, data.dtype)
            ),
        )
        layer.register_parameter(self.names.input_scale, input_scales())

    def process_weights_after_loading(self, layer: Any) -> None:
        if not is_loaded(layer, self.names):
            return
        # Once: what comes after that, by a reload, is real.
        dummy, self.dummy = self.dummy, False
        weight = take(layer, self.prefix, self.names, layer.logical_widths, dummy=dummy)
        name = f"vllm linear {self.prefix}"
        held = install(layer, self.names, {"": weight}, Nvfp4LinearRunner, name)
        warm.expect_linear(held.runner, compat.serving(PROVIDER), invariant=held.invariant)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        held = getattr(layer, HELD)
        y: torch.Tensor = torch.ops.gristmill.nvfp4_linear_gemm(x, held.runner_id, held.width)
        return y if bias is None else y + bias
