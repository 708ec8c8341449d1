"""What a block of code asks of the chooser: a variant by name, rows that know no batch, tuning.

`with gristmill.use("rms_norm", "library"): ...`, `with gristmill.batch_invariant(): ...` and
`gristmill.tune`. All of it lives in one ContextVar, so threads and async tasks do not see each
other's. Its value is None until the first of these: then the environment alone rules, read when
first needed.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import NamedTuple, cast

from gristmill.errors import UnknownVariant
from gristmill.log import warn_once
from gristmill.settings import settings


class Modes(NamedTuple):
    """What is asked for here. None: nothing said, the environment rules.

    `use`: (op, variant) pairs, sorted. `tuning`: the number of the `tune` region this is.
    """

    use: tuple[tuple[str, str], ...] | None = None
    batch_invariant: bool | None = None
    tuning: int | None = None


# Likeness (difflib) from which a name is taken for a mistyped one: of rms_nrom, not of my_softmax.
_MISTYPED = 0.85
_NOTHING = Modes()
_ACTIVE: ContextVar[Modes | None] = ContextVar("gristmill_modes", default=None)
_REGISTRY: dict[str, tuple[str, ...]] = {}

# Part of every plan key, hence the bare C method: equal modes give equal tokens, so leaving and
# entering the same `use` finds its plans again.
token: Callable[[], Hashable] = _ACTIVE.get


def register_variants(op: str, names: Iterable[str]) -> None:
    """Make the variants of `op` known, so that `use` and GRISTMILL_USE can check their names."""
    _REGISTRY[op] = tuple(names)


def forget_variants(op: str) -> None:
    """The opposite, for what does not live as long as the process."""
    _REGISTRY.pop(op, None)


def active() -> Mapping[str, str]:
    """The variants asked for by name here: op name -> variant name."""
    modes = _ACTIVE.get()
    if modes is None or modes.use is None:
        return _from_environment()
    return MappingProxyType(dict(modes.use))


def is_batch_invariant() -> bool:
    """Whether rows must not depend on the batch here."""
    modes = _ACTIVE.get()
    if modes is None or modes.batch_invariant is None:
        return settings().batch_invariant
    return modes.batch_invariant


def tuning_region() -> int | None:
    """The number of the innermost `tune` region around here, if there is one."""
    modes = _ACTIVE.get()
    return None if modes is None else modes.tuning


@contextmanager
def restored(modes: Hashable) -> Iterator[None]:
    """The modes of an earlier `token()`, beneath those that are in force here.

    Autograd runs backward passes on CUDA in threads of its own, which know nothing of the caller's
    context: they get that of their forward pass.
    """
    if modes is None:
        yield
        return
    before, here = cast(Modes, modes), _ACTIVE.get() or _NOTHING
    use = before.use
    if here.use is not None:
        use = tuple(sorted({**dict(before.use or ()), **dict(here.use)}.items()))
    both = Modes(
        use,
        before.batch_invariant if here.batch_invariant is None else here.batch_invariant,
        before.tuning if here.tuning is None else here.tuning,
    )
    with _entered(both):
        yield


def use(op: str, variant: str) -> AbstractContextManager[None]:
    """Run `op` by the variant named `variant` inside the `with` block, and by no other.

    Nests, and holds for the current thread or async task only; a backward pass follows the `use`
    that was in force in its forward pass. A name that does not exist raises
    UnknownVariant here; a variant that cannot run a call raises VariantUnavailable at that call.
    """
    _check(op, variant, f"use({op!r}, {variant!r})")
    return _using(op, variant)


@contextmanager
def _using(op: str, variant: str) -> Iterator[None]:
    use = tuple(sorted({**active(), op: variant}.items()))
    with _entered((_ACTIVE.get() or _NOTHING)._replace(use=use)):
        yield


@contextmanager
def batch_invariant(enabled: bool = True) -> Iterator[None]:
    """Inside the `with` block a row's result depends on that row alone, bit by bit.

    Only variants that promise so run, with launches that do not depend on how many rows there are:
    row i of a batch equals the same row alone, wherever in memory either lies. It costs some speed
    where the best launch for few rows is not the best for many. An op with no such variant raises
    VariantUnavailable. Nests, holds for the current thread or async task only, and a backward pass
    follows its forward pass; for a whole process set GRISTMILL_BATCH_INVARIANT=1.
    """
    with _entered((_ACTIVE.get() or _NOTHING)._replace(batch_invariant=bool(enabled))):
        yield


@contextmanager
def tuning(region: int) -> Iterator[None]:
    """Problems met inside the block are tuned; `region` tells one such block from another."""
    with _entered((_ACTIVE.get() or _NOTHING)._replace(tuning=region)):
        yield


@contextmanager
def _entered(modes: Modes) -> Iterator[None]:
    reset = _ACTIVE.set(modes)
    try:
        yield
    finally:
        _ACTIVE.reset(reset)


def _from_environment() -> Mapping[str, str]:
    requested = settings().use
    for op, variant in requested.items():
        where = f"GRISTMILL_USE={op}:{variant}"
        if op in _REGISTRY or difflib.get_close_matches(op, list(_REGISTRY), 1, _MISTYPED):
            _check(op, variant, where)
        else:
            # It may be that of a MultiKernel which is yet to be made.
            said = f"{where}: there is no {op!r} (yet); there are: {_names(_REGISTRY)}"
            warn_once(where, said, kind="GRISTMILL_USE")
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
    return f"{meant}; there are: {_names(known)}"


def _names(known: Iterable[str]) -> str:
    return ", ".join(known) or "none"
