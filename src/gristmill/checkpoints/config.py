"""How a checkpoint describes its quantization, in any of the three places where it may."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gristmill.checkpoints.names import COMPRESSED_TENSORS, FUSED, MODELOPT, shards_of
from gristmill.checkpoints.patterns import Patterns
from gristmill.errors import CheckpointError
from gristmill.formats.nvfp4.tensor import BLOCK
from gristmill.jit.folder import read_plain
from gristmill.log import shown

CONFIG_FILE = "config.json"
MODELOPT_FILE = "hf_quant_config.json"
WITH_ACTIVATIONS, WEIGHT_ONLY = "NVFP4", "W4A16_NVFP4"
PACKED_FORMAT = "nvfp4-pack-quantized"

MOST_JSON = 64 << 20  # bytes: an index of a million tensors
_MOST_DIGITS = 100


@dataclass(frozen=True)
class QuantizationConfig:
    """How a model was quantized to NVFP4.

    Attributes:
        producer: ``"modelopt"`` or ``"compressed-tensors"``.
        activations: whether inputs were meant to be quantized as well (W4A4), or weights only.
        group_size: elements that share a scale; always 16.
        ignore: names and patterns of modules that were left alone.
        targets: names and patterns of those that were not; empty means every linear layer.
        kv_cache: ``"fp8"``, None, or the producer's own word for something else.
        source: the file and the entry that say so, for errors.
    """

    producer: str
    activations: bool
    group_size: int = BLOCK
    ignore: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    kv_cache: str | None = None
    source: str = field(default="quantization_config", repr=False, compare=False, kw_only=True)
    _ignored: Patterns = field(init=False, repr=False, compare=False)
    _targeted: Patterns = field(init=False, repr=False, compare=False)
    _all_linear: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        inner = self.producer == MODELOPT.producer
        # A capitalized word is the class of a layer. Only "Linear" matters here.
        all_linear = not self.targets or any(name[:1].isupper() for name in self.targets)
        key = "exclude_modules" if self.source.endswith(MODELOPT_FILE) else "ignore"
        ignored = Patterns(f"{self.source}: {key}", self.ignore, inner=inner)
        targeted = Patterns(f"{self.source}: targets", self.targets, inner=inner)
        object.__setattr__(self, "_ignored", ignored)
        object.__setattr__(self, "_targeted", targeted)
        object.__setattr__(self, "_all_linear", all_linear)

    @classmethod
    def from_dict(
        cls, config: Mapping[str, Any], source: str = "quantization_config"
    ) -> QuantizationConfig:
        """From the ``quantization_config`` of a config.json; `source` is for errors."""
        _check_object(source, config)
        if "quantization" in config:
            return cls.from_hf_quant_config(config, f"{source} in the form of {MODELOPT_FILE}")
        named = config.get("quant_method")
        method = named.lower() if isinstance(named, str) else ""
        if method == COMPRESSED_TENSORS.producer:
            return _compressed_tensors(config, source)
        if not method.startswith(MODELOPT.producer):
            raise CheckpointError(
                f"{source}: quant_method must be 'modelopt' or 'compressed-tensors', "
                f"got {shown(named)}"
            )
        activations = _algorithm(source, config.get("quant_algo")) == WITH_ACTIVATIONS
        groups = _groups(source, config)
        quantized = []
        for name, group in groups.items():
            here = f"{source}: config_groups {shown(name)}"
            weights = _object(here, "weights", group.get("weights"))
            _check_group_size(here, weights.get("group_size"))
            _check_kind(here, {"num_bits": 4, "type": "float", **weights})
            quantized.append(_has_activations(here, group))
        if groups and not any(quantized):
            activations = False
        _check_group_size(source, config.get("group_size"))
        return cls(
            producer=MODELOPT.producer,
            activations=activations,
            ignore=_strings(source, "ignore", config.get("ignore")),
            kv_cache=_kv_cache_of_scheme(source, config.get("kv_cache_scheme")),
            source=source,
        )

    @classmethod
    def from_hf_quant_config(
        cls, config: Mapping[str, Any], source: str = MODELOPT_FILE
    ) -> QuantizationConfig:
        """From the content of ModelOpt's hf_quant_config.json; `source` is for errors."""
        _check_object(source, config)
        quantization = config.get("quantization")
        if not isinstance(quantization, Mapping):
            raise CheckpointError(
                f"{source}: there is no 'quantization' in it, got {shown(list(config))}"
            )
        algorithm = _algorithm(source, quantization.get("quant_algo"))
        _check_group_size(source, quantization.get("group_size"))
        kv_cache = quantization.get("kv_cache_quant_algo") or None
        if kv_cache is not None and not isinstance(kv_cache, str):
            raise CheckpointError(
                f"{source}: kv_cache_quant_algo must be a string, got {shown(kv_cache)}"
            )
        return cls(
            producer=MODELOPT.producer,
            activations=algorithm == WITH_ACTIVATIONS,
            ignore=_strings(source, "exclude_modules", quantization.get("exclude_modules")),
            kv_cache=None if kv_cache is None else kv_cache.lower(),
            source=source,
        )

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> QuantizationConfig | None:
        """From config.json, else from hf_quant_config.json; None if neither describes it.

        In a config.json of several models, that of the text model counts.
        """
        key, path = "quantization_config", Path(folder) / CONFIG_FILE
        source = str(path)
        content: Mapping[str, Any] = read_json(path)
        if content.get(key) is None:
            content = _object(source, "text_config", content.get("text_config"))
            source = f"{source}: text_config"
        if content.get(key) is not None:
            found = _object(source, key, content[key])
            return cls.from_dict(found, f"{source}: {key}")
        path = Path(folder) / MODELOPT_FILE
        config = read_json(path)
        return cls.from_hf_quant_config(config, str(path)) if config else None

    def is_ignored(self, module: str, fused: Mapping[str, Sequence[str]] = FUSED) -> bool:
        """Whether a module was left as it was.

        `fused` names the modules that are stored as several; those must all be ignored, or none.

        Patterns are names, wildcards, or regular expressions after ``re:``. In a list of ModelOpt a
        name also matches the modules below it, and may be an inner part of a module's name, as
        older exports wrote it.
        """
        if self._ignored.match(module):
            return True
        parts = shards_of(module, fused) or [module]
        left = [part for part in parts if self._is_left(part)]
        if left and len(left) < len(parts):
            kept = [part for part in parts if part not in left]
            raise CheckpointError(
                f"{module} would be quantized in part: {', '.join(left)} left out, "
                f"{', '.join(kept)} not"
            )
        return bool(left)

    def _is_left(self, module: str) -> bool:
        return self._ignored.match(module) or not (self._all_linear or self._targeted.match(module))


def _compressed_tensors(config: Mapping[str, Any], where: str) -> QuantizationConfig:
    groups = _groups(where, config)
    if not groups:
        raise CheckpointError(f"{where}: there are no config_groups")
    if config.get("transform_config"):
        raise CheckpointError(f"{where}: weights under a transform_config are not supported")
    activations = False
    targets: list[str] = []
    for name, group in groups.items():
        here = f"{where}: config_groups {shown(name)}"
        stored_as = group.get("format") or config.get("format")
        if stored_as not in (None, PACKED_FORMAT):
            raise CheckpointError(
                f"{here} has format {shown(stored_as)}; only {PACKED_FORMAT!r} is read"
            )
        weights = _object(here, "weights", group.get("weights"))
        _check_kind(here, weights)
        _check_group_size(here, weights.get("group_size"))
        for key, right in (("strategy", "tensor_group"), ("symmetric", True)):
            if weights.get(key, right) != right:
                raise CheckpointError(
                    f"{here} has {key} {shown(weights[key])}; NVFP4 has {right!r}"
                )
        activations |= _has_activations(here, group)
        targets += _strings(here, "targets", group.get("targets"))
    return QuantizationConfig(
        producer=COMPRESSED_TENSORS.producer,
        activations=activations,
        ignore=_strings(where, "ignore", config.get("ignore")),
        targets=tuple(targets),
        kv_cache=_kv_cache_of_scheme(where, config.get("kv_cache_scheme")),
        source=where,
    )


def _algorithm(where: str, value: Any) -> str:
    if not value:
        raise CheckpointError(f"{where}: quant_algo is missing")
    name = value.upper() if isinstance(value, str) else ""
    if name in (WITH_ACTIVATIONS, WEIGHT_ONLY):
        return name
    awq = "; its weights expect inputs multiplied by pre_quant_scale" if "AWQ" in name else ""
    raise CheckpointError(
        f"{where}: quant_algo {shown(value)} is not supported, only {WITH_ACTIVATIONS} and "
        f"{WEIGHT_ONLY} are{awq}"
    )


def _check_group_size(where: str, size: Any) -> None:
    if size is not None and (type(size) is not int or size != BLOCK):
        raise CheckpointError(f"{where}: group_size must be {BLOCK}, got {shown(size)}")


def _check_kind(where: str, weights: Mapping[str, Any]) -> None:
    bits, kind = weights.get("num_bits"), weights.get("type")
    if type(bits) is not int or (bits, kind) != (4, "float"):
        raise CheckpointError(
            f"{where} has weights of {shown(bits)} bits and type {shown(kind)}; "
            f"NVFP4 has 4 bits and type 'float'"
        )


def _groups(where: str, config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    groups = {} if config.get("config_groups") is None else config["config_groups"]
    if not isinstance(groups, Mapping) or not all(isinstance(g, Mapping) for g in groups.values()):
        raise CheckpointError(
            f"{where}: config_groups must map names to objects, got {shown(groups)}"
        )
    return dict(groups)


def _object(where: str, key: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    return _check_object(f"{where}: {key}", value)


def _check_object(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{where} must be an object, got {shown(value)}")
    return value


def _has_activations(where: str, group: Mapping[str, Any]) -> bool:
    given = group.get("input_activations")
    _object(where, "input_activations", given)
    return given is not None


def _strings(where: str, key: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise CheckpointError(f"{where}: {key} must be a list of strings, got {shown(value)}")
    return tuple(value)


def _kv_cache_of_scheme(where: str, given: Any) -> str | None:
    scheme = _object(where, "kv_cache_scheme", given)
    if given is None:
        return None
    kind, bits = scheme.get("type"), scheme.get("num_bits")
    if not isinstance(kind, str) or type(bits) is not int:
        raise CheckpointError(
            f"{where}: kv_cache_scheme must have a string as type and an integer as num_bits, got "
            f"{shown(kind)} and {shown(bits)}"
        )
    return "fp8" if (kind, bits) == ("float", 8) else f"{kind}{bits}"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no such file.

    NaN and Infinity are accepted: configs of published models have them.
    """
    try:
        text = read_plain(path, MOST_JSON).decode("utf-8")
        value = json.loads(text, parse_int=_integer)
    except FileNotFoundError:
        return {}
    except RecursionError:
        raise CheckpointError(f"{path} cannot be read: its values are nested too deeply") from None
    except (OSError, ValueError) as problem:
        raise CheckpointError(f"{path} cannot be read: {problem}") from problem
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected an object, got {type(value).__name__}")
    return value


def _integer(digits: str) -> int:
    # The time Python takes grows with the square of their number; its own limit differs by version.
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits, more than {_MOST_DIGITS}")
    return int(digits)
