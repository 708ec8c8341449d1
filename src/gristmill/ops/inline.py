"""Tracing an op as its reference, for those who would rather have the compiler fuse it."""

from __future__ import annotations

from types import TracebackType

from gristmill.errors import ArgumentError

# A new set at each change, never a changed one: a compiled graph guards on this very object's
# contents and is traced again when they differ.
NAMES: frozenset[str] = frozenset()
_KNOWN: set[str] = set()
_ACTIVE: list[inline] = []


def allow_inline(name: str) -> None:
    """Called by each op that can be inlined."""
    _KNOWN.add(name)


class inline:  # noqa: N801 - reads as a statement, like torch.no_grad
    """`gristmill.inline("rms_norm")`: from now on `torch.compile` sees the op's plain formula.

    The compiler may then fuse it with its neighbours, at the price of our kernels. Holds for the
    whole process, from the call on; in a `with` block it ends with the block. Eager calls are not
    touched. Graphs compiled before are traced again.
    """

    def __init__(self, *names: str) -> None:
        global NAMES
        unknown = sorted(set(names) - _KNOWN)
        if unknown or not names:
            raise ArgumentError(
                f"inline: {', '.join(map(repr, unknown)) or 'no op named'}; ops that can be "
                f"inlined: {', '.join(sorted(_KNOWN))}"
            )
        self.names = frozenset(names)
        _ACTIVE.append(self)
        NAMES = frozenset().union(*[active.names for active in _ACTIVE])

    def __enter__(self) -> inline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global NAMES
        if self in _ACTIVE:
            _ACTIVE.remove(self)
        NAMES = frozenset().union(*[active.names for active in _ACTIVE])
