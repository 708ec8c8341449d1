"""Autograd kernels for ops that `torch.library.register_autograd` does not support.

torch accepts gradients only for operators that write to none of their arguments. For all others its
fallback runs the operator and records nothing, so gradients are silently wrong, in compiled graphs
and in eager mode. Each such operator therefore gets its own kernel at the Autograd key, which
compilers trace through as well. Written tensors get a new version before the op runs: a backward
pass that needs their old values raises, as after torch's own in-place ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
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

# The keys that `_AutoDispatchBelowAutograd` excludes, of the devices that ops run on.
_RECORDING = (
    _DispatchKey.AutogradFunctionality,
    _DispatchKey.AutogradCPU,
    _DispatchKey.AutogradCUDA,
    _DispatchKey.ADInplaceOrView,
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
    itself; those of torch.func are unwrapped before it is reached. It also gives written tensors
    their new version, because eager calls bypass the dispatcher.
    """
    written = written_in(overload._schema)
    increment: Callable[..., Any] = _nothing
    if written:
        names = [overload._schema.arguments[at].name for at in written]
        increment = version_incrementer(written, names)

    def autograd(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args, **kwargs):
            refuse_tangents((*args, *kwargs.values()))
            return differentiated(keys, args, kwargs)
        if keys.raw_repr() & _BELOW in _BACKENDS:
            if not torch.is_grad_enabled():
                return implementation(*args, **kwargs)
            # What the kernel itself refers to, such as a parameter, gives the result no history; it
            # may record gradients for itself. A `torch.no_grad()` costs 1 us more.
            torch._C._set_grad_enabled(False)
            try:
                return implementation(*args, **kwargs)
            finally:
                torch._C._set_grad_enabled(True)
        refuse_tangents((*args, *kwargs.values()))
        increment(args, kwargs)
        return below_autograd(overload, keys, args, kwargs)

    library.impl(overload._schema.name, autograd, "Autograd", with_keyset=True)


def _nothing(*args: Any) -> None: ...


def below_autograd(overload: Any, keys: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    """Call the op below autograd, which records nothing inside of it."""
    with torch._C._AutoDispatchBelowAutograd():
        return overload.redispatch(keys & _below, *args, **kwargs)


@contextmanager
def recording() -> Iterator[None]:
    """Record gradients, also within an op that the dispatcher has called below autograd."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _RECORDING:
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def written_in(schema: Any) -> tuple[int, ...]:
    """Positions of the arguments that an op writes to."""
    arguments = enumerate(schema.arguments)
    return tuple(at for at, one in arguments if one.alias_info and one.alias_info.is_write)


# `torch.autograd.graph.increment_version` of several tensors, at half its cost.
increment_versions: Callable[[Sequence[torch.Tensor]], None] = torch._C._increment_version


def version_incrementer(
    written: Sequence[int], names: Sequence[str]
) -> Callable[[Arguments, Mapping[str, Any]], None]:
    """A function of a call's arguments, to be called before it writes to some of them.

    `written`: the positions of these; `names`: the keywords that they may be passed by.
    """
    highest = max(written)
    # A slice, so that one position gives a tuple as well.
    pick = itemgetter(*written) if len(written) > 1 else itemgetter(slice(highest, highest + 1))

    def increment(args: Arguments, kwargs: Mapping[str, Any]) -> None:
        if len(args) > highest:
            try:
                increment_versions(pick(args))
            except (RuntimeError, TypeError):  # not given, or a collection of tensors
                increment_each(args, kwargs)
        else:
            increment_each(args, kwargs)

    def increment_each(args: Arguments, kwargs: Mapping[str, Any]) -> None:
        values = [args[at] for at in written if at < len(args)]
        values += [kwargs[name] for name in names if name in kwargs]
        increment_versions([one for value in values for one in tensors_in(value)])

    return increment


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """A tensor, or those in lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(one)


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
