"""The values that a launch may have: what is enumerated, and what a table may name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

# By the name of a field, or by several with spaces between: its values, or those that go together.
Choices = Mapping[str, Collection[Any]]

_LISTED = 12


def outside(config: Any, choices: Choices) -> str | None:
    """The first value of `config` that is none of `choices`, in words; None if all are.

    Any int may come, of any size.
    """
    for names, allowed in choices.items():
        name, *others = names.split()
        if not others:
            if getattr(config, name) not in allowed:
                return _none_of(name, getattr(config, name), allowed)
        elif tuple(getattr(config, one) for one in (name, *others)) not in allowed:
            return _not_together(config, (name, *others), allowed)
    return None


def short(value: Any) -> str:
    """`value` in a few characters."""
    if isinstance(value, tuple):
        return f"({', '.join(map(short, value))})"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"{'-' if value < 0 else ''}2**{value.bit_length() - 1}, or more"
    return repr(value)


def _not_together(config: Any, names: tuple[str, ...], allowed: Collection[Any]) -> str:
    for at, name in enumerate(names):
        values = sorted({values[at] for values in allowed})
        if getattr(config, name) not in values:
            return _none_of(name, getattr(config, name), values)
    return f"no launch has {', '.join(f'{name}={getattr(config, name)!r}' for name in names)}"


def _none_of(name: str, value: Any, allowed: Collection[Any]) -> str:
    listed = ", ".join(map(short, allowed))
    if len(allowed) > _LISTED:
        listed = f"the {len(allowed)} that there are"
    if len(allowed) == 1:
        return f"{name}={short(value)} is not {listed}"
    return f"{name}={short(value)} is none of {listed}"
