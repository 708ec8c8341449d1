"""The variant for Hopper: both products fused with what is around them, tokens in tiles by expert.

Few slots take three launches: the products, whose blocks find out by themselves who is routed
where, and one that adds what a token's experts give. Up to 64 tokens are put in order by a launch
before, and added by the second product; more of them take four launches.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from gristmill.errors import DriverError
from gristmill.formats.nvfp4.tensor import FRAGMENTS
from gristmill.jit import Program
from gristmill.jit.tensor_map import maps_of_rows
from gristmill.ops import launch
from gristmill.ops.experts import ids as experts_ids
from gristmill.ops.experts.combine import Combine
from gristmill.ops.experts.routing import Routing, misfit
from gristmill.ops.nvfp4_linear.fused import BIAS_KINDS, TYPES
from gristmill.ops.nvfp4_moe.problem import Details
from gristmill.ops.nvfp4_moe.wgmma_configs import (
    ADD,
    CHUNK,
    LAUNCH,
    SCAN,
    UP,
    MoeConfig,
    Product,
    candidates_of,
    products,
    why_rejected,
)
from gristmill.ops.ready import at_hand
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

SOURCE = "nvfp4_moe.cu"
OPTIONS = ("-default-device",)  # for generic lambdas, which cannot say that they are device code
ACTIVATIONS = {"silu": 0, "gelu": 1, "swiglu_oai": 2}

# MoeParams: two maps of x; codes, scales, row_scale, bias, out, weights; slot_of, tiles,
# tile_count; ids, map and what IdFacts packs; and what is the same for all calls of a plan, packed
# once: weights_row, weights_column; bias_kind, weights_kind, wide_ids, wide_map, activation; limit,
# slope; tokens, slots; rows, inner; slabs, chunks, share, row_units; up to the struct's alignment.
CONSTANTS = struct.Struct("<2q5i2f8I52x")
PARAMS = struct.Struct(f"<128s128s9Q2Q{experts_ids.CONSTANTS.size}s{CONSTANTS.size}s")
SMALL, LARGE = 8, 32  # rows of a box

_LARGEST = 2**31 - 256  # sizes are 32-bit numbers, and rounded up to tiles


class Wgmma(Variant):
    """See kernels/cuda/nvfp4_moe.cu."""

    name = "cuda_wgmma"
    summary = "routing, products, activation and sum in three or four launches (sm_90)"
    config_type = MoeConfig

    def supports(self, problem: Problem) -> str | None:
        details: Details = problem.layout
        device = problem.device
        tokens, topk = problem.rows, problem.dim("k")
        experts, hidden, inner = problem.dim("E"), problem.dim("H"), problem.dim("I")
        if device.kind != "cuda":
            return f"needs a CUDA device, not {device.kind}"
        if device.capability != (9, 0):
            return f"uses instructions of sm_90a alone, not {device.arch}"
        if FRAGMENTS not in problem.flags:
            return f"takes weights in layout {FRAGMENTS!r}"
        if problem.dtype("x") not in ("bfloat16", "float16"):
            return f"takes x of bf16 or fp16, not {problem.dtype('x')}"
        for kind in (details.w13_bias, details.w2_bias, details.weights):
            if kind not in BIAS_KINDS:
                return f"takes biases and topk_weights of fp32, bf16 or fp16, not {kind}"
        if not (details.w13.packed and details.w2.packed):
            return "takes codes, scales, row scales and biases that are dense and aligned"
        if 0 in (tokens, topk, experts, hidden, inner):
            return "nothing to compute"
        if max(tokens * topk, experts * 2 * inner, experts * hidden) >= _LARGEST:
            return "has more slots, or rows of weights, than 2**31"
        return misfit(device, experts)

    def config(self, problem: Problem) -> MoeConfig:
        return at_hand(self, problem, candidates_of(problem))

    def configs(self, problem: Problem) -> Sequence[MoeConfig]:
        return candidates_of(problem)

    def rejects(self, problem: Problem, config: MoeConfig) -> str | None:
        reason = why_rejected(config)
        if reason is None:
            up, down = self._products(problem, self._right(problem, config))
            reason = up.reason or down.reason
        return reason

    def varies_with_batch(self, problem: Problem) -> str | None:
        """Nothing: a token is a column of each product, and its shares are added in their order.

        In which order a column is summed is given by the config's groups, depth and split, and by
        the columns of the weight. Where the second product adds up, experts are added in an order
        that does depend on the others: it does not then.
        """
        return None

    def programs(self, problem: Problem, config: MoeConfig) -> tuple[Program, ...]:
        """Of what is launched for so many tokens.

        So a row of a table speaks for calls that launch the same kernels, and is passed over where
        slots are no longer scanned, or no longer added by the second product.
        """
        config = self._right(problem, config)
        up, down = self._products(problem, config)
        found = [self._program(problem, up), self._program(problem, down)]
        if up.routing == LAUNCH:
            found += self._routing(problem, up).programs()
        if down.step != ADD:
            found += self._combine(problem, config, up).programs()
        return tuple(found)

    def bind(self, problem: Problem, config: MoeConfig) -> Callable[..., Any]:
        details: Details = problem.layout
        index, x = problem.device.index, str(problem.dtype("x"))
        tokens, topk, experts = problem.rows, problem.dim("k"), problem.dim("E")
        hidden, inner, slots = problem.dim("H"), problem.dim("I"), tokens * topk
        config = self._right(problem, config)
        up, down = self._products(problem, config)
        for product in (up, down):
            if product.reason is not None:
                raise DriverError(f"{self.name}: no launch by {config}: {product.reason}")
        route = self._routing(problem, up).prepare() if up.routing == LAUNCH else None
        combine = None if down.step == ADD else self._combine(problem, config, up).prepare()
        tiles = min(slots, experts) + (0 if up.routing == SCAN else slots // up.tile)
        start_up = self._start(problem, config, up, tiles)
        start_down = self._start(problem, config, down, tiles)

        # h is by tile of all tokens, or by sorted position.
        lines = tiles * up.tile if up.routing == SCAN else slots
        # Rows of x that overlap, or are all the same, have no map.
        copied = details.copied or (route is None and details.x_stride < hidden)
        rows, stride = (tokens, hidden if copied else details.x_stride)
        if route is not None:
            rows, stride = slots, hidden
        x_small, x_large = (
            maps_of_rows(index, x, 2, hidden, rows, stride, (n, CHUNK)) for n in (SMALL, LARGE)
        )
        h_small, h_large = (
            maps_of_rows(index, x, 2, inner, lines, inner, (n, CHUNK)) for n in (SMALL, LARGE)
        )
        constants_up = self._constants(problem, up, details.w13_bias)
        constants_down = self._constants(problem, down, details.w2_bias)
        of_ids = details.ids.pack(experts)
        # One workspace: h, and what the expert of each slot gives.
        h_bytes = -(-lines * inner * 2 // 256) * 256
        total = h_bytes + (0 if combine is None else slots * hidden * (4 if config.wide else 2))
        dense = torch.contiguous_format
        stream_of, empty, uint8 = launch.current_stream, torch.empty, torch.uint8

        def plan(
            hidden_states: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            w13_codes: torch.Tensor,
            w13_scales: torch.Tensor,
            w13_row_scale: torch.Tensor,
            w2_codes: torch.Tensor,
            w2_scales: torch.Tensor,
            w2_row_scale: torch.Tensor,
            w13_bias: torch.Tensor | None,
            w2_bias: torch.Tensor | None,
            activation: str,
            limit: float | None,
            expert_map: torch.Tensor | None,
            layout: str,
            alpha: float | None,
        ) -> torch.Tensor:
            device = hidden_states.device
            y = empty((tokens, hidden), dtype=hidden_states.dtype, device=device)
            if copied:
                hidden_states = hidden_states.clone(memory_format=dense)
            workspace = empty(total, dtype=uint8, device=device)
            stream, h_at = stream_of(index), workspace.data_ptr()
            ids_at = topk_ids.data_ptr()
            map_at = 0 if expert_map is None else expert_map.data_ptr()
            weights_at, y_at = topk_weights.data_ptr(), y.data_ptr()
            lists = (0, 0, 0)
            if route is None:
                x_at, rows_at = hidden_states.data_ptr(), ids_at
            else:  # it holds on to its results as long as `routed` lives
                routed = route(stream, topk_ids, expert_map, hidden_states)
                x_at, rows_at = routed.x_sorted_at, routed.position_of_at
                lists = routed.slot_of_at, routed.tiles_at, routed.tile_count_at
            start_up(
                stream,
                x_small(x_at),
                x_large(x_at),
                w13_codes.data_ptr(),
                w13_scales.data_ptr(),
                w13_row_scale.data_ptr(),
                0 if w13_bias is None else w13_bias.data_ptr(),
                h_at,
                weights_at,
                *lists,
                ids_at,
                map_at,
                of_ids,
                constants_up,
            )
            start_down(
                stream,
                h_small(h_at),
                h_large(h_at),
                w2_codes.data_ptr(),
                w2_scales.data_ptr(),
                w2_row_scale.data_ptr(),
                0 if w2_bias is None else w2_bias.data_ptr(),
                y_at if combine is None else h_at + h_bytes,
                weights_at,
                *lists,
                ids_at,
                map_at,
                of_ids,
                constants_down,
            )
            if combine is not None:
                combine(stream, h_at + h_bytes, y_at, rows_at, map_at, weights_at)
            return y

        return launch.on_device(index, plan)

    def _products(self, problem: Problem, config: MoeConfig) -> tuple[Product, Product]:
        dims = (problem.dim(name) for name in ("k", "H", "I"))
        return products(config, problem.rows, *dims, problem.device)

    def _right(self, problem: Problem, config: MoeConfig) -> MoeConfig:
        """The config, or as much of it as gives what was asked for."""
        if problem.batch_invariant and config.added:
            # The experts of a token would be added in an order that is that of all tiles.
            config = replace(config, added=False, down=(*config.down[:4], 1, config.down[5]))
        # What an expert gives may be more than fp16 holds before it is weighed.
        return replace(config, wide=True) if problem.dtype("x") == "float16" else config

    def _program(self, problem: Problem, product: Product) -> Program:
        name = product.template(TYPES[str(problem.dtype("x"))])
        return Program(SOURCE, (name,), OPTIONS)

    def _start(
        self, problem: Problem, config: MoeConfig, product: Product, tiles: int
    ) -> Callable[..., None]:
        program, device = self._program(problem, product), problem.device
        grid = tiles * product.row_units
        if product.step == ADD:  # whose clusters have rows of their own, and all tiles
            grid = product.row_units
        # The producer of a split takes no part in the meetings of its cluster: one unit each.
        elif config.persistent and product.split == 1:
            per_sm = launch.resident_blocks(program, device.index, product.threads, product.shared)
            grid = min(grid, per_sm * device.multiprocessors)
        call = launch.KernelCall(
            program,
            program.names[0],
            grid=grid * product.split,
            block=product.threads,
            shared=product.shared,
            params=PARAMS,
            cluster=product.split,
            dependent=True,
        )
        return launch.prepare(call, device.index)

    def _routing(self, problem: Problem, up: Product) -> Routing:
        details: Details = problem.layout
        return Routing(
            problem.device,
            details.ids,
            problem.dim("E"),
            sizes=up.sizes,
            row_bytes=problem.dim("H") * 2,
            row_stride=details.x_stride * 2,
            positions=True,
        )

    def _combine(self, problem: Problem, config: MoeConfig, up: Product) -> Combine:
        details: Details = problem.layout
        dtype = getattr(torch, str(problem.dtype("x")))
        return Combine(
            problem.device,
            details.ids,
            problem.dim("E"),
            problem.dim("H"),
            partial=torch.float32 if config.wide else dtype,
            out=dtype,
            sorted=up.routing == LAUNCH,
            weights=details.weights,
            weights_strides=details.weights_strides,
        )

    def _constants(self, problem: Problem, product: Product, bias: torch.dtype | None) -> bytes:
        details: Details = problem.layout
        tokens, hidden, inner = problem.rows, problem.dim("H"), problem.dim("I")
        return CONSTANTS.pack(
            *details.weights_strides,
            *(BIAS_KINDS[bias], BIAS_KINDS[details.weights]),
            *(details.ids.dtype == torch.int64, details.ids.map_dtype == torch.int64),
            ACTIVATIONS[details.activation],
            *(math.inf if details.limit is None else details.limit, details.slope),
            *(tokens, tokens * problem.dim("k")),
            *(2 * inner if product.step == UP else hidden, inner),
            *(product.slabs, product.chunks, product.share, product.row_units),
        )
