"""What linear and expert layers have in common: the tensors that are loaded, by the names of their
producer; the checks of what came; and the runner that the layer keeps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.nn import Parameter

from gristmill.checkpoints.checks import check_block_scales
from gristmill.checkpoints.names import COMPRESSED_TENSORS, MODELOPT, Names
from gristmill.errors import ArgumentError, CheckpointError
from gristmill.formats.nvfp4.tensor import BLOCK, NVFP4Tensor, PackedNVFP4
from gristmill.integrations.vllm import adapter, compat
from gristmill.integrations.vllm.layer_runner import LayerRunner
from gristmill.log import warn_once
from gristmill.runners import register_runner
from gristmill.version import __version__

NAMES = {names.producer: names for names in (MODELOPT, COMPRESSED_TENSORS)}
ROW_SCALE = "weight_row_scale"
HELD = "gristmill"  # the submodule of a layer that holds its runner

_NAN, _ONE = 0x7F, 0x38  # of E4M3
_UNLOADED = 0x88  # two codes of -0: no quantizer writes a whole matrix of them
_DUMMY_SCALE = 2.0**-8  # gives dummy weights the size of real ones
_DUMMY_SEED = 1234


def check_columns(prefix: str, what: str, columns: int, whole: int) -> None:
    """Every rank must get whole blocks of its rows."""
    if columns % BLOCK == 0:
        return
    if columns == whole:
        raise ArgumentError(
            f"{prefix}: {what} is {columns}; NVFP4 needs a multiple of {BLOCK}, its block"
        )
    raise ArgumentError(
        f"{prefix}: {what} of {whole} leaves {columns} for each of {whole // columns} ranks, no "
        f"multiple of {BLOCK}, the block of NVFP4; use fewer tensor-parallel ranks"
    )


def empty_weight(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and block scales of a weight to be loaded."""
    *stack, columns = shape
    codes = torch.empty(*stack, columns // 2, dtype=torch.uint8)
    scales = torch.empty(*stack, columns // BLOCK, dtype=torch.uint8)
    return codes, scales.view(torch.float8_e4m3fn)


class Loading:
    """Loads codes and scales into a layer: only what fits, and so that `take` notices what is left.

    Until they are loaded codes are -0, scales NaN. vLLM's reload gives the layer new tensors with
    anything in them: the first tensor that is loaded after `processed` was set marks them all.

    Args:
        prefix: the layer's name, for errors.
        stacks: what the names of the tensors of each weight begin with.
    """

    def __init__(self, prefix: str, names: Names, *stacks: str) -> None:
        self.prefix = prefix
        self.names = names
        self.stacks = stacks
        self.processed = False

    def mark(self, layer: Any) -> None:
        """Mark all that is to be loaded, once the layer has its parameters."""
        for stack in self.stacks:
            codes, scales, global_scales = (
                getattr(layer, stack + name).data
                for name in (self.names.codes, self.names.scales, self.names.global_scale)
            )
            codes.fill_(_UNLOADED)
            scales.view(torch.uint8).fill_(_NAN)
            global_scales.fill_(torch.nan)

    def checked(
        self,
        layer: Any,
        name: str,
        loader: Any,
        dtype: torch.dtype,
        wanted_shape: Callable[..., str | None],
    ) -> Any:
        """`loader` for the parameter `name`, which accepts only what it can load whole.

        vLLM's loaders convert other dtypes: codes as if they were numbers, global scales by
        rounding. They take a slice of what is too large, and leave the rest of what is too small
        as it was.

        Args:
            loader: takes the parameter, the tensor of the checkpoint, and which part it is.
            wanted_shape: takes the shape of the tensor of the checkpoint and which part it is.
                Returns None if the shape is right, else the right one, for errors.
        """
        if loader is None:
            return None
        where = f"{self.prefix}.{name}"

        @functools.wraps(loader)
        def load(param: Parameter, loaded_weight: torch.Tensor, *others: Any, **named: Any) -> Any:
            if dtype == torch.uint8 and loaded_weight.is_floating_point():
                raise CheckpointError(
                    f"{where}: the checkpoint has a weight of {loaded_weight.dtype} in the place "
                    f"of packed NVFP4: its quantization config must name the layer among the "
                    f"ignored ones"
                )
            if loaded_weight.dtype != dtype:
                raise CheckpointError(
                    f"{where}: the checkpoint has {loaded_weight.dtype} in the place of {dtype}"
                )
            shape = tuple(loaded_weight.shape)
            wanted = wanted_shape(shape, *others, **named)
            if wanted is not None:
                raise CheckpointError(
                    f"{where}: the checkpoint has shape {shape} in the place of {wanted}"
                )
            if self.processed and not param.is_meta:  # on meta, vLLM only counts
                self.processed = False
                self.mark(layer)
            try:
                return loader(param, loaded_weight, *others, **named)
            except torch.OutOfMemoryError:
                raise  # the checkpoint is not at fault
            except (AssertionError, IndexError, RuntimeError) as error:
                raise CheckpointError(
                    f"{where}: vLLM cannot load shape {shape}: {str(error) or type(error).__name__}"
                ) from error

        return load


def input_scales() -> Parameter:
    """A place for the scales of activations: takes what a checkpoint has of them, and keeps none.

    Empty, so that vLLM does not count on its being loaded; and kept, for it may come last, when a
    layer that is loaded again has been processed already.
    """
    parameter: Any = Parameter(torch.empty(0), requires_grad=False)
    parameter.weight_loader = _drop
    return cast(Parameter, parameter)


def _drop(param: Parameter, loaded_weight: torch.Tensor, *others: Any, **named: Any) -> bool:
    return True


def is_loaded(layer: Any, names: Names, stack: str = "") -> bool:
    """Whether there is something to process: `install` removes the global scales."""
    return hasattr(layer, stack + names.global_scale)


def take(
    layer: Any, prefix: str, names: Names, widths: Sequence[int], *, stack: str = "", dummy: bool
) -> NVFP4Tensor:
    """The weight that was loaded, checked, with a global scale for each row.

    The layer is not changed: if another of its weights is rejected, it can be loaded again.

    Args:
        prefix: the layer's name, for errors.
        widths: the rows of each part of the layer that has a global scale of its own.
        stack: what the names of the tensors begin with.
        dummy: nothing was loaded; make something up.
    """
    codes, scales, global_scale = (
        getattr(layer, stack + name).detach()
        for name in (names.codes, names.scales, names.global_scale)
    )
    if dummy:
        codes.random_(generator=torch.Generator(codes.device).manual_seed(_DUMMY_SEED))
        scales.view(torch.uint8).fill_(_ONE)
        factors = torch.full_like(global_scale, _DUMMY_SCALE)
    else:
        factors = _factors(f"{prefix}.{stack}{names.global_scale}", global_scale, names.divides)
        check_block_scales(f"{prefix}.{stack}{names.scales}", scales)
        _check_codes(f"{prefix}.{stack}{names.codes}", codes, widths)
    factors = factors.reshape(*codes.shape[:-2], len(widths))
    counts = torch.tensor(widths, device=factors.device)
    return NVFP4Tensor(codes, scales, factors.repeat_interleave(counts, dim=-1))


def _factors(where: str, scales: torch.Tensor, divides: bool) -> torch.Tensor:
    missing = int(scales.isnan().sum())
    if missing:
        raise CheckpointError(
            f"{where}: {missing} of {scales.numel()} were never loaded, or are NaN: the checkpoint "
            f"has this layer, or a part of it, not in NVFP4; if so, its quantization config must "
            f"name the layer among the ignored ones"
        )
    factors = scales.reciprocal() if divides else scales
    # A layer of zeros may have a scale of zero; a divisor of zero, or of infinity, means nothing.
    right = (scales > 0) & (factors > 0) if divides else scales >= 0
    if not bool((right & scales.isfinite() & factors.isfinite()).all()):
        wanted = "above zero" if divides else "not negative"
        raise CheckpointError(
            f"{where} must be finite and {wanted}, got {float(scales.min())} to "
            f"{float(scales.max())}"
        )
    return factors


def _check_codes(where: str, codes: torch.Tensor, widths: Sequence[int]) -> None:
    parts = [part.flatten(-2) for part in codes.split(list(widths), dim=-2) if part.numel()]
    # By the extremes, which need no memory of the size of the codes.
    missing = sum(
        int(((part.amin(-1) == _UNLOADED) & (part.amax(-1) == _UNLOADED)).sum()) for part in parts
    )
    if missing:
        count = codes[..., 0, 0].numel() * len(parts)
        raise CheckpointError(f"{where}: {missing} of {count} were never loaded")


def install(
    layer: Any,
    names: Names,
    weights: dict[str, NVFP4Tensor],
    make: Callable[..., Any],
    runner_name: str,
    *,
    paired: str | None = None,
) -> HeldRunner:
    """Give `layer` a runner over `weights`, and the runner's tensors as its parameters.

    Those are what the kernels read, in the place of the loaded ones: packed in the same memory
    where that can be, and the loaded ones freed where it cannot.

    A layer that has a runner already is being loaded again: the new values go into the tensors of
    that runner, whose addresses captured CUDA graphs have and whose id compiled graphs have. The
    loaded global scales are removed from the layer: each row has its own now.

    Args:
        weights: by what the names of their tensors begin with, in the order `make` takes them.
        make: the runner's class.
        paired: the key of the weight that is gate before up.
    """
    held = getattr(layer, HELD, None)
    packed = [
        weight.prepare(in_place=True, pairs=stack == paired) for stack, weight in weights.items()
    ]
    if isinstance(held, HeldRunner) and held.fits(packed):
        held.load(packed)
    else:
        if held is not None:
            delattr(layer, HELD)
            held = None  # the last reference: its name, and so its id, goes to the new one
        held = HeldRunner(make, tuple(map(_of_parameters, packed)), runner_name)
        setattr(layer, HELD, held)
    for stack, weight in zip(weights, held.weights, strict=True):
        parts = {
            names.codes: weight.codes,
            names.scales: weight.scales,
            ROW_SCALE: weight.row_scale,
        }
        for name, part in parts.items():
            layer.register_parameter(stack + name, part)
        delattr(layer, stack + names.global_scale)
    return held


def _of_parameters(weight: PackedNVFP4) -> PackedNVFP4:
    codes, scales, row_scale = (
        Parameter(part, requires_grad=False)
        for part in (weight.codes, weight.scales, weight.row_scale)
    )
    return PackedNVFP4(codes, scales, row_scale, weight.layout, weight.columns)


class HeldRunner(torch.nn.Module):
    """A layer's runner with its id: what keeps it alive, and what a traced `apply` reads.

    A module, for Dynamo takes integers of modules as constants. Its weights are the very parameters
    of the layer, so that whatever moves or copies those (`layer.to`, `deepcopy`, vLLM's offloading)
    moves or copies these. A copy registers a runner of its own.

    `invariant`: vLLM was asked for results that do not depend on the batch when the layer was made.
    """

    def __init__(
        self, make: Callable[..., Any], weights: tuple[PackedNVFP4, ...], name: str
    ) -> None:
        super().__init__()
        self.make = make
        self.weights = weights
        self.name = name
        self.runner = make(*weights)
        self.invariant = adapter.is_batch_invariant()
        self.registered = LayerRunner(self.runner, invariant=self.invariant)
        self.width = int(weights[-1].shape[-2])
        self.runner_id = _register(self.registered, name)

    def fits(self, weights: Sequence[PackedNVFP4]) -> bool:
        return all(
            old.shape == new.shape and old.layout == new.layout and old.device == new.device
            for old, new in zip(self.weights, weights, strict=True)
        )

    @torch.no_grad()
    def load(self, weights: Sequence[PackedNVFP4]) -> None:
        for old, new in zip(self.weights, weights, strict=True):
            old.codes.copy_(new.codes)
            old.scales.copy_(new.scales)
            old.row_scale.copy_(new.row_scale)

    def __reduce__(self) -> tuple[Any, ...]:
        # The bare parameters, which in a copy of the layer are one with those of the layer.
        return _held_again, (self.make, [{**vars(weight)} for weight in self.weights], self.name)


def _held_again(make: Callable[..., Any], weights: list[dict[str, Any]], name: str) -> HeldRunner:
    return HeldRunner(make, tuple(PackedNVFP4(**fields) for fields in weights), name)


def _register(runner: Any, name: str) -> int:
    """Register under `name`; a second live layer of that name gets "name#1", and so on.

    Ids are baked into the graphs that vLLM keeps on disk. They follow from the layer's name, so a
    process that loads such a graph has them too, unless another model of the same layers lived in
    the process that compiled it: hence the numbers go into the key of vLLM's cache.
    """
    compat.add_to_compile_hash("version", __version__)
    number = 0
    while True:
        numbered = f"{name}#{number}" if number else name
        try:
            runner_id = register_runner(runner, numbered)
        except ArgumentError:  # taken by a live one
            number += 1
            continue
        if number and not compat.add_to_compile_hash(name, numbered):
            warn_once(
                "vllm compile hash",
                "vLLM NVFP4: two models of one process have layers of the same names, and vLLM's "
                "cache of compiled graphs cannot tell them apart; set VLLM_DISABLE_COMPILE_CACHE=1",
            )
        return runner_id
