"""Ever new shapes through the host code of all ops, on CPU tensors that pass for those of a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from process_memory import Gpu

from gristmill.jit import Program
from gristmill.ops import launch
from gristmill.ops import op as op_module
from gristmill.ops.op import Op
from gristmill.ops.registry import OPS
from gristmill.select.device import KNOWN

RARE = {"nvfp4_moe": 8}  # one shape in so many: its weights take long to make

# What each op's `example` is asked for, as a function of a number that is never used twice.
SHAPES: dict[str, Any] = {
    "rms_norm": lambda n: (1 + n % 7, 8 + n),
    "add_rms_norm": lambda n: (1 + n, 64),
    "fused_add_rms_norm_": lambda n: (1 + n, 64),
    "rms_norm_backward": lambda n: (1 + n % 5, 8 + n),
    "rms_norm_fp8": lambda n: (2, 8 + n),
    "layer_norm": lambda n: (3, 8 + n),
    "layer_norm_backward": lambda n: (1 + n, 32),
    "softmax": lambda n: (2, 8 + n),
    "log_softmax": lambda n: (1 + n, 40),
    "softmax_backward": lambda n: (2, 8 + n),
    "cross_entropy": lambda n: (2, 8 + n),
    "cross_entropy_one_pass": lambda n: (1 + n, 50),
    "cross_entropy_one_pass_": lambda n: (2, 8 + n),
    "linear": lambda n: (1 + n, 16, 16),
    "matmul": lambda n: (1 + n, 16, 16),
    "nvfp4_linear": lambda n: (1 + n, 64, 128),
    "nvfp4_moe": lambda n: (1 + n, 4, 2, 64, 64),
    "topk_router": lambda n: (1 + n, 8, 2),
}


class Day:
    """Calls of ops, of shapes that were never seen before, as on a GPU of some architecture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, arch: str = "sm_90a") -> None:
        self.device = replace(KNOWN[arch], index=0)
        self.gpu = Gpu(monkeypatch)
        self.arch = arch
        self._numbers = itertools.count(512)  # rows so short have a kernel for every few lengths
        monkeypatch.setattr(op_module, "device_of", lambda device: self.device)
        prepare, prepare_separate = launch.prepare, launch.prepare_separate

        def keyed(call: Any, index: int) -> Any:
            self._compile(call.program)
            return prepare(call, index)

        def keyed_separate(program: Any, index: int, **rest: Any) -> Any:
            self._compile(program)
            return prepare_separate(program, index, **rest)

        monkeypatch.setattr(launch, "prepare", keyed)
        monkeypatch.setattr(launch, "prepare_separate", keyed_separate)

    def pass_by(self, shapes: int) -> int:
        """So many shapes of each op; how many calls that were."""
        count = 0
        for number in itertools.islice(self._numbers, shapes):
            for op, args in self._calls(number):
                op.run(*args)
                count += 1
            self.gpu.launches.clear()
        return count

    def _calls(self, number: int) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        for name, shape in SHAPES.items():
            if number % RARE.get(name, 1) == 0:
                op = OPS[name]
                yield op, op.example_for(self.device, shape(number), torch.bfloat16, "cpu")

    def _compile(self, program: Program) -> None:
        program.key(self.arch)  # as a compile would be looked for
