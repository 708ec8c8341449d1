"""A model with NVFP4 layers as a state dict of ModelOpt's checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    revert_weight_conversion,
)

from gristmill.checkpoints.names import EXPERTS, MODELOPT
from gristmill.errors import CheckpointError
from gristmill.formats.nvfp4 import NVFP4Tensor
from gristmill.integrations.transformers.experts import DOWN, GATE_UP
from gristmill.nn import NVFP4Linear, NVFP4MoE

Tensors = dict[str, torch.Tensor]


def state_dict_of(model: Any) -> Tensors:
    """By the names of the model, but for experts, which are stored one by one."""
    found: Tensors = dict(model.state_dict())
    matrices = _matrices(model)
    for name, module in model.named_modules():
        before = f"{name}." if name else ""
        if isinstance(module, NVFP4MoE):
            for key in [one for one in found if one.startswith(before)]:
                del found[key]
            found.update(_experts(before, module, matrices))
        elif isinstance(module, NVFP4Linear):
            for key, part in _parts(module.weight4):
                found[f"{before}{key}"] = part
    return found


def keep_names(model: Any) -> None:
    """Let layers in NVFP4 be stored one by one where the model's checkpoints join or change them.

    transformers would concatenate, or transpose, codes as if they were the weight, and leave the
    scales as they are. Read by the names of the model, such a checkpoint is whole.
    """
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        # As transformers does for models that it has not loaded.
        conversions = [one for one in conversions if not isinstance(one, PrefixChange)]
    weights = [
        f"{name}.weight" for name, one in model.named_modules() if isinstance(one, NVFP4Linear)
    ]
    kept = [one for one in conversions if not _changes_any_of(one, weights)]
    if len(kept) < len(conversions):
        model._weight_conversions = kept


def _changes_any_of(conversion: Any, weights: list[str]) -> bool:
    if not isinstance(conversion, WeightConverter):
        return False  # names alone
    back = conversion.reverse_transform()
    return any(back.rename_source_key(name)[1] is not None for name in weights)


def left_dense(model: Any) -> tuple[str, ...]:
    """The modules with a matrix that is not in NVFP4, by their names in a checkpoint."""
    dense: Tensors = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        stacks = [one for one in (GATE_UP, DOWN) if module._parameters.get(one) is not None]
        if weight is not None and weight.dim() > 1:
            dense[f"{name}.weight"] = weight.detach().to("meta")
        elif stacks:
            dense |= {
                f"{name}.{one}": module._parameters[one].detach().to("meta") for one in stacks
            }
    with suppress(Exception):  # a model's own way back may want values: its names will do
        dense = revert_weight_conversion(model, dense)
    names = (name.rpartition(".")[0] for name in dense)
    return tuple(sorted({name for name in names if name}))


def _matrices(model: Any) -> tuple[str, str, str]:
    """What the model's checkpoints call gate, up and down of an expert."""
    conversions = getattr(model, "_weight_conversions", None) or []
    conversions = [*conversions, *get_model_conversion_mapping(model, add_legacy=False)]
    for one in conversions:
        if isinstance(one, WeightConverter) and one.target_patterns[0].endswith(GATE_UP):
            parts = [source.rstrip("$").split(".")[-2:-1] for source in one.source_patterns]
            for known in EXPERTS:
                if [part[0] for part in parts if part][:2] == list(known[:2]):
                    return known
    return EXPERTS[0]


def _experts(before: str, module: NVFP4MoE, names: tuple[str, str, str]) -> Iterator[Any]:
    inner = module.intermediate_size
    w13, w2 = module.w13, module.w2
    whole = {
        names[0]: (w13.rows(0, inner), module.w13_bias, slice(0, inner)),
        names[1]: (w13.rows(inner, 2 * inner), module.w13_bias, slice(inner, 2 * inner)),
        names[2]: (w2, module.w2_bias, slice(None)),
    }
    for matrix, (weight, bias, rows) in whole.items():
        for expert in range(module.num_experts):
            one = NVFP4Tensor(weight.codes[expert], weight.scales[expert], weight.row_scale[expert])
            for key, part in _parts(one):
                yield f"{before}{expert}.{matrix}.{key}", part
            if bias is not None:
                yield f"{before}{expert}.{matrix}.bias", bias[expert, rows].contiguous()


def _parts(weight: NVFP4Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one weight on disk, where it has one global scale."""
    rows = weight.row_scale
    scale = rows[:1] if rows.numel() else rows.new_ones(1)
    if not bool((rows == scale).all()):
        raise CheckpointError(
            "save_pretrained: a weight has several global scales, as layers that were fused do; "
            "ModelOpt stores one for each layer: use gristmill.checkpoints.save_modelopt and shards"
        )
    yield MODELOPT.codes, weight.codes.contiguous()
    yield MODELOPT.scales, weight.scales.contiguous()
    yield MODELOPT.global_scale, scale.reshape(()).clone()
