"""NVFP4 linear layers of vLLM, on a runner each.

A fused layer (q, k and v; gate and up) has a global scale for each of its parts in the checkpoint.
They become one for each output row, so what runs is what the checkpoint says, where a single scale
for the whole layer would be wrong for all parts but one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

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
from gristmill.runners import Nvfp4LinearRunner

_PARTS = {"q": 0, "k": 1, "v": 2}


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
        self.loading = Loading(self.prefix, self.names, "")
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
            on_disk = input_size * data.shape[1] // columns
            wanted = functools.partial(
                _wanted_matrix, output_partition_sizes, output_size // rows, on_disk
            )
            parameter = compat.ModelWeightParameter(
                data=data,
                input_dim=1,
                output_dim=0,
                weight_loader=self.loading.checked(layer, name, loader, data.dtype, wanted),
            )
            layer.register_parameter(name, parameter)
        name, dtype = self.names.global_scale, torch.float32
        parameter = compat.PerTensorScaleParameter(
            data=torch.empty(len(output_partition_sizes), dtype=dtype),
            weight_loader=self.loading.checked(layer, name, loader, dtype, _wanted_scale),
        )
        layer.register_parameter(name, parameter)
        layer.register_parameter(self.names.input_scale, input_scales())
        self.loading.mark(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        if not is_loaded(layer, self.names):
            return
        # Once: what comes after that, by a reload, is real.
        dummy, self.dummy = self.dummy, False
        self.loading.processed = True
        weight = take(layer, self.prefix, self.names, layer.logical_widths, dummy=dummy)
        name = f"vllm linear {self.prefix}"
        held = install(layer, self.names, {"": weight}, Nvfp4LinearRunner, name)
        warm.expect_linear(held.runner, compat.serving(PROVIDER), invariant=held.invariant)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        held = getattr(layer, HELD)
        y: torch.Tensor = torch.ops.gristmill.nvfp4_linear_gemm(x, held.runner_id, held.width)
        return y if bias is None else y + bias


def _wanted_matrix(
    widths: Sequence[int],
    ranks: int,
    columns: int,
    shape: tuple[int, ...],
    loaded_shard_id: Any = None,
) -> str | None:
    """The shape of codes or block scales in a checkpoint; None if `shape` is right.

    Ranks may have a part each, or share one: there may be fewer heads of keys than ranks.

    Args:
        widths: the rows of each part of the layer on this rank.
        ranks: how many ranks share the layer.
        columns: of the whole matrix.
        shape: of the tensor in the checkpoint.
        loaded_shard_id: vLLM's name of the part, or of several; None for the whole layer.
    """
    ids = loaded_shard_id if isinstance(loaded_shard_id, tuple) else (loaded_shard_id,)
    parts = [part for part in (_PARTS.get(one, one) for one in ids) if isinstance(part, int)]
    rows = sum(widths[part] for part in parts) if parts else sum(widths)
    # Models may name parts of their own: those are as large as vLLM finds them.
    least = rows if parts or loaded_shard_id is None else 1
    if len(shape) == 2 and least <= shape[0] <= rows * ranks and shape[1] == columns:
        return None
    return f"({rows * ranks}, {columns})"


def _wanted_scale(shape: tuple[int, ...], loaded_shard_id: Any = None) -> str | None:
    return None if shape in ((), (1,)) else "one value"
