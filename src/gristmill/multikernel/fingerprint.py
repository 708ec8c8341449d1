"""A fingerprint of a user's functions: a row that was measured with other code is stale.

Of a Python function the bytecode counts, with its constants, its defaults and what it closes over:
comments and line numbers do not, and there need not be a source file. Functions of the same module
that it calls (a Triton kernel, say) count as well, and so do constants there whose names are in
capitals. Of what has no Python code only the name is known.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from gristmill.multikernel.problem import PLAIN_VALUES

# Deeper than anybody nests on purpose; beyond it the name counts.
_DEEPEST = 16


def fingerprint(kernels: Mapping[str, Callable[..., Any]], version: str | None) -> str:
    """One for all kernels: when one of them changes, another may be the best."""
    seen: set[int] = set()
    parts = [(name, _of(function, seen)) for name, function in kernels.items()]
    return hashlib.sha256(repr((version, parts)).encode()).hexdigest()[:16]


def _of(value: Any, seen: set[int], depth: int = 0) -> Any:
    """What is known of a callable, or of a value that it holds, as text in tuples.

    `seen`: functions that have been looked into; of these the name is enough.
    """
    depth += 1
    if depth > _DEEPEST:
        return _name(value)
    if isinstance(value, PLAIN_VALUES):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return tuple(_of(item, seen, depth) for item in value)
    if isinstance(value, (set, frozenset)):
        return tuple(sorted(repr(_of(item, seen, depth)) for item in value))
    if isinstance(value, dict):
        return tuple((str(key), _of(item, seen, depth)) for key, item in value.items())
    if isinstance(value, CodeType):
        consts = tuple(_of(item, seen, depth) for item in value.co_consts)
        return (value.co_code.hex(), value.co_names, value.co_varnames, consts)
    if isinstance(value, FunctionType):
        return _of_function(value, seen, depth)
    if isinstance(value, MethodType):
        return _of(value.__func__, seen, depth)
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, value.keywords)
        return tuple(_of(part, seen, depth) for part in parts)
    if isinstance(value, torch.nn.Module):
        return (repr(value), _of(type(value).forward, seen, depth))
    inner = _inner(value)
    if inner is None:
        return _name(value)
    return (type(value).__qualname__, _of(inner, seen, depth))


def _of_function(function: FunctionType, seen: set[int], depth: int) -> Any:
    wrapped = getattr(function, "_torchdynamo_orig_callable", None)
    if wrapped is not None:  # torch.compile: the wrapper is torch's
        return _of(wrapped, seen, depth)
    if id(function) in seen:
        return function.__qualname__
    seen.add(id(function))
    cells = tuple(_cell(cell, seen, depth) for cell in function.__closure__ or ())
    defaults = _of([function.__defaults__, function.__kwdefaults__], seen, depth)
    used = tuple((name, _of(value, seen, depth)) for name, value in _globals(function))
    return (_of(function.__code__, seen, depth), defaults, cells, used)


def _globals(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function uses of its own module: functions, kernels, and constants in capitals."""
    for name in dict.fromkeys(_names(function.__code__)):
        value = function.__globals__.get(name)
        inner = value if isinstance(value, FunctionType) else _inner(value)
        own = isinstance(inner, FunctionType) and inner.__module__ == function.__module__
        if own or (name.isupper() and isinstance(value, (*PLAIN_VALUES, tuple))):
            yield name, value


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for item in code.co_consts:
        if isinstance(item, CodeType):
            yield from _names(item)


def _cell(cell: Any, seen: set[int], depth: int) -> Any:
    try:
        return _of(cell.cell_contents, seen, depth)
    except ValueError:
        return "empty"


def _inner(value: Any) -> Any:
    """The Python function in a callable object: a Triton kernel's `fn`, or a class's `__call__`.

    An autotuned Triton kernel has the kernel for its `fn`.
    """
    function: Any = getattr(value, "fn", None)
    for _ in range(_DEEPEST):
        if not hasattr(function, "fn"):
            break
        function = function.fn
    if callable(function):
        return function
    call = inspect.getattr_static(type(value), "__call__", None)
    return call if isinstance(call, FunctionType) else None


def _name(value: Any) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(named, '__module__', '')}.{named.__qualname__}"
