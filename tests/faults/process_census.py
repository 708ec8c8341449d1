"""What gristmill holds on to for as long as the process lives: its containers, caches and locks.

Found by walking from the globals of its modules, through its own objects, containers, closures and
functions that remember their results. What belongs to others (torch, ctypes) is not looked into.
"""

from __future__ import annotations

import collections
import functools
import re
import sys
import threading
import types
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

CONTAINERS = (dict, list, set, collections.deque, weakref.WeakSet)
WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
LOCKS = (type(threading.Lock()), type(threading.RLock()))
_REMEMBERING = functools._lru_cache_wrapper


@dataclass(frozen=True)
class Found:
    """An object, by the way that leads to it from a module, and who holds it."""

    path: str
    value: Any
    holder: Any


def walk() -> Iterator[Found]:
    """Every object of interest, once, by the shortest way."""
    seen: set[int] = set()
    waiting: collections.deque[Found] = collections.deque()
    for name, module in sorted(sys.modules.items()):
        if name == "gristmill" or name.startswith("gristmill."):
            for key, value in list(vars(module).items()):
                if not key.startswith("__"):
                    waiting.append(Found(f"{name}.{key}", value, module))
    while waiting:
        found = waiting.popleft()
        if id(found.value) in seen or isinstance(found.value, types.ModuleType):
            continue
        seen.add(id(found.value))
        yield found
        for step, value in _inside(found.value):
            waiting.append(Found(f"{found.path}{step}", value, found.value))


def sizes() -> Counter[str]:
    """How much is held, by where; what lies inside of containers is added up.

    Functions that remember a limited number of results are left out.
    """
    found: Counter[str] = Counter()
    for one in walk():
        place = re.sub(r"\[[^]]*\]+", "[]", one.path)
        if isinstance(one.value, (*CONTAINERS, *WEAK)):
            found[place] += len(one.value)
        elif isinstance(one.value, _REMEMBERING) and _limit(one.value) is None:
            found[place] += one.value.cache_info().currsize
    return found


def limits() -> dict[str, int | None]:
    """How many results each function remembers at most; None: all of them. By its own name.

    Not by where it was found: a module that imports it may be walked first.
    """
    found = [one.value for one in walk() if isinstance(one.value, _REMEMBERING)]
    return {f"{one.__module__}.{one.__qualname__}": _limit(one) for one in found}


def _limit(function: Any) -> int | None:
    found: int | None = function.cache_parameters()["maxsize"]
    return found


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (Mapping, *WEAK)):
        for key, item in list(value.items()):
            yield f"[{_short(key)}]", item
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        for at, item in enumerate(list(value)):
            yield f"[{at}]", item
    elif isinstance(value, _REMEMBERING):
        yield "()", value.__wrapped__
    elif isinstance(value, functools.partial):
        yield ".func", value.func
        yield ".args", value.args
    elif isinstance(value, types.MethodType):
        yield ".self", value.__self__
    elif isinstance(value, types.FunctionType):
        if _is_ours(value.__module__):
            for cell in value.__closure__ or ():
                try:
                    yield "<closure>", cell.cell_contents
                except ValueError:
                    continue  # empty
            yield "<defaults>", value.__defaults__
    elif isinstance(value, (classmethod, staticmethod)):
        yield "", value.__func__
    elif isinstance(value, property):
        yield "", value.fget
    elif isinstance(value, type):
        if _is_ours(value.__module__):
            for key, item in list(vars(value).items()):
                if not key.startswith("__"):
                    yield f".{key}", item
    elif _is_ours(type(value).__module__):
        yield from _attributes(value)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    for key, item in list(getattr(value, "__dict__", {}).items()):
        yield f".{key}", item
    for kind in type(value).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield f".{name}", getattr(value, name)


def _is_ours(module: str | None) -> bool:
    return module is not None and (module == "gristmill" or module.startswith("gristmill."))


def _short(key: Any) -> str:
    text = key if isinstance(key, str) else repr(key)
    return text if len(text) <= 40 else f"{text[:37]}..."
