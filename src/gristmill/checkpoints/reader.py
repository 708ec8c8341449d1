"""Reading NVFP4 weights out of a checkpoint, straight to where they are to be."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import torch

from gristmill.checkpoints.checks import check_block_scales, multiplier, printable
from gristmill.checkpoints.config import QuantizationConfig
from gristmill.checkpoints.files import Files, Reader
from gristmill.checkpoints.layers import Layer, check_inputs, find_layer, names_of, parts_of
from gristmill.checkpoints.names import EXPERTS, shards_of
from gristmill.errors import CheckpointError
from gristmill.formats.nvfp4 import NVFP4Tensor, tiles
from gristmill.formats.nvfp4.tensor import BLOCK
from gristmill.log import shown

Device = torch.device | str

_FLOATS = ("F64", "F32", "F16", "BF16")


class Checkpoint:
    """A checkpoint whose linear layers are, some or all of them, in NVFP4.

    Takes the names of ModelOpt and of compressed-tensors. Every weight is copied once, from the
    file to tensors of its final size, so at no time is there more than the result and a part of a
    file in memory.

    Args:
        path: a folder with ``model.safetensors`` or ``model.safetensors.index.json``, or one
            safetensors file.
        swizzled: the block scales in these files are in the order of Blackwell's tensor cores (see
            `gristmill.nvfp4.swizzle`), not in rows.

    Attributes:
        config: what the checkpoint says of its quantization, None where it says nothing.
    """

    def __init__(self, path: str | os.PathLike[str], *, swizzled: bool = False) -> None:
        self._files = Files(path)
        self.path = self._files.path
        self.swizzled = swizzled
        self.config = QuantizationConfig.read(self._files.folder)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {len(self._files.where)} tensors)"

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._files

    def names(self) -> list[str]:
        """Of all tensors, sorted."""
        return sorted(self._files.where)

    def modules(self) -> Iterator[str]:
        """The names of the modules that are in NVFP4, sorted."""
        owners = dict.fromkeys(name.rpartition(".")[0] for name in self.names())
        with self._files.reading() as reader:
            return iter([module for module in owners if names_of(reader, module) is not None])

    def tensor(self, name: str, device: Device = "cpu") -> torch.Tensor:
        """A tensor as it is stored."""
        with self._files.reading() as reader:
            return reader.view(name).to(device, copy=True)

    def is_quantized(self, module: str) -> bool:
        """Whether a module is in NVFP4, by the tensors that are there.

        A fused module (``qkv_proj``, ``gate_up_proj``) is judged by those it is stored as, which
        must agree, and ``experts`` by the first of them.
        """
        first = [f"{module}.0.{part}" for names in EXPERTS for part in names]
        candidates = dict.fromkeys([module, *shards_of(module), *first])
        shards = [shard for shard in candidates if parts_of(self._files, shard)]
        with self._files.reading() as reader:
            quantized = [shard for shard in shards if names_of(reader, shard) is not None]
        if not shards:
            raise CheckpointError(f"{self.path}: there is no tensor of a module {module!r}")
        if quantized and len(quantized) < len(shards):
            raise CheckpointError(
                f"{self.path}: {module} is quantized in part: {', '.join(quantized)} of "
                f"{', '.join(shards)}"
            )
        return bool(quantized)

    def linear(self, module: str, device: Device = "cpu") -> NVFP4Tensor:
        """The weight of one module, with its one global scale."""
        with self._files.reading() as reader:
            layer = self._layer(reader, module)
            codes, scales = _empty((layer.rows,), layer.columns, device)
            factor = self._copy(reader, layer, codes, scales)
        return NVFP4Tensor(codes, scales, factor.to(device, copy=True))

    def bias(self, module: str, device: Device = "cpu") -> torch.Tensor | None:
        """The bias of a module in NVFP4; None where it has none."""
        name = f"{module}.bias"
        if name not in self._files:
            return None
        with self._files.reading() as reader:
            rows = self._layer(reader, module).rows
            dtype, shape = reader.kind(name)
            if dtype not in _FLOATS or shape != (rows,):
                raise CheckpointError(
                    f"{self._files.at(name)} must have shape {(rows,)} and one of the dtypes "
                    f"{', '.join(_FLOATS)}, got {dtype} {shape}"
                )
            return reader.view(name).to(device, copy=True)

    def fused(self, modules: Sequence[str], device: Device = "cpu") -> NVFP4Tensor:
        """The weights of modules with one input, such as q, k and v, as one: rows below rows.

        Each row keeps the global scale of its module.
        """
        if not modules:
            raise CheckpointError("fused: modules is empty")
        with self._files.reading() as reader:
            layers = [self._layer(reader, module) for module in modules]
            check_inputs(layers)
            rows = sum(layer.rows for layer in layers)
            codes, scales = _empty((rows,), layers[0].columns, device)
            row_scale = _empty_scale(rows)
            self._copy_all(reader, layers, codes, scales, row_scale)
        return NVFP4Tensor(codes, scales, row_scale.to(device))

    def experts(
        self, prefix: str, device: Device = "cpu", *, local: Sequence[int] | None = None
    ) -> tuple[NVFP4Tensor, NVFP4Tensor]:
        """The weights of a layer's experts, ``{prefix}.{e}.{gate,up,down}_proj``, as two stacks.

        Args:
            prefix: such as ``"model.layers.0.mlp.experts"``.
            local: the experts to read, in this order; None means all. For expert parallelism.

        Returns:
            w13 ``(E, 2 I, H)``, gate rows first and then up, and w2 ``(E, H, I)``, with a global
            scale per row.
        """
        gate_up, down = self._expert_modules(prefix, local)
        with self._files.reading() as reader:
            w13 = self._stack(reader, gate_up, device)
            w2 = self._stack(reader, down, device)
        if w13.shape[-2] != 2 * w2.shape[-1] or w13.shape[-1] != w2.shape[-2]:
            raise CheckpointError(
                f"{self.path}: the experts of {prefix} do not fit together: gate and up are "
                f"{tuple(w13.shape[1:])}, down is {tuple(w2.shape[1:])}"
            )
        return w13, w2

    def _expert_modules(
        self, prefix: str, local: Sequence[int] | None
    ) -> tuple[list[list[str]], list[list[str]]]:
        numbers = set()
        for name in self._files.where:
            if name.startswith(f"{prefix}."):
                number = name[len(prefix) + 1 :].partition(".")[0]
                if number.isdecimal():
                    numbers.add(number)
        if not numbers:
            raise CheckpointError(
                f"{self.path}: there are no experts {prefix}.0, {prefix}.1, ...{self._why(prefix)}"
            )
        # As strings: a number in a name may have any number of digits.
        missing = [number for number in range(len(numbers)) if str(number) not in numbers]
        if missing:
            beyond = sorted(numbers - set(map(str, range(len(numbers)))))
            raise CheckpointError(
                f"{self.path}: {prefix} has no experts {missing[:10]}, but others that are called "
                f"{shown(beyond)}"
            )
        chosen = list(range(len(numbers))) if local is None else list(local)
        unknown = sorted(set(chosen) - set(range(len(numbers))))
        if unknown:
            raise CheckpointError(
                f"{self.path}: {prefix} has {len(numbers)} experts, local asks for {unknown}"
            )
        first = f"{prefix}.{chosen[0] if chosen else 0}"
        known = [names for names in EXPERTS if parts_of(self._files, f"{first}.{names[0]}")]
        gate, up, down = (known or EXPERTS)[0]
        return (
            [[f"{prefix}.{number}.{part}" for part in (gate, up)] for number in chosen],
            [[f"{prefix}.{number}.{down}"] for number in chosen],
        )

    def _why(self, prefix: str) -> str:
        """A hint where the experts are there, but all in one tensor."""
        parts = (*dict.fromkeys(part for names in EXPERTS for part in names), "gate_up_proj", "w13")
        below = tuple(f"{prefix}.{part}" for part in parts)
        with self._files.reading() as reader:
            for name in self.names():
                if name.startswith(below) and len(shape := reader.kind(name)[1]) == 3:
                    return (
                        f"; they are stored stacked ({printable(name)} has shape {shape}), which "
                        f"is not read: only experts of two dims each are"
                    )
        return ""

    def _stack(self, reader: Reader, modules: list[list[str]], device: Device) -> NVFP4Tensor:
        """One matrix for each list of modules, its rows those of the modules in turn."""
        if not modules:
            raise CheckpointError("experts: local is empty")
        stack: list[list[Layer]] = []
        shape: tuple[int, int] | None = None
        for names in modules:
            layers = [self._layer(reader, name) for name in names]
            check_inputs(layers)
            if len({layer.rows for layer in layers}) > 1:
                counts = " and ".join(str(layer.rows) for layer in layers)
                raise CheckpointError(
                    f"{self.path}: {' and '.join(names)} must have the same number of rows, "
                    f"got {counts}"
                )
            found = sum(layer.rows for layer in layers), layers[0].columns
            shape = shape or found
            if found != shape:
                raise CheckpointError(
                    f"{self.path}: {' and '.join(names)} have shape {found}, those of the first "
                    f"expert {shape}"
                )
            stack.append(layers)
        # All headers are checked before memory is allocated.
        rows, columns = found
        codes, scales = _empty((len(stack), rows), columns, device)
        row_scale = _empty_scale(len(stack), rows)
        for number, layers in enumerate(stack):
            self._copy_all(reader, layers, codes[number], scales[number], row_scale[number])
        return NVFP4Tensor(codes, scales, row_scale.to(device))

    def _copy_all(
        self,
        reader: Reader,
        layers: Sequence[Layer],
        codes: torch.Tensor,
        scales: torch.Tensor,
        row_scale: torch.Tensor,
    ) -> None:
        row = 0
        for layer in layers:
            rows = slice(row, row + layer.rows)
            row_scale[rows] = self._copy(reader, layer, codes[rows], scales[rows])
            row += layer.rows

    def _copy(
        self, reader: Reader, layer: Layer, codes: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        """Fill the codes and scales of one layer; its global scale, as a multiplier."""
        codes.copy_(reader.view(layer.codes))
        source = reader.view(layer.scales)
        if self.swizzled:
            source = tiles.unswizzle(source.flatten(), layer.rows, layer.columns // BLOCK)
        check_block_scales(self._files.at(layer.scales), source)
        # By bytes: not every device copies fp8.
        scales.view(torch.uint8).copy_(source.view(torch.uint8))
        stored = reader.view(layer.global_scale)
        return multiplier(self._files.at(layer.global_scale), stored, layer.names.divides)

    def _layer(self, reader: Reader, module: str) -> Layer:
        return find_layer(reader, module, swizzled=self.swizzled)


def _empty_scale(*shape: int) -> torch.Tensor:
    # Said in full: programs that build models change torch's defaults.
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _empty(
    rows: tuple[int, ...], columns: int, device: Device
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.empty((*rows, columns // 2), dtype=torch.uint8, device=device),
        torch.empty((*rows, columns // BLOCK), dtype=torch.float8_e4m3fn, device=device),
    )
