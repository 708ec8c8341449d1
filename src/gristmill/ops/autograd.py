"""Autograd kernels for ops that `torch.library.register_autograd` does not support.

torch accepts gradients only for operators that write to none of their arguments. For all others its
fallback runs the operator and records nothing, so gradients are silently wrong, in compiled graphs
and in eager mode. Each such operator therefore gets its own kernel at the Autograd key, which
compilers trace through as well.
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

# The keys of a call below autograd if only a backend is left: no mode, transform, subclass, lazy
# tensor or meta tensor. Compared as bits, because key sets take 0.4 us longer.
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
    """Register the kernel of `overload` at the Autograd key.

    `differentiated(keys, args, kwargs)` is called if an argument requires a gradient. All other
    calls run `implementation`, the kernel for real tensors: directly if no other key is left, since
    a second pass through the dispatcher costs a microsecond. `implementation` rejects dual numbers
    itself; those of torch.func are unwrapped before it is reached.
    """

    def autograd(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args, **kwargs):
            refuse_tangents((*args, *kwargs.values()))
            return differentiated(keys, args, kwargs)
        if keys.raw_repr() & _BELOW in _BACKENDS:
            if not torch.is_grad_enabled():
                return implementation(*args, **kwargs)
            # What the kernel itself refers to, such as a parameter, gives the result no history.
            with torch._C._AutoDispatchBelowAutograd():
                return implementation(*args, **kwargs)
        refuse_tangents((*args, *kwargs.values()))
        return below_autograd(overload, keys, args, kwargs)

    library.impl(overload._schema.name, autograd, "Autograd", with_keyset=True)


def below_autograd(overload: Any, keys: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    """Call the op below autograd, which records nothing inside of it."""
    with torch._C._AutoDispatchBelowAutograd():
        return overload.redispatch(keys & _below, *args, **kwargs)


def written_in(schema: Any) -> tuple[int, ...]:
    """Positions of the arguments that an op writes to."""
    arguments = enumerate(schema.arguments)
    return tuple(at for at, one in arguments if one.alias_info and one.alias_info.is_write)


class Refusal:
    """Stands in for an autograd function if an op has no gradient: raises when applied."""

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
