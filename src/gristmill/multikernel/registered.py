"""A MultiKernel as a torch op, `torch.ops.gristmill_user.<name>`.

torch cannot take back what was defined (a graph may hold it), so an op is defined once for its
name, knows nothing but that name, and finds the MultiKernel when it runs. A later MultiKernel of
the same name and schema thus takes over; one that is gone leaves an op that says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gristmill.errors import ArgumentError, DtypeError, VariantUnavailable
from gristmill.locks import Lock
from gristmill.multikernel.gradients import Differentiable
from gristmill.multikernel.live import live
from gristmill.ops import written_views
from gristmill.ops.autograd import define_autograd, written_in
from gristmill.ops.direct import refuse_tangents

if TYPE_CHECKING:
    from gristmill.multikernel.multikernel import MultiKernel

NAMESPACE = "gristmill_user"

Function = Callable[..., Any]

_LIBRARIES: list[torch.library.Library] = []
_DEFINED: dict[str, str] = {}
_LOCK = Lock()


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
    if any(one.alias_info is not None for one in parsed.returns):
        raise ArgumentError(
            f"{where}: a result must not alias an argument, got schema {schema!r}: torch.compile "
            f"does not support custom operators that return an argument; remove the result, as the "
            f"caller has the argument"
        )
    for one in parsed.arguments:
        if isinstance(one.default_value, int) and any(
            kind in str(one.real_type) for kind in ("Layout", "MemoryFormat")
        ):
            raise ArgumentError(
                f"{where}: {one.name} must have no default, as torch would pass a number in its "
                f"place, got schema {schema!r}"
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
    return [schema.arguments[at].name for at in written_in(schema)]


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

    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    differentiable = Differentiable(name, overload, lambda: _find(name).gradient)
    completed = differentiable.completed
    refuse = partial(refuse_tangents, name, namespace=NAMESPACE, instead="the MultiKernel itself")

    def implementation(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = completed(args, kwargs)
        refuse((*args, *kwargs.values()))
        return _find(name).run(*args, **kwargs)

    def fake(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = completed(args, kwargs)
        function: Any = _find(name).fake
        return function(*args, **kwargs)

    library.impl(name, implementation, "CompositeExplicitAutograd")
    written_views.define(library, name, overload)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    define_autograd(library, overload, implementation, differentiable, refuse)


def _find(name: str) -> MultiKernel:
    found = live(name)
    if found is None or found.op is None:
        raise VariantUnavailable(
            f"torch.ops.{NAMESPACE}.{name}: its MultiKernel is gone; keep it for as long as the op "
            f"is called"
        )
    return found
