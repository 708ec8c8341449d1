"""Run the Triton variant of `nvfp4_moe` on the CPU, in Triton's interpreter: the child of
test_triton_nvfp4_moe.py, which sets TRITON_INTERPRET=1.

As in triton_interpreted.py, everything but the launch is what runs on a GPU. The sorting of slots
before the products and the sums after them, which are CUDA kernels with tests of their own, are a
few lines of Python here.
"""

from __future__ import annotations

import ctypes
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import triton_interpreted
from triton_interpreted import BF16, F16, F32
from triton_nvfp4_interpreted import _guarded

from gristmill.formats.nvfp4.tensor import BLOCK
from gristmill.formats.nvfp4.tiles import swizzle
from gristmill.ops import launch
from gristmill.ops.experts.combine import Combine
from gristmill.ops.experts.routing import Routing
from gristmill.ops.nvfp4_moe import cases, triton
from gristmill.ops.nvfp4_moe.problem import forward_problem
from gristmill.ops.nvfp4_moe.semantics import Call
from gristmill.ops.nvfp4_moe.triton import TritonExperts
from gristmill.ops.nvfp4_moe.triton_configs import FEW, ExpertsConfig
from gristmill.select.device import KNOWN
from gristmill.select.problem import Problem

triton_interpreted.TYPES.update(u8=torch.uint8, i8=torch.int8, i32=torch.int32, i64=torch.int64)
DEVICE = KNOWN["sm_90a"]
VARIANT = TritonExperts()
SMALL = ExpertsConfig(8, 32, 64, stages=3, warps=4, group=2)
FAR = 10**6  # where nothing may look
KEPT: list[torch.Tensor] = []  # h and partial sums of the last call


def _empty(count: int, dtype: torch.dtype, index: int) -> torch.Tensor:
    KEPT.append(torch.full((count,), math.nan, dtype=dtype))
    return KEPT[-1]


def _local_ids(ids: torch.Tensor, mapped: torch.Tensor | None, experts: int) -> list[int]:
    found = []
    for number in ids.flatten().tolist():
        if mapped is not None:
            number = int(mapped[number]) if 0 <= number < len(mapped) else -1
        found.append(number if 0 <= number < experts else -1)
    return found


def _route(routing: Routing) -> Callable[..., Any]:
    (size,) = routing.sizes

    def run(stream: int, ids: torch.Tensor, mapped: torch.Tensor | None) -> Any:
        assert ids.shape == (routing.ids.tokens, routing.ids.topk)
        local = _local_ids(ids, mapped, routing.experts)
        order = sorted((expert, slot) for slot, expert in enumerate(local) if expert >= 0)
        slot_of = torch.full((len(local),), FAR, dtype=torch.int32)
        slot_of[: len(order)] = torch.tensor([slot for _, slot in order], dtype=torch.int32)
        tiles = torch.full((routing.most_tiles, 4), FAR, dtype=torch.int32)
        count, first = 0, 0
        for expert in range(routing.experts):
            left = local.count(expert)
            each = math.ceil(left / max(1, math.ceil(left / size)))
            while left:
                own = min(left, each)
                tiles[count] = torch.tensor([expert, first, own, size])
                count, first, left = count + 1, first + own, left - own
        counted = torch.tensor([count], dtype=torch.int32)
        return SimpleNamespace(
            tiles_at=tiles.data_ptr(),
            tile_count_at=counted.data_ptr(),
            slot_of_at=slot_of.data_ptr(),
            alive=(tiles, counted, slot_of),
        )

    return run


def _add(combine: Combine) -> Callable[..., None]:
    facts = combine.ids

    def run(
        stream: int, partial_at: int, y_at: int, ids_at: int, map_at: int, weights_at: int
    ) -> None:
        mapped = None
        if facts.map_dtype is not None:
            mapped = _tensor(map_at, facts.map_dtype, (facts.mapped,), (facts.map_stride,))
        ids = _tensor(ids_at, facts.dtype, (facts.tokens, facts.topk), facts.strides)
        local = torch.tensor(_local_ids(ids, mapped, combine.experts))
        shape, width = (facts.tokens, facts.topk, combine.hidden), combine.hidden
        partial = _tensor(partial_at, F32, shape, (facts.topk * width, width, 1))
        y = _tensor(y_at, combine.out, (facts.tokens, width), (width, 1))
        assert combine.weights is not None
        shares = _tensor(weights_at, combine.weights, ids.shape, combine.weights_strides)
        valid = (local >= 0).view(facts.tokens, facts.topk, 1)
        y.copy_(torch.where(valid, partial * shares.unsqueeze(-1).float(), 0.0).sum(1))

    return run


def _tensor(
    at: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    """What lies at an address."""
    reach = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * (reach * dtype.itemsize)).from_address(at)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


for owner, name, stand_in in (
    (launch, "empty", _empty),
    (Routing, "prepare", _route),
    (Combine, "prepare", _add),
):
    setattr(owner, name, stand_in)


@dataclass(frozen=True)
class Shape:
    """A call: sizes, dtypes, options, and how the parts of the weights lie."""

    rows: int
    experts: int
    topk: int
    hidden: int
    inner: int
    dtype: torch.dtype = BF16
    layout: str = "rows"
    activation: str = "silu"
    limit: float | None = None
    alpha: float | None = None
    bias: torch.dtype | None = None
    weights: torch.dtype = F32
    ids: torch.dtype = torch.int64
    missing: bool = False
    mapped: bool = False


def _weight(
    experts: int, rows: int, columns: int, layout: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every code, and positive scales of moderate size; sums of about one."""

    def drawn(low: int, high: int, *size: int) -> torch.Tensor:
        made = torch.randint(low, high, size, generator=generator, dtype=torch.int32)
        return made.to(torch.uint8)

    codes = drawn(0, 256, experts, rows, columns // 2)
    scales = drawn(40, 72, experts, rows, columns // BLOCK).view(torch.float8_e4m3fn)
    row_scale = torch.rand(experts, rows, generator=generator) / math.sqrt(columns)
    return codes, swizzle(scales) if layout == "tiles" else scales, row_scale


def _arguments(shape: Shape, seed: int = 3) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    known = 2 * shape.experts if shape.mapped else shape.experts
    mapped = None
    if shape.mapped:
        every = torch.arange(known)
        mapped = torch.where(every % 2 == 0, every // 2, -1).to(torch.int32)
        # What is behind its end, and beside it, would be experts.
        mapped = torch.stack((torch.cat((mapped, mapped * 0)), torch.zeros(2 * known).int()), 1)
        mapped = mapped[:known, 0]
    x = normal(shape.rows, shape.hidden).to(shape.dtype)
    shares = torch.softmax(normal(shape.rows, shape.topk), -1).to(shape.weights)
    low = -1 if shape.missing else 0
    high = known + 1 if shape.missing else known
    ids = torch.randint(low, high, (shape.rows, shape.topk), generator=generator).to(shape.ids)
    wide = _weight(shape.experts, 2 * shape.inner, shape.hidden, shape.layout, generator)
    back = _weight(shape.experts, shape.hidden, shape.inner, shape.layout, generator)
    biases: list[torch.Tensor | None] = [None, None]
    if shape.bias is not None:
        biases = [
            normal(shape.experts, width).to(shape.bias) for width in (2 * shape.inner, shape.hidden)
        ]
    options = (shape.activation, shape.limit, mapped, shape.layout, shape.alpha)
    return (x, shares, ids, *wide, *back, *biases, *options)


def _problem(arguments: tuple[Any, ...]) -> Problem:
    return forward_problem(DEVICE, *arguments)


def _run(config: ExpertsConfig | None, arguments: tuple[Any, ...]) -> torch.Tensor:
    problem = _problem(arguments)
    reason = VARIANT.supports(problem)
    assert reason is None, reason
    config = VARIANT.config(problem) if config is None else config
    KEPT.clear()
    result: torch.Tensor = VARIANT.bind(problem, config)(*arguments)
    return result


def _check(config: ExpertsConfig | None, arguments: tuple[Any, ...], what: object) -> None:
    """Each product against fp64 on exact weights: h by itself, y of the h that was made.

    So both are within one rounding, and no more.
    """
    call, got = Call(*arguments), _run(config, arguments)
    what = f"{what} {config}"
    assert (got.shape, got.dtype) == (call.hidden_states.shape, call.hidden_states.dtype), what
    topk = call.topk_ids.shape[1]
    local = _local_ids(call.topk_ids, call.expert_map, call.experts)
    ranks = sorted((expert, slot) for slot, expert in enumerate(local) if expert >= 0)
    position = {slot: at for at, (_, slot) in enumerate(ranks)}
    if len(local) <= FEW:
        position = {slot: slot for slot in position}
    h = KEPT[0].view(-1, call.intermediate)
    y, terms = (torch.zeros(got.shape, dtype=torch.float64) for _ in range(2))
    matrices: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for slot, expert in enumerate(local):
        if expert < 0:
            continue
        if expert not in matrices:
            weights = (call.w13.expert(expert), call.w2.expert(expert))
            matrices[expert] = (weights[0].whole(torch.float64), weights[1].whole(torch.float64))
        w13, w2 = matrices[expert]
        token = slot // topk
        own = h[position[slot]]
        _check_h(call, expert, w13, call.hidden_states[token].double(), own, what)
        share = call.topk_weights[token, slot % topk].double()
        out, size = w2 @ own.double(), w2.abs() @ own.double().abs()
        if call.w2_bias is not None:
            shift = call.w2_bias[expert].double()
            out, size = out + shift, size + shift.abs()
        y[token] += share * out
        terms[token] += share.abs() * size
    triton_interpreted._compare(got, y, terms, what)
    # Nothing was made of slots that take no part.
    partial = KEPT[1].view(len(local), -1)
    assert partial[torch.tensor(local) < 0].isnan().all(), what
    if not matrices:
        assert not got.any(), what


def _check_h(
    call: Call, expert: int, w13: torch.Tensor, x: torch.Tensor, got: torch.Tensor, what: str
) -> None:
    both, size = w13 @ x, w13.abs() @ x.abs()
    if call.w13_bias is not None:
        shift = call.w13_bias[expert].double()
        both, size = both + shift, size + shift.abs()
    gate, up = both.chunk(2)
    gate_size, up_size = size.chunk(2)
    factor = up.abs() if call.limit is None else up.abs().clamp(max=call.limit)
    steep = 1.2 * (1 + abs(call.slope))  # of the activation, at most
    terms = steep * gate_size * (factor + 1) + (gate.abs() + 1e-3) * up_size
    triton_interpreted._compare(got, _activated(call, gate, up), terms, f"h of {what}")


def _activated(call: Call, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    limit = math.inf if call.limit is None else call.limit
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if call.activation == "gelu":
        return gate * (1 + torch.erf(gate / math.sqrt(2))) / 2 * up
    if call.activation == "swiglu_oai":
        return gate / (1 + torch.exp(-(call.alpha or 1.702) * gate)) * (up + 1)
    return gate / (1 + torch.exp(-gate)) * up


def shapes() -> None:
    for layout in ("rows", "tiles"):
        for shape in (
            Shape(24, 4, 3, 64, 48, layout=layout),
            Shape(1, 1, 1, 16, 16, layout=layout),
            Shape(3, 5, 2, 48, 80, layout=layout),
            Shape(40, 3, 2, 80, 48, F16, layout),
            Shape(33, 6, 2, 272, 16, layout=layout),
            Shape(70, 2, 1, 32, 272, F16, layout),
        ):
            _check(SMALL, _arguments(shape), shape)
    wide = ExpertsConfig(16, 128, 128, stages=3, warps=4)
    tall = ExpertsConfig(128, 64, 64, stages=3, warps=4, group=8)
    for layout in ("rows", "tiles"):
        _check(wide, _arguments(Shape(40, 4, 2, 144, 80, F16, layout)), layout)
        _check(tall, _arguments(Shape(150, 2, 2, 80, 48, BF16, layout)), layout)


def activations() -> None:
    for activation in ("silu", "gelu", "swiglu_oai"):
        for limit in (None, 0.5, 1e39):
            for rows in (5, 40):
                shape = Shape(rows, 4, 2, 48, 32, activation=activation, limit=limit, bias=BF16)
                _check(SMALL, _arguments(shape), shape)
    for alpha in (0.5, -2.0):
        shape = Shape(5, 4, 2, 48, 32, F16, activation="swiglu_oai", alpha=alpha)
        _check(SMALL, _arguments(shape), shape)


def dtypes() -> None:
    for dtype, weights, bias, ids in (
        (BF16, BF16, F32, torch.int32),
        (F16, F16, BF16, torch.int64),
        (BF16, F32, F16, torch.int32),
    ):
        for rows in (4, 40):
            shape = Shape(
                rows, 5, 2, 32, 48, dtype, bias=bias, weights=weights, ids=ids, missing=True
            )
            _check(SMALL, _arguments(shape), shape)


def routes() -> None:
    """Slots without an expert, ids beyond the last, maps, one expert for all, and repeated ones."""
    for rows in (7, 50):
        for mapped in (False, True):
            shape = Shape(rows, 4, 3, 32, 32, missing=True, mapped=mapped, bias=F32)
            _check(SMALL, _arguments(shape), shape)
        x, shares, ids, *rest = _arguments(Shape(rows, 4, 3, 32, 32))
        for name, other in {
            "nobody": ids * 0 - 1,
            "one for all": ids * 0 + 2,
            "repeated": ids[:, :1].expand(ids.shape),
            "beyond": ids + 2,
            "far": ids + 2**40,
            "far below": ids - 2**40,
            "strided": ids.t().contiguous().t(),
        }.items():
            _check(SMALL, (x, shares.t().contiguous().t(), other, *rest), (rows, name))


def layouts() -> None:
    """Where the parts lie: expanded scales, rows apart, biases and x of any strides."""
    for rows in (6, 40):
        shape = Shape(rows, 3, 2, 48, 32, bias=F32)
        x, shares, ids, codes, scales, row_scale, *rest = _arguments(shape)
        one = row_scale[:, :1].contiguous().expand(row_scale.shape)
        apart = torch.zeros(*codes.shape[:-1], 40, dtype=torch.uint8)[..., : codes.shape[-1]]
        apart.copy_(codes)
        _check(SMALL, (x, shares, ids, codes, scales, one, *rest), "one scale")
        _check(SMALL, (x, shares, ids, apart, scales, row_scale, *rest), "codes apart")
        for name, other in {
            "columns": x.t().contiguous().t(),
            "expanded": x[:1].expand(x.shape),
            "odd": torch.cat((x, x[:, :3]), 1)[:, : x.shape[1]],
        }.items():
            _check(SMALL, (other, shares, ids, codes, scales, row_scale, *rest), name)
        bias, *rest = rest[3:]
        parts = (x, shares, ids, *_arguments(shape)[3:9])
        _check(SMALL, (*parts, bias.t().contiguous().t(), *rest), "bias in columns")


def parts() -> None:
    """More tokens than have their values kept at a time."""
    kept = triton._MOST_KEPT
    for rows, most in ((50, 30 * 2 * 48), (100, 33 * 2 * 48), (65, 64 * 2 * 48), (2, 2 * 48)):
        triton._MOST_KEPT = most
        try:
            shape = Shape(rows, 3, 2, 48, 32)
            arguments = _arguments(shape)
            many = _run(SMALL, arguments)
            assert len(KEPT) == 2 * math.ceil(rows * 2 * 48 / most), len(KEPT)
            assert max(part.numel() for part in KEPT) <= most
        finally:
            triton._MOST_KEPT = kept
        assert torch.equal(many, _run(SMALL, arguments)), rows


def every_case() -> None:
    """The op's own cases, those that the variant takes."""
    assert _taken(1) >= 25


def few_cases() -> None:
    """Each fourth of them."""
    assert _taken(4) >= 6


def _taken(step: int) -> int:
    """How many of the op's cases the variant takes, and has right, going by steps."""
    given = [(case.name, case.make("cpu", 1)) for case in cases.forward_cases()]
    taken = [one for one in given if VARIANT.supports(_problem(one[1])) is None][::step]
    for name, arguments in taken:
        _check(None, arguments, name)
    return len(taken)


def bounds() -> None:
    """Nothing is read beyond the end of any tensor: the page after each may not be touched."""
    for layout in ("rows", "tiles"):
        for rows in (3, 40):
            shape = Shape(rows, 3, 2, 48, 80, layout=layout, bias=F32, missing=True)
            given = [
                _guarded(part) if isinstance(part, torch.Tensor) else part
                for part in _arguments(shape)
            ]
            for config in (SMALL, ExpertsConfig(16, 128, 256, 3, 4)):
                _check(config, tuple(given), shape)


def rows_alone() -> None:
    """The bits of a token do not depend on how many there are, nor on which they are."""
    whole = _arguments(Shape(50, 4, 2, 80, 48, bias=F32))
    problem = replace(_problem(whole), batch_invariant=True)
    for config in (VARIANT.config(problem.asked()), ExpertsConfig(16, 32, 64, 3, 4, group=8)):

        def run(start: int, stop: int, config: ExpertsConfig = config) -> torch.Tensor:
            some = [part[start:stop] for part in whole[:3]]
            return _run(config, (*some, *whole[3:]))

        together = run(0, 50)
        for row in (0, 17, 49):
            assert torch.equal(run(row, row + 1)[0], together[row]), config
        assert torch.equal(run(5, 45), together[5:45]), config


if __name__ == "__main__":
    for name in sys.argv[1:]:
        begin = time.perf_counter()
        globals()[name]()
        sys.stdout.write(f"{name} {time.perf_counter() - begin:.1f} s\n")
