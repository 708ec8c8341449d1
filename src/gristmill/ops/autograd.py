"""What autograd does at an op that torch itself takes no gradient for.

torch knows a gradient for operators that write to none of their arguments. For all others its own
fallback runs the operator and records nothing, so that gradients come out wrong without a word: in
a compiled graph, where the kernel is a black box, and in eager mode. Every operator of ours
therefore has a kernel of its own at the Autograd key, which is also what a compiler traces through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from gristmill.errors import NoGradientError

Function = Callable[..., Any]
Arguments = tuple[Any, ...]
Differentiated = Callable[[Any, Arguments, Mapping[str, Any]], Any]

_DispatchKey = torch._C.DispatchKey
_below: Any = torch._C._after_autograd_keyset
_BELOW: int = _below.raw_repr()

# What is left of a call's keys below autograd where nothing but a backend is asked: no mode, no
# transform, no subclass, no lazy bit of a tensor, no meta tensor. As bits: sets take 0.4 us more.
_BACKENDS = frozenset(
    torch._C.DispatchKeySet(key).raw_repr() for key in (_DispatchKey.CPU, _DispatchKey.CUDA)
)


def define_autograd(
    library: torch.library.Library,
    overload: Any,
    implementation: Function,
    differentiated: Differentiated,
    refuse_tangents: Callable[[Arguments], None],
) -> None:
    """Register what happens to calls of `overload` at the Autograd key.

    `differentiated(keys, args, kwargs)` is called where autograd must see the call. All others go
    on to `implementation`, the op's kernel for real tensors: at once where nothing else is asked
    between the two, as a second way through the dispatcher costs a microsecond. It refuses dual
    numbers itself; those of torch.func are gone when it is reached.
    """

    def autograd(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args, **kwargs):
            refuse_tangents((*args, *kwargs.values()))
            return differentiated(keys, args, kwargs)
        if keys.raw_repr() & _BELOW in _BACKENDS:
            return implementation(*args, **kwargs)
        refuse_tangents((*args, *kwargs.values()))
        return below_autograd(overload, keys, args, kwargs)

    library.impl(overload._schema.name, autograd, "Autograd", with_keyset=True)


def below_autograd(overload: Any, keys: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    """The call as it is without autograd, which records nothing that happens in it."""
    with torch._C._AutoDispatchBelowAutograd():
        return overload.redispatch(keys & _below, *args, **kwargs)


def written_in(schema: Any) -> tuple[int, ...]:
    """Positions of the arguments that an op writes to."""
    arguments = enumerate(schema.arguments)
    return tuple(at for at, one in arguments if one.alias_info and one.alias_info.is_write)


class Refusal:
    """In place of an autograd function, for an op that has no gradient: raises when applied."""

    def __init__(self, name: str, instead: str | None) -> None:
        way_out = "call it under torch.no_grad(), or detach the argument"
        self._message = (
            f"{name}: this op has no gradient, and an argument requires one; {way_out}"
            f"{f', or use {instead}' if instead else ''}"
        )

    def apply(self, *args: Any) -> NoReturn:
        raise NoGradientError(self._message)

    def differentiated(self, keys: Any, args: Arguments, kwargs: Mapping[str, Any]) -> NoReturn:
        self.apply()
