"""Checks of a config: the values that its fields may have, and the shared memory that it needs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from gristmill.log import shown

if TYPE_CHECKING:
    from gristmill.select.device import Device

# From the name of a field to its values; from several names, separated by spaces, to tuples of
# values that go together.
Choices = Mapping[str, Collection[Any]]

_MOST_LISTED = 12


def why_unlisted(config: Any, choices: Choices) -> str | None:
    """The first value of `config` that is not in `choices`, and what is; None if all are."""
    for names, allowed in choices.items():
        fields = names.split()
        found = attrgetter(*fields)(config)
        if found in allowed:
            continue
        if len(fields) > 1:
            return _why_apart(fields, found, allowed)
        return f"{names}={shown(found)} is not {_listed(allowed)}"
    return None


def why_no_room(shared: int, device: Device) -> str | None:
    """Why a block cannot have so many bytes of shared memory; None if it can."""
    room = device.shared_per_block
    if shared <= room:
        return None
    return f"needs {shared} bytes of shared memory, and a block has {room}"


def _why_apart(fields: list[str], values: tuple[Any, ...], allowed: Collection[Any]) -> str:
    """Name the first field whose value is in no allowed combination with the fields before it."""
    for at, value in enumerate(values):
        left = {one[at] for one in allowed if one[:at] == values[:at]}
        if value not in left:
            break
    pairs = [f"{name}={shown(one)}" for name, one in zip(fields[:at], values, strict=False)]
    beside = f" with {', '.join(pairs)}" if pairs else ""
    return f"{fields[at]}={shown(value)} is not {_listed(left)}{beside}"


def _listed(allowed: Collection[Any]) -> str:
    if not allowed:
        return "possible here"
    if isinstance(allowed, range) and len(allowed) > 2:
        step = f"a multiple of {allowed.step} " if allowed.step > 1 else ""
        return f"{step}from {allowed[0]} to {allowed[-1]}"
    if len(allowed) > _MOST_LISTED:
        return f"one of the {len(allowed)} known ones"
    *others, last = map(shown, sorted(allowed))
    return f"{', '.join(others)} or {last}" if others else last
