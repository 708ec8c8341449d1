"""The variant of rms_norm that is written in NVIDIA's CuTe DSL (docs/cutedsl.md).

It is an extra: without the DSL it says so and nothing else changes. It is never preferred, only
measured: a row of a table, or its name, is what makes it run.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gristmill.jit.cutedsl import CuteProgram, why_missing
from gristmill.ops import launch
from gristmill.ops.norms.cuda import Run
from gristmill.ops.norms.problem import Details
from gristmill.ops.ready import is_there
from gristmill.ops.rms_norm.cuda import plan_rms_norm
from gristmill.ops.rows.config import MAX_THREADS, power_of_two
from gristmill.ops.rows.layout import Layout
from gristmill.select.choices import why_unlisted
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

_WARP = 32
_LEAST_LANES = 4
# Blocks that share a row; few sizes, since each is a kernel of its own.
_BLOCKS = (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, MAX_THREADS)
_WARPS_BLOCK = 128  # threads of a block whose warps have rows of their own
# Vectors of a lane, if the row needs that many. H200, bf16, 32768x1024: 33.7 us, but 40.3 with two
# for each thread of a small block; 32768x256: 8.5 us, but 11.0 with one for each lane.
_WARP_ITEMS = 4
# Elements of a row that a thread holds, by default and at most: 32 take half of the 64 registers
# that each of 1024 threads has. So does a vector's address, if there are many of them.
_ELEMENTS, _MOST_ELEMENTS, _MOST_ITEMS = 16, 32, 16
_MOST_ROWS = 2**31 - MAX_THREADS

_TENSOR = re.compile(r"Tensor<(\w+),(\d+)>")
_TYPES = {"float": "fp32", "bf16": "bf16", "f16": "fp16"}
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class CuteConfig:
    """A launch: blocks of `threads`, `lanes` of which share a row, with `items` vectors for each.

    `lanes` is a power of two up to 32, or all of `threads`.
    """

    threads: int
    lanes: int
    items: int


class CuteRmsNorm(Variant):
    """Rows that the registers of a block can hold, by a kernel in the CuTe DSL."""

    name = "cutedsl"
    summary = "a warp's lanes or a block share a row, in NVIDIA's CuTe DSL (an extra; sm_90 and up)"
    config_type = CuteConfig

    def supports(self, problem: Problem) -> str | None:
        device = problem.device
        if device.kind != "cuda":
            return f"needs a CUDA device, not {device.kind}"
        if device.capability < (9, 0):
            return f"needs compute capability 9.0 or later, not {device.arch}"
        wide = [f"{name} is {dtype}" for name, dtype in problem.dtypes if dtype == "float64"]
        if wide:
            return f"computes in fp32: {', '.join(wide)}"
        details: Details = problem.layout
        if any(access < _BYTES[kind] for kind, access in _tensors(details).values()):
            return "a tensor is not aligned to its own elements"
        layout = details.layout
        if layout.vectors > MAX_THREADS * _most_items(layout):
            return (
                f"rows of {layout.columns} columns, in vectors of {layout.vector}, are too long "
                f"for the registers of a block"
            )
        if layout.rows >= _MOST_ROWS:
            return f"{layout.rows} rows are more than a grid has"
        return self._why_unmade(problem)

    def declines(self, problem: Problem) -> str | None:
        return "runs where a table has measured it to be the fastest, and none has here"

    def config(self, problem: Problem) -> CuteConfig:
        layout: Layout = problem.layout.layout
        several = max(_WARP_ITEMS, _ELEMENTS // layout.vector)
        if layout.vectors <= several * _WARP:
            return _config(layout, min(several, power_of_two(-(-layout.vectors // _LEAST_LANES))))
        items = _ELEMENTS // layout.vector
        return _config(
            layout, items if layout.vectors <= items * MAX_THREADS else _most_items(layout)
        )

    def configs(self, problem: Problem) -> Sequence[CuteConfig]:
        layout: Layout = problem.layout.layout
        few = (_config(layout, items) for items in (1, 2, 4) if items >= _least_items(layout))
        return tuple(dict.fromkeys((self.config(problem), *few)))

    def rejects(self, problem: Problem, config: CuteConfig) -> str | None:
        layout: Layout = problem.layout.layout
        known = [
            _config(layout, items) for items in range(_least_items(layout), _most_items(layout) + 1)
        ]
        choices = {"items threads lanes": [(one.items, one.threads, one.lanes) for one in known]}
        return why_unlisted(config, choices)

    def varies_with_batch(self, problem: Problem) -> str | None:
        """Nothing: a row's sum is that of its lanes in a fixed order, and N gives the launch."""
        return None

    def programs(self, problem: Problem, config: CuteConfig) -> tuple[CuteProgram, ...]:
        return (_program(problem.layout, config),)

    def bind(self, problem: Problem, config: CuteConfig) -> Callable[..., Any]:
        details: Details = problem.layout
        return plan_rms_norm(launcher(problem, config), details)

    def _why_unmade(self, problem: Problem) -> str | None:
        """Why there is no kernel: the DSL is missing, and no cache has what it would have made.

        A bundle has the launch that a table names, which need not be the usual one.
        """
        reason = why_missing()
        if reason is None:
            return None
        configs = self.configs(problem.asked())
        return None if any(is_there(self, problem, one) for one in configs) else reason


def _config(layout: Layout, items: int) -> CuteConfig:
    """The fewest threads that hold a row by so many vectors each."""
    lanes = power_of_two(-(-layout.vectors // items))
    if lanes <= _WARP:
        return CuteConfig(_WARPS_BLOCK, max(_LEAST_LANES, lanes), items)
    threads = next(size for size in _BLOCKS if size * items >= layout.vectors)
    return CuteConfig(threads, threads, items)


def _least_items(layout: Layout) -> int:
    return max(1, -(-layout.vectors // MAX_THREADS))


def _most_items(layout: Layout) -> int:
    return min(_MOST_ITEMS, _MOST_ELEMENTS // layout.vector)


def _tensors(details: Details) -> dict[str, tuple[str, int]]:
    """The tensors of the kernel that are there: their element, and bytes of their widest access."""
    types = {"x": details.type(0), "weight": details.weight, "y": details.type(2)}
    found = {}
    for name, text in types.items():
        if match := _TENSOR.fullmatch(text):
            found[name] = _TYPES[match[1]], int(match[2])
    return found


def _program(details: Details, config: CuteConfig) -> CuteProgram:
    layout, tensors = details.layout, _tensors(details)
    constants = (
        ("lanes", config.lanes),
        ("items", config.items),
        ("vector", layout.vector),
        ("nested", layout.nested),
        ("normalised", _TYPES[details.normalised]),
        ("product", _TYPES[details.product] if "weight" in tensors else "fp32"),
    )
    return _written(tuple(tensors.items()), constants, config.threads)


@functools.lru_cache(maxsize=1024)
def _written(
    tensors: tuple[tuple[str, tuple[str, int]], ...],
    constants: tuple[tuple[str, int | bool | str | None], ...],
    threads: int,
) -> CuteProgram:
    """The program, once: without the DSL four of them are asked after for every new shape."""
    signature = [(name, f"*{kind}") for name, (kind, _) in tensors]
    signature += [(name, "i64") for name in ("x_outer", "x_inner", "y_outer", "y_inner")]
    signature += [(name, "i32") for name in ("rows", "inner_rows", "columns")]
    signature += [(name, "fp32") for name in ("inverse_columns", "eps", "weight_offset")]
    if all(name != "weight" for name, _ in tensors):
        constants += (("weight", None),)
    aligned = tuple((name, access) for name, (_, access) in tensors)
    return CuteProgram("rms_norm.py", "rms_norm", tuple(signature), constants, aligned, threads)


def launcher(problem: Problem, config: CuteConfig) -> Run:
    """What the plan calls once it has made its output."""
    details: Details = problem.layout
    layout = details.layout
    if layout.rows == 0 or layout.columns == 0:
        return lambda *args: None
    device = problem.device.index
    grid = -(-layout.rows // (config.threads // config.lanes))
    start = launch.prepare_separate(_program(details, config), device, grid=grid, dependent=True)
    numbers = (
        *layout.strides(0),
        *layout.strides(2),
        layout.rows,
        layout.inner_rows,
        layout.columns,
        1.0 / layout.columns,
    )
    stream = launch.current_stream

    def run(
        x: torch.Tensor,
        residual: None,
        weight: torch.Tensor | None,
        bias: None,
        y: torch.Tensor,
        total: None,
        eps: float,
        weight_offset: float,
    ) -> None:
        now = stream(device)
        if weight is None:
            start(now, x.data_ptr(), y.data_ptr(), *numbers, eps, weight_offset)
        else:
            start(now, x.data_ptr(), weight.data_ptr(), y.data_ptr(), *numbers, eps, weight_offset)

    return launch.on_device(device, run)


CUTEDSL = CuteRmsNorm()
