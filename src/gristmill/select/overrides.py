"""Forcing a variant by name: `with gristmill.use("rms_norm", "library"): ...` and GRISTMILL_USE.

The active overrides live in one ContextVar, so threads and async tasks do not see each other's.
Its value is None until the first `use`: then the environment alone rules, read when first needed.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import cast

from gristmill.errors import UnknownVariant
from gristmill.settings import settings

_Layer = tuple[tuple[str, str], ...]

_ACTIVE: ContextVar[_Layer | None] = ContextVar("gristmill_use", default=None)
_REGISTRY: dict[str, tuple[str, ...]] = {}

# Part of every plan key, hence the bare C method: equal overrides give equal tokens, so leaving
# and entering the same `use` finds its plans again.
token: Callable[[], Hashable] = _ACTIVE.get


def register_variants(op: str, names: Iterable[str]) -> None:
    """Make the variants of `op` known, so that `use` and GRISTMILL_USE can check their names."""
    _REGISTRY[op] = tuple(names)


def active() -> Mapping[str, str]:
    """The overrides in force here: op name -> variant name."""
    layer = _ACTIVE.get()
    return _from_environment() if layer is None else MappingProxyType(dict(layer))


@contextmanager
def restored(layer: Hashable) -> Iterator[None]:
    """The overrides of an earlier `token()`, beneath those that are in force here.

    Autograd runs backward passes on CUDA in threads of its own, which know nothing of the caller's
    context: they get that of their forward pass.
    """
    if layer is None:
        yield
        return
    both = {**dict(cast(_Layer, layer)), **dict(_ACTIVE.get() or ())}
    reset = _ACTIVE.set(tuple(sorted(both.items())))
    try:
        yield
    finally:
        _ACTIVE.reset(reset)


def use(op: str, variant: str) -> AbstractContextManager[None]:
    """Run `op` by the variant named `variant` inside the `with` block, and by no other.

    Nests, and holds for the current thread or async task only; a backward pass follows the `use`
    that was in force in its forward pass. A name that does not exist raises
    UnknownVariant here; a variant that cannot run a call raises VariantUnavailable at that call.
    """
    _check(op, variant, f"use({op!r}, {variant!r})")
    return _pushed(op, variant)


@contextmanager
def _pushed(op: str, variant: str) -> Iterator[None]:
    reset = _ACTIVE.set(tuple(sorted({**active(), op: variant}.items())))
    try:
        yield
    finally:
        _ACTIVE.reset(reset)


def _from_environment() -> Mapping[str, str]:
    requested = settings().use
    for op, variant in requested.items():
        _check(op, variant, f"GRISTMILL_USE={op}:{variant}")
    return requested


def _check(op: str, variant: str, where: str) -> None:
    names = _REGISTRY.get(op)
    if names is None:
        raise UnknownVariant(f"{where}: there is no op {op!r}{_listing(op, _REGISTRY)}")
    if variant not in names:
        raise UnknownVariant(f"{where}: {op} has no variant {variant!r}{_listing(variant, names)}")


def _listing(word: str, names: Iterable[str]) -> str:
    known = list(names)
    close = difflib.get_close_matches(word, known, n=1)
    meant = f" (did you mean {close[0]!r}?)" if close else ""
    return f"{meant}; there are: {', '.join(known) or 'none'}"
