"""A variant's config, a frozen dataclass of plain values, to JSON and back."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from gristmill.log import shown

_LARGEST = 1e300


def config_to_json(config: Any) -> dict[str, Any] | None:
    return None if config is None else dataclasses.asdict(config)


def config_from_json(config_type: type | None, values: Mapping[str, Any] | None) -> Any:
    """An instance of `config_type`; ValueError when names or types do not fit it exactly.

    Exactly, because a config of an older version that happened to fit in part would run a launch
    that nobody measured.
    """
    if config_type is None:
        if values is not None:
            raise ValueError(f"takes no config, got {shown(dict(values))}")
        return None
    if values is None:
        raise ValueError(f"needs a {config_type.__name__}, got none")
    hints = typing.get_type_hints(config_type)
    names = [field.name for field in dataclasses.fields(config_type)]
    if sorted(names) != sorted(values):
        raise ValueError(f"its fields are {shown(sorted(values))}; they must be {names}")
    return config_type(**{name: _checked(name, hints[name], values[name]) for name in names})


def _checked(name: str, hint: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for choice in arguments:
            try:
                return _checked(name, choice, value)
            except ValueError:
                continue
    elif origin is typing.Literal:
        if value in arguments:
            return value
    elif origin is tuple and isinstance(value, (list, tuple)):
        return _checked_tuple(name, arguments, value)
    elif hint is float and type(value) in (int, float) and -_LARGEST <= value <= _LARGEST:
        return float(value)
    elif isinstance(hint, type) and type(value) is hint:
        return value
    raise ValueError(f"{name}={shown(value)} is not of type {getattr(hint, '__name__', hint)}")


def _checked_tuple(
    name: str, arguments: tuple[Any, ...], value: list[Any] | tuple[Any, ...]
) -> tuple[Any, ...]:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_checked(name, arguments[0], item) for item in value)
    if len(arguments) != len(value):
        raise ValueError(f"{name}={shown(value)} must have {len(arguments)} items")
    return tuple(_checked(name, hint, item) for hint, item in zip(arguments, value, strict=True))
