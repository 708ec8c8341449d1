"""NVFP4 weights on their way from a checkpoint into a model of transformers.

transformers loads a checkpoint name by name: renamings, then at most one converter, which collects
the tensors for one parameter of the model and makes it of them. Dense layers stay in the model
until their weight is there; then a layer in NVFP4 takes their place. So the loader sees the names
it knows, and what a checkpoint lacks is reported as missing in the usual way.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter

from gristmill.checkpoints.checks import check_block_scales, multiplier
from gristmill.checkpoints.names import COMPRESSED_TENSORS, EXPERTS, MODELOPT, Names
from gristmill.errors import ArgumentError, CheckpointError
from gristmill.formats.nvfp4 import NVFP4Tensor
from gristmill.formats.nvfp4.tensor import BLOCK, E4M3
from gristmill.integrations.transformers.experts import (
    DOWN,
    DOWN_BIAS,
    GATE_UP,
    GATE_UP_BIAS,
    Layout,
    NVFP4Experts,
    parameters_of,
    stacked_rows,
)
from gristmill.integrations.transformers.linears import quantized_linear, shape_of
from gristmill.integrations.transformers.nvfp4 import places_of, put_in_place

# What is in checkpoints beside weights: scales of activations and of the KV cache.
UNUSED = (
    rf"\.{MODELOPT.input_scale}$",
    rf"\.{COMPRESSED_TENSORS.input_scale}$",
    r"\.[qkv]_scale$",
    r"\.kv_scale$",
    r"\.(output|prob)_scale$",
)
_EXPERT = re.compile(r"(.*)\.(\d+)\.([^.]+)")
_MATRICES = {name: number for names in EXPERTS for number, name in enumerate(names)}
_KNOWN = (MODELOPT, COMPRESSED_TENSORS)
_ROLES = tuple(
    f"{matrix}{part}"
    for matrix in ("", "0.", "1.", "2.")
    for part in ("bias", *(f"{which}:{part}" for which in (0, 1) for part in ("c", "s", "g")))
)


def marked(names: Iterable[str]) -> set[str]:
    """The modules with a global scale, which only weights in NVFP4 have, by names of tensors."""
    found = set()
    for name in names:
        owner, _, part = name.rpartition(".")
        if part in (MODELOPT.global_scale, COMPRESSED_TENSORS.global_scale):
            found.add(owner)
    return found


class Targets:
    """The modules of a model that are to be in NVFP4, by name, and what has come for them.

    `files` has the tensors of the checkpoint, by name, for errors.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        modules: Mapping[str, Layout | None],
        files: Mapping[str, Path] | None = None,
    ) -> None:
        self.model = model
        self.modules = dict(modules)
        self.files = files or {}
        self.problem: CheckpointError | None = None  # of the last conversion
        self.base = str(getattr(model, "base_model_prefix", "") or "")
        self._places = places_of(model)
        self._counts = {
            name: len(model.get_submodule(name).get_parameter(DOWN))
            for name, layout in self.modules.items()
            if layout is not None
        }
        # For each matrix of experts, the names of its tensors without the expert's number.
        self._called: dict[tuple[str, int], tuple[str, str]] = {}
        self._waiting: dict[str, dict[str, NVFP4Tensor | torch.Tensor]] = {}

    def place_of(self, keys: Iterable[str]) -> str:
        """The file that has these tensors, or the folder if several have them."""
        found = {self.files[key] for key in keys if key in self.files} or {*self.files.values()}
        if not found:
            return "from_pretrained"
        file = found.pop()
        return str(file.parent if found else file)

    def named(self, owner: str) -> str | None:
        """A target by its name in a checkpoint, which may have the base model's name before it."""
        for name in (owner, f"{self.base}.{owner}", owner.removeprefix(f"{self.base}.")):
            if name in self.modules:
                return name
        return None

    def check_expert(self, key: str, name: str, number: str, called: tuple[str, str]) -> None:
        """Check that a tensor is of one of the model's experts, and that no other name means it."""
        count = self._counts[name]
        # In Python's form: "01" and "1" would be the same expert.
        if str(int(number)) != number or int(number) >= count:
            raise CheckpointError(
                f"{self.place_of([key])}: {key} in the checkpoint is of none of the {count} "
                f"experts of {name}, 0 to {count - 1}"
            )
        known = self._called.setdefault((name, _MATRICES[called[1]]), called)
        if known != called:
            raise CheckpointError(
                f"{self.place_of([key])}: {key} in the checkpoint is of the same matrix as "
                f"{known[0]}.{number}.{known[1]}"
            )

    def owners(self, name: str, matrix: str) -> list[str]:
        """A matrix of each expert by its name in the checkpoint, after renamings; if it has any."""
        known = self._called.get((name, int(matrix[0])))
        if known is None:
            return [name]
        return [f"{known[0]}.{number}.{known[1]}" for number in range(self._counts[name])]

    def put_linear(self, name: str, weight: NVFP4Tensor | torch.Tensor, config: Any) -> None:
        old = self.model.get_submodule(name)
        new = quantized_linear(old, weight, method=config.method, act=config.act)
        self._put(name, new)

    def put_part(
        self, name: str, parameter: str, part: NVFP4Tensor | torch.Tensor
    ) -> tuple[str, ...]:
        """A parameter of experts, which take their place when all are there: then, their names."""
        parts = self._waiting.setdefault(name, {})
        parts[parameter] = part
        layout = self.modules[name]
        wanted = parameters_of(self.model.get_submodule(name))
        if layout is None or set(parts) != set(wanted):
            return ()
        self._put(name, NVFP4Experts.of_parts(layout, self._waiting.pop(name)))
        return tuple(f"{name}.{one}" for one in wanted)

    def _put(self, name: str, new: torch.nn.Module) -> None:
        # Or transformers would draw random numbers into what it did not load itself.
        loaded: list[Any] = [new, *new.buffers()]
        for one in loaded:
            one._is_hf_initialized = True
        put_in_place(self.model.get_submodule(name), new, self._places)


class QuantizeOnLoad(ConversionOps):  # type: ignore[misc]
    """A dense parameter that has been loaded, as NVFP4."""

    def __init__(self, targets: Targets, config: Any) -> None:
        self.targets, self.config = targets, config

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], *, missing_keys: set[str] | None = None, **_: Any
    ) -> dict[str, Any]:
        for full_name, found in input_dict.items():
            dense = found[0] if isinstance(found, list) else found
            name, _dot, parameter = full_name.rpartition(".")
            _check_plain(self.targets.model, full_name)
            layout = self.targets.modules[name]
            if layout is None:
                self.targets.put_linear(name, dense, self.config)
                done: tuple[str, ...] = (full_name,)
            else:
                part = layout.quantized(parameter, dense, self.config.method)
                done = self.targets.put_part(name, parameter, part)
            if missing_keys is not None:
                missing_keys.difference_update(done)
        return {}


class LoadNvfp4(WeightConverter):  # type: ignore[misc]
    """Collects the parts of NVFP4 weights: all that a checkpoint has for one parameter of a model.

    One converter speaks for all modules. Names are looked up, not matched: a checkpoint of experts
    has tens of thousands.
    """

    __slots__ = ("targets",)

    def __init__(self, targets: Targets, config: Any) -> None:
        super().__init__(list(_ROLES), "nvfp4", [Assemble(targets, config)])
        self.targets = targets

    def __deepcopy__(self, memo: dict[int, Any]) -> LoadNvfp4:
        """Made for every tensor of a checkpoint: shares all but what is collected."""
        new = LoadNvfp4.__new__(LoadNvfp4)
        for kind in type(self).__mro__:
            for name in getattr(kind, "__slots__", ()):
                if hasattr(self, name):
                    object.__setattr__(new, name, getattr(self, name))
        new.collected_tensors, new.layer_targets = defaultdict(list), defaultdict(set)
        return new

    def convert(self, layer_name: str, *args: Any, **kwargs: Any) -> Any:
        """As its base, but raises errors of the checkpoint, which transformers would only log."""
        try:
            return super().convert(layer_name, *args, **kwargs)
        except Exception:
            problem, self.targets.problem = self.targets.problem, None
            if problem is None:
                raise
            keys = self.layer_targets[layer_name]
            named = str(problem).partition(" ")[0].rstrip(":")  # a tensor or a module
            place = self.targets.place_of({named} & keys or keys)
            raise CheckpointError(f"{place}: {problem}") from problem

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        found = self._role(source_key)
        if found is None:
            return source_key, None
        object.__setattr__(self, "_was_used", True)  # one of its base's slots
        return found

    def _role(self, key: str) -> tuple[str, str] | None:
        """The parameter of the model that a tensor is for, and what it is of it."""
        owner, _, part = key.rpartition(".")
        name = self.targets.named(owner)
        role = _part(part)
        if name is not None:
            layout = self.targets.modules[name]
            return (f"{name}.weight", role) if layout is None and role is not None else None
        expert = _EXPERT.fullmatch(owner)
        if expert is None or expert[3] not in _MATRICES:
            return None
        name = self.targets.named(expert[1])
        if name is None or self.targets.modules[name] is None:
            return None
        matrix = _MATRICES[expert[3]]
        if part == "bias" or role is not None:
            self.targets.check_expert(key, name, expert[2], (expert[1], expert[3]))
        if part == "bias":
            return f"{name}.{DOWN_BIAS if matrix == 2 else GATE_UP_BIAS}", f"{matrix}.bias"
        if role is None:
            return None
        return f"{name}.{DOWN if matrix == 2 else GATE_UP}", f"{matrix}.{role}"


class Assemble(ConversionOps):  # type: ignore[misc]
    """The parts of one parameter, as the checkpoint has them, into the model."""

    def __init__(self, targets: Targets, config: Any) -> None:
        self.targets, self.config = targets, config

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, list[torch.Tensor]],
        *,
        full_layer_name: str,
        missing_keys: set[str] | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        try:
            done = self._put(input_dict, full_layer_name)
        except CheckpointError as problem:
            self.targets.problem = problem
            raise
        if missing_keys is not None:
            missing_keys.difference_update(done)
        return {}

    def _put(self, found: dict[str, list[torch.Tensor]], full_layer_name: str) -> tuple[str, ...]:
        """Put one parameter into the model; the names of those that are there with it."""
        name, _dot, parameter = full_layer_name.rpartition(".")
        _check_plain(self.targets.model, full_layer_name)
        layout = self.targets.modules[name]
        if layout is None:
            weight = _weight([name], found, "")
            wanted = shape_of(self.targets.model.get_submodule(name))
            if tuple(weight.shape[1:]) != wanted:
                raise CheckpointError(
                    f"{name}: the weight has shape {tuple(weight.shape[1:])}, the model's has "
                    f"{wanted}"
                )
            one = NVFP4Tensor(weight.codes[0], weight.scales[0], weight.global_scale[0])
            self.targets.put_linear(name, one, self.config)
            return (full_layer_name,)
        part = self._experts(name, parameter, layout, found)
        return self.targets.put_part(name, parameter, part)

    def _experts(
        self, name: str, parameter: str, layout: Layout, found: dict[str, list[torch.Tensor]]
    ) -> NVFP4Tensor | torch.Tensor:
        old = self.targets.model.get_submodule(name)
        count, whole = len(old.get_parameter(DOWN)), old.get_parameter(parameter).detach()
        is_bias = parameter in (DOWN_BIAS, GATE_UP_BIAS)
        if parameter in (GATE_UP, GATE_UP_BIAS):
            wanted = dict(zip(("0.", "1."), layout.split(whole, bias=is_bias), strict=True))
        else:
            wanted = {"2.": whole if is_bias else layout.down(whole)}
        for role, tensors in found.items():
            if len(tensors) != count:
                raise CheckpointError(
                    f"{name}: the checkpoint has {len(tensors)} of {count} experts ({role})"
                )
        owners = {one: self.targets.owners(name, one) for one in wanted}
        if is_bias:
            biases = [_biases(owners[one], found, one, wanted[one].shape) for one in wanted]
            return torch.cat(biases, 1)
        weights = {one: _weight(owners[one], found, one) for one in wanted}
        for one, weight in weights.items():
            if weight.shape != wanted[one].shape:
                raise CheckpointError(
                    f"{name}: a part of {parameter} has shape {tuple(weight.shape)} in the "
                    f"checkpoint, the model's is {tuple(wanted[one].shape)}"
                )
        return stacked_rows(list(weights.values()))


def _part(part: str) -> str | None:
    """The role of a part of a weight, by any producer's name for it."""
    for which, names in enumerate(_KNOWN):
        own = {names.codes: "c", names.scales: "s", names.global_scale: "g"}
        # "weight_scale" is in both: the first takes it, `_weight` looks there.
        if part in own:
            return f"{which}:{own[part]}"
    return None


def _collected(
    owners: list[str], found: Mapping[str, list[torch.Tensor]], role: str, part: str
) -> list[torch.Tensor]:
    """What came for a part of each of the modules `owners`, which transformers sorts by number."""
    tensors = found.get(role, [])
    if not tensors:
        raise CheckpointError(f"{owners[0]}: there is no {part} in the checkpoint")
    if len(tensors) != len(owners):
        raise CheckpointError(f"{owners[0]}: the checkpoint has {len(tensors)} of {part}")
    return tensors


def _biases(
    owners: list[str], found: Mapping[str, list[torch.Tensor]], matrix: str, shape: torch.Size
) -> torch.Tensor:
    """The biases of one matrix of all experts, stacked."""
    tensors = _collected(owners, found, f"{matrix}bias", "bias")
    for owner, one in zip(owners, tensors, strict=True):
        if one.shape != shape[1:] or not one.is_floating_point():
            raise CheckpointError(
                f"{owner}.bias must be floating-point numbers of shape {tuple(shape[1:])}, got "
                f"{one.dtype} {tuple(one.shape)}"
            )
    return torch.stack(tensors)


def _weight(owners: list[str], found: Mapping[str, list[torch.Tensor]], matrix: str) -> NVFP4Tensor:
    """A stack of matrices, one for each of the modules `owners`."""
    which = 1 if f"{matrix}1:c" in found else 0
    names: Names = _KNOWN[which]
    codes, scales, factors = (
        _collected(owners, found, f"{matrix}{role}", part)
        for role, part in (
            (f"{which}:c", names.codes),
            ("0:s", names.scales),
            (f"{which}:g", names.global_scale),
        )
    )
    for owner, one in zip(owners, codes, strict=True):
        if one.dtype != torch.uint8 or one.dim() != 2 or one.shape != codes[0].shape:
            same = "" if one is codes[0] else f" of shape {tuple(codes[0].shape)}, as others are"
            raise CheckpointError(
                f"{owner}.{names.codes} must be a matrix of U8{same}, got {one.dtype} "
                f"{tuple(one.shape)}"
            )
    wanted = (codes[0].shape[0], codes[0].shape[1] * 2 // BLOCK)
    for owner, one in zip(owners, scales, strict=True):
        where = f"{owner}.{names.scales}"
        if one.dtype != E4M3 or tuple(one.shape) != wanted:
            raise CheckpointError(
                f"{where} must be E4M3 of shape {wanted}, got {one.dtype} {tuple(one.shape)}"
            )
        check_block_scales(where, one)
    stacked = torch.stack([one.view(torch.uint8) for one in scales]).view(E4M3)
    multipliers = []
    for owner, one in zip(owners, factors, strict=True):
        where = f"{owner}.{names.global_scale}"
        if one.dtype != torch.float32:
            raise CheckpointError(f"{where} must be F32, got {one.dtype}")
        multipliers.append(multiplier(where, one.cpu(), names.divides))
    scale = torch.stack(multipliers).to(codes[0].device)
    return NVFP4Tensor(torch.stack(codes), stacked, scale)


def _check_plain(model: torch.nn.Module, name: str) -> None:
    weight = model.get_parameter(name)
    if type(weight.data) is not torch.Tensor:
        raise ArgumentError(
            f"{name} is a {type(weight.data).__name__}: NVFP4 weights cannot be loaded into "
            f"sharded models; load without a tp_plan or distributed_config"
        )
