"""The MultiKernels there are, by name: `use`, `explain` and the torch op find them here.

Held weakly: one that its program has dropped is gone here, too.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from gristmill.log import logger
from gristmill.select.overrides import forget_variants, register_variants

if TYPE_CHECKING:
    from gristmill.multikernel.multikernel import MultiKernel

_LIVE: weakref.WeakValueDictionary[str, MultiKernel] = weakref.WeakValueDictionary()


def enlist(one: MultiKernel) -> None:
    """Make `one` the MultiKernel of its name; an earlier one goes on as a function only.

    So a cell of a notebook can be run again. Two in different places are more likely a mistake.
    """
    other = _LIVE.get(one.name)
    if other is not None and _places(other) != _places(one):
        logger.warning(
            "MultiKernel %r is made twice, of other functions: %s, now %s; the name stands for "
            "the later one",
            one.name,
            ", ".join(sorted(_places(other))),
            ", ".join(sorted(_places(one))),
        )
    register_variants(one.name, list(one.kernels))
    _LIVE[one.name] = one
    weakref.finalize(one, _dismiss, one.name).atexit = False


def _dismiss(name: str) -> None:
    if name not in _LIVE:
        forget_variants(name)


def live(name: str) -> MultiKernel | None:
    """The MultiKernel of that name, if there is one."""
    return _LIVE.get(name)


def forget_plans() -> None:
    """Let every MultiKernel choose anew: rows have come that earlier choices did not know."""
    for one in list(_LIVE.values()):
        one.forget_plans()


def _places(one: MultiKernel) -> set[str]:
    """Where the functions are written: the same when a cell is run again."""
    return {
        f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', name)}"
        for name, function in one.kernels.items()
    }
