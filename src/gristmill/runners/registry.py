"""Which runner an id means: in this process, in its forks, and in any other."""

from __future__ import annotations

import hashlib
import os
import secrets
import weakref
from typing import Any, NamedTuple, Protocol

from gristmill.errors import ArgumentError, DtypeError, UnknownRunner
from gristmill.locks import RLock

# Ids are positive int64. This bit is set in those made from a name, and in no others.
NAMED = 1 << 62


class Runner(Protocol):
    """What can be registered: its `_run_impl` takes the tensors of an op and returns a new one."""

    @property
    def _run_impl(self) -> Any: ...


def register_runner(runner: Runner, name: str | None = None, *, replace: bool = False) -> int:
    """Make `runner` known to the ops that take a runner's id, and return that id.

    The runner is held weakly: keep it for as long as anything may call it, be it a compiled graph
    or a captured CUDA graph. A copy of a runner is another runner, which is not registered; so is
    what comes back from a pickle.

    Args:
        runner: any object with a method `_run_impl`, which is called with the tensors of the op.
            What it returns is contiguous, shares no memory with them, and has the dtype and the
            device of the first.
        name: gives an id that is the same in every process: a graph compiled in one finds the
            runner of that name in another. Without a name, the id is valid in this process alone,
            and in those forked from it later.
        replace: take over the name of a runner that is still alive. Without it, only the same
            object can be registered under that name again.

    Returns:
        A positive integer below 2**63.
    """
    if isinstance(runner, type):
        raise DtypeError(
            f"register_runner: runner must be an object with a method _run_impl, got the class "
            f"{runner.__name__} itself"
        )
    if not callable(getattr(runner, "_run_impl", None)):
        raise DtypeError(
            f"register_runner: runner must have a method _run_impl; {_kind(runner)} has none"
        )
    if name is not None and not isinstance(name, str):
        raise DtypeError(f"register_runner: name must be None or a str, got {_kind(name)}")
    if name == "":
        raise ArgumentError("register_runner: name is empty; leave it out for an unnamed runner")
    if replace and name is None:
        raise ArgumentError("register_runner: replace=True takes over a name, and none was given")
    return REGISTRY.add(runner, name, replace)


def id_of(name: str) -> int:
    """The id of a name, the same in every process."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return NAMED | int.from_bytes(digest, "little") % NAMED


class Entry(NamedTuple):
    reference: weakref.ref[Any]
    name: str | None
    kind: str

    def describe(self, runner_id: int) -> str:
        return f"runner {runner_id if self.name is None else repr(self.name)} ({self.kind})"


class Registry:
    """Runners by id, held weakly. Looking one up takes no lock.

    `keep`: how many entries of freed runners may lie about, for the sake of error messages, beside
    as many as there are live ones.
    """

    def __init__(self, keep: int = 4096) -> None:
        self._entries: dict[int, Entry] = {}
        self._keep = self._sweep_at = keep
        self._lock = RLock()
        # The unnamed ids handed out so far. A forked child begins a range of its own.
        self._unnamed: list[range] = []
        self.begin()

    def begin(self) -> None:
        """Draw where unnamed ids begin: once per process, so in every forked child again.

        At random: an id from another process is then unknown here, and never somebody else's.
        """
        first = 1 + secrets.randbelow(NAMED // 2)
        self._unnamed.append(range(first, first))

    def add(self, runner: Runner, name: str | None, replace: bool) -> int:
        try:
            entry = Entry(weakref.ref(runner), name, _kind(runner))
        except TypeError:
            raise DtypeError(
                f"register_runner: runners are held weakly, which {_kind(runner)} does not allow; "
                f"add '__weakref__' to its __slots__"
            ) from None
        with self._lock:
            if name is None:
                runner_id = self._next_id()
            else:
                runner_id = id_of(name)
                self._refuse_taken(runner_id, runner, name, replace)
            self._entries[runner_id] = entry
            if len(self._entries) >= self._sweep_at:
                self._forget_freed()
        return runner_id

    def find(self, op: str, runner_id: int) -> Any:
        entry = self._entries.get(runner_id)
        runner = None if entry is None else entry.reference()
        if runner is None:
            raise UnknownRunner(f"{op}: {self._why_not(runner_id, entry)}")
        return runner

    def describe(self, runner_id: int) -> str:
        """A live runner, for error messages."""
        return self._entries[runner_id].describe(runner_id)

    def _next_id(self) -> int:
        ids = self._unnamed[-1]
        self._unnamed[-1] = range(ids.start, ids.stop + 1)
        return ids.stop

    def _refuse_taken(self, runner_id: int, runner: Runner, name: str, replace: bool) -> None:
        taken = self._entries.get(runner_id)
        if taken is None:
            return
        if taken.name != name:
            raise ArgumentError(
                f"register_runner: the names {taken.name!r} and {name!r} have one id, {runner_id}; "
                f"choose another name"
            )
        holder = taken.reference()
        if not (replace or holder is None or holder is runner):
            raise ArgumentError(
                f"register_runner: the name {name!r} belongs to another {taken.kind} that is still "
                f"alive; choose another name, or pass replace=True to take it over"
            )

    def _forget_freed(self) -> None:
        for runner_id, entry in list(self._entries.items()):
            if entry.reference() is None:
                del self._entries[runner_id]
        self._sweep_at = 2 * len(self._entries) + self._keep

    def _why_not(self, runner_id: int, entry: Entry | None) -> str:
        if entry is not None or any(runner_id in ids for ids in self._unnamed):
            who = f"runner {runner_id}" if entry is None else entry.describe(runner_id)
            return (
                f"{who} was freed; runners are registered weakly: keep a reference for as long as "
                f"calls and graphs use the id"
            )
        if runner_id >= NAMED:
            return (
                f"runner {runner_id} is unknown in this process: the id is that of a name, and no "
                f"runner has that name here; call register_runner(runner, name) first"
            )
        return (
            f"runner {runner_id} is unknown in this process: ids of unnamed runners are valid only "
            f"in the process that registered them; register it with a name to share its id"
        )


def _kind(value: Any) -> str:
    return type(value).__name__


REGISTRY = Registry()
os.register_at_fork(after_in_child=REGISTRY.begin)
