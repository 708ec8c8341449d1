"""Runs a variant's own host code on CPU tensors, its launches in the emulation.

`gristmill.ops.launch` is the one place through which a plan reaches a device. Here its functions
launch in the emulation instead: what runs is what a GPU would be told to run, with the same grid,
shared memory, attributes and packed parameters. Every tensor that the plan makes is filled with
NaN and known to the bounds checks; what it was given may only be read, unless the op writes it.
What a launch wrote the next one may read only after it has waited.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from emulation.harness import Buffer, Emulator, Traffic, emulator_for, readable, writable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gristmill.jit import Program
from gristmill.ops import launch
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant


@dataclass
class Run:
    """What one call of a plan gave, and what it launched."""

    outputs: Any
    calls: list[launch.KernelCall] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)


class _Watch(TorchDispatchMode):
    """Knows every tensor that is made while it is active, and leaves nothing uninitialised."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
                continue
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given:
                self.made[storage.data_ptr()] = storage
                if "empty" in func.__name__ and tensor.is_floating_point():
                    tensor.fill_(float("nan"))
                elif "empty" in func.__name__ and tensor.dtype == torch.uint8:
                    tensor.fill_(0xFF)  # NaN again, where such bytes are read as floats
        return result

    def buffers(self, fresh: Container[int]) -> list[Buffer]:
        return [
            Buffer(at, storage.nbytes(), writable=True, fresh=at in fresh)
            for at, storage in self.made.items()
        ]

    def contents(self) -> dict[int, bytes]:
        return {at: ctypes.string_at(at, held.nbytes()) for at, held in self.made.items()}


class EmulatedHost:
    """`resident` blocks (or clusters per device) run at once; threads run in the given `order`.

    `fresh`: the arguments of a plan come from the kernel right before its first one.
    """

    def __init__(self, emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
        self.emulator = emulator
        self.resident = 1
        self.order = 0
        self.fresh = False
        self._given: list[Buffer] = []
        self._watch = _Watch()
        self._run = Run(None)
        self._written: set[int] = set()
        monkeypatch.setattr(launch, "prepare", self._prepare)
        monkeypatch.setattr(launch, "current_stream", lambda device_index: 0)
        monkeypatch.setattr(launch, "resident_blocks", lambda *args: self.resident)
        monkeypatch.setattr(launch, "resident_clusters", lambda *args: self.resident)

    def build(self, programs: Sequence[Program]) -> None:
        """Compiles for the CPU what a list of tests will need, all at once."""
        self.emulator.prepare(programs)

    def run(
        self,
        variant: Variant,
        problem: Problem,
        config: Any,
        args: Sequence[Any],
        *,
        written: Sequence[int] = (),
        order: int = 0,
    ) -> Run:
        """`variant` on `args`, of which those at positions `written` are written in place."""
        self.order = order
        self._run = Run(None)
        self._given = [
            (writable if index in written else readable)(arg)
            for index, arg in enumerate(args)
            if isinstance(arg, torch.Tensor)
        ]
        self._written = set()
        with self._watching():
            self._run.outputs = variant.bind(problem, config)(*args)
        return self._run

    @contextmanager
    def _watching(self) -> Iterator[None]:
        self._watch = _Watch()
        with self._watch:
            yield

    def _prepare(self, call: launch.KernelCall, device_index: int) -> Callable[..., None]:
        run = self._run

        def start(stream: int, *values: Any) -> None:
            fresh = self.fresh and not run.calls
            given = [replace(one, fresh=fresh) for one in self._given]
            before = self._watch.contents()
            traffic = self.emulator.launch(
                call.program,
                call.name,
                call.params.pack(*values),
                grid=call.grid,
                block=call.block,
                shared=call.shared,
                cluster=call.cluster,
                cooperative=call.cooperative,
                dependent=call.dependent,
                buffers=[*given, *self._watch.buffers(self._written)],
                order=self.order,
            )
            after = self._watch.contents()
            self._written = {at for at, held in after.items() if held != before[at]}
            run.calls.append(call)
            run.traffic.append(traffic)

        return start


def build_cases(request: pytest.FixtureRequest) -> None:
    """What a file's `test_kernel` will run, in one build on all cores instead of one per test."""
    programs: list[Program] = []
    for item in request.session.items:
        if item.path == request.path and getattr(item, "originalname", "") == "test_kernel":
            case = item.callspec.params["case"]  # type: ignore[attr-defined]
            variant, problem = case.find_variant(), case.problem(case.arguments())
            programs += variant.programs(problem, case.config or variant.config(problem))
    emulator_for(request.config).prepare(programs)
