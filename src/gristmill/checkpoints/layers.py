"""A quantized layer as it lies in a file: found and checked by its headers, before any data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from gristmill.checkpoints.files import Files, Reader
from gristmill.checkpoints.names import COMPRESSED_TENSORS, MODELOPT, Names
from gristmill.errors import CheckpointError
from gristmill.formats.nvfp4 import tiles
from gristmill.formats.nvfp4.tensor import BLOCK

_PARTS = tuple(
    dict.fromkeys(
        part
        for names in (MODELOPT, COMPRESSED_TENSORS)
        for part in (names.codes, names.scales, names.global_scale, names.input_scale)
    )
)


@dataclass(frozen=True)
class Layer:
    """A module with all it needs, of right dtypes and shapes; its weight is `rows` x `columns`."""

    module: str
    names: Names
    rows: int
    columns: int

    @property
    def codes(self) -> str:
        return f"{self.module}.{self.names.codes}"

    @property
    def scales(self) -> str:
        return f"{self.module}.{self.names.scales}"

    @property
    def global_scale(self) -> str:
        return f"{self.module}.{self.names.global_scale}"


def parts_of(files: Files, module: str) -> list[str]:
    """Which of the tensors that a linear layer may have are there."""
    return [part for part in _PARTS if f"{module}.{part}" in files]


def names_of(reader: Reader, module: str) -> Names | None:
    """Whose names the NVFP4 weight of a module has; None if it is not in NVFP4.

    Other formats have a scale beside the weight, too; but no other has a global scale, or block
    scales in E4M3, so either of them tells even where the rest is missing.
    """
    parts = parts_of(reader.files, module)
    for names in (COMPRESSED_TENSORS, MODELOPT):
        if names.global_scale in parts:
            return names
    if MODELOPT.scales not in parts or reader.kind(f"{module}.{MODELOPT.scales}")[0] != "F8_E4M3":
        return None
    return COMPRESSED_TENSORS if COMPRESSED_TENSORS.codes in parts else MODELOPT


def find_layer(reader: Reader, module: str, *, swizzled: bool) -> Layer:
    files = reader.files
    names = names_of(reader, module)
    if names is None:
        _refuse_unquantized(reader, module)
    if f"{module}.pre_quant_scale" in files:
        raise CheckpointError(
            f"{files.at(f'{module}.pre_quant_scale')}: this weight expects its input multiplied by "
            f"a pre_quant_scale (AWQ), which is not supported"
        )
    wanted = {names.codes: "U8", names.scales: "F8_E4M3", names.global_scale: "F32"}
    there = [part for part in wanted if f"{module}.{part}" in files]
    kinds = {part: reader.kind(f"{module}.{part}") for part in there}
    for part, (dtype, _) in kinds.items():
        if dtype != wanted[part]:
            raise CheckpointError(
                f"{files.at(f'{module}.{part}')} must have dtype {wanted[part]}, got {dtype}"
            )
    if len(there) < len(wanted):
        missing = ", ".join(part for part in wanted if part not in there)
        found = ", ".join(parts_of(files, module))
        raise CheckpointError(f"{files.path}: {module} lacks {missing}; there are {found}")
    shape = kinds[names.codes][1]
    if len(shape) != 2 or shape[1] % (BLOCK // 2) or 0 in shape:
        raise CheckpointError(
            f"{files.at(f'{module}.{names.codes}')} must have shape (N, K / 2), not empty, with K "
            f"a multiple of {BLOCK}, got {shape}"
        )
    layer = Layer(module, names, shape[0], shape[1] * 2)
    _check_order(reader, layer, kinds[names.scales][1], swizzled)
    return layer


def check_inputs(layers: Sequence[Layer]) -> None:
    """That layers which are to be one have one input."""
    for layer in layers:
        if layer.columns != layers[0].columns:
            raise CheckpointError(
                f"{layer.module} has K = {layer.columns}, {layers[0].module} has "
                f"K = {layers[0].columns}; layers that are run as one have one K"
            )


def _check_order(reader: Reader, layer: Layer, shape: tuple[int, ...], swizzled: bool) -> None:
    """That the block scales have the shape, and by all signs the order, they will be read in."""
    at = reader.files.at(layer.scales)
    plain = layer.rows, layer.columns // BLOCK
    tall, wide = tiles.padded(*plain)
    is_whole = math.prod(shape) == tall * wide
    if swizzled and is_whole:
        return
    if swizzled:
        raise CheckpointError(
            f"{at} has shape {shape}; in tiles of 128 x 4 it would be {tall} x {wide}. Read this "
            f"checkpoint without swizzled=True"
        )
    is_marked = _is_marked(reader, layer)
    if shape == plain and not is_marked:
        return
    if is_whole:
        reason = f"has shape {shape}" if shape != plain else "is marked so in its file"
        raise CheckpointError(
            f"{at} looks swizzled, in tiles of 128 x 4 instead of {plain} in rows: it {reason}. "
            f"If it is, open the checkpoint with swizzled=True"
        )
    per_row = shape[1] if len(shape) == 2 and shape[0] == layer.rows else 0
    fits = per_row > 0 and layer.columns % per_row == 0
    group = f", which is a group size of {layer.columns // per_row}" if fits else ""
    raise CheckpointError(
        f"{at} must have shape {plain}, one scale for every {BLOCK} of K = {layer.columns}, "
        f"got {shape}{group}"
    )


def _is_marked(reader: Reader, layer: Layer) -> bool:
    """By ComfyUI, whose files have swizzled scales, or by a word in the file's metadata."""
    is_comfy = f"{layer.module}.comfy_quant" in reader.files
    return is_comfy or reader.is_marked(layer.scales)


def _refuse_unquantized(reader: Reader, module: str) -> NoReturn:
    packed = COMPRESSED_TENSORS.codes in parts_of(reader.files, module)
    name = f"{module}.{COMPRESSED_TENSORS.codes if packed else MODELOPT.codes}"
    dtype, shape = reader.kind(name)  # says so where there is no such tensor
    raise CheckpointError(
        f"{reader.files.at(name)} is not in NVFP4, it is {dtype} {shape} and has no global scale "
        f"beside it; read it with tensor({name!r})"
    )
