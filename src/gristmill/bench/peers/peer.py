"""A library to be measured against, and what the adapters of all op families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gristmill.bench.inputs import Arguments
from gristmill.jit.optional import NotImportableError, imported, installed_version

Function = Callable[..., Any]
Sets = Sequence[Arguments]
# Called once per task with all sets of arguments that will be used, so that it can import or
# allocate outside what is timed; returns what is called with each set.
Builder = Callable[[Sets], Function]
# Per peer and task name. A peer with several ways to do a task has a builder for each, by name.
Builders = Mapping[str, Mapping[str, Builder | Mapping[str, Builder]]]


@dataclass(frozen=True)
class Part:
    """A function that does a part of the task: `run` is what is timed.

    `finish` makes of its outputs and its arguments what the whole would give, to be checked.
    """

    run: Function
    finish: Function

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)


@dataclass(frozen=True)
class Peer:
    """One library: how to find it, and how it does the tasks that it can do.

    `coarse`: tasks in which it rounds in between, so that its results are off by more. `compiles`:
    it makes code at its first call, which others may make ahead; but not for tasks that it `tunes`
    itself for, by timing: what else runs meanwhile would decide.
    """

    name: str
    package: str
    module: str
    builders: Mapping[str, Builder | Mapping[str, Builder]]
    cpu: bool = False
    coarse: frozenset[str] = frozenset()
    compiles: bool = False
    tunes: frozenset[str] = frozenset()

    def is_ahead(self, task: str) -> bool:
        """Whether its code for a task can be made ahead of the timing."""
        return self.compiles and task in self.builders and task not in self.tunes

    def implementations(self, task: str) -> dict[str, Builder]:
        """Its builders for a task by the names they have in results: quack, quack_one_pass."""
        found = self.builders.get(task, {})
        if isinstance(found, Mapping):
            return {f"{self.name}_{way}": builder for way, builder in found.items()}
        return {self.name: found}

    def missing(self, device: torch.device) -> str | None:
        """Why it cannot take part here, or None."""
        if device.type == "cpu" and not self.cpu:
            return "needs a GPU"
        try:
            imported(self.module)
        except NotImportableError as error:
            return f"cannot be imported: {error}"
        return None

    def version(self) -> str:
        return installed_version(self.package) or "unknown"


def compiled(function: Function, *, mode: str | None = None) -> Function:
    """`function` through Inductor, for one problem; `mode` as torch.compile takes it."""
    # Here, because torch imports Triton with it, whose import may fail in any way.
    import torch._inductor.config

    # Every problem gets code of its own, as a model with one shape would: past a few shapes Dynamo
    # would otherwise make the sizes symbolic, and then stop compiling altogether.
    torch._dynamo.reset()
    # Choices between configs that it makes by timing are made here, by every run for itself, and
    # not taken from disk: whoever compiled ahead timed them beside others.
    torch._inductor.config.autotune_local_cache = False
    return torch.compile(function, fullgraph=True, dynamic=False, mode=mode)


def ahead(sets: Sets, position: int, make: Callable[[Arguments], Any]) -> dict[int, Any]:
    """What `make` gives for each set, by the address of the set's tensor at `position`.

    For what an adapter needs beside the arguments, made outside what is timed.
    """
    return {args[position].data_ptr(): make(args) for args in sets}
