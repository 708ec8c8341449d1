"""What a MultiKernel is made of, checked when it is made."""

from __future__ import annotations

import inspect
import keyword
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from gristmill.errors import ArgumentError, DtypeError
from gristmill.ops.registry import OPS
from gristmill.select.problem import HINTS

Function = Callable[..., Any]


def checked_name(name: Any) -> str:
    if not isinstance(name, str):
        raise DtypeError(f"MultiKernel: name must be a string, got {type(name).__name__}")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ArgumentError(
            f"MultiKernel: name must be a Python identifier, as the torch op has it for a name, "
            f"got {name!r}"
        )
    if name in OPS:
        raise ArgumentError(
            f"MultiKernel: name {name!r} is that of an op of gristmill, and gristmill.use could "
            f"not tell them apart; take another name"
        )
    return name


def checked_kernels(name: str, kernels: Any) -> dict[str, Function]:
    where = f"MultiKernel {name!r}"
    if not isinstance(kernels, Mapping):
        raise DtypeError(
            f"{where}: kernels must be a dict of names and callables, got {type(kernels).__name__}"
        )
    if not kernels:
        raise ArgumentError(f"{where}: kernels is empty; give at least one callable")
    for one, function in kernels.items():
        if not isinstance(one, str) or not one or any(c in one for c in ":, \t\n"):
            raise ArgumentError(
                f"{where}: a kernel's name must be a string without spaces, commas and colons, "
                f"as in GRISTMILL_USE={name}:fast; got {one!r}"
            )
        if not callable(function):
            raise DtypeError(
                f"{where}: kernel {one!r} must be callable, got {type(function).__name__}"
            )
    return dict(kernels)


def checked_hints(name: str, hints: Any) -> tuple[int, ...]:
    """Ascending, each once."""
    if hints is None:
        return HINTS
    where = f"MultiKernel {name!r}: hints"
    if isinstance(hints, (str, bytes)) or not isinstance(hints, Iterable):
        raise DtypeError(f"{where} must be a list of ints, got {type(hints).__name__}")
    found = list(hints)
    for hint in found:
        if isinstance(hint, bool) or not isinstance(hint, int) or hint < 1:
            raise ArgumentError(f"{where} must be positive ints, got {hint!r}")
    if not found:
        raise ArgumentError(f"{where} is empty; give at least one size, or None for {HINTS}")
    return tuple(sorted(set(found)))


def checked_names(name: str, argument: str, given: Any, kernels: Iterable[str]) -> frozenset[str]:
    """A list of kernels' names, or a dict by them."""
    known = list(kernels)
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise DtypeError(
            f"MultiKernel {name!r}: {argument} must be a list of kernels' names, got {given!r}"
        )
    for one in given:
        if one not in known:
            raise ArgumentError(
                f"MultiKernel {name!r}: {argument} names {one!r}, which is no kernel of it; "
                f"there are: {', '.join(known)}"
            )
    return frozenset(given)


def checked_supports(name: str, supports: Any, kernels: Iterable[str]) -> dict[str, Function]:
    if supports is None:
        return {}
    if not isinstance(supports, Mapping):
        raise DtypeError(
            f"MultiKernel {name!r}: supports must be a dict of kernels' names and predicates, "
            f"got {type(supports).__name__}"
        )
    checked_names(name, "supports", supports, kernels)
    for one, predicate in supports.items():
        if not callable(predicate):
            raise DtypeError(
                f"MultiKernel {name!r}: supports[{one!r}] must be callable, "
                f"got {type(predicate).__name__}"
            )
    return dict(supports)


def refusal(name: str, kernel: str, answer: Any) -> str | None:
    """What a predicate of `supports` says: None or True, or why not; False gives no reason."""
    if answer is None or answer is True:
        return None
    if answer is False:
        return "its predicate in supports= says no"
    if isinstance(answer, str):
        return answer
    raise DtypeError(
        f"MultiKernel {name!r}: supports[{kernel!r}] must give None, a bool or a reason as a "
        f"string, got {type(answer).__name__}"
    )


def signature_of(kernels: Mapping[str, Function]) -> inspect.Signature | None:
    """The signature that the kernels have in common, by the first that tells."""
    for function in kernels.values():
        told = function.forward if isinstance(function, torch.nn.Module) else function
        try:
            return inspect.signature(told)
        except (TypeError, ValueError):
            continue  # a builtin
    return None


def check_call(
    name: str, signature: inspect.Signature | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    try:
        if signature is not None:
            signature.bind(*args, **kwargs)
    except TypeError as error:
        raise DtypeError(f"MultiKernel {name!r}: {error}; it takes {signature}") from None


def checked_mutates(name: str, mutates: Any, signature: inspect.Signature | None) -> list[str]:
    """The arguments that kernels write to, by name where the signature has names."""
    if mutates is None:
        return []
    where = f"MultiKernel {name!r}: mutates"
    if isinstance(mutates, (str, bytes)) or not isinstance(mutates, Iterable):
        raise DtypeError(f"{where} must be a list of names or positions, got {mutates!r}")
    kinds = inspect.Parameter
    parameters = list(signature.parameters.values()) if signature else []
    known = [
        one.name for one in parameters if one.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
    ]
    positional = _positional(signature)
    collecting = [one.name for one in parameters if one.name not in known]  # *args, **kwargs
    is_open = signature is None or bool(collecting)
    found = []
    for one in mutates:
        if isinstance(one, bool) or not isinstance(one, (str, int)):
            raise DtypeError(f"{where} must have names or positions of arguments, got {one!r}")
        if one in collecting:
            raise ArgumentError(
                f"{where} names {one!r}, which collects any number of arguments; give their "
                f"positions or keywords"
            )
        inside = one in known if isinstance(one, str) else 0 <= one < len(positional)
        if not inside and not (is_open and (isinstance(one, str) or one >= 0)):
            raise ArgumentError(
                f"{where} names {one!r}, which is no argument of the kernels; "
                f"there are: {', '.join(known) or 'none'}"
            )
        found.append(positional[one] if isinstance(one, int) and inside else str(one))
    return found


def places_of(
    names: Iterable[str], schema: Sequence[str] | None, signature: inspect.Signature | None
) -> tuple[list[int], list[str]]:
    """Where arguments stand in a call, sys.maxsize for those that have no position, and the
    keywords that they may be passed by.

    `schema`: its positional arguments. The functions may have other names for them, which are the
    keywords: the dispatcher passes these arguments by position.
    """
    own = _positional(signature)
    known = own if schema is None else schema
    positions, keywords = [], []
    for name in names:
        at = known.index(name) if name in known else sys.maxsize
        if schema is None and name.isdecimal():
            at = int(name)
        positions.append(at)
        keywords.append(own[at] if at < len(own) else name)
    return positions, keywords


def _positional(signature: inspect.Signature | None) -> list[str]:
    parameters = signature.parameters.values() if signature else ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [one.name for one in parameters if one.kind in kinds]


def checked_size(name: str, found: Any) -> tuple[int, tuple[Any, ...] | None]:
    """What `key` gave, as the size and the words."""
    words = None
    size = found
    if isinstance(found, tuple) and found:
        size, words = found[0], found[1:]
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise DtypeError(
            f"MultiKernel {name!r}: key must give an int that is not negative, or a tuple that "
            f"begins with one, got {found!r}"
        )
    for word in words or ():
        if not isinstance(word, (int, float, str, type(None), torch.dtype)):
            raise DtypeError(
                f"MultiKernel {name!r}: after the size, key must give ints, floats, strings, "
                f"dtypes or None, got {word!r}"
            )
    return int(size), words


def check_version(name: str, version: Any) -> None:
    if version is not None and not isinstance(version, str):
        raise DtypeError(
            f"MultiKernel {name!r}: version must be a string, got {type(version).__name__}"
        )


def check_key(name: str, key: Any) -> None:
    if key is not None and not callable(key):
        raise DtypeError(
            f"MultiKernel {name!r}: key must be a function of the arguments that gives the size, "
            f"got {type(key).__name__}"
        )
