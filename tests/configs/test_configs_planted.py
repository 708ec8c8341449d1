"""Tables with rows that no tuning writes: they are passed over, and `explain` shows the reason.

Their rows have the right hash, which anyone can compute.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from configs.products_problems import MODELS, Case, dense, experts, nvfp4

import gristmill
from gristmill.ops.linear.configs import MatmulConfig
from gristmill.ops.linear_cross_entropy import LINEAR_CROSS_ENTROPY, LINEAR_CROSS_ENTROPY_BACKWARD
from gristmill.ops.nvfp4_linear.mma_configs import MmaConfig
from gristmill.ops.nvfp4_linear.triton_configs import RowsConfig
from gristmill.ops.nvfp4_linear.wgmma_configs import WgmmaConfig
from gristmill.ops.nvfp4_moe.triton_configs import ExpertsConfig
from gristmill.ops.nvfp4_moe.wgmma_configs import MoeConfig
from gristmill.ops.op import Op
from gristmill.ops.registry import OPS
from gristmill.ops.rms_norm import cutedsl
from gristmill.ops.rms_norm.cutedsl import CuteConfig
from gristmill.ops.rows.config import RowConfig
from gristmill.ops.topk_router.cuda import RouterConfig
from gristmill.select import reset_tables
from gristmill.select.chooser import ranked
from gristmill.select.configs import config_to_json
from gristmill.select.device import KNOWN, device_of
from gristmill.select.explain import explain_problem
from gristmill.select.problem import Problem
from gristmill.select.sight import placed
from gristmill.select.table import Row, Table
from gristmill.select.tables import user_table_path
from gristmill.select.variant import Variant
from gristmill.settings import reload_settings
from gristmill.tune.jobs import default_shapes

H200 = KNOWN["sm_90a"]
HUGE = 10**4000
TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _own_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GRISTMILL_CACHE_DIR", str(tmp_path / "cache"))
    _forget()
    yield
    monkeypatch.undo()
    _forget()


def _forget() -> None:
    reload_settings()
    reset_tables()
    for op in (LINEAR_CROSS_ENTROPY, LINEAR_CROSS_ENTROPY_BACKWARD):
        op.forget_plans()


def _row(problem: Problem, variant: str, config: Any, source_hash: str) -> Row:
    key, covers = placed(problem)
    return Row(
        key=key,
        covers=covers,
        variant=variant,
        config=config,
        us=1.0,
        spread_us=0.0,
        second=None,
        date="2026-01-01",
        source_hash=source_hash,
        rows=problem.rows,
        times={variant: 1.0},
        candidates=1,
        torch=torch.__version__,
    )


def _plant(*rows: Row, device: Any = H200) -> None:
    """Into the user's own table, and read anew."""
    path = user_table_path(device)
    assert path is not None
    table = Table.for_device(device)
    for row in rows:
        table.put(row)
    path.unlink(missing_ok=True)
    table.save(path)
    _forget()


def _first(name: str, cases: Iterator[Case]) -> Case:
    return next(one for one in cases if one.variant.name == name)


TILES = _first("triton_tiles", dense(H200, 64, 4096, 4160))  # of no shipped table
SPLIT = _first("triton_split_k", dense(H200, 64, 4096, 4160))
STAYING = _first("triton_persistent", dense(H200, 256, 4096, 4160))
ROWS = _first("triton", nvfp4(H200, 64, 4096, 4160))
WARPS = _first("cuda_mma", nvfp4(H200, 64, 4096, 4160))
GROUPS = _first("cuda_wgmma", nvfp4(H200, 64, 4096, 4160))
EXPERTS = _first("triton", experts(H200, 64, MODELS[2]))
BOTH = _first("cuda_wgmma", experts(H200, 64, MODELS[2]))
# Without checks these raise, hang or take all memory on the host, or hang a GPU. That each field is
# checked is shown by test_configs_products.py.
BAD: tuple[tuple[Case, dict[str, Any]], ...] = (
    *((case, {"block_k": 0}) for case in (TILES, SPLIT, STAYING, ROWS, EXPERTS)),
    *((case, {"stages": 10**12}) for case in (TILES, SPLIT, STAYING, ROWS, GROUPS, EXPERTS)),
    *((TILES, {"warps": 0}), (EXPERTS, {"block_m": -HUGE}), (SPLIT, {"split_k": 1 << 40})),
    *((WARPS, {"depth": 10**6}), (WARPS, {"partial": True}), (GROUPS, {"k_groups": 0})),
    *((BOTH, {"up": [1, 1, 4, 10**12, 1, 1]}), (BOTH, {"tile": HUGE})),
)


@pytest.mark.parametrize(
    ("case", "change"), BAD, ids=[f"{case.variant.name} {str(one)[:40]}" for case, one in BAD]
)
def test_a_planted_launch_is_passed_over_with_its_reason(
    case: Case, change: dict[str, Any]
) -> None:
    variant, problem = case
    own = variant.config(problem)
    values = {**(config_to_json(own) or {}), **change}
    begin = time.perf_counter()
    row = _row(problem, variant.name, values, variant.source_hash(problem, own))
    table = Table.for_device(H200)
    table.put(row)
    variants = OPS[problem.op].variants
    assert table.lookup(problem, variants) is None
    reason = table.ignored[row.key]
    assert reason.startswith(f"config of {variant.name} is rejected: ")
    assert next(iter(change)) in reason
    assert len(reason) < 250
    # The user's table, with the choice and what is said of it.
    _plant(row)
    chosen = ranked(problem.op, variants, problem)[0]
    assert chosen.source == "preference"
    assert chosen.variant.rejects(problem, chosen.config) is None
    said = str(explain_problem(problem.op, variants, problem))
    assert reason in said
    assert time.perf_counter() - begin < 5.0


@pytest.mark.parametrize(
    "case", [TILES, SPLIT, STAYING, ROWS, WARPS, GROUPS, EXPERTS, BOTH], ids=str
)
def test_the_same_row_with_a_launch_is_believed(case: Case) -> None:
    """So the rows above are passed over for their launch."""
    variant, problem = case
    config = variant.configs(problem)[-1]
    row = _row(problem, variant.name, config_to_json(config), variant.source_hash(problem, config))
    _plant(row)
    chosen = ranked(problem.op, OPS[problem.op].variants, problem)[0]
    assert (chosen.variant, chosen.config, chosen.source) == (variant, config, "user table")


# ---- every variant that has a config ----

# By variant and type of config, one op: the configs of a type are read alike for all ops.
READ = {
    (variant.name, variant.config_type): op.name
    for op in OPS.values()
    for variant in op.variants
    if variant.config_type is not None
}
# Where the configs of each type are drawn, and those that are accepted run; for which variants.
EMULATED = "kernels/test_emulated_nvfp4_accepted.py::test_any_config_that_is_accepted_is_right"
INTERPRETED = "kernels/test_triton_accepted.py::test_any_config_that_is_accepted_is_right"
ROWS_EMULATED = "kernels/test_fuzz_emulated_configs.py::test_any_launch"
FUZZED: dict[type, tuple[str, set[str]]] = {
    RowConfig: (ROWS_EMULATED, {"cuda_warp", "cuda_block", "cuda_cluster", "cuda_cooperative"}),
    RouterConfig: (ROWS_EMULATED, {"cuda_warp"}),
    MatmulConfig: (INTERPRETED, {"triton_tiles", "triton_split_k", "triton_persistent"}),
    RowsConfig: (INTERPRETED, {"triton"}),
    ExpertsConfig: (INTERPRETED, {"triton"}),
    MmaConfig: (EMULATED, {"cuda_mma"}),
    WgmmaConfig: (EMULATED, {"cuda_wgmma"}),
    MoeConfig: (EMULATED, {"cuda_wgmma"}),
    CuteConfig: (
        "configs/test_configs_cutedsl.py::test_what_is_accepted_covers_each_row_once",
        {"cutedsl"},
    ),
}


def _subclasses(kind: type) -> Iterator[type]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


def test_every_config_type_has_a_property_test() -> None:
    """A new type or variant must be added to `FUZZED`, and to the test that is named there."""
    here = [one for one in _subclasses(Variant) if one.__module__.startswith("gristmill.")]
    types = {one.config_type for one in here if getattr(one, "config_type", None) is not None}
    assert types == set(FUZZED)
    found: dict[type, set[str]] = {}
    for variant in (one for op in OPS.values() for one in op.variants):
        if variant.config_type is not None:
            found.setdefault(variant.config_type, set()).add(variant.name)
    assert found == {kind: names for kind, (_, names) in FUZZED.items()}
    for test, _ in FUZZED.values():
        file, _, name = test.partition("::")
        assert f"\ndef {name}(" in (TESTS / file).read_text(), test


def _problem(op: Op, variant: Variant) -> Problem:
    """An example of the op that the variant runs, on one of the known GPUs."""
    shapes = (*default_shapes(op.name), *(((64, 1024),) if op.name.startswith("cross") else ()))
    for shape, arch in itertools.product(shapes, ("sm_90a", "sm_80", "sm_120a")):
        args = op.example_for(KNOWN[arch], shape, torch.bfloat16)
        problem = op.problem(*args, device=KNOWN[arch])
        if variant.supports(problem) is None:
            return problem
    raise AssertionError(f"no example of {op.name} runs by {variant.name}")


def _wrong(value: Any) -> tuple[Any, ...]:
    """What JSON may have in the place of a field of a config."""
    if isinstance(value, bool):
        return (int(value), float(value), None, str(value), [value], {})
    if isinstance(value, int):
        return (bool(value), float(value), None, str(value), [value], {}, HUGE, -HUGE)
    if isinstance(value, str):
        return (1, True, None, value + "x", [value], {})
    size = len(value)
    lists = ([], [*value, 1], value[1:], [[*value]], *([one] * size for one in (1.0, True, HUGE)))
    return (None, 1, True, "x", {}, *lists)


def _damaged(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The config with something wrong, and what the reason must name."""
    for name, value in values.items():
        for wrong in _wrong(list(value) if isinstance(value, tuple) else value):
            yield f"{name}=", {**values, name: wrong}
        yield "its fields are", {one: values[one] for one in values if one != name}
    yield "its fields are", {**values, "other": 1}
    yield "its fields are", {}
    yield "got none", None


@pytest.mark.parametrize(
    ("by", "kind", "name"),
    [(*one, name) for one, name in READ.items()],
    ids=[f"{by} {kind.__name__}" for by, kind in READ],
)
def test_a_config_of_wrong_types_is_passed_over_with_its_reason(
    by: str, kind: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutedsl, "why_missing", lambda: None)
    op = OPS[name]
    variant = next(one for one in op.variants if (one.name, one.config_type) == (by, kind))
    problem = _problem(op, variant)
    device, own = problem.device, variant.config(problem)
    right = _row(problem, by, config_to_json(own), variant.source_hash(problem, own))
    table = Table.for_device(device)
    table.put(right)
    assert table.lookup(problem, op.variants) == (variant, own)
    tried = 0
    for word, values in _damaged(config_to_json(own) or {}):
        table.put(replace(right, config=values))
        assert table.lookup(problem, op.variants) is None, values
        reason = table.ignored[right.key]
        assert re.match(rf"config of {by} is (malformed|rejected): .*{word}", reason), reason
        assert len(reason) < 310
        tried += 1
    assert tried > 8
    # Of the last one, through the user's own table.
    _plant(replace(right, config=values), device=device)
    assert ranked(name, op.variants, problem)[0].source != "user table"
    assert f"is ignored: {reason}" in str(explain_problem(name, op.variants, problem))


# ---- blocks of logits: on the CPU, through the op ----

BLOCKS: tuple[Any, ...] = (
    {"rows": 300, "classes": -1},  # would leave gradients unwritten
    {"rows": 64, "classes": 100},  # valid sizes, but not from a table
)


def _loss(*tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    leaves = [one.clone().requires_grad_(one.is_floating_point()) for one in tensors]
    loss = gristmill.linear_cross_entropy(*leaves, **options)
    loss.backward()
    return loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)


@pytest.mark.parametrize("chunk_rows", [None, 24])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("blocks", BLOCKS, ids=[str(one)[:40] for one in BLOCKS])
def test_no_table_says_how_large_blocks_of_logits_are(
    blocks: Any, weighted: bool, chunk_rows: int | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 16, generator=generator), torch.randn(100, 16, generator=generator)
    target = torch.randint(0, 100, (64,), generator=generator)
    of_class = torch.rand(100, generator=generator) if weighted else None
    options = {"class_weight": of_class, "chunk_rows": chunk_rows}
    expected = _loss(x, weight, target, **options)
    forward = (x, weight, target, None, of_class, -100, 0.0, 0.0, None, "mean", chunk_rows)
    _, _, denominators, stats = LINEAR_CROSS_ENTROPY.run(*forward)
    between = (torch.ones(()), None, stats, denominators)
    backward = (*forward[:5], *between, *forward[5:], True, True, False)
    calls = {LINEAR_CROSS_ENTROPY: forward, LINEAR_CROSS_ENTROPY_BACKWARD: backward}
    problems = {op: op.problem(*args) for op, args in calls.items()}
    rows = [_row(problem, "chunked", blocks, "") for problem in problems.values()]
    _plant(*rows, device=device_of("cpu"))
    for op, args in calls.items():
        said = gristmill.explain(op.name, *args)
        assert said.chosen == "chunked"
        assert "config of chunked is malformed: takes no config" in str(said)
    found = _loss(x, weight, target, **options)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    logits = x.double().requires_grad_(), weight.double().requires_grad_()
    exact = torch.nn.functional.cross_entropy(
        logits[0] @ logits[1].t(), target, None if of_class is None else of_class.double()
    )
    exact.backward()
    for one, other in zip(found, (exact, *(leaf.grad for leaf in logits)), strict=True):
        assert other is not None
        torch.testing.assert_close(one.double(), other.detach(), rtol=1e-4, atol=1e-6)
