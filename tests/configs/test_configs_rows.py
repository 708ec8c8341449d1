"""Which configs of the row kernels and of the router are launches, and why the others are not."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from row_problems import (
    DTYPES,
    H20,
    H100_PCIE,
    H200,
    ROW_OPS,
    SLICE,
    is_real,
    of_rows,
    problems,
    row_variants,
    usual,
)

from gristmill.ops.op import Op
from gristmill.ops.registry import OPS
from gristmill.ops.rows.config import AHEAD, ASYNC, STRAIGHT, TWICE, RowConfig
from gristmill.ops.rows.variant import RowVariant
from gristmill.ops.topk_router.cuda import RouterConfig
from gristmill.select.device import KNOWN
from gristmill.select.overrides import batch_invariant
from gristmill.select.problem import Problem
from gristmill.select.table import Row, revive
from gristmill.select.tables import _shipped
from gristmill.select.variant import Variant

DEVICES = (*KNOWN.values(), H100_PCIE, H20)
COLUMNS = (0, 1, 5, 24, 64, 100, 129, 256, 1000, 1024, 3000, 4096, 5003, 8192, 20001, 65536, 128256)
ROWS = (0, 1, 3, 60, 130, 180, 1000, 70000, 2**31 - 1, 2**31)
over_ops = pytest.mark.parametrize(
    "op", [pytest.param(op, id=name) for name, op in ROW_OPS.items()]
)
(SHIPPED,) = _shipped()


def variant_of(name: str, variant: str) -> Variant:
    return next(one for one in OPS[name].variants if one.name == variant)


# --- what the variants themselves come up with


@over_ops
def test_what_rules_and_tuning_come_up_with_is_accepted(op: Op) -> None:
    sizes = itertools.cycle(itertools.product(ROWS, DEVICES))
    found, asked = set(), 0
    for columns in COLUMNS:
        for problem in problems(op, columns, torch.bfloat16 if columns % 3 else torch.float32):
            for here, variant in itertools.product(
                [of_rows(problem, *next(sizes)) for _ in range(3)], row_variants(op)
            ):
                if is_real(here) and variant.supports(here) is None:
                    configs = variant.configs(here.asked())
                    assert configs[0] == variant.config(here.asked())
                    for config in configs:
                        assert variant.rejects(here.asked(), config) is None, (here, config)
                    found.update(configs)
                    asked += 1
    assert asked > 500
    assert len(found) > 15


@pytest.mark.parametrize("name", ["topk_router", "topk_router_backward"])
def test_what_the_router_comes_up_with_is_accepted(name: str) -> None:
    op, variant = OPS[name], variant_of(name, "cuda_warp")
    for rows in (1, 100, 5000):
        problem = op.problem(*op.example((rows, 64), torch.bfloat16, "meta"), device=H200)
        assert all(variant.rejects(problem, one) is None for one in variant.configs(problem))
        for warps in (0, -1, 3, 9, 2**40, 10**4000):
            assert variant.rejects(problem, RouterConfig(warps)) is not None
    assert variant.rejects(problem, RouterConfig(0)) == "warps=0 is not 1, 2, 4 or 8"


# --- the shipped table

_SHIPPED_ROWS = [row for row in SHIPPED.rows.values() if row.key.split()[0] in ROW_OPS]


def _problem_of(row: Row, known: dict[Any, dict[str, Problem]]) -> Problem:
    """The very problem that a row's key names."""
    op = ROW_OPS[row.key.split()[0]]
    found = re.search(r" N=(\d+)", row.key)
    assert found is not None
    columns = int(found[1])
    if (op.name, columns) not in known:
        known[op.name, columns] = {
            problem.family(): problem
            for dtype in DTYPES
            for problem in problems(op, columns, dtype)
            if not problem.batch_invariant
        }
    return known[op.name, columns][row.family]


def test_shipped_rows_are_accepted_wherever_they_hold() -> None:
    known: dict[Any, dict[str, Problem]] = {}
    tried = set()
    for row in _SHIPPED_ROWS:
        problem = _problem_of(row, known)
        low, high = row.covers
        for rows in {max(1, low), row.stop, row.rows, high or 4 * row.stop}:
            variants = ROW_OPS[problem.op].variants
            for device in (H200, H100_PCIE, H20, SLICE):
                found = revive(row, of_rows(problem, rows, device), variants)
                assert not isinstance(found, str), (row.key, rows, device.name, found)
        tried.add(problem.op)
    assert len(_SHIPPED_ROWS) > 500
    assert len(tried) > 12
    # The others are in test_configs_products.py.
    products = {"linear", "nvfp4_linear", "nvfp4_moe"}
    assert {key.split()[0] for key in SHIPPED.rows} == tried | products


# --- what is rejected

THREADS = "is not a multiple of 32 from 32 to 1024"
LANES = "is not 1, 2, 4, 8, 16 or 32"
FEEDS = "is not -3, -2, 0, 2 or 3"
# Variant, rows and columns, what is changed in its own launch, and the reason against that.
NORM, BLOCK = ("rms_norm", "cuda_block"), (64, 2048)
REASONS: list[tuple[tuple[str, ...], tuple[int, int], dict[str, Any], str]] = [
    (NORM, BLOCK, {"threads": 2048}, f"threads=2048 {THREADS}"),
    (NORM, BLOCK, {"threads": 48}, f"threads=48 {THREADS}"),
    (NORM, BLOCK, {"items": 0}, "items=0 is not from 1 to 16"),
    (
        NORM,
        BLOCK,
        {"threads": 32, "items": 1},
        "32 threads of 1 vectors hold 256 of a row's 2048 columns",
    ),
    (
        ("rms_norm", "cuda_warp"),
        (64, 1024),
        {"lanes": 16, "items": 4},
        "16 threads of 4 vectors hold 512 of a row's 1024 columns",
    ),
    (
        ("rms_norm", "cuda_cluster"),
        (4, 65536),
        {"threads": 256, "items": 2, "cluster": 8},
        "2048 threads of 2 vectors hold 32768 of a row's 65536 columns",
    ),
    (("rms_norm", "cuda_warp"), (64, 256), {"lanes": 0}, f"lanes=0 {LANES}"),
    (NORM, BLOCK, {"lanes": 16}, "lanes=16 is not 32"),
    (("cross_entropy", "cuda_warp"), (64, 131), {"lanes": 4}, "lanes=4 is not 8, 16 or 32"),
    (NORM, BLOCK, {"cluster": 0}, "cluster=0 is not 1"),
    (("rms_norm", "cuda_cluster"), (4, 65536), {"cluster": 1}, "cluster=1 is not from 2 to 16"),
    (
        ("rms_norm", "cuda_cluster", "sm_120a"),
        (4, 65536),
        {"cluster": 16},
        "cluster=16 is not from 2 to 8",
    ),
    (
        ("rms_norm", "cuda_cooperative", "sm_80"),
        (4, 65536),
        {"cluster": 109},
        "cluster=109 is not from 1 to 108",
    ),
    (
        ("cross_entropy_backward", "cuda_block"),
        (64, 32768),
        {"cluster": 9},
        "cluster=9 is not from 1 to 8",
    ),
    (NORM, BLOCK, {"blocks_per_sm": 3}, "blocks_per_sm=3 is not from 0 to 2"),
    (
        ("rms_norm_backward", "cuda_warp"),
        (64, 256),
        {"blocks_per_sm": 0},
        "blocks_per_sm=0 is not 1 or 2",
    ),
    (NORM, BLOCK, {"feed": -7}, f"feed=-7 {FEEDS}"),
    (NORM, BLOCK, {"feed": AHEAD}, f"feed=-1 {FEEDS}"),
    ((*NORM, "sm_80"), BLOCK, {"feed": 2}, "feed=2 is not -3, -2 or 0"),
    (NORM, (64, 2047), {"feed": ASYNC}, "feed=-2 is not -3 or 0"),
    (("rms_norm", "cuda_cooperative"), (4, 65536), {"feed": STRAIGHT}, "feed=0 is not -1"),
    (
        ("fused_add_rms_norm_", "cuda_block"),
        BLOCK,
        {"feed": TWICE},
        "feed=-3 is not -2, 0, 2 or 3",
    ),
    (("softmax", "cuda_warp"), (64, 131), {"feed": AHEAD}, "feed=-1 is not 0"),
    (("softmax", "cuda_block"), BLOCK, {"feed": 2}, "feed=2 is not -3, -2 or 0"),
    (
        ("rms_norm_backward", "cuda_block"),
        (513, 4096),
        {"feed": STRAIGHT},
        "feed=0 is not -1, 2 or 3",
    ),
    (
        NORM,
        BLOCK,
        {"feed": TWICE, "hold": True},
        "hold=True is not False with feed=-3",
    ),
    (
        ("softmax", "cuda_block"),
        (64, 65536),
        {"feed": TWICE, "hold": False, "threads": 128},
        "128 threads are too few to add up rows of 65536 columns",
    ),
    (
        ("cross_entropy", "cuda_warp"),
        (64, 1024),
        {"lanes": 8},
        "8 threads are too few to add up rows of 1024 columns",
    ),
    (
        ("rms_norm", "cuda_cluster"),
        (2**27, 65536),
        {"cluster": 16, "feed": STRAIGHT},
        f"{2**27} rows of 16 blocks are more than a grid has",
    ),
    (
        NORM,
        (64, 65536),
        {"threads": 1024, "items": 8, "feed": 2},
        "needs 262528 bytes of shared memory, and a block has 232448",
    ),
    (
        ("layer_norm_backward", "cuda_warp", "sm_120a"),
        (64, 256),
        {"threads": 1024, "lanes": 8, "items": 4},
        "needs 131072 bytes of shared memory, and a block has 101376",
    ),
]


@pytest.mark.parametrize(("of", "shape", "changes", "reason"), REASONS)
def test_reasons(
    of: tuple[str, ...], shape: tuple[int, int], changes: dict[str, Any], reason: str
) -> None:
    op, name, arch = (*of, "sm_90a")[:3]
    problem, variant = usual(op, *shape, KNOWN[arch]), variant_of(op, name)
    assert variant.supports(problem) is None
    own = variant.config(problem)
    assert variant.rejects(problem, own) is None
    assert variant.rejects(problem, replace(own, **changes)) == reason


def test_partial_rows_of_a_gradient_stay_few() -> None:
    """A team for each row leaves as many of them as there are rows."""
    variant = variant_of("rms_norm_backward", "cuda_block")
    few = usual("rms_norm_backward", H200.multiprocessors, 4096)
    config = variant.config(few)
    assert isinstance(config, RowConfig)
    assert config.feed == STRAIGHT
    op = OPS["rms_norm_backward"]
    for rows, accepted in ((1, True), (132, True), (512, True), (513, False), (10**6, False)):
        reason = variant.rejects(of_rows(few, rows), config)
        assert (reason is None) == accepted, rows
    # There all numbers of rows have one launch.
    with batch_invariant():
        args = op.example((10**6, 4096), torch.bfloat16, "meta")
        many = op.problem(*args, device=H200)
        assert many.asked().rows <= 512
        assert variant.rejects(many.asked(), config) is not None


def test_a_row_of_another_number_of_rows_is_judged_by_these() -> None:
    """What was measured on many rows is right for few, and the other way round."""
    variant = variant_of("rms_norm", "cuda_block")
    assert isinstance(variant, RowVariant)
    for rows, others in itertools.permutations((1, 64, 1024, 65536), 2):
        for config in variant.configs(usual("rms_norm", rows, 4096)):
            assert variant.rejects(usual("rms_norm", others, 4096), config) is None
