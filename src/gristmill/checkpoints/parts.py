"""Weights that come in parts, as modules hold them in a state dict, put together again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from gristmill.checkpoints.names import EXPERTS, MODELOPT
from gristmill.errors import ArgumentError, CheckpointError, DtypeError
from gristmill.formats.nvfp4 import NVFP4Tensor, PackedNVFP4

Weight = NVFP4Tensor | PackedNVFP4 | torch.Tensor

_PARTS = (MODELOPT.codes, MODELOPT.scales, MODELOPT.global_scale)
_BIAS = "bias"
# What stacks of experts have before the name of a part, and which layers their rows are.
_STACKS = {"w13_": EXPERTS[0][:2], "w2_": EXPERTS[0][2:]}


def collected(weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """`weights` with every ``weight``, ``weight_scale`` and ``weight_scale_2`` as one NVFP4Tensor.

    It has the name of its module. The stacks ``w13_weight``, ... and ``w2_weight``, ... of a module
    of experts become stacks of their gate, up and down, and its biases those of each expert.
    """
    stems = dict.fromkeys(stem for name, part in weights.items() for stem in _stem(name, part))
    taken = {f"{stem}{part}": stem for stem in stems for part in _PARTS}
    taken |= {f"{stem}{_BIAS}": stem for stem in stems if _layers_of(stem)}
    found: dict[str, Weight] = {}
    for name, part in weights.items():
        stem = taken.get(name)
        if stem is None:
            _put(found, name, part)
        elif stem in stems:
            for module, whole in _whole(weights, stem):
                _put(found, module, whole)
            del stems[stem]
    return found


def _stem(name: str, part: object) -> Iterator[str]:
    """What stands before the name of a part that only a weight in NVFP4 has."""
    for ending in (MODELOPT.global_scale, MODELOPT.scales):
        stem = name.removesuffix(ending)
        if stem == name or not isinstance(part, torch.Tensor):
            continue
        # Other formats have a weight_scale, too, but not in E4M3.
        is_ours = ending == MODELOPT.global_scale or part.dtype == torch.float8_e4m3fn
        if is_ours and (stem == "" or stem.endswith(".") or _layers_of(stem)):
            yield stem


def _layers_of(stem: str) -> tuple[str, ...]:
    """The layers that a stack of experts is stored as; none where it is an ordinary layer."""
    return _STACKS.get(stem.rpartition(".")[2], ())


def _whole(weights: Mapping[str, Weight], stem: str) -> Iterator[tuple[str, Weight]]:
    weight = _joined(weights, stem)
    owner, _, last = stem.rpartition(".")
    if not owner:
        raise CheckpointError(
            f"save_modelopt: {stem}{MODELOPT.codes} needs the name of a module before it, such as "
            f"'model.layers.0.{last}{MODELOPT.codes}'"
        )
    layers = _layers_of(stem)
    if not layers:
        yield owner, weight
        return
    rows = weight.shape[-2] // len(layers)
    if weight.codes.dim() != 3 or rows * len(layers) != weight.shape[-2]:
        raise CheckpointError(
            f"save_modelopt: {stem}{MODELOPT.codes} must be a stack of experts with the rows of "
            f"{' and '.join(layers)}, got shape {tuple(weight.shape)}"
        )
    bias = weights.get(f"{stem}{_BIAS}")
    lines = weight.row_scale.shape
    if bias is not None and (not isinstance(bias, torch.Tensor) or bias.shape != lines):
        got = tuple(bias.shape) if isinstance(bias, torch.Tensor) else type(bias).__name__
        raise CheckpointError(
            f"save_modelopt: {stem}{_BIAS} must have shape {tuple(lines)}, got {got}"
        )
    for number, layer in enumerate(layers):
        some = slice(number * rows, (number + 1) * rows)
        yield f"{owner}.{layer}", weight.rows(some.start, some.stop)
        if isinstance(bias, torch.Tensor):
            for expert, values in enumerate(bias):
                yield f"{owner}.{expert}.{layer}.{_BIAS}", values[some]


def _joined(weights: Mapping[str, Weight], stem: str) -> NVFP4Tensor:
    parts: list[torch.Tensor] = []
    for part in _PARTS:
        value = weights.get(f"{stem}{part}")
        if isinstance(value, torch.Tensor):
            parts.append(value)
    if len(parts) < len(_PARTS):
        names = [f"{stem}{part}" for part in _PARTS]
        lacking = [name for name in names if not isinstance(weights.get(name), torch.Tensor)]
        raise CheckpointError(
            f"save_modelopt: a weight in NVFP4 has the tensors {', '.join(names)}; there is no "
            f"{' and no '.join(lacking)}"
        )
    codes, scales, global_scale = parts
    if global_scale.numel() == codes.shape[:-2].numel():
        global_scale = global_scale.reshape(codes.shape[:-2])
    try:
        return NVFP4Tensor(codes, scales, global_scale)
    except (ArgumentError, DtypeError) as problem:
        raise CheckpointError(f"save_modelopt: {stem}{MODELOPT.codes}: {problem}") from problem


def _put(found: dict[str, Weight], name: str, value: Weight) -> None:
    if name in found:
        raise CheckpointError(f"save_modelopt: {name} would be there twice")
    found[name] = value
