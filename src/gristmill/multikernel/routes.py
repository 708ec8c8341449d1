"""How a call finds its plan: a key of cheap metadata, made by code written out for that call.

A loop over arguments costs a microsecond more at every call. What is written out holds for one kind
of call: so many positional arguments, these keywords, these types; it gives False for any other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch.nn import Parameter

from gristmill.multikernel.problem import PLAIN_VALUES
from gristmill.ops.direct import needs_grad
from gristmill.ops.plan_key import are_deterministic
from gristmill.select.overrides import token

Route = Callable[..., Hashable]

_NUMBERS = count(1)

# torch.device costs twice its index; one process has no two kinds of accelerators.
_TENSOR = "{0}.dtype, {0}.shape, {0}.is_contiguous() or {0}.stride(), {0}.get_device()"


def kind_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    """What a route holds for."""
    if not kwargs:
        return tuple(map(type, args))
    return (*map(type, args), *kwargs, *map(type, kwargs.values()))


def write_route(
    args: Sequence[Any], kwargs: Mapping[str, Any], key: Callable[..., Any] | None
) -> Route:
    """The route of calls like this one; TypeError for names that cannot be written out.

    Its own names end with an underscore, so that no keyword of the call hides them.
    `key`: the user's own; where it gives a tuple, values of arguments do not count.
    """
    positional = [f"argument_{at}_" for at in range(len(args))]
    if not all(name.isidentifier() and not name.endswith("_") for name in kwargs):
        raise TypeError(f"{list(kwargs)} cannot be written out")
    named = [*zip(positional, args, strict=True), *kwargs.items()]
    checks, parts, values, tensors = (
        [],
        [str(next(_NUMBERS)), "token_()", "deterministic_()"],
        [],
        [],
    )
    for name, value in named:
        kind = type(value)
        if kind is torch.Tensor or kind is Parameter:
            checks.append(f"({name}.__class__ is Tensor_ or {name}.__class__ is Parameter_)")
            parts.append(_TENSOR.format(name))
            tensors.append(name)
        elif value is None:
            checks.append(f"{name} is None")
        elif isinstance(value, (list, tuple, dict)):
            parts.append(f"nested_({name})")
        elif isinstance(value, PLAIN_VALUES):
            values.append(f"{name}.__class__, {name}")
        else:
            parts.append(f"{name}.__class__")
    if tensors:
        # Nearly always all are aligned, and none is at 0, where the empty and meta tensors are.
        joined = " | ".join(f"(at_{at}_ := {name}.data_ptr())" for at, name in enumerate(tensors))
        somewhere = " and ".join(f"at_{at}_" for at in range(len(tensors)))
        unusual = f"({joined}) & 15 or not ({somewhere})"
        parts.append(f"({unusual}) and places_({', '.join(tensors)})")
        wanted = " or ".join(f"{name}.requires_grad" for name in tensors)
        parts.append(f"grad_() and ({wanted})")
    if key is None:
        parts += values
    else:
        passed = ", ".join([*positional, *(f"{name}={name}" for name in kwargs)])
        parts.append(f"sized_(key_({passed}), ({''.join(f'{one}, ' for one in values)}))")
    head = ", ".join([*positional, *(["*", *kwargs] if kwargs else [])])
    body = " and ".join([*checks, f"({', '.join(parts)},)"])
    names = {
        "Tensor_": torch.Tensor,
        "Parameter_": Parameter,
        "token_": token,
        "deterministic_": are_deterministic,
        "grad_": torch.is_grad_enabled,
        "nested_": nested,
        "places_": _places,
        "sized_": _sized,
        "key_": key,
    }
    try:
        route: Route = eval(f"lambda {head}: {body}", names)
    except SyntaxError as error:  # a keyword of Python
        raise TypeError(f"{list(kwargs)} cannot be written out") from error
    return route


def nested(value: Any) -> Hashable:
    """The part of a key that a list, a tuple or a dict is."""
    if isinstance(value, torch.Tensor):
        if type(value) is not torch.Tensor and type(value) is not Parameter:
            raise TypeError("a tensor of another kind: its metadata does not say all")
        strides = value.is_contiguous() or value.stride()
        device, place = value.get_device(), _places(value)
        return (value.dtype, value.shape, strides, device, place, needs_grad(value))
    if isinstance(value, dict):
        return ("dict", *value, *map(nested, value.values()))
    if isinstance(value, (list, tuple)):
        return tuple(map(nested, value))
    if isinstance(value, PLAIN_VALUES):
        return (type(value), value)
    return (type(value),)


def _places(*tensors: torch.Tensor) -> Hashable:
    """Alignments, and which tensors have no memory: these have the same index as the CPU's."""
    return tuple((tensor.data_ptr() & 15, tensor.is_meta) for tensor in tensors)


def _sized(key: Any, values: tuple[Any, ...]) -> Hashable:
    found: Hashable = key if isinstance(key, tuple) else (key, values)
    return found
