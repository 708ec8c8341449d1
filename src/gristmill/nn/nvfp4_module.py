"""What modules with NVFP4 weights share: buffers in the layout of their device's kernels, that keep
their dtypes, and their saving and loading in the layout of checkpoints.

Which hook does what:

- `_hold` (a module is made) and `_apply` (it is moved) lay the weight out for the device it is on.
  On its way between devices it is unpacked before it leaves one and packed when it has come to the
  other, so that a GPU does either.
- `_save_to_state_dict` unpacks into new tensors; `_load_from_state_dict` shows torch such tensors
  in the buffers' places, then packs them into the memory that the buffers had all along. Before
  that it checks everything that the state dict has for the module, and loads all of it or nothing.
- A pickle, and a deep copy, has the buffers as they are; `__setstate__` lays them out anew where
  they have come to another kind of device.

The layout is nowhere written down: the buffers' dims tell it (`layout_by`), so whoever exchanges
buffers behind the module's back (offloading, `torch.func.functional_call`) exchanges it, too. Of a
weight that is gate before up (`_paired`) fragments are in pairs, always.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

import torch
from torch.nn.parameter import is_lazy

from gristmill.errors import ArgumentError, CheckpointError
from gristmill.formats.nvfp4 import packing
from gristmill.formats.nvfp4 import tensor as formats
from gristmill.formats.nvfp4.tensor import (
    BLOCK,
    E4M3,
    FRAGMENTS,
    IN_PIECES,
    PAIRS,
    ROWS,
    TILES,
    NVFP4Tensor,
    PackedNVFP4,
)
from gristmill.ops.overlap import is_overlapping

if TYPE_CHECKING:
    from typing_extensions import Self

_NAMES = ("weight", "weight_scale", "weight_scale_2")
_ARCHS = {ROWS: "cpu", FRAGMENTS: "sm_90", PAIRS: "sm_90", TILES: "sm_100"}  # one that has it


class NVFP4Module(torch.nn.Module):
    """Holds weights as buffers ``weight``, ``weight_scale`` and ``weight_scale_2``, after a prefix.

    These are ModelOpt's names for codes, block scales and global scales; the last is kept for every
    row. They are frozen, and `.to(torch.bfloat16)` and its like leave them as they are. On a GPU
    they hold what :meth:`gristmill.nvfp4.NVFP4Tensor.prepare` gives, in place of the checkpoint's
    tensors; state dicts are in the layout of checkpoints, whatever the device.
    """

    _prefixes: ClassVar[tuple[str, ...]] = ("",)
    _paired: ClassVar[tuple[str, ...]] = ()  # those of weights that are gate before up
    _is_strict = False  # the argument of `load_state_dict` while that runs on this module

    def _shape(self, prefix: str) -> tuple[int, ...]:
        """Of the weight."""
        raise NotImplementedError

    @property
    def layout(self) -> str:
        """How the buffers hold the weights, as the op is told: ``"rows"`` as in checkpoints,
        ``"fragments"`` (of experts w13 in ``"pairs"`` then) or ``"tiles"``."""
        layout = self._packed(self._prefixes[0]).layout
        return FRAGMENTS if layout == PAIRS else layout

    def _hold_zeros(
        self, prefix: str, shape: tuple[int, ...], device: torch.device | str | None
    ) -> None:
        """Buffers for a weight of `shape` that is still to be loaded."""
        self._check_columns()
        *stack, rows, columns = shape
        lines = (*stack, rows)
        codes = torch.zeros((*lines, columns // 2), dtype=torch.uint8, device=device)
        scales = torch.zeros((*lines, columns // BLOCK), dtype=torch.uint8, device=device)
        row_scale = torch.zeros(lines, dtype=torch.float32, device=device)
        self._hold(prefix, NVFP4Tensor(codes, scales.view(E4M3), row_scale))

    def _check_columns(self) -> None:
        """Of all weights, before the first is held."""
        for shape in map(self._shape, self._prefixes):
            if shape[-1] % BLOCK:
                raise ArgumentError(
                    f"{type(self).__name__}: the columns of a weight must be a multiple of "
                    f"{BLOCK}, got {shape[-1]} in {shape}"
                )

    def _hold(self, prefix: str, weight: NVFP4Tensor) -> None:
        """Take over a weight that nobody else holds."""
        for name in _NAMES:
            self.register_buffer(prefix + name, None)
        self._put(prefix, _laid_out(weight, in_place=True, pairs=prefix in self._paired))

    def _put(self, prefix: str, weight: PackedNVFP4) -> None:
        parts = (weight.codes, weight.scales, weight.row_scale.contiguous())
        for name, part in zip(_NAMES, parts, strict=True):
            self._buffers[prefix + name] = part

    def _packed(self, prefix: str) -> PackedNVFP4:
        """The buffers as they are."""
        codes, scales, row_scale = (self.get_buffer(prefix + name) for name in _NAMES)
        shape = self._shape(prefix)
        layout = layout_by(codes, scales, len(shape))
        if layout == FRAGMENTS and prefix in self._paired:
            layout = PAIRS
        return PackedNVFP4(codes, scales, row_scale, layout, shape[-1])

    def _held(self, prefix: str) -> NVFP4Tensor:
        """The weight in the layout of checkpoints: the buffers themselves if they have it."""
        return self._packed(prefix).unpack()

    def _settle(self, prefix: str) -> None:
        """Lay the buffers out for the device they have come to, if they are all there."""
        weight = self._packed(prefix)
        parts = (weight.codes, weight.scales, weight.row_scale)
        if len({part.device for part in parts}) > 1 or not _are_plain(*parts):
            return
        pairs = prefix in self._paired
        if weight.layout != _layout_on(weight.device, weight, pairs):
            self._put(prefix, _laid_out(weight.unpack(), in_place=False, pairs=pairs))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Moves everything, and converts what may be converted, which weights may not."""
        weights = {prefix: self._packed(prefix) for prefix in self._prefixes}
        for name in self._weight_names():
            self._buffers[name] = None
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            weights = {
                prefix: _moved(weight, fn, prefix in self._paired)
                for prefix, weight in weights.items()
            }
        finally:
            for prefix, weight in weights.items():
                self._put(prefix, weight)
        return self

    def _weight_names(self) -> list[str]:
        return [prefix + name for prefix in self._prefixes for name in _NAMES]

    def __getstate__(self) -> dict[str, Any]:
        """For pickles, in which torch writes fp8 but does not read it: by bytes."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        state["_buffers"] = {
            name: part.view(torch.uint8) if part is not None and part.dtype == E4M3 else part
            for name, part in self._buffers.items()
        }
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for prefix in self._prefixes:
            weight = self._packed(prefix)
            if weight.layout not in IN_PIECES:
                self._buffers[f"{prefix}weight_scale"] = weight.scales.view(E4M3)
            self._settle(prefix)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """In the layout of checkpoints; a copy where the buffers have another."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for which in self._prefixes:
            weight = self._packed(which)
            if weight.layout != ROWS:
                found = weight.unpack()
                parts = (found.codes, found.scales, found.global_scale)
                for name, part in zip(_NAMES, parts, strict=True):
                    destination[prefix + which + name] = part

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As :meth:`torch.nn.Module.load_state_dict`, but this module loads all or nothing.

        It is an error, and the module keeps its values, if a tensor has a wrong shape or dtype, has
        no values or cannot be written to, if a block scale is negative or NaN, if a global scale is
        negative or not finite, or if a key is missing or unexpected and `strict` is set. Scales on
        a GPU are not checked, since that would synchronize with it.

        As part of a larger module, each such module loads all that the state dict has for it or
        nothing. There torch does not pass `strict` on: if keys are missing, the others are loaded
        before torch raises its error.
        """
        self.__dict__["_is_strict"] = strict
        try:
            keys = super().load_state_dict(state_dict, strict, assign)
            if strict and not self._is_strict:
                # Rejected, but a hook has cleared the missing and unexpected keys: load the others.
                keys = super().load_state_dict(state_dict, strict, assign)
            return keys
        finally:
            self.__dict__.pop("_is_strict", None)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Also takes one global scale for all rows, block scales as bytes, and leaves the scales of
        activations out. Any other dtype is an error: torch would convert numbers that are codes.
        """
        assign = local_metadata.get("assign_to_params_buffers", False)
        packed: dict[str, PackedNVFP4] = {}
        rejected: list[str] = []
        parameters, buffers = dict(self._parameters), dict(self._buffers)
        count, is_loaded = len(error_msgs), False

        def adapt(found: dict[str, Any], *others: Any) -> None:
            self._adapt(found, prefix)
            error_msgs.extend(self._problems(found, prefix, assign))
            is_rejected = len(error_msgs) > count  # maybe by another hook
            if is_rejected or (self._is_strict and not self._has_all(found, prefix)):
                # Without this module's keys torch loads nothing of it and raises its error.
                self.__dict__["_is_strict"] = False
                rejected.extend(key for key in self._own(prefix) if key in found)
                for key in rejected:
                    del found[key]
                return
            for which in self._prefixes:
                old = self._packed(which)
                is_there = any(prefix + which + name in found for name in _NAMES)
                if is_there and old.layout != ROWS:
                    packed[which] = old
                    self._put(which, _in_layout(old.unpack(), ROWS))

        # The last hook of all, for the others may bring the weight.
        adapting = self._register_load_state_dict_pre_hook(adapt)  # type: ignore[no-untyped-call]
        try:
            super()._load_from_state_dict(
                state_dict,
                prefix,
                local_metadata,
                strict,
                missing_keys,
                unexpected_keys,
                error_msgs,
            )
            is_loaded = len(error_msgs) == count
        finally:
            adapting.remove()
            missing_keys[:] = [key for key in missing_keys if key not in rejected]
            if not is_loaded and (assign or packed):
                self._parameters.update(parameters)
                self._buffers.update(buffers)
            elif assign:
                for which in self._prefixes:
                    self._settle(which)
            else:
                for which, old in packed.items():
                    new = _in_layout(self._held(which), old.layout, in_place=True)
                    self._put(which, old)
                    _overwrite(old, new)

    def _adapt(self, state_dict: dict[str, Any], prefix: str) -> None:
        """What is to be loaded in the form of buffers in rows."""
        for name, (shape, _) in self._kinds().items():
            found = state_dict.get(prefix + name)
            if not _is_dense(found):
                continue  # `_problem` says so
            found = found.detach()  # of a parameter too, which would not be assigned as a buffer
            if name.endswith("weight_scale_2"):
                found = _for_every_row(found, shape)
            if name.endswith("weight_scale") and found.dtype == torch.uint8:
                found = found.view(E4M3)
            state_dict[prefix + name] = found
        state_dict.pop(f"{prefix}input_scale", None)

    def _kinds(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shapes and dtypes of the weights' parts in rows, by name."""
        kinds: dict[str, tuple[torch.Size, torch.dtype]] = {}
        for which in self._prefixes:
            *lines, columns = self._shape(which)
            for name, parts, dtype in (
                ("weight", (columns // 2,), torch.uint8),
                ("weight_scale", (columns // BLOCK,), E4M3),
                ("weight_scale_2", (), torch.float32),
            ):
                kinds[which + name] = torch.Size((*lines, *parts)), dtype
        return kinds

    def _own(self, prefix: str) -> dict[str, torch.Tensor]:
        """The parameters and buffers of this module by their keys in a state dict."""
        parts = {**self._parameters, **self._buffers}
        left = self._non_persistent_buffers_set
        return {
            prefix + name: part
            for name, part in parts.items()
            if part is not None and name not in left
        }

    def _has_all(self, state_dict: dict[str, Any], prefix: str) -> bool:
        """Whether a state dict has exactly the keys of this module."""
        own = self._own(prefix)
        below = tuple(f"{prefix}{name}." for name in self._modules)
        others = {key for key in state_dict if key.startswith(prefix) and key not in own}
        return own.keys() <= state_dict.keys() and all(key.startswith(below) for key in others)

    def _problems(self, state_dict: dict[str, Any], prefix: str, assign: bool) -> list[str]:
        """Why what a state dict has for this module cannot be loaded."""
        kinds = self._kinds()
        problems = (
            _problem(key, state_dict[key], held, kinds.get(key.removeprefix(prefix)), assign)
            for key, held in self._own(prefix).items()
            if key in state_dict
        )
        return [problem for problem in problems if problem is not None]


def layout_by(codes: torch.Tensor, scales: torch.Tensor, dims: int) -> str:
    """The layout of the parts of a weight of so many dims; pairs are fragments here."""
    if codes.dim() > dims:
        return FRAGMENTS
    return TILES if scales.dim() < dims else ROWS


def _laid_out(weight: NVFP4Tensor, *, in_place: bool, pairs: bool) -> PackedNVFP4:
    """As the kernels of its device want it; what is no ordinary tensor stays as it is."""
    if not _are_plain(weight.codes, weight.scales, weight.global_scale):
        return _in_layout(weight, ROWS)
    return weight.prepare(in_place=in_place, pairs=pairs)


def _in_layout(weight: NVFP4Tensor, layout: str, *, in_place: bool = False) -> PackedNVFP4:
    return weight.prepare(_ARCHS[layout], in_place=in_place, pairs=layout == PAIRS)


def _layout_on(device: torch.device, weight: PackedNVFP4, pairs: bool) -> str:
    return formats.layout_of(formats.arch_of(device), len(weight.shape) > 2, pairs=pairs)


def _moved(
    weight: PackedNVFP4, fn: Callable[[torch.Tensor], torch.Tensor], pairs: bool
) -> PackedNVFP4:
    """`weight` with `fn` applied to its parts, as bytes, laid out for where they have come to.

    Row scales go first: where they land says what the others must be. Those are unpacked before
    they leave, since a copy to a CPU may not be over when `fn` returns.
    """
    row_scale = _part_moved(weight.row_scale, fn)
    wanted = _layout_on(row_scale.device, weight, pairs) if _are_plain(row_scale) else ROWS
    if weight.layout not in (wanted, ROWS):
        weight = _in_layout(weight.unpack(), ROWS)
    codes, scales = _part_moved(weight.codes, fn), _part_moved(weight.scales, fn)
    # Nobody else can hold what has just been made.
    is_ours = codes.device != weight.codes.device and scales.device != weight.scales.device
    if weight.layout == wanted:
        return PackedNVFP4(codes, scales, row_scale, wanted, weight.columns)
    return _laid_out(NVFP4Tensor(codes, scales, row_scale), in_place=is_ours, pairs=pairs)


def _part_moved(part: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`fn` of a part as integers, which few conversions touch; of one that does, the device."""
    bits = part.view(torch.int32 if part.dtype == torch.float32 else torch.uint8)
    moved = fn(bits)
    if moved.dtype != bits.dtype:  # `Module.type`
        moved = bits.to(moved.device)
    return moved.view(part.dtype)


def _overwrite(old: PackedNVFP4, new: PackedNVFP4) -> None:
    """The values of `new` in the memory of `old`."""
    with torch.no_grad():
        old.codes.copy_(new.codes)
        old.scales.copy_(new.scales)
        old.row_scale.copy_(new.row_scale)


def _are_plain(*tensors: torch.Tensor) -> bool:
    """Whether they are no fakes, no DTensors and the like."""
    return all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in tensors)


def _is_dense(found: Any) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor with a shape and strides."""
    if not isinstance(found, torch.Tensor) or is_lazy(found):
        return False
    return found.layout == torch.strided and not found.is_nested


def _has_values(part: torch.Tensor) -> bool:
    return not (part.is_meta or hasattr(part, "fake_mode"))


def _problem(
    key: str,
    found: Any,
    held: torch.Tensor,
    kind: tuple[torch.Size, torch.dtype] | None,
    assign: bool,
) -> str | None:
    """Why `found` cannot be loaded. `kind` is that of a part of a weight, None for a bias."""
    from gristmill.checkpoints.checks import check_block_scales, check_global_scales

    if not _is_dense(found):
        layout = f" of layout {found.layout}" if isinstance(found, torch.Tensor) else ""
        return f"{key} must be a dense tensor, got {type(found).__name__}{layout}"
    shape = held.shape if kind is None else kind[0]
    if found.shape != shape:
        return (
            f"size mismatch for {key}: copying a param with shape {found.shape} from checkpoint, "
            f"the shape in current model is {shape}."
        )
    if kind is not None and found.dtype != kind[1]:
        return f"{key} must have dtype {kind[1]}, got {found.dtype}"
    if kind is None and held.is_floating_point() and not found.is_floating_point():
        return f"{key} must have a floating-point dtype, got {found.dtype}"
    if not assign and (reason := _why_not_copied(found, held)):
        return f"{key} {reason}"
    if kind is None or found.device.type != "cpu" or not packing.is_real(found):
        return None
    try:
        if kind[1] == E4M3:
            check_block_scales(key, found)
        elif key.endswith("weight_scale_2"):
            check_global_scales(key, found)
    except CheckpointError as problem:
        return str(problem)
    return None


def _why_not_copied(found: torch.Tensor, held: torch.Tensor) -> str | None:
    """Why torch cannot copy `found` into `held`."""
    wanted, mesh = getattr(held, "device_mesh", None), getattr(found, "device_mesh", None)
    if (wanted is None) != (mesh is None):
        return f"must be a {type(held).__name__}, got a {type(found).__name__}"
    if wanted != mesh:
        return f"must be on the device mesh {wanted}, got {mesh}"
    if _has_values(held) and not _has_values(found):
        return "is on the meta device or fake: there are no values to load"
    if held.is_inference() and not torch.is_inference_mode_enabled():
        return "was made in inference mode, and can be written to only there"
    if is_overlapping(held):
        return "cannot be written to: elements of it share memory"
    return None


def _for_every_row(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """`scale` of one value per matrix as `shape`. Others are returned unchanged: see `_problem`."""
    matrices = shape[:-1]
    if scale.shape == shape or scale.numel() != matrices.numel():
        return scale
    return scale.reshape(*matrices, 1).expand(shape).contiguous()
