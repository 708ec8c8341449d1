"""Linear layers over an NVFP4 weight, without a bias, as language models have them.

What there is to beat: the product with the same weight in 16 bits (cuBLAS on a GPU), which reads
3.6 times the bytes, and three libraries that decode such weights on the way: Humming, QuACK (bf16
only) and vLLM's Marlin. Each gets the weight in its own order, made ahead from what a checkpoint
has, once for every set of arguments. They take one global scale for a whole matrix.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gristmill.bench.inputs import Arguments
from gristmill.bench.peers.peer import Builders, Function, Sets
from gristmill.errors import ArgumentError
from gristmill.formats.nvfp4 import NVFP4Tensor, PackedNVFP4, dequantize

TASKS = ("nvfp4_linear", "nvfp4_linear_fp8")
# Positions of the parts of a weight among the arguments: codes, scales, row_scale.
_PARTS = slice(1, 4)
_LAYOUT = 5

Prepared = tuple[Tensor, ...]
Prepare = Callable[[NVFP4Tensor, torch.dtype], Prepared]


def checkpoint(args: Arguments) -> NVFP4Tensor:
    """The weight among the arguments as a checkpoint has it, whatever its layout is here."""
    codes, scales, row_scale = args[_PARTS]
    if args[_LAYOUT] == "rows":
        return NVFP4Tensor(codes, scales, row_scale)
    return PackedNVFP4(codes, scales, row_scale, args[_LAYOUT], args[0].shape[-1]).unpack()


def global_scale(weight: NVFP4Tensor) -> Tensor:
    """The one scale of all rows, fp32 of no dims."""
    scale = weight.row_scale
    if not bool((scale == scale[0]).all()):
        raise ArgumentError("takes one global scale for a whole matrix, and here rows differ")
    return scale[0].clone()


def ahead_of(sets: Sets, prepare: Prepare) -> dict[int, Prepared]:
    """What `prepare` makes of the weight of each set, by the address of its codes.

    Sets of equal weights, as a benchmark's are, get copies of what was made for the first.
    """
    first: Arguments | None = None
    made: dict[int, Prepared] = {}
    for args in sets:
        if first is not None and _equal(first, args):
            made[_key(args)] = copy.deepcopy(made[_key(first)])
        else:
            made[_key(args)] = prepare(checkpoint(args), args[0].dtype)
            first = args
    return made


def _key(args: Arguments) -> int:
    return int(args[1].data_ptr())


def _equal(one: Arguments, other: Arguments) -> bool:
    pairs = zip(one[_PARTS], other[_PARTS], strict=True)
    # By bytes: not every torch compares fp8.
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def _cublas(sets: Sets) -> Function:
    weights = ahead_of(sets, lambda weight, dtype: (dequantize(weight, dtype),))

    def layer(x: Tensor, codes: Tensor, *_: object) -> Tensor:
        return F.linear(x, weights[codes.data_ptr()][0])

    return layer


def _humming(sets: Sets) -> Function:
    from humming.forward import humming_forward
    from humming.layer import HummingLayer

    configs: list[Any] = []

    def prepare(weight: NVFP4Tensor, dtype: torch.dtype) -> Prepared:
        rows, columns = weight.shape
        with torch.device(weight.device):
            layer = HummingLayer(
                shape_n=rows,
                shape_k=columns,
                weight_config={"quant_method": "modelopt", "quant_algo": "nvfp4"},
                torch_dtype=dtype,
            )
        parts = {
            "weight": weight.codes,
            "weight_scale": weight.scales,
            "weight_scale_2": global_scale(weight).view(1),
        }
        layer.load_from_tensors(parts)
        layer.transform()
        configs.append(layer.humming_config)
        names = ("weight", "weight_scale", "weight_scale_2", "locks")
        return tuple(getattr(layer, name).detach() for name in names)

    weights = ahead_of(sets, prepare)
    config = configs[0]

    def layer(x: Tensor, codes: Tensor, *_: object) -> Any:
        weight, scales, scale, locks = weights[codes.data_ptr()]
        return humming_forward(
            config, x, weight, weight_scale=scales, weight_scale_2=scale, locks=locks
        )

    return layer


def _quack(sets: Sets) -> Function:
    from quack.gemm_w4 import gemm_w4a16, prepare_w4_weight

    x, _, _, row_scale = sets[0][:4]
    if x.dtype != torch.bfloat16:
        raise ArgumentError(f"takes bfloat16 only, not {x.dtype}")
    rows = row_scale.shape[0]
    scales: list[float] = []

    def prepare(weight: NVFP4Tensor, dtype: torch.dtype) -> Prepared:
        scales.append(float(global_scale(weight)))
        blob, strip = prepare_w4_weight(weight.codes, weight.scales, "nvfp4")
        return blob, strip

    weights = ahead_of(sets, prepare)
    scale = scales[0]

    def layer(x: Tensor, codes: Tensor, *_: object) -> Any:
        blob, strip = weights[codes.data_ptr()]
        return gemm_w4a16(x, blob, strip, tensor_scale=scale, n_out=rows, wformat="nvfp4")

    return layer


def _marlin(sets: Sets) -> Function:
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import (
        apply_fp4_marlin_linear,
        prepare_fp4_layer_for_marlin,
    )

    x, _, _, row_scale = sets[0][:4]
    rows, columns = row_scale.shape[0], x.shape[-1]

    def prepare(weight: NVFP4Tensor, dtype: torch.dtype) -> Prepared:
        layer: Any = torch.nn.Module()
        layer.output_size_per_partition, layer.input_size_per_partition = rows, columns
        layer.params_dtype = dtype
        parts = {
            "weight": weight.codes,
            "weight_scale": weight.scales,
            "weight_global_scale": global_scale(weight),
        }
        for name, part in parts.items():
            setattr(layer, name, torch.nn.Parameter(part, requires_grad=False))
        prepare_fp4_layer_for_marlin(layer)
        return *(getattr(layer, name).detach() for name in parts), layer.workspace

    weights = ahead_of(sets, prepare)

    def layer(x: Tensor, codes: Tensor, *_: object) -> Any:
        weight, scales, scale, workspace = weights[codes.data_ptr()]
        return apply_fp4_marlin_linear(x, weight, scales, scale, workspace, rows, columns)

    return layer


def _ours(sets: Sets) -> Function:
    from gristmill.ops.nvfp4_linear import linear_of

    return linear_of


# By the names that recorded results have: cublas_bf16, humming, quack_w4a16, vllm_marlin. None but
# cuBLAS has anything to set against activations in fp8.
BUILDERS: Builders = {
    "gristmill": dict.fromkeys(TASKS, _ours),
    "cublas": {task: {"bf16": _cublas} for task in TASKS},
    "humming": {TASKS[0]: _humming},
    "quack": {TASKS[0]: {"w4a16": _quack}},
    "vllm": {TASKS[0]: {"marlin": _marlin}},
}
