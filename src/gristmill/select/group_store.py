"""Entries that all ranks of a job see, in the store of its process group.

Every process group has a key-value store by which its ranks found each other. It is reached
without a collective: a rank that never asks is never waited for. It has three traps, and this
module is where they are avoided:

- `Store.get` waits for a key that is not there, minutes long, and a TCPStore lets no other thread
  through meanwhile. So nothing here ever calls `get` on a missing key, and a TCPStore is cloned:
  a connection of our own, so that nobody waits for us nor we for them.
- An answer has no time limit, not even that of the store: with the process that serves a TCPStore
  stopped, a client waits for ever. So each operation runs on a thread of its own, which is left
  behind when it takes longer than `PATIENCE_S`.
- A store may outlive its group: torchrun serves one store to all groups that a program makes one
  after another. Hence `Entries.generation`.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from gristmill.locks import Lock

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

# The most one operation may take. It takes about 0.3 ms with a TCPStore on a busy machine, mostly
# for its thread; but a clone of a TCPStore may first sleep up to a millisecond per rank, lest all
# connect at once, and then queues behind the others.
PATIENCE_S = 30.0

# Never stored: comparing with it reads an entry, whether it is there or not, and changes nothing.
_NEVER = "gristmill never stores this"


class StoreLost(Exception):  # noqa: N818 - reads as what it says
    """The store did not answer, or with an error. It is not asked again for this group."""


class Entries:
    """The entries of one process group, by key. All operations raise StoreLost.

    An entry begins empty. `claim` fills an empty one; `settle` replaces one claim by its outcome,
    once. Both are atomic over all ranks and return what the entry then holds.

    Compare-and-set is what `TCPStore`, `FileStore` and `HashStore` have: on a missing key it sets
    the value if "" is expected, and otherwise gives back the expected value, as if it were there.
    A store without it (that of etcd) claims by counting: whoever counts to 1 writes. Should a rank
    end between the two, the store is lost for that entry.
    """

    def __init__(self, store: Store | None, rank: int) -> None:
        self.rank = rank
        self.pid = os.getpid()
        self.checked: set[str] = set()  # topics found equal: select/agreement.py
        self.generation = 0
        self.store: Store | None = None
        self._lost: str | None = None if store is not None else "the process group has no store"
        self._counts = False
        if store is not None:
            self._open(store)

    def _open(self, store: Store) -> None:
        dist = sys.modules["torch.distributed"]
        inner: Any = store
        while isinstance(inner, dist.PrefixStore):
            inner = inner.underlying_store
        self._counts = not _compares(inner)
        # Held as long as the group lives, and no longer: a FileStore removes its file at last.
        self.store = dist.PrefixStore("gristmill", store)
        try:
            # Not in torch's stubs. Where it is missing, others may keep us waiting: PATIENCE_S.
            clone: Callable[[], Store] | None = getattr(store, "clone", None)
            if isinstance(inner, dist.TCPStore) and clone is not None:
                self.store = dist.PrefixStore("gristmill", self._bounded(clone))
            # How many groups of this rank the store has seen, this one included.
            self.generation = self._bounded(lambda: self._store.add(f"groups/{self.rank}", 1))
        except StoreLost:
            pass  # and every operation says so

    @property
    def _store(self) -> Store:
        if self.store is None:
            raise StoreLost(self._lost)
        return self.store

    def read(self, key: str) -> str | None:
        """What `key` holds now, None for nothing. Waits for no rank."""
        if not self._counts:
            found = self._compare_set(key, _NEVER, _NEVER)
            return None if found == _NEVER else found
        return self._get(f"{key}/outcome") or self._get(f"{key}/claim")

    def claim(self, key: str, value: str) -> str:
        """Put `value` into an empty entry; what it holds then."""
        if not self._counts:
            return self._compare_set(key, "", value)
        return self._first(f"{key}/claim", value, lambda: self.read(key))

    def settle(self, key: str, claim: str, outcome: str) -> str:
        """Put `outcome` in the place of `claim`, unless an outcome is there; what it holds then."""
        if not self._counts:
            return self._compare_set(key, claim, outcome)
        place = f"{key}/outcome"
        return self._first(place, outcome, lambda: self._get(place))

    def _first(self, place: str, value: str, read: Callable[[], str | None]) -> str:
        """Write `value` if nobody came before; otherwise what they write, as `read` finds it."""
        if self._bounded(lambda: self._store.add(f"{place} count", 1)) == 1:
            self._bounded(lambda: self._store.set(place, value))
            return value
        start = time.monotonic()
        while time.monotonic() - start < PATIENCE_S:
            found = read()
            if found is not None:
                return found
            time.sleep(0.01)
        raise StoreLost(f"a rank has counted for {place} and not written it")

    def _get(self, place: str) -> str | None:
        if not self._bounded(lambda: self._store.check([place])):
            return None
        return _text(self._bounded(lambda: self._store.get(place)))

    def _compare_set(self, key: str, expected: str, desired: str) -> str:
        return _text(self._bounded(lambda: self._store.compare_set(key, expected, desired)))

    def _bounded(self, work: Callable[[], T]) -> T:
        """`work()`, or StoreLost after PATIENCE_S."""
        if self._lost is not None:
            raise StoreLost(self._lost)
        answers: queue.SimpleQueue[tuple[T, None] | tuple[None, Exception]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answers.put((work(), None))
            except Exception as error:
                answers.put((None, error))

        threading.Thread(target=run, name="gristmill-store", daemon=True).start()
        try:
            answer, error = answers.get(timeout=PATIENCE_S)
        except queue.Empty:
            self._lost = f"it has not answered for {PATIENCE_S:g} s"
            raise StoreLost(self._lost) from None
        if error is not None:
            # The first line: below it, torch's errors have the frames of its C++ stack.
            self._lost = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            raise StoreLost(self._lost) from error
        return answer  # type: ignore[return-value]


def _compares(inner: Any) -> bool:
    """Whether a store has compare-and-set: torch's own have, others if they define it."""
    dist = sys.modules["torch.distributed"]
    if isinstance(inner, (dist.TCPStore, dist.FileStore, dist.HashStore)):
        return True
    return getattr(type(inner), "compare_set", None) is not dist.Store.compare_set


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode(errors="backslashreplace")


# By group, so that a group made after another was destroyed starts anew. Weakly: a store that is
# held on to keeps a port or a file that the next group may want.
_OPEN: weakref.WeakKeyDictionary[Any, Entries] = weakref.WeakKeyDictionary()
_OPENING = Lock()


def entries() -> Entries | None:
    """Those of the default process group; None where this process is alone.

    The first call opens the store, which takes at most twice `PATIENCE_S`.
    """
    group = _group()
    if group is None:
        return None
    found = _OPEN.get(group)
    if found is None or found.pid != os.getpid():
        # One thread opens, or a group would count as two. It waits for the store, for no rank.
        with _OPENING:
            found = _OPEN.get(group)
            if found is None or found.pid != os.getpid():  # a fork must not share a connection
                dist = sys.modules["torch.distributed"]
                found = Entries(dist.distributed_c10d._get_default_store(), group.rank())
                _OPEN[group] = found
    return found


def _group() -> Any:
    """The default process group if it has more than one rank, else None."""
    # Not imported: what nobody has imported cannot be initialised.
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    group = dist.group.WORLD
    return None if group is None or group.size() < 2 else group


def alone() -> bool:
    """Whether there is nobody to agree with: no process group, or one rank. Opens nothing."""
    return _group() is None


def store() -> Store | None:
    """The store of the default process group under the prefix "gristmill".

    None where this process is alone, and where the group has no store (that of MPI).
    """
    found = entries()
    return None if found is None else found.store
