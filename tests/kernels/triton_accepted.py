"""Run in Triton's interpreter what variants accept of any configs: the child of
test_triton_accepted.py, which sets TRITON_INTERPRET=1.

Configs are those of some number of rows, most with a field changed: to a value of another config,
to a neighbouring one, to anything. Those that `rejects` accepts are run and must give correct
results. The page behind every tensor that is read may not be touched.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton_interpreted
import triton_nvfp4_interpreted as nvfp4
import triton_nvfp4_moe_interpreted as experts
from accepted_configs import Seen, changed
from fuzz_emulated import examples, given, st
from triton_interpreted import BF16, F16, F32
from triton_nvfp4_interpreted import _guarded

from gristmill.ops import launch
from gristmill.ops.linear.configs import candidates
from gristmill.ops.linear.problem import linear_problem, linear_with_pre_problem, matmul_problem
from gristmill.ops.linear.triton import PERSISTENT, SPLIT_K, TILES, TritonMatmul
from gristmill.select.device import KNOWN, Device

OLD, NEW = KNOWN["sm_80"], KNOWN["sm_90a"]
SEEN = Seen()


def _sizes(draw: Any) -> tuple[int, int, int]:
    step = draw(st.sampled_from([1, 2, 8, 8, 16]))
    rows = draw(st.one_of(st.integers(1, 20), st.integers(1, 70), st.sampled_from([64, 128])))
    return rows, step * draw(st.integers(1, 300 // step)), step * draw(st.integers(1, 600 // step))


# ---- dense products ----


@st.composite
def products(draw: Any, variant: TritonMatmul) -> tuple[Any, ...]:
    rows, columns, depth = _sizes(draw)
    staying = variant is PERSISTENT
    if staying:
        columns, depth = 64 + -(-columns // 8) * 8, -(-depth // 8) * 8
    dtype = draw(st.sampled_from((BF16, F16) if staying else (BF16, F16, F32)))
    seed = draw(st.integers(0, 1 << 20))
    device = NEW if staying else draw(st.sampled_from([OLD, NEW]))
    kind = draw(st.sampled_from(["linear", "pre", "matmul"]))
    turned = draw(st.booleans())

    def made(*size: int) -> torch.Tensor:
        values = triton_interpreted._made(*size, dtype=dtype, seed=seed + sum(size))
        return _guarded(values)

    if kind == "matmul":
        several = () if staying else draw(st.sampled_from([(), (2,), (3,)]))
        a = made(*several, rows, depth)
        if not staying and draw(st.booleans()):
            a = made(*several, depth, rows).mT
        b = made(*several, columns, depth).mT if turned else made(*several, depth, columns)
        args: tuple[Any, ...] = (a, b)
        problem = matmul_problem(device, *args)
    else:
        weight = made(depth, columns).t() if turned else made(columns, depth)
        bias = made(columns) if draw(st.booleans()) else None
        activation = draw(st.sampled_from([None, "silu", "gelu"]))
        args = (made(rows, depth), weight, bias, activation)
        make = linear_with_pre_problem if kind == "pre" else linear_problem
        problem = make(device, *args)
    others = st.sampled_from([rows, 1, 16, 100, 300, 2000])
    found = candidates(variant.kind, problem.layout, draw(others), device, None)
    if not found or variant.supports(problem) is not None:
        return kind, None, None, args
    picked = found[min(len(found) - 1, draw(st.sampled_from([0, 1, 5, 30, 100, 300])))]
    return kind, problem, draw(changed(picked.config)), args


def _check_product(variant: TritonMatmul, drawn: tuple[Any, ...]) -> None:
    kind, problem, config, args = drawn
    if problem is None or not SEEN.accepts(variant, problem, config, variant.kind):
        return
    result = variant.bind(problem, config)(*args)
    what = f"{config} {problem} {[(one.shape, one.stride()) for one in args[:2]]}"
    if kind == "matmul":
        a, b = (one.double() for one in args)
        triton_interpreted._compare(result, a @ b, a.abs() @ b.abs(), what)
        return
    x, weight, bias, activation = args
    pre, terms = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    if bias is not None:
        pre, terms = pre + bias.double(), terms + bias.double().abs()
    if kind == "pre":
        result, h = result
        triton_interpreted._compare(h, pre, terms, f"pre of {what}")
    wanted = triton_interpreted._activated(pre, activation)
    triton_interpreted._compare(result, wanted, 1.2 * terms, what)


def _matmul(variant: TritonMatmul, count: int) -> None:
    @examples(count)
    @given(drawn=products(variant))
    def check(drawn: tuple[Any, ...]) -> None:
        _check_product(variant, drawn)

    check()
    SEEN.enough(variant.kind, count // 6)


def tiles(count: int) -> None:
    _matmul(TILES, count)


def split_k(count: int) -> None:
    _matmul(SPLIT_K, count)


def persistent(count: int) -> None:
    _matmul(PERSISTENT, count)


# ---- NVFP4 weights ----


@st.composite
def packed(draw: Any) -> tuple[Any, ...]:
    rows, columns, _ = _sizes(draw)
    depth, layout = 16 * draw(st.integers(1, 150)), draw(st.sampled_from(["rows", "tiles"]))
    if layout == "tiles" and columns * depth // 2 % 16:
        depth *= 2  # what is guarded ends with a page, and tiles begin at multiples of 16 bytes
    shape = nvfp4.Shape(
        rows,
        columns,
        depth,
        draw(st.sampled_from([BF16, F16])),
        layout,
        draw(st.sampled_from([None, F32, BF16])),
        draw(st.sampled_from([None, F32])),
    )
    args = tuple(
        _guarded(one) if isinstance(one, torch.Tensor) else one for one in nvfp4._arguments(shape)
    )
    device: Device = draw(st.sampled_from([OLD, NEW]))
    problem = nvfp4.forward_problem(device, *args)
    other = replace(problem, rows=draw(st.sampled_from([rows, 1, 16, 100, 300, 2000])))
    config = draw(st.sampled_from(nvfp4.VARIANT.configs(other)))
    return device, problem, draw(changed(config)), args


def rows(count: int) -> None:
    @examples(count)
    @given(drawn=packed())
    def check(drawn: tuple[Any, ...]) -> None:
        device, problem, config, args = drawn
        assert nvfp4.VARIANT.supports(problem) is None
        if SEEN.accepts(nvfp4.VARIANT, problem, config, "rows"):
            nvfp4.DEVICE = device
            nvfp4._check(config, args, problem)

    check()
    SEEN.enough("rows", count // 6)


# ---- experts ----


@st.composite
def mixtures(draw: Any) -> tuple[Any, ...]:
    shape = experts.Shape(
        draw(st.one_of(st.integers(1, 20), st.integers(20, 90))),
        draw(st.integers(1, 6)),
        draw(st.integers(1, 3)),
        16 * draw(st.integers(1, 20)),
        16 * draw(st.integers(1, 20)),
        draw(st.sampled_from([BF16, F16])),
        draw(st.sampled_from(["rows", "tiles"])),
        bias=draw(st.sampled_from([None, F32])),
        missing=draw(st.booleans()),
    )
    args = tuple(
        _guarded(one) if isinstance(one, torch.Tensor) else one for one in experts._arguments(shape)
    )
    device: Device = draw(st.sampled_from([OLD, NEW]))
    problem = experts.forward_problem(device, *args)
    other = replace(problem, rows=draw(st.sampled_from([shape.rows, 1, 16, 100, 1000, 20000])))
    config = draw(st.sampled_from(experts.VARIANT.configs(other)))
    return device, problem, draw(changed(config)), args


def mixture(count: int) -> None:
    @examples(count)
    @given(drawn=mixtures())
    def check(drawn: tuple[Any, ...]) -> None:
        device, problem, config, args = drawn
        assert experts.VARIANT.supports(problem) is None
        if SEEN.accepts(experts.VARIANT, problem, config, "mixture"):
            experts.DEVICE = device
            experts._check(config, args, problem)

    check()
    SEEN.enough("mixture", count // 6)


CHECKS: dict[str, Callable[[int], None]] = {
    one.__name__: one for one in (tiles, split_k, persistent, rows, mixture)
}


def _workspace(count: int, dtype: torch.dtype, index: int) -> torch.Tensor:
    """At a multiple of 16 bytes, as allocators give it, before a page that may not be touched."""
    whole = -(-count // 16) * 16
    made = torch.full((whole,), float("nan") if dtype.is_floating_point else 255, dtype=dtype)
    experts.KEPT.append(_guarded(made)[:count])
    return experts.KEPT[-1]


if __name__ == "__main__":
    launch.empty = _workspace
    for word in sys.argv[1:]:
        begin = time.perf_counter()
        name, _, count = word.partition("=")
        CHECKS[name](int(count))
        sys.stdout.write(f"{name} {time.perf_counter() - begin:.1f} s {dict(SEEN.counts)}\n")
