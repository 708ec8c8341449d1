"""The Triton variants of `linear` and `matmul`: bias and activation cost no pass of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from gristmill.jit import TritonProgram
from gristmill.ops import launch
from gristmill.ops.linear.configs import (
    CANDIDATES,
    STURDY,
    Candidate,
    MatmulConfig,
    candidates,
    library_estimate,
    why_rejected,
)
from gristmill.ops.linear.problem import Product
from gristmill.ops.linear.programs import (
    ADD_BLOCK,
    INT32,
    SLACK,
    TYPES,
    add_program,
    is_dependent,
    persistent_program,
    tile_count,
    tiles_numbers,
    tiles_program,
    tma_steps,
)
from gristmill.ops.linear.semantics import leading_dims
from gristmill.ops.ready import at_hand
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant
from gristmill.settings import settings

_BOTH_WAYS = 6

Plan = Callable[..., Any]


class TritonMatmul(Variant):
    """What the Triton variants have in common.

    The bits of a row do not depend on the other rows: which rows share a tile changes nothing in a
    row's sum, whose order along K is given by the config alone (block_k, split_k and the shape of
    the tensor core's instruction), and a config that is asked for with a fixed number of rows does
    not change with theirs. Rows beyond the end are zeros in the tile, and touch no other row.
    """

    kind: str
    config_type = MatmulConfig

    def supports(self, problem: Problem) -> str | None:
        reason = self.unable(problem)
        if reason is None and not self._candidates(problem.asked()):
            return "the product is too small to be cut that way, or its partial sums are too large"
        return reason

    def unable(self, problem: Problem) -> str | None:
        """Why the kernel cannot compute `problem`, whatever its config."""
        device = problem.device
        if device.kind != "cuda":
            return f"needs a CUDA device, not {device.kind}"
        if device.capability < (8, 0):
            return f"needs compute capability 8.0 or later, not {device.arch}"
        product: Product = problem.layout
        if product.dtype not in TYPES:
            return f"computes in fp32: {problem.dtype('out')} needs more"
        if product.empty:
            return "there is nothing to compute"
        if max(product.rows, product.columns, product.depth) > INT32 - SLACK:
            return "a dimension has 2**31 elements or more"
        if product.batch * product.rows * product.columns // 128 > INT32:
            return "more tiles than a grid has"
        return None

    def declines(self, problem: Problem) -> str | None:
        product: Product = problem.layout
        if not (product.a_aligned and product.b_aligned):
            return "rows that are not aligned to 16 bytes are read element by element"
        if 1 not in product.a_strides[1:] or 1 not in product.b_strides[1:]:
            return "a matrix without a contiguous dim is read element by element"
        if product.dtype == torch.float32:
            return "full fp32 products use no tensor cores here; cuBLAS has better ones"
        mine = self.estimated_us(problem)
        library = library_estimate(product, problem.rows)
        if library < mine:
            return f"cuBLAS should take {library:.1f} us, this {mine:.1f}"
        for other in TRITON:
            if other is not self and other.supports(problem) is None:
                theirs = other.estimated_us(problem)
                if theirs < mine:
                    return f"{other.name} should take {theirs:.1f} us, this {mine:.1f}"
        return None

    def config(self, problem: Problem) -> MatmulConfig:
        found = self._candidates(problem)
        if settings().jit:
            return found[0].config
        every = [one.config for one in self._candidates(problem, count=None)]
        # Every look into the caches takes time: of what promises little, the one that bundles have.
        first, rest = every[:CANDIDATES], every[CANDIDATES:]
        return at_hand(self, problem, [*first, STURDY[self.kind], *rest])

    def configs(self, problem: Problem) -> Sequence[MatmulConfig]:
        found = [candidate.config for candidate in self._candidates(problem)]
        if self.kind == "persistent" or not is_dependent(problem.device):
            return found
        # What it brings to overlap with other kernels depends on these, too: both ways are tried.
        other = [replace(config, early=not config.early) for config in found[:_BOTH_WAYS]]
        return found[: CANDIDATES - _BOTH_WAYS] + other

    def rejects(self, problem: Problem, config: MatmulConfig) -> str | None:
        product = self._product(problem)
        return why_rejected(self.kind, config, product, problem.rows, problem.device)

    def estimated_us(self, problem: Problem) -> float:
        """What the model of `configs.py` says of the config that would run."""
        return self._candidates(problem)[0].us

    def _candidates(
        self, problem: Problem, count: int | None = CANDIDATES
    ) -> tuple[Candidate, ...]:
        product = self._product(problem)
        return candidates(self.kind, product, problem.rows, problem.device, count)

    def _product(self, problem: Problem) -> Product:
        """The inputs of the heuristics. Batch-invariant calls leave the batch out."""
        product: Product = problem.layout
        return replace(product, batch=1) if problem.batch_invariant else product

    def varies_with_batch(self, problem: Problem) -> str | None:
        return None


class TritonTiles(TritonMatmul):
    """One program per tile of the result."""

    name = "triton_tiles"
    summary = "one program per tile, with bias and activation in its epilogue"
    kind = "tiles"

    def programs(self, problem: Problem, config: MatmulConfig) -> tuple[TritonProgram, ...]:
        return (tiles_program(problem.layout, config, problem.device),)

    def bind(self, problem: Problem, config: MatmulConfig) -> Plan:
        product: Product = problem.layout
        device = problem.device
        start = launch.prepare_separate(
            tiles_program(product, config, device),
            device.index,
            grid=tile_count(product, config),
            dependent=is_dependent(device),
        )
        numbers = tiles_numbers(product)
        stream = launch.current_stream

        def run(pointers: tuple[int, ...]) -> None:
            start(stream(device.index), *pointers, *numbers, 0, 0)

        return _plan(problem, launch.on_device(device.index, run))


class TritonSplitK(TritonMatmul):
    """Several programs per tile, each with a share of K; a second kernel adds their fp32 sums.

    The shares are added in their order, so the result is the same each time.
    """

    name = "triton_split_k"
    summary = "several programs per tile, each with a share of K, added in order"
    kind = "split_k"

    def programs(self, problem: Problem, config: MatmulConfig) -> tuple[TritonProgram, ...]:
        product: Product = problem.layout
        return (
            tiles_program(product, config, problem.device),
            add_program(product, config, problem.device),
        )

    def bind(self, problem: Problem, config: MatmulConfig) -> Plan:
        product: Product = problem.layout
        device = problem.device
        dependent = is_dependent(device)
        tiles, add = self.programs(problem, config)
        count = product.batch * product.rows * product.columns
        first = launch.prepare_separate(
            tiles,
            device.index,
            grid=tile_count(product, config) * config.split_k,
            dependent=dependent,
        )
        second = launch.prepare_separate(
            add, device.index, grid=math.ceil(count / ADD_BLOCK), dependent=dependent
        )
        numbers = tiles_numbers(product)
        stream = launch.current_stream

        def run(pointers: tuple[int, ...]) -> None:
            a, b, *rest = pointers
            partials = launch.empty(config.split_k * count, torch.float32, device.index)
            now = stream(device.index)
            at = partials.data_ptr()
            first(now, a, b, at, *numbers, 0, 0)
            second(now, at, *rest, count, product.columns, 0, 0)

        return _plan(problem, launch.on_device(device.index, run))


class TritonPersistent(TritonMatmul):
    """As many programs as the GPU runs at once, each with tile after tile, fed by TMA."""

    name = "triton_persistent"
    summary = "programs that stay and make tile after tile, fed by TMA (sm_90 and up)"
    kind = "persistent"

    def unable(self, problem: Problem) -> str | None:
        reason = super().unable(problem)
        if reason is not None:
            return reason
        product: Product = problem.layout
        if problem.device.capability < (9, 0):
            return f"needs TMA (compute capability 9.0), not {problem.device.arch}"
        if product.dtype.itemsize != 2:
            return f"takes bfloat16 and float16, not {problem.dtype('out')}"
        if product.batch != 1:
            return "takes one product at a time, not a batch"
        if product.a_strides[2] != 1 or 1 not in product.b_strides[1:]:
            return "TMA reads matrices with a contiguous dim, of A the last one"
        if not (product.a_aligned and product.b_aligned):
            return "TMA reads rows that are aligned to 16 bytes"
        if product.columns * product.dtype.itemsize % 16:
            return f"TMA writes rows of a multiple of 16 bytes, not of {product.columns} columns"
        if not all(0 < step <= INT32 for step in tma_steps(product)):
            return "rows that are all one and the same, or too far apart"
        return None

    def programs(self, problem: Problem, config: MatmulConfig) -> tuple[TritonProgram, ...]:
        return (persistent_program(problem.layout, config, problem.device),)

    def bind(self, problem: Problem, config: MatmulConfig) -> Plan:
        product: Product = problem.layout
        device = problem.device
        (program,) = self.programs(problem, config)
        resident = launch.resident_programs(program, device.index) * device.multiprocessors
        grid = min(tile_count(product, config), resident)
        start = launch.prepare_separate(
            program, device.index, grid=grid, dependent=is_dependent(device)
        )
        scratch = grid * launch.scratch_bytes(program, device.index)
        numbers = (product.rows, product.columns, product.depth, *tma_steps(product))
        stream = launch.current_stream

        def run(pointers: tuple[int, ...]) -> None:
            # Freed when this returns, and used again only by what runs after the kernel.
            memory = launch.empty(scratch, torch.uint8, device.index)
            start(stream(device.index), *pointers, *numbers, memory.data_ptr(), 0)

        return _plan(problem, launch.on_device(device.index, run))


TILES, SPLIT_K, PERSISTENT = TritonTiles(), TritonSplitK(), TritonPersistent()
TRITON: tuple[TritonMatmul, ...] = (TILES, SPLIT_K, PERSISTENT)


def _plan(problem: Problem, run: Callable[..., None]) -> Plan:
    """The op's plan around `run(pointers)`: a, b, bias if any, c, pre if any."""
    product: Product = problem.layout
    columns = product.columns

    def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        leading = leading_dims(a, b)
        c = a.new_empty((*leading, a.shape[-2], columns))
        # Copies, if any, live until the kernel is in its queue.
        a, b = product.a_of(a, leading), product.b_of(b, leading)
        run((a.data_ptr(), b.data_ptr(), c.data_ptr()))
        return c

    def linear(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
    ) -> Any:
        y = x.new_empty((*x.shape[:-1], columns))
        x = product.a_of(x)
        pointers = [x.data_ptr(), weight.data_ptr()]
        if bias is not None:
            bias = bias.contiguous()
            pointers.append(bias.data_ptr())
        pointers.append(y.data_ptr())
        if not product.pre:
            run(tuple(pointers))
            return y
        h = torch.empty_like(y)
        run((*pointers, h.data_ptr()))
        return y, h

    return matmul if problem.op == "matmul" else linear
