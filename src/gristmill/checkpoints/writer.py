"""Writing NVFP4 checkpoints in the form of ModelOpt, which vLLM and others load."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gristmill.checkpoints.checks import check_block_scales, multiplier, printable
from gristmill.checkpoints.config import (
    CONFIG_FILE,
    MODELOPT_FILE,
    WEIGHT_ONLY,
    WITH_ACTIVATIONS,
    QuantizationConfig,
    read_json,
)
from gristmill.checkpoints.files import INDEX_FILE, SINGLE_FILE, check_tensor_names
from gristmill.checkpoints.names import MODELOPT, sibling
from gristmill.checkpoints.parts import Weight, collected
from gristmill.errors import CheckpointError
from gristmill.formats.nvfp4 import NVFP4Tensor, PackedNVFP4
from gristmill.formats.nvfp4.tensor import BLOCK
from gristmill.version import __version__

_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")

Tensors = dict[str, torch.Tensor]


def save_modelopt(
    folder: str | os.PathLike[str],
    weights: Mapping[str, NVFP4Tensor | PackedNVFP4 | torch.Tensor],
    *,
    config: Mapping[str, Any] | None = None,
    shards: Mapping[str, Mapping[str, int]] | None = None,
    activations: bool = False,
    ignore: Sequence[str] = (),
    kv_cache: str | None = None,
    max_shard_bytes: float = 5e9,
) -> None:
    """Write a checkpoint: safetensors files, config.json and hf_quant_config.json.

    Everything is written to a temporary folder ``.saving-...`` inside `folder` first. At the end,
    the files of the old checkpoint are moved into ``.saving-.../old`` and the new ones moved out.
    An error, or an interrupt, leaves a checkpoint that was there unchanged. If the process is
    killed while files are moved, some are missing: neither checkpoint can be read then, only
    safetensors files of other names, such as an adapter's. Links are replaced, not followed.

    Args:
        folder: made if it is not there.
        weights: NVFP4 weights by the name of their module, all other tensors by their own. A stack
            ``(E, N, K)`` named ``"a.experts.down_proj"`` becomes ``"a.experts.{e}.down_proj"``.
            What is prepared for a GPU is unpacked. Also the state dict of a model with
            `gristmill.nn.NVFP4Linear` and `NVFP4MoE`, whose weights come in parts.
        config: what config.json is to hold besides; None keeps the one in the folder, if any.
        shards: how fused weights are stored: ``{"a.qkv_proj": {"q_proj": 64, "k_proj": 32, ...}}``
            gives names, that replace the last part of the module's, and numbers of rows. A layer
            on disk has one global scale, so rows with different ones must be different shards.
        activations: whether inputs are to be quantized, too. Then each module needs its
            ``input_scale`` among `weights`.
        ignore: names or wildcards of modules that are not quantized. Those of all other matrices in
            `weights` are added.
        kv_cache: ``"fp8"`` if the KV cache is meant to be; scales of it are among `weights`.
        max_shard_bytes: the size above which another file is begun.
    """
    if kv_cache not in (None, "fp8"):
        raise CheckpointError(f"save_modelopt: kv_cache must be None or 'fp8', got {kv_cache!r}")
    if isinstance(ignore, str):
        raise CheckpointError(f"save_modelopt: ignore must be a list of strings, got {ignore!r}")
    layers = list(_layers(collected(weights), _by_module(shards or {})))
    _check_names(layers, activations)
    quantized = {name.rpartition(".")[0] for layer in layers for name in layer if _is_scale(name)}
    found = QuantizationConfig(
        producer=MODELOPT.producer,
        activations=activations,
        ignore=tuple(ignore),
        kv_cache=kv_cache,
    )
    left = dict.fromkeys(ignore)
    for layer in layers:
        for name, tensor in layer.items():
            module, _, part = name.rpartition(".")
            is_matrix = part == "weight" and tensor.dim() > 1 and module not in quantized
            if is_matrix and not found.is_ignored(module):
                left[module] = None
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    base = read_json(folder / CONFIG_FILE) if config is None else dict(config)
    base["quantization_config"] = _quantization_config(activations, list(left), kv_cache)
    with _replacing(folder) as place:
        _write_tensors(place, _files(layers, max_shard_bytes))
        _write_json(place / CONFIG_FILE, base)
        _write_json(place / MODELOPT_FILE, _hf_quant_config(activations, list(left), kv_cache))


def _by_module(shards: Mapping[str, Mapping[str, int]]) -> dict[str, Mapping[str, int]]:
    found: dict[str, Mapping[str, int]] = {}
    for name, parts in shards.items():
        module = name.removesuffix(f".{MODELOPT.codes}")
        if module in found:
            raise CheckpointError(f"save_modelopt: shards names {module} twice")
        found[module] = parts
    return found


def _layers(
    weights: Mapping[str, Weight], shards: Mapping[str, Mapping[str, int]]
) -> Iterator[Tensors]:
    """The tensors on disk, those of one module together."""
    unused = set(shards)
    for name, weight in weights.items():
        if isinstance(weight, PackedNVFP4):
            # Off the device at once, which need not hold all weights a second time.
            weight = weight.unpack().to("cpu")
        if isinstance(weight, NVFP4Tensor):
            module = name.removesuffix(f".{MODELOPT.codes}")
            unused -= {module}
            yield from _quantized(module, weight, shards.get(module))
        elif isinstance(weight, torch.Tensor):
            _check_dense(name, weight)
            yield {name: weight}
        else:
            raise CheckpointError(
                f"save_modelopt: {name} must be an NVFP4Tensor or a tensor, "
                f"got {type(weight).__name__}"
            )
    if unused:
        raise CheckpointError(
            f"save_modelopt: shards names modules that are not NVFP4 weights: "
            f"{', '.join(sorted(unused))}"
        )


def _quantized(
    module: str, weight: NVFP4Tensor, shards: Mapping[str, int] | None
) -> Iterator[Tensors]:
    if weight.codes.dim() > 3:
        raise CheckpointError(
            f"save_modelopt: {module} must be a matrix or a stack of them, "
            f"got shape {tuple(weight.shape)}"
        )
    rows = weight.shape[-2]
    parts = {module.rpartition(".")[2]: rows} if shards is None else dict(shards)
    if sum(parts.values()) != rows or min(parts.values(), default=0) < 1:
        raise CheckpointError(
            f"save_modelopt: the shards of {module} must add up to its {rows} rows, got {parts}"
        )
    is_stack = weight.codes.dim() == 3
    for number in range(weight.shape[0] if is_stack else 1):
        matrix = NVFP4Tensor(
            weight.codes[number] if is_stack else weight.codes,
            weight.scales[number] if is_stack else weight.scales,
            weight.row_scale[number] if is_stack else weight.row_scale,
        )
        first = 0
        for part, count in parts.items():
            name = sibling(module, f"{number}.{part}" if is_stack else part)
            yield _on_disk(name, matrix.rows(first, first + count), first)
            first += count


def _on_disk(module: str, weight: NVFP4Tensor, first_row: int) -> Tensors:
    names = {part: f"{module}.{part}" for part in (MODELOPT.codes, MODELOPT.scales)}
    for part in (weight.codes, weight.scales, weight.row_scale):
        _check_dense(module, part)
    check_block_scales(f"save_modelopt: {module}", weight.scales)
    factors = weight.row_scale
    factor = multiplier(f"save_modelopt: {module}", factors[:1], divides=False)
    changes = (factors[1:] != factors[:-1]).nonzero().flatten().tolist()
    if changes:
        places = ", ".join(str(first_row + row + 1) for row in changes[:4])
        more = ", ..." if len(changes) > 4 else ""
        raise CheckpointError(
            f"save_modelopt: {module} would have rows of different global scales, and a layer on "
            f"disk has one: {float(factors[0])} and from row {places}{more} another. Give shards "
            f"that end there, such as shards={{name: {{'q_proj': {changes[0] + 1}, ...}}}}"
        )
    return {
        names[MODELOPT.codes]: weight.codes,
        names[MODELOPT.scales]: weight.scales,
        f"{module}.{MODELOPT.global_scale}": factor,
    }


def _check_dense(name: str, tensor: torch.Tensor) -> None:
    dense = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized
    if not dense or tensor.is_meta:
        kind = "on the meta device" if dense else f"of layout {tensor.layout}, {tensor.dtype}"
        raise CheckpointError(
            f"save_modelopt: {printable(name)} must be a dense tensor with values, got one {kind}"
        )


def _is_scale(name: str) -> bool:
    return name.endswith(f".{MODELOPT.global_scale}")


def _check_names(layers: Iterable[Tensors], activations: bool) -> None:
    seen: set[str] = set()
    for layer in layers:
        check_tensor_names("save_modelopt", layer)
        twice = seen & set(layer)
        if twice:
            raise CheckpointError(f"save_modelopt: {', '.join(sorted(twice))} would be there twice")
        seen |= set(layer)
    modules = [name.removesuffix(f".{MODELOPT.global_scale}") for name in seen if _is_scale(name)]
    bare = sorted(name for name in modules if f"{name}.{MODELOPT.input_scale}" not in seen)
    if activations and bare:
        raise CheckpointError(
            f"save_modelopt: activations=True needs an input_scale for each module, there is no "
            f"{bare[0]}.{MODELOPT.input_scale}"
        )


def _files(layers: Iterable[Tensors], most: float) -> list[Tensors]:
    """What goes into each file; a layer is not torn apart."""
    files: list[Tensors] = [{}]
    size = 0
    for layer in layers:
        more = sum(tensor.nbytes for tensor in layer.values())
        if files[-1] and size + more > most:
            files.append({})
            size = 0
        files[-1].update(layer)
        size += more
    return files


def _write_tensors(folder: Path, files: Sequence[Tensors]) -> None:
    from safetensors.torch import save_file

    count = len(files)
    index: dict[str, str] = {}
    for number, tensors in enumerate(files, 1):
        file = SINGLE_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        index |= dict.fromkeys(tensors, file)
        # Each in memory of its own: rows of a fused weight, and tied weights, share theirs.
        owned = {name: _owned(tensor) for name, tensor in tensors.items()}
        save_file(owned, folder / file, metadata={"format": "pt"})
    if count > 1:
        total = sum(tensor.nbytes for tensors in files for tensor in tensors.values())
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
        _write_json(folder / INDEX_FILE, content)


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A temporary folder in `folder`, whose files replace those of a checkpoint at the end."""
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as place:
        yield Path(place)
        written = sorted(path.name for path in Path(place).iterdir())
        there = [path.name for path in folder.iterdir() if _OURS.fullmatch(path.name)]
        old = [INDEX_FILE, *sorted(there)]
        for name in (*written, *old):
            if (folder / name).exists() and not (folder / name).is_file():
                raise CheckpointError(f"save_modelopt: {folder / name} is not a regular file")
        # Move the old files away, the index first, before moving in the new ones. The new index is
        # moved last, after the files that it lists.
        order = sorted(written, key=lambda name: name == INDEX_FILE)
        incoming = [(Path(place) / name, folder / name) for name in order]
        aside = Path(place) / "old"
        aside.mkdir()
        outgoing, configs = (
            [(folder / name, aside / name) for name in names if os.path.lexists(folder / name)]
            for names in (old, (CONFIG_FILE, MODELOPT_FILE))
        )
        # The configs stay until they are replaced: users may have no other copy.
        for source, target in configs:
            shutil.copy2(source, target, follow_symlinks=False)
        try:
            for source, target in (*outgoing, *incoming):
                os.replace(source, target)
        except BaseException:
            # What is no longer at its source was moved, also if an interrupt came just after.
            for source, target in reversed((*configs, *outgoing, *incoming)):
                if not os.path.lexists(source):
                    os.replace(target, source)
            raise


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _quantization_config(
    activations: bool, ignore: list[str], kv_cache: str | None
) -> dict[str, Any]:
    four_bits = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK}
    content: dict[str, Any] = {
        "quant_method": MODELOPT.producer,
        "quant_algo": WITH_ACTIVATIONS if activations else WEIGHT_ONLY,
        "group_size": BLOCK,
        "config_groups": {
            "group_0": {
                "input_activations": four_bits if activations else None,
                "weights": four_bits,
                "targets": ["Linear"],
            }
        },
        "ignore": ignore,
        "producer": {"name": "gristmill", "version": __version__},
    }
    if kv_cache == "fp8":
        content["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return content


def _hf_quant_config(activations: bool, ignore: list[str], kv_cache: str | None) -> dict[str, Any]:
    return {
        "producer": {"name": "gristmill", "version": __version__},
        "quantization": {
            "quant_algo": WITH_ACTIVATIONS if activations else WEIGHT_ONLY,
            "kv_cache_quant_algo": "FP8" if kv_cache == "fp8" else None,
            "group_size": BLOCK,
            "exclude_modules": ignore,
        },
    }
