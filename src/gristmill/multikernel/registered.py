"""A MultiKernel as a torch op, `torch.ops.gristmill_user.<name>`.

torch cannot take back what was defined (a graph may hold it), so an op is defined once for its
name, knows nothing but that name, and finds the MultiKernel when it runs. A later MultiKernel of
the same name and schema thus takes over; one that is gone leaves an op that says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gristmill.errors import ArgumentError, DtypeError, NoGradientError, VariantUnavailable
from gristmill.locks import Lock
from gristmill.multikernel.live import live

if TYPE_CHECKING:
    from gristmill.multikernel.multikernel import MultiKernel

NAMESPACE = "gristmill_user"

Function = Callable[..., Any]

_LIBRARIES: list[torch.library.Library] = []
_DEFINED: dict[str, str] = {}
_LOCK = Lock()


@dataclass(frozen=True)
class Gradient:
    """As `torch.library.register_autograd` takes it."""

    backward: Function
    setup_context: Function | None


def checked_schema(
    name: str,
    schema: Any,
    fake: Any,
    mutates: Sequence[str] | None,
    kernels: Mapping[str, Function],
) -> Any:
    """The schema, parsed; an error where it does not fit the rest."""
    where = f"MultiKernel {name!r}"
    if not isinstance(schema, str):
        raise DtypeError(f"{where}: schema must be a string, got {type(schema).__name__}")
    if fake is None:
        raise ArgumentError(
            f"{where}: schema is given without fake, a function of the arguments that gives empty "
            f"tensors like the result; torch.compile needs both"
        )
    if not callable(fake):
        raise DtypeError(f"{where}: fake must be callable, got {type(fake).__name__}")
    try:
        parsed = torch._C.parse_schema(f"{NAMESPACE}::{name}{schema}")
    except RuntimeError as error:
        raise ArgumentError(
            f'{where}: schema must read like "(Tensor x, Tensor(a!) y, float eps) -> Tensor", '
            f"got {schema!r}: {error}"
        ) from error
    if not schema.lstrip().startswith("("):
        raise ArgumentError(
            f"{where}: schema must begin with the arguments in parentheses, as the name is that "
            f"of the MultiKernel, got {schema!r}"
        )
    written = written_by(parsed)
    if mutates is not None and sorted(mutates) != sorted(written):
        raise ArgumentError(
            f"{where}: mutates is {sorted(mutates)}, but schema writes to {sorted(written)}: "
            f"an argument that is written to reads Tensor(a!) there"
        )
    _check_kernels(where, parsed, kernels)
    return parsed


def written_by(schema: Any) -> list[str]:
    return [one.name for one in schema.arguments if one.alias_info and one.alias_info.is_write]


def is_functional(schema: Any) -> bool:
    """Whether an op gives something, and that and its arguments are nobody else's."""
    both = [*schema.arguments, *schema.returns]
    return bool(schema.returns) and all(one.alias_info is None for one in both)


def _check_kernels(where: str, schema: Any, kernels: Mapping[str, Function]) -> None:
    """Every kernel takes what the schema says, called as the op calls it."""
    positional = [None for one in schema.arguments if not one.kwarg_only]
    named = {one.name: None for one in schema.arguments if one.kwarg_only}
    for kernel, function in kernels.items():
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            continue
        try:
            signature.bind(*positional, **named)
        except TypeError as error:
            raise ArgumentError(
                f"{where}: kernel {kernel!r}{signature} does not take the arguments of "
                f"schema {schema}: {error}"
            ) from error


def define(name: str, schema: Any) -> Any:
    """Make the torch op, or find the one of an earlier MultiKernel; gives its overload."""
    with _LOCK:
        known = _DEFINED.get(name)
        if known is None:
            _define(name, schema)
            _DEFINED[name] = str(schema)
        elif known != str(schema):
            raise ArgumentError(
                f"MultiKernel {name!r}: schema {schema} differs from that of an earlier one of "
                f"this name, {known}, and torch keeps the first for as long as the process lives; "
                f"take another name"
            )
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _define(name: str, schema: Any) -> None:
    if not _LIBRARIES:
        _LIBRARIES.append(torch.library.Library(NAMESPACE, "FRAGMENT"))
    library = _LIBRARIES[0]
    text = str(schema).partition("::")[2]
    library.define(text, tags=(torch.Tag.pt2_compliant_tag,))

    def implementation(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _completed(schema, args, kwargs)
        return _find(name).run(*args, **kwargs)

    def fake(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _completed(schema, args, kwargs)
        function: Any = _find(name).fake
        return function(*args, **kwargs)

    library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    if not is_functional(schema):
        return  # torch takes no gradient for it

    def setup_context(ctx: Any, inputs: Any, output: Any, **keyword_only: Any) -> None:
        ctx.gristmill_gradient = gradient = _find(name).gradient
        if gradient is not None and gradient.setup_context is not None:
            gradient.setup_context(ctx, inputs, output, **keyword_only)

    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.gristmill_gradient is None:
            raise NoGradientError(
                f"MultiKernel {name!r}: as a torch op it has no gradient; give one by "
                f"register_autograd(backward, setup_context=...), or call it under torch.no_grad()"
            )
        return ctx.gristmill_gradient.backward(ctx, *gradients)

    torch.library.register_autograd(
        f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=library
    )


def _find(name: str) -> MultiKernel:
    found = live(name)
    if found is None or found.op is None:
        raise VariantUnavailable(
            f"torch.ops.{NAMESPACE}.{name}: its MultiKernel is gone; keep it for as long as the op "
            f"is called"
        )
    return found


def _completed(
    schema: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The dispatcher leaves out arguments that equal their defaults: trailing ones and keywords."""
    positional = [one for one in schema.arguments if not one.kwarg_only]
    named = {one.name: one.default_value for one in schema.arguments if one.kwarg_only}
    return (*args, *(one.default_value for one in positional[len(args) :])), {**named, **kwargs}
