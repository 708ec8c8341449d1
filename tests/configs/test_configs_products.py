"""A table can only name a launch that a variant of the products and experts could have chosen."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from configs.products_problems import (
    BF16,
    DEVICES,
    F32,
    MODELS,
    SIZES,
    Case,
    dense,
    every_case,
    experts,
    nvfp4,
)

from gristmill.ops.linear.configs import MOST_PARTIALS, STURDY, MatmulConfig
from gristmill.ops.linear.triton import TritonMatmul
from gristmill.ops.nvfp4_linear.mma_configs import MmaConfig
from gristmill.ops.nvfp4_linear.problem import SIZES as SIZES_OF_TILES
from gristmill.ops.nvfp4_linear.triton_configs import RowsConfig
from gristmill.ops.nvfp4_linear.wgmma_configs import WgmmaConfig
from gristmill.ops.nvfp4_moe.triton_configs import ExpertsConfig
from gristmill.ops.nvfp4_moe.wgmma_configs import MoeConfig
from gristmill.ops.registry import OPS
from gristmill.select.choices import why_unlisted
from gristmill.select.device import KNOWN, Device
from gristmill.select.problem import BUCKETS, HINTS, Problem, Sizes
from gristmill.select.table import Row, Table, revive

H200, A100 = KNOWN["sm_90a"], KNOWN["sm_80"]
SHIPPED = Table.load(Path(str(resources.files("gristmill"))) / "tables" / "nvidia-h200.json")
PRODUCTS = ("linear", "linear_with_pre", "matmul", "nvfp4_linear", "nvfp4_moe", "moe")
# No field of a launch has one of these values.
WILD = (0, -1, 7, 10**6, 2**31, 10**12, 10**4000, -(10**4000))


# ---- what variants choose themselves ----


def _check_rules(cases: Iterator[Case]) -> None:
    seen = 0
    for case in cases:
        variant, problem = case
        for config in (variant.config(problem), *variant.configs(problem)):
            assert variant.rejects(problem, config) is None, (str(case), config)
        if isinstance(variant, TritonMatmul):
            assert variant.rejects(problem, STURDY[variant.kind]) is None, str(case)
        seen += 1
    assert seen > 1000


@pytest.mark.parametrize("rows", [33, 70000])
@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_all_that_a_rule_gives_is_accepted(device: Device, rows: int) -> None:
    _check_rules(every_case(device, rows))


@pytest.mark.long
@pytest.mark.parametrize("rows", [1, 2, 7, 32, 65, 129, 256, 600, 1024, 5000, 16384])
@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_all_that_rules_give_is_accepted(device: Device, rows: int) -> None:
    _check_rules(every_case(device, rows))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("arch", KNOWN)
def test_all_that_a_bundle_has_is_accepted(arch: str, dtype: torch.dtype) -> None:
    for name in PRODUCTS:
        op = OPS[name]
        assert op.space is not None
        for problem, choice in op.space(op, KNOWN[arch], dtype):
            assert choice.variant.rejects(problem.asked(), choice.config) is None, (problem, choice)


@pytest.mark.parametrize(
    ("device", "rows", "several"),
    [(H200, 16, True), (H200, 17, False), (H200, 64, False), (A100, 17, True), (A100, 64, True)],
    ids=str,
)
def test_warps_compete_with_warpgroups_at_few_rows_alone(
    device: Device, rows: int, several: bool
) -> None:
    """Where they do not, their usual launch is all that is compiled and timed of them."""
    problems = [
        problem
        for variant, problem in nvfp4(device, rows, 4096, 4096)
        if variant.name == "cuda_mma" and "fragments" in problem.flags
    ]
    variant = next(one for one in OPS["nvfp4_linear"].variants if one.name == "cuda_mma")
    found = {len(variant.configs(one)) for one in problems if one.op == "nvfp4_linear"}
    assert max(found) > 1 if several else found == {1}
    assert all(variant.configs(one)[0] == variant.config(one) for one in problems)


def _by_family(device: Device, rows: int, at: int) -> dict[tuple[str, str], list[Case]]:
    found: dict[tuple[str, str], list[Case]] = {}
    every = (*dense(device, rows, *SIZES[at]), *nvfp4(device, rows, *SIZES[at]))
    for case in (*every, *experts(device, rows, MODELS[at])):
        if not case.problem.batch_invariant:
            key = (case.variant.name, case.problem.family())
            found.setdefault(key, []).append(case)
    return found


def _check_spans(device: Device, at: int, sizes: Sizes, stops: tuple[int, ...]) -> None:
    for stop in stops:
        low, high = sizes.span(stop)
        measured = _by_family(device, stop, at)
        for rows in {max(1, low), high or 4 * stop} - {stop}:
            called = _by_family(device, rows, at)
            for key, cases in measured.items():
                for case, other in zip(cases, called.get(key, ()), strict=False):
                    for config in case.variant.configs(case.problem):
                        reason = other.variant.rejects(other.problem, config)
                        # Memory for them grows with the rows.
                        assert reason is None or "partial sums" in reason, (str(other), config)


@pytest.mark.parametrize("device", [A100, H200], ids=str)
def test_what_is_measured_at_one_size_is_accepted_where_its_row_holds(device: Device) -> None:
    _check_spans(device, 0, BUCKETS, (1, 256))
    _check_spans(device, 0, SIZES_OF_TILES, (4, 64, 512))


@pytest.mark.long
@pytest.mark.parametrize("at", range(len(MODELS)))
@pytest.mark.parametrize("device", DEVICES[1:], ids=str)
def test_what_is_measured_at_any_size_is_accepted_where_its_row_holds(
    device: Device, at: int
) -> None:
    _check_spans(device, at, BUCKETS, HINTS)
    _check_spans(device, at, SIZES_OF_TILES, SIZES_OF_TILES.stops[::12])


# ---- the shipped table ----


def _problem_of(row: Row, rows: int) -> Problem:
    words = row.key.split()
    op, named = OPS[words[0]], dict(word.split("=") for word in words if "=" in word)
    dtype = getattr(torch, named["x"])
    names = ("E", "k", "H", "I") if op.name == "nvfp4_moe" else ("N", "K")
    args = op.example_for(H200, (rows, *(int(named[name]) for name in names)), dtype)
    if op.name == "linear":
        bias = torch.empty(int(named["N"]), dtype=dtype, device="meta") if "bias" in named else None
        activation = next((word for word in words if word in ("relu", "silu", "gelu_tanh")), None)
        args = (*args[:2], bias, activation)
    problem = op.problem(*args, device=H200)
    assert problem.family() == row.family
    return problem


@pytest.mark.parametrize("op", ["linear", "nvfp4_linear", "nvfp4_moe"])
def test_every_shipped_row_is_accepted_wherever_it_holds(op: str) -> None:
    rows = [row for row in SHIPPED.rows.values() if row.key.split()[0] == op]
    assert len(rows) >= 20
    for row in rows:
        problem = _problem_of(row, row.rows)
        held = revive(row, problem, OPS[op].variants)
        assert not isinstance(held, str), (row.key, held)
        variant, config = held
        low, high = row.covers
        for count in {max(1, low), row.stop, high or 4 * row.stop, *map(int, row.also)}:
            other = _problem_of(row, count)
            assert variant.supports(other) is None
            assert variant.rejects(other, config) is None, (row.key, count)
            # The experts have other kernels for few and for many tokens.
            if op != "nvfp4_moe":
                assert variant.source_hash(other, config) == row.source_hash


# ---- what no variant would choose ----


def _case(name: str, device: Device, cases: Iterator[Case]) -> Case:
    return next(one for one in cases if (one.variant.name, one.problem.device) == (name, device))


# By the type of their config; of 64 rows and of common layers.
CHOSEN = {
    "tiles": _case("triton_tiles", H200, dense(H200, 64, 4096, 4096)),
    "split_k": _case("triton_split_k", H200, dense(H200, 64, 4096, 4096)),
    "persistent": _case("triton_persistent", H200, dense(H200, 256, 4096, 4096)),
    "rows": _case("triton", H200, nvfp4(H200, 64, 4096, 4096)),
    "mma": _case("cuda_mma", H200, nvfp4(H200, 64, 4096, 4096)),
    "wgmma": _case("cuda_wgmma", H200, nvfp4(H200, 64, 4096, 4096)),
    "experts": _case("triton", H200, experts(H200, 64, MODELS[0])),
    "moe": _case("cuda_wgmma", H200, experts(H200, 64, MODELS[0])),
}


def _planted(config: Any) -> Iterator[tuple[str, Any]]:
    """The config with a wild number for each of its numbers, and that one's name."""
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, tuple):
            for at, wild in itertools.product(range(len(value)), WILD):
                other = (*value[:at], wild, *value[at + 1 :])
                yield field.name, replace(config, **{field.name: other})
        elif isinstance(value, int) and not isinstance(value, bool):
            for wild in WILD:
                yield field.name, replace(config, **{field.name: wild})


@pytest.mark.parametrize("kind", CHOSEN)
def test_wild_numbers_are_rejected_at_once_in_a_few_words(kind: str) -> None:
    variant, problem = CHOSEN[kind]
    config = variant.config(problem)
    begin, count = time.perf_counter(), 0
    for name, planted in _planted(config):
        reason = variant.rejects(problem, planted)
        assert reason is not None, planted
        assert name in reason
        assert len(reason) < 200
        count += 1
    assert count >= 5 * len(WILD)
    assert time.perf_counter() - begin < 1.0


def _dense(device: Device = H200, rows: int = 64, **changes: Any) -> Problem:
    given: dict[str, Any] = {"columns": 4096, "depth": 4096, "dtype": BF16, **changes}
    dtype, columns, depth = given["dtype"], given["columns"], given["depth"]
    x = torch.empty((rows, depth), dtype=dtype, device="meta")
    weight = torch.empty((columns, depth), dtype=dtype, device="meta")
    return OPS["linear"].problem(x, weight, None, given.get("act"), device=device)


def _small(device: Device = H200, shared: int = 48 << 10) -> Device:
    return replace(device, shared_per_block=shared)


def _nvfp4(device: Device = H200, rows: int = 64, *sizes: int, layout: str = "rows") -> Problem:
    columns, depth = sizes or (4096, 4096)
    found = (one.problem for one in nvfp4(device, rows, columns, depth))
    return next(one for one in found if one.layout.layout == layout and one.op == "nvfp4_linear")


def _moe(device: Device = H200, rows: int = 64, *model: int, layout: str = "rows") -> Problem:
    given: Any = model or MODELS[0]
    found = (one.problem for one in experts(device, rows, given) if one.problem.op == "nvfp4_moe")
    return next(one for one in found if one.layout.layout == layout)


TILES = MatmulConfig(64, 128, 64, stages=4, warps=4)
WIDE = MatmulConfig(128, 256, 64, stages=3, warps=8)
SHARED = MatmulConfig(16, 64, 128, stages=4, warps=4, split_k=4, swap=True)
STAYING = MatmulConfig(128, 256, 64, stages=3, warps=8, parts=2)
ROWS = RowsConfig(16, 64, 128, stages=3, warps=2, split_k=4)
WARPS = MmaConfig(8, 1, 4, 8, shares=4)
GROUPS = WgmmaConfig(64, 1, 2, 4, 3, split=4, blocks=2)
EXPERTS = ExpertsConfig(16, 64, 256, stages=3, warps=4)
BOTH = MoeConfig((1, 1, 4, 4, 1, 3), (2, 1, 4, 3, 1, 2), 8, "scan", added=False)
ADDED = replace(BOTH, down=(1, 1, 4, 4, 8, 3), added=True)

FRAGMENTS = _nvfp4(layout="fragments")
MIXED = _moe(layout="fragments")
# What depends on the GPU, the problem or several fields. For single fields, see `_planted`.
NONE: Any = [
    # Of dense GEMMs.
    ("triton_tiles", _dense(), replace(TILES, warps=8), "warps=8 is not 4 with block_m=64"),
    ("triton_tiles", _dense(), replace(WIDE, swap=True), "swap=True is not False"),
    ("triton_tiles", _dense(), replace(TILES, split_k=2), "split_k=2 is not 1"),
    ("triton_tiles", _dense(), replace(TILES, parts=2), "parts=2 is not 1"),
    ("triton_tiles", _dense(A100), replace(TILES, early=True), "early=True is not False"),
    ("triton_tiles", _dense(_small()), TILES, "bytes of shared memory, and a block has 49152"),
    ("triton_tiles", _dense(columns=100), WIDE, "block_n=256 is too wide for 100 columns"),
    ("triton_tiles", _dense(A100), WIDE, "hold 128 sums, and 64 are the most"),
    ("triton_tiles", _dense(act="gelu"), WIDE, "hold 128 sums"),
    ("triton_tiles", _dense(), replace(WIDE, block_k=128), "as tiles of 128 by 256 require"),
    ("triton_tiles", _dense(depth=4095), replace(TILES, block_k=128), "=128 is not 16, 32 or 64"),
    ("triton_tiles", _dense(depth=4095), TILES, "load 96 single elements, and 32 are the most"),
    ("triton_tiles", _dense(dtype=F32), replace(TILES, block_n=64), "stages=4 is not 2 or 3"),
    ("triton_tiles", _dense(dtype=F32), replace(TILES, stages=3), "block_n=128 .* block_m=64"),
    ("triton_split_k", _dense(), replace(SHARED, split_k=1), "split_k=1 is not 2, 4, 8 or 16"),
    ("triton_split_k", _dense(depth=256), SHARED, "split_k=4 with block_k=128 .* K=256"),
    ("triton_split_k", _dense(rows=20000), SHARED, f"bytes, and {MOST_PARTIALS} are the most"),
    ("triton_persistent", _dense(), replace(STAYING, block_n=64, warps=4), "leaves parts of 32"),
    ("triton_persistent", _dense(), replace(STAYING, early=True), "early=True is not False"),
    # Of NVFP4 weights.
    ("triton", _nvfp4(), replace(ROWS, warps=4), "warps=4 is not 2 with block_m=16"),
    ("triton", _nvfp4(A100), replace(ROWS, early=True), "early=True is not False"),
    ("triton", _nvfp4(H200, 64, 4096, 1024), ROWS, "split_k=4 with block_k=128 is too .* K=1024"),
    ("triton", _nvfp4(H200, 20000), ROWS, f"bytes, and {MOST_PARTIALS} are the most"),
    ("triton", _nvfp4(_small(shared=16 << 10)), ROWS, "bytes of shared memory"),
    ("cuda_mma", FRAGMENTS, replace(WARPS, partial=True), "partial=True"),
    ("cuda_mma", _nvfp4(A100, layout="fragments"), WARPS, "partial=False is not True"),
    ("cuda_mma", FRAGMENTS, replace(WARPS, groups=3), "groups=3"),
    (
        *("cuda_mma", _nvfp4(H200, 8, 64, 512, layout="fragments"), WARPS),
        "shares=4 with groups=4 is too much for 8 chunks",
    ),
    (
        *("cuda_mma", _nvfp4(H200, 8, 64, 1152, layout="fragments")),
        *(replace(WARPS, groups=2, shares=8), "shares=8 with groups=2 is too much for 18 chunks"),
    ),
    ("cuda_mma", _nvfp4(_small(), layout="fragments"), WARPS, "bytes of shared memory"),
    (
        *("cuda_mma", _nvfp4(A100, 20000, layout="fragments"), replace(WARPS, partial=True)),
        f"bytes, and {MOST_PARTIALS} are the most",
    ),
    ("cuda_wgmma", FRAGMENTS, replace(GROUPS, persistent=True), "persistent=True"),
    ("cuda_wgmma", FRAGMENTS, replace(GROUPS, depth=3), "depth=3"),
    ("cuda_wgmma", FRAGMENTS, replace(GROUPS, stages=1), "stages=1"),
    ("cuda_wgmma", _nvfp4(H200, 64, 64, 128, layout="fragments"), GROUPS, "cannot be split in 4"),
    ("cuda_wgmma", _nvfp4(_small(shared=16 << 10), layout="fragments"), GROUPS, "bytes of shared"),
    # Of experts.
    ("triton", _moe(), replace(EXPERTS, block_n=32), "block_n=32"),
    ("triton", _moe(H200, 64, 8, 2, 256, 256), EXPERTS, "block_k=256 is too much for 256 columns"),
    ("triton", _moe(_small(shared=16 << 10)), EXPERTS, "bytes of shared memory"),
    ("cuda_wgmma", MIXED, replace(BOTH, routing="launch"), "routing='launch'"),
    ("cuda_wgmma", MIXED, replace(BOTH, persistent=False), "persistent=False"),
    ("cuda_wgmma", MIXED, replace(BOTH, down=ADDED.down), r"down=\(1, 1, 4, 4, 8"),
    ("cuda_wgmma", MIXED, replace(ADDED, down=BOTH.down), r"down=\(2, 1, 4, 3, 1"),
    *(
        ("cuda_wgmma", MIXED, replace(BOTH, tile=192, **change), "need more registers than 3")
        for change in ({"up": (3, 1, 2, 4, 1, 1)}, {"down": (3, 1, 2, 4, 1, 1)})
    ),
    ("cuda_wgmma", _moe(_small(shared=16 << 10), layout="fragments"), BOTH, "bytes of shared"),
]


@pytest.mark.parametrize(
    ("name", "problem", "config", "reason"), NONE, ids=[f"{one[0]} {one[3]}" for one in NONE]
)
def test_reasons(name: str, problem: Problem, config: Any, reason: str) -> None:
    """The configs without these changes are accepted by the next test."""
    variant = next(one for one in OPS[problem.op].variants if one.name == name)
    found = variant.rejects(problem, config)
    assert found is not None
    assert re.search(reason, found), found
    assert len(found) < 200


@pytest.mark.parametrize(
    ("name", "problem", "config"),
    [
        *(("triton_tiles", _dense(), TILES), ("triton_split_k", _dense(), SHARED)),
        ("triton_tiles", _dense(), replace(TILES, early=True)),
        ("triton_tiles", _dense(), WIDE),
        ("triton_tiles", _dense(A100), TILES),
        ("triton_persistent", _dense(), STAYING),
        *(("triton", _nvfp4(), ROWS), ("triton", _nvfp4(), replace(ROWS, early=True))),
        ("cuda_mma", FRAGMENTS, WARPS),
        ("cuda_mma", _nvfp4(A100, layout="fragments"), replace(WARPS, partial=True)),
        ("cuda_wgmma", FRAGMENTS, GROUPS),
        ("cuda_wgmma", FRAGMENTS, replace(GROUPS, split=1, persistent=True)),
        ("triton", _moe(), EXPERTS),
        *(("cuda_wgmma", MIXED, config) for config in (BOTH, ADDED)),
        ("cuda_wgmma", _moe(H200, 5, layout="fragments"), replace(ADDED, tile=192)),
    ],
)
def test_launches_for_other_numbers_of_rows(name: str, problem: Problem, config: Any) -> None:
    variant = next(one for one in OPS[problem.op].variants if one.name == name)
    assert variant.rejects(problem, config) is None


def test_words() -> None:
    for choices, reason in (
        ({"block_k": (64, 128), "stages warps": ((4, 4), (3, 8))}, None),
        ({"block_k": (32, 128)}, "block_k=64 is not 32 or 128"),
        ({"group": (4,)}, "group=8 is not 4"),
        ({"stages warps": ((3, 4), (5, 8))}, "stages=4 is not 3 or 5"),
        ({"stages warps": ((4, 8), (4, 2), (3, 4))}, "warps=4 is not 2 or 8 with stages=4"),
        ({"block_n": range(129, 149)}, "block_n=128 is not from 129 to 148"),
        ({"block_n": tuple(range(20))}, "block_n=128 is not one of the 20 known ones"),
        ({"block_n": ()}, "block_n=128 is not possible here"),
        ({"stages warps": ()}, "stages=4 is not possible here"),
    ):
        assert why_unlisted(TILES, choices) == reason
    huge = replace(TILES, stages=10**4000)
    assert (
        why_unlisted(huge, {"stages": (3, 4)}) == f"stages=1{'0' * 17}...{'0' * 19} is not 3 or 4"
    )
