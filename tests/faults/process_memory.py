"""Calls of CUDA variants without a GPU, in a memory that runs out when it is told to."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gristmill.ops import launch
from gristmill.ops.nvfp4_linear import wgmma as linear_wgmma
from gristmill.ops.nvfp4_moe import wgmma as moe_wgmma
from gristmill.ops.op import Op
from gristmill.ops.registry import OPS
from gristmill.select.chooser import refusal
from gristmill.select.device import KNOWN
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

WORDS = "CUDA out of memory. Tried to allocate 1.00 GiB."
ARCHS = ("sm_90a", "sm_80", "sm_100a")
# What an op's own cases do not have: shapes for `example`, and other arguments.
MORE: dict[str, tuple[tuple[tuple[int, ...], dict[str, Any]], ...]] = {
    "linear": (((130, 200, 136), {}),),
    "linear_with_pre": (((130, 200, 136), {}),),
    "matmul": (((130, 200, 136), {}),),
    "nvfp4_linear": (
        ((1, 64, 128), {}),
        ((48, 192, 128), {}),
        ((200, 512, 256), {}),
        ((200, 512, 256), {"act": "fp8"}),
        ((200, 512, 256), {"act": "nvfp4"}),
    ),
    "nvfp4_linear_backward": (((1, 64, 128), {}), ((48, 192, 128), {})),
    "nvfp4_moe": (((3, 4, 2, 64, 64), {}), ((64, 8, 2, 128, 64), {})),
}


class Memory(TorchDispatchMode):
    """Counts what is allocated, and refuses the allocation number `refused`, counted from 0."""

    def __init__(self, refused: int | None = None) -> None:
        super().__init__()
        self.refused = refused
        self.allocated = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
                continue
            if tensor.untyped_storage()._cdata in given or tensor.numel() == 0:
                continue
            if self.allocated == self.refused:
                raise torch.OutOfMemoryError(WORDS)
            self.allocated += 1
            if "empty" in func.__name__:
                tensor.zero_()  # no kernel runs here, but what is behind one reads its results
        return result


class Gpu:
    """Stands where a GPU would: launches are written down, and nothing runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[tuple[str, tuple[Any, ...]]] = []
        for name, stand_in in {
            "prepare": lambda call, index: self._start(call.name),
            "prepare_separate": lambda program, index, **rest: self._start(program.function),
            "scratch_bytes": lambda program, index: 128,
            "resident_programs": lambda program, index: 2,
            "resident_blocks": lambda *args: 2,
            "resident_clusters": lambda *args: 20,
            "current_stream": lambda index: 0,
            "empty": lambda count, dtype, index: torch.empty(count, dtype=dtype),
        }.items():
            monkeypatch.setattr(launch, name, stand_in)
        for module in (linear_wgmma, moe_wgmma):
            monkeypatch.setattr(module, "maps_of_rows", lambda *args: lambda address: address)
        monkeypatch.setattr(torch.nn.functional, "scaled_mm", _product)  # of FP4 on no CPU

    def _start(self, name: str) -> Callable[..., None]:
        return lambda stream, *values: self.launches.append((name, values))

    def writes_to(self, tensors: list[torch.Tensor]) -> bool:
        """Whether a kernel was handed the address of one of them."""
        places = {tensor.data_ptr() for tensor in tensors}
        return any(
            places & {one for one in values if isinstance(one, int)} for _, values in self.launches
        )


def _product(a: torch.Tensor, b: torch.Tensor, *, output_dtype: torch.dtype, **_: Any) -> Any:
    return torch.empty((a.shape[0], b.shape[1]), dtype=output_dtype)


@dataclass(frozen=True)
class Call:
    """One call of a variant that launches kernels."""

    op: Op
    variant: Variant
    arch: str
    args: tuple[Any, ...]

    @property
    def problem(self) -> Problem:
        return self.op.problem(*self.args, device=replace(KNOWN[self.arch], index=0))

    def bind(self) -> Callable[..., Any]:
        problem = self.problem
        return self.variant.bind(problem, self.variant.config(problem))

    def launches(self) -> bool:
        problem = self.problem
        if problem.rows == 0 or refusal(self.variant, problem) is not None:
            return False
        return bool(self.variant.programs(problem, self.variant.config(problem)))


def calls(op: Op, variant: Variant, most: int) -> list[Call]:
    """Some calls that `variant` runs by kernels, as different as the op's cases are."""
    every = [Call(op, variant, arch, args) for arch, args in _arguments(op)]
    found = [call for call in every if call.launches()]
    return found[:: max(1, len(found) // most)][:most]


def launching() -> Iterator[tuple[Op, Variant]]:
    """Every variant of every op that has kernels of its own."""
    for op in OPS.values():
        for variant in op.variants:
            if type(variant).programs is not Variant.programs:
                yield op, variant


@functools.cache
def _arguments(op: Op) -> list[tuple[str, tuple[Any, ...]]]:
    """Arguments of the op, each with an architecture."""
    cases = [case.make("cpu", 0) for case in itertools.islice(op.cases(), 0, 40, 5)]
    found = [(arch, args) for arch in ARCHS for args in cases]
    for arch in ARCHS:
        for shape, options in MORE.get(op.name, ()):
            args = op.example_with(options, shape, torch.bfloat16, "cpu", KNOWN[arch])
            found.append((arch, args))
    return found
