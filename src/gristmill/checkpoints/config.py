"""What a checkpoint says of its own quantization, in any of the three places it is said."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from gristmill.checkpoints.names import COMPRESSED_TENSORS, FUSED, MODELOPT, shards_of
from gristmill.errors import CheckpointError
from gristmill.formats.nvfp4.tensor import BLOCK

CONFIG_FILE = "config.json"
MODELOPT_FILE = "hf_quant_config.json"
WITH_ACTIVATIONS, WEIGHT_ONLY = "NVFP4", "W4A16_NVFP4"
PACKED_FORMAT = "nvfp4-pack-quantized"


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
    """

    producer: str
    activations: bool
    group_size: int = BLOCK
    ignore: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    kv_cache: str | None = None

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> QuantizationConfig:
        """From the ``quantization_config`` of a config.json."""
        where = "quantization_config"
        if "quantization" in config:
            return cls.from_hf_quant_config(config)
        method = str(config.get("quant_method", "")).lower()
        if method == COMPRESSED_TENSORS.producer:
            return _compressed_tensors(config)
        if not method.startswith(MODELOPT.producer):
            raise CheckpointError(
                f"{where}: quant_method must be 'modelopt' or 'compressed-tensors', "
                f"got {config.get('quant_method')!r}"
            )
        activations = _algorithm(where, config.get("quant_algo")) == WITH_ACTIVATIONS
        groups = _groups(where, config)
        for name, group in groups.items():
            weights = _of(group, "weights")
            _check_group_size(f"{where}: group {name!r}", weights.get("group_size"))
            _check_kind(f"{where}: group {name!r}", {"num_bits": 4, "type": "float", **weights})
        if groups and all(group.get("input_activations") is None for group in groups.values()):
            activations = False
        _check_group_size(where, config.get("group_size"))
        return cls(
            producer=MODELOPT.producer,
            activations=activations,
            ignore=_strings(where, "ignore", config.get("ignore")),
            kv_cache=_kv_cache_of_scheme(config.get("kv_cache_scheme")),
        )

    @classmethod
    def from_hf_quant_config(cls, config: Mapping[str, Any]) -> QuantizationConfig:
        """From what stands in ModelOpt's hf_quant_config.json."""
        where = MODELOPT_FILE
        quantization = config.get("quantization")
        if not isinstance(quantization, Mapping):
            raise CheckpointError(f"{where}: there is no 'quantization' in it, got {list(config)}")
        algorithm = _algorithm(where, quantization.get("quant_algo"))
        _check_group_size(where, quantization.get("group_size"))
        kv_cache = quantization.get("kv_cache_quant_algo")
        return cls(
            producer=MODELOPT.producer,
            activations=algorithm == WITH_ACTIVATIONS,
            ignore=_strings(where, "exclude_modules", quantization.get("exclude_modules")),
            kv_cache=str(kv_cache).lower() if kv_cache else None,
        )

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> QuantizationConfig | None:
        """From config.json, else from hf_quant_config.json; None where neither speaks of it.

        In a config.json of several models, that of the text model counts.
        """
        folder = Path(folder)
        content = read_json(folder / CONFIG_FILE)
        config = content.get("quantization_config")
        if config is None:
            config = _of(content, "text_config").get("quantization_config")
        if config is not None:
            return _told(folder / CONFIG_FILE, cls.from_dict, config)
        config = read_json(folder / MODELOPT_FILE)
        return _told(folder / MODELOPT_FILE, cls.from_hf_quant_config, config) if config else None

    def is_ignored(self, module: str, fused: Mapping[str, Sequence[str]] = FUSED) -> bool:
        """Whether a module was left as it was.

        `fused` names the modules that are stored as several; those must all be ignored, or none.

        Patterns are names, wildcards, or regular expressions after ``re:``. In a list of ModelOpt a
        name also speaks for what lies below it, and may be some inner part of the whole name, as
        older exports wrote it.
        """
        if self._is_named(module, self.ignore):
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
        # A word with a capital is the class of a layer, and all that matter here are "Linear".
        all_linear = not self.targets or any(name[:1].isupper() for name in self.targets)
        return self._is_named(module, self.ignore) or not (
            all_linear or self._is_named(module, self.targets)
        )

    def _is_named(self, module: str, patterns: tuple[str, ...]) -> bool:
        inner = self.producer == MODELOPT.producer
        return any(
            _matches(module, pattern) or (inner and f".{pattern.strip('.')}." in f".{module}.")
            for pattern in patterns
        )


def _matches(module: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error as problem:
            raise CheckpointError(
                f"ignore: {pattern!r} is no regular expression: {problem}"
            ) from problem
    # With the dot: a pattern that takes everything below a module takes the module.
    return fnmatchcase(module, pattern) or fnmatchcase(f"{module}.", pattern)


def _compressed_tensors(config: Mapping[str, Any]) -> QuantizationConfig:
    where = "quantization_config"
    groups = _groups(where, config)
    if not groups:
        raise CheckpointError(f"{where}: there are no config_groups")
    if config.get("transform_config"):
        raise CheckpointError(f"{where}: weights under a transform_config are not supported")
    activations = False
    targets: list[str] = []
    for name, group in groups.items():
        here = f"{where}: group {name!r}"
        stored_as = group.get("format") or config.get("format")
        if stored_as not in (None, PACKED_FORMAT):
            raise CheckpointError(
                f"{here} has format {stored_as!r}; only {PACKED_FORMAT!r} is read"
            )
        weights = _of(group, "weights")
        _check_kind(here, weights)
        _check_group_size(here, weights.get("group_size"))
        for key, right in (("strategy", "tensor_group"), ("symmetric", True)):
            if weights.get(key, right) != right:
                raise CheckpointError(f"{here} has {key} {weights[key]!r}; NVFP4 has {right!r}")
        activations |= group.get("input_activations") is not None
        targets += _strings(here, "targets", group.get("targets"))
    return QuantizationConfig(
        producer=COMPRESSED_TENSORS.producer,
        activations=activations,
        ignore=_strings(where, "ignore", config.get("ignore")),
        targets=tuple(targets),
        kv_cache=_kv_cache_of_scheme(config.get("kv_cache_scheme")),
    )


def _algorithm(where: str, value: Any) -> str:
    if not value:
        raise CheckpointError(f"{where}: quant_algo is missing")
    name = str(value).upper()
    if name in (WITH_ACTIVATIONS, WEIGHT_ONLY):
        return name
    awq = "; its weights expect inputs multiplied by pre_quant_scale" if "AWQ" in name else ""
    raise CheckpointError(
        f"{where}: quant_algo {value!r} is not supported, only {WITH_ACTIVATIONS} and "
        f"{WEIGHT_ONLY} are{awq}"
    )


def _check_group_size(where: str, size: Any) -> None:
    if size is not None and str(size) != str(BLOCK):
        raise CheckpointError(f"{where}: group_size must be {BLOCK}, got {size!r}")


def _check_kind(where: str, weights: Mapping[str, Any]) -> None:
    kind = weights.get("num_bits"), weights.get("type")
    if kind != (4, "float"):
        raise CheckpointError(
            f"{where} has weights of {kind[0]} bits and type {kind[1]!r}; "
            f"NVFP4 has 4 bits and type 'float'"
        )


def _groups(where: str, config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(g, Mapping) for g in groups.values()):
        raise CheckpointError(f"{where}: config_groups must map names to objects, got {groups!r}")
    return dict(groups)


def _of(group: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = group.get(key)
    return value if isinstance(value, Mapping) else {}


def _strings(where: str, key: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise CheckpointError(f"{where}: {key} must be a list of strings, got {value!r}")
    return tuple(value)


def _kv_cache_of_scheme(scheme: Any) -> str | None:
    if not isinstance(scheme, Mapping):
        return None
    kind, bits = scheme.get("type"), scheme.get("num_bits")
    return "fp8" if (kind, bits) == ("float", 8) else f"{kind}{bits}"


def _told(path: Path, parse: Any, config: Any) -> QuantizationConfig:
    """An error of `parse`, with the file it is about."""
    try:
        if not isinstance(config, Mapping):
            raise CheckpointError(f"expected an object, got {config!r}")
        parsed: QuantizationConfig = parse(config)
    except CheckpointError as problem:
        raise CheckpointError(f"{path}: {problem}") from problem
    return parsed


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as problem:
        raise CheckpointError(f"{path} cannot be read: {problem}") from problem
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected an object, got {type(value).__name__}")
    return value
