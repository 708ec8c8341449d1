"""The Triton variant of `nvfp4_moe`: experts in a checkpoint's order, on any GPU since sm_80.

It takes weights that nobody prepared, and those of Blackwell, whose codes keep that order. Up to
`FEW` slots: two products and the sums. More: slots are sorted by expert first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from gristmill.formats.nvfp4.tensor import ROWS, TILES
from gristmill.jit.compilers import Compilable
from gristmill.ops import launch
from gristmill.ops.experts import routing
from gristmill.ops.experts.combine import Combine
from gristmill.ops.experts.ids import IdFacts
from gristmill.ops.experts.routing import Routing
from gristmill.ops.linear.programs import INT32, SLACK, TYPES, is_dependent
from gristmill.ops.nvfp4_moe import semantics
from gristmill.ops.nvfp4_moe.problem import Details
from gristmill.ops.nvfp4_moe.semantics import Call
from gristmill.ops.nvfp4_moe.triton_configs import FEW, ExpertsConfig, candidates, why_rejected
from gristmill.ops.nvfp4_moe.triton_programs import PRODUCTS, X, numbers, product_program
from gristmill.ops.ready import at_hand, out_of_reach
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

# Beyond, it should cost less to decode a matrix once, for torch's grouped mm, than in every tile:
# an estimate, as for the linear product.
_MOST_EACH = 1024
_LEAST_ALIGNED = 8  # bytes; every weight that lies alone has such rows
# Values of slots that are kept at a time, in each of two buffers: 1 GiB of fp32. More tokens than
# have so many are computed in parts. Offsets into the buffers fit 32 bits.
_MOST_KEPT = 1 << 28

Run = Callable[[Call, torch.Tensor], None]


class TritonExperts(Variant):
    """Tiles of slots with one expert by rows of its matrix, one per program.

    The bits of a token do not depend on the others: which slots share a tile changes nothing in a
    slot's sums, whose order along K is given by the config alone, and a config that is asked for
    with a fixed number of rows does not change with theirs. A token's slots are added in their
    order, so two runs give the same bits.
    """

    name = "triton"
    summary = "Triton programs over tiles of one expert's tokens, weights decoded in registers"
    config_type = ExpertsConfig

    def supports(self, problem: Problem) -> str | None:
        device = problem.device
        if device.kind != "cuda":
            return f"needs a CUDA device, not {device.kind}"
        if device.capability < (8, 0):
            return f"needs compute capability 8.0 or later, not {device.arch}"
        if 0 in (problem.rows, *(size for _, size in problem.dims)):
            return "nothing to compute"
        return _unable(problem)

    def declines(self, problem: Problem) -> str | None:
        details: Details = problem.layout
        for weight in (details.w13, details.w2):
            if not weight.aligned or any(
                step % _LEAST_ALIGNED for step in weight.codes_strides or ()
            ):
                return "a weight whose rows are not aligned is read byte by byte"
        grouped = problem.device.capability == (9, 0) or problem.device.capability[0] == 10
        many = _slots(problem) > _MOST_EACH * problem.dim("E")
        if many and grouped and problem.dtype("x") == "bfloat16":
            return (
                f"for more than {_MOST_EACH} tokens an expert it should take less time to "
                f"dequantise a matrix once than in every tile"
            )
        return out_of_reach(self, problem)

    def config(self, problem: Problem) -> ExpertsConfig:
        return at_hand(self, problem, self.configs(problem))

    def configs(self, problem: Problem) -> Sequence[ExpertsConfig]:
        sizes = (problem.dim("E"), problem.dim("H"), problem.dim("I"))
        return candidates(_slots(problem), *sizes, problem.device)

    def rejects(self, problem: Problem, config: ExpertsConfig) -> str | None:
        return why_rejected(config, problem.dim("H"), problem.dim("I"), problem.device)

    def varies_with_batch(self, problem: Problem) -> str | None:
        return None

    def programs(self, problem: Problem, config: ExpertsConfig) -> tuple[Compilable, ...]:
        products = tuple(product_program(problem, config, which) for which in PRODUCTS)
        tokens = max(_parts(problem))
        sums = _combine(problem, tokens).programs()
        if _slots(problem) <= FEW:
            return (*products, *sums)
        return (*_routing(problem, config, tokens).programs(), *products, *sums)

    def bind(self, problem: Problem, config: ExpertsConfig) -> Callable[..., Any]:
        details: Details = problem.layout
        parts = _parts(problem)
        bound = {tokens: _bind_part(problem, config, tokens) for tokens in set(parts)}
        guarded = {
            tokens: launch.on_device(problem.device.index, run) for tokens, run in bound.items()
        }

        def moe(*args: Any) -> torch.Tensor:
            call, y = Call(*args), semantics.outputs_forward(*args)
            # Copies, if any, live until the kernels are in their queue.
            call = _dense(call._replace(hidden_states=details.x_of(call.hidden_states)))
            if len(parts) == 1:
                guarded[parts[0]](call, y)
                return y
            for own in _slices(parts):
                guarded[own.stop - own.start](call.some(own), y[own])
            return y

        return moe


def _unable(problem: Problem) -> str | None:
    """Why the kernel cannot take this call, wherever it runs."""
    details: Details = problem.layout
    if details.layout not in (ROWS, TILES):
        return f"reads weights in a checkpoint's order, not in layout {details.layout!r}"
    if problem.dtype("x") not in X:
        return f"multiplies in 16 bits; hidden_states are {problem.dtype('x')}"
    for name, dtype in (
        ("topk_weights", details.weights),
        ("w13_bias", details.w13_bias),
        ("w2_bias", details.w2_bias),
    ):
        if dtype not in (None, *TYPES):
            return f"takes {name} of fp32, bf16 or fp16, not {dtype}"
    for weight in (details.w13, details.w2):
        if weight.codes_strides is None or weight.scales_strides is None:
            return "the bytes of a row of codes or scales are not side by side"
    if problem.dim("k") * max(problem.dim("H"), problem.dim("I")) > _MOST_KEPT:
        return "one token's slots have more values than are kept at a time"
    if max(_slots(problem), problem.dim("E") * problem.dim("I")) > INT32 - SLACK:
        return "a dimension has 2**31 elements or more"
    if _slots(problem) > FEW:
        return routing.misfit(problem.device, problem.dim("E"))
    return None


def _slots(problem: Problem) -> int:
    return problem.rows * problem.dim("k")


def _parts(problem: Problem) -> tuple[int, ...]:
    """The tokens in parts whose slots' values can be kept: mostly one."""
    width = max(problem.dim("H"), problem.dim("I"))
    most = max(1, _MOST_KEPT // (problem.dim("k") * width))
    count = math.ceil(problem.rows / most)
    each = math.ceil(problem.rows / count)
    *whole, last = range(0, problem.rows, each)
    return (*[each] * len(whole), problem.rows - last)


def _slices(parts: tuple[int, ...]) -> Iterator[slice]:
    start = 0
    for tokens in parts:
        yield slice(start, start + tokens)
        start += tokens


def _ids(problem: Problem, tokens: int) -> IdFacts:
    details: Details = problem.layout
    return replace(details.ids, tokens=tokens)


def _routing(problem: Problem, config: ExpertsConfig, tokens: int) -> Routing:
    ids, experts = _ids(problem, tokens), problem.dim("E")
    return Routing(problem.device, ids, experts, sizes=(config.block_m,))


def _combine(problem: Problem, tokens: int) -> Combine:
    details: Details = problem.layout
    return Combine(
        device=problem.device,
        ids=_ids(problem, tokens),
        experts=problem.dim("E"),
        hidden=problem.dim("H"),
        partial=torch.float32,
        out=details.x,
        weights=details.weights,
        weights_strides=details.weights_strides,
    )


def _bind_part(problem: Problem, config: ExpertsConfig, tokens: int) -> Run:
    """`run(call, y)` for calls of so many tokens."""
    details: Details = problem.layout
    index = problem.device.index
    slots, few = tokens * problem.dim("k"), _slots(problem) <= FEW
    route = None if few else _routing(problem, config, tokens)
    tiles = slots if route is None else route.most_tiles
    sort = None if route is None else route.prepare()
    add = _combine(problem, tokens).prepare()
    products = []
    for which in PRODUCTS:
        rows = problem.dim("H") if which == "down" else 2 * problem.dim("I")
        products.append(
            launch.prepare_separate(
                product_program(problem, config, which),
                index,
                grid=tiles * math.ceil(rows / config.block_n),
                dependent=is_dependent(problem.device),
            )
        )
    first, second = products
    up_numbers, down_numbers = (numbers(problem, which, tiles) for which in PRODUCTS)
    activation = (math.inf if details.limit is None else details.limit, details.slope)
    h_size, partial_size = slots * problem.dim("I"), slots * problem.dim("H")

    def run(call: Call, y: torch.Tensor) -> None:
        now = launch.current_stream(index)
        # Freed when this returns, and used again only by what runs after the kernels.
        h = launch.empty(h_size, details.x, index)
        partial = launch.empty(partial_size, torch.float32, index)
        ids, mapped = call.topk_ids, call.expert_map
        ids_at, map_at = ids.data_ptr(), 0 if mapped is None else mapped.data_ptr()
        where: tuple[int, ...] = (ids_at,) if mapped is None else (ids_at, map_at)
        if sort is not None:
            routed = sort(now, ids, mapped)
            where = (routed.tiles_at, routed.tile_count_at, routed.slot_of_at)
        first(
            now,
            call.hidden_states.data_ptr(),
            *where,
            *_pointers(call.w13_codes, call.w13_scales, call.w13_row_scale, call.w13_bias),
            h.data_ptr(),
            *up_numbers,
            *activation,
            0,
            0,
        )
        second(
            now,
            h.data_ptr(),
            *where,
            *_pointers(call.w2_codes, call.w2_scales, call.w2_row_scale, call.w2_bias),
            partial.data_ptr(),
            *down_numbers,
            0,
            0,
        )
        shares_at = call.topk_weights.data_ptr()
        add(now, partial.data_ptr(), y.data_ptr(), ids_at, map_at, shares_at)

    return run


def _pointers(*parts: torch.Tensor | None) -> tuple[int, ...]:
    return tuple(part.data_ptr() for part in parts if part is not None)


def _dense(call: Call) -> Call:
    """With biases that are contiguous: mostly as they are."""
    return call._replace(
        w13_bias=None if call.w13_bias is None else call.w13_bias.contiguous(),
        w2_bias=None if call.w2_bias is None else call.w2_bias.contiguous(),
    )
