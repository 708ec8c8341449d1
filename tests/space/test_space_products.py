"""Products, routers and experts: with a bundle of everything, and no compiler, any call runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from space.space_sets import OTHER_OPS, programs, space

from gristmill.jit import cache
from gristmill.jit.compilers import Compilable
from gristmill.ops import ready
from gristmill.ops.linear.configs import STURDY
from gristmill.ops.linear.problem import Product
from gristmill.ops.registry import OPS
from gristmill.select.chooser import ranked
from gristmill.select.device import KNOWN, Device
from gristmill.select.problem import Problem
from gristmill.settings import reload_settings

H200 = KNOWN["sm_90a"]
BF16 = torch.bfloat16
Holding = Callable[[frozenset[Compilable]], None]


@pytest.fixture
def holding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Holding]:
    """`holding(programs)`: from now on nothing may be compiled, and these are what there is."""

    def begin(kept: frozenset[Compilable]) -> None:
        monkeypatch.setenv("GRISTMILL_JIT", "off")
        reload_settings()
        monkeypatch.setattr(cache, "is_cached", lambda program, arch: program in kept)
        monkeypatch.setattr(ready, "_FOUND", {})

    yield begin
    monkeypatch.undo()
    reload_settings()


def linear(rows: int, columns: int, depth: int, device: Device = H200) -> Problem:
    x = torch.empty((rows, depth), dtype=BF16, device="meta")
    weight = torch.empty((columns, depth), dtype=BF16, device="meta")
    return OPS["linear"].problem(x, weight, None, None, device=device)


def test_without_a_compiler_the_most_promising_config_that_is_there_is_taken(
    holding: Holding,
) -> None:
    problem, op = linear(64, 4096, 4160), OPS["linear"]  # of no table
    tiles = next(one for one in op.variants if one.name == "triton_tiles")
    configs = list(tiles.configs(problem))
    usual = tiles.config(problem)
    third = tiles.programs(problem, configs[2])
    assert usual == configs[0] != configs[2]
    holding(frozenset(third))
    assert tiles.config(problem) == configs[2]
    holding(frozenset(tiles.programs(problem, STURDY["tiles"])))
    assert tiles.config(problem) == STURDY["tiles"]
    holding(frozenset())
    assert tiles.config(problem) == usual  # for the message of KernelNotCached


def test_only_triton_over_nvfp4_is_passed_over_without_kernels(holding: Holding) -> None:
    op = OPS["nvfp4_linear"]
    holding(frozenset())
    problem = op.problem(*op.example_for(H200, (5, 4112, 4112), BF16), device=H200)
    assert ranked(op.name, op.variants, problem)[0].variant.name == "cuda_wgmma"
    b200 = KNOWN["sm_100a"]
    problem = op.problem(*op.example_for(b200, (5, 4112, 4112), BF16), device=b200)
    first = ranked(op.name, op.variants, problem)[0].variant
    assert first.name != "triton"
    assert not first.is_reference


@pytest.mark.parametrize("rows", [1, 24, 300])
@pytest.mark.parametrize(
    ("columns", "depth"), [(4096, 4096), (5000, 1000), (24, 72), (999, 4160), (17, 64), (50, 1096)]
)
def test_any_layer_runs(holding: Holding, rows: int, columns: int, depth: int) -> None:
    kept = space("linear", H200, BF16)
    assert kept
    holding(kept)
    assert set(programs(linear(rows, columns, depth))) <= kept


@pytest.mark.parametrize("op", ["linear", "linear_with_pre", "matmul", "nvfp4_linear"])
@pytest.mark.parametrize("count", [6, pytest.param(200, marks=pytest.mark.long)])
def test_random_products_run(holding: Holding, op: str, count: int) -> None:
    kept, draw = space(op, H200, BF16), random.Random(1)
    holding(kept)
    for _ in range(count):
        rows = draw.choice([1, 5, 16, 60, 200, 500])
        columns, depth = draw.randint(1, 9000), 16 * draw.randint(1, 600)
        if op == "nvfp4_linear":
            args = OPS[op].example_for(H200, (rows, columns, depth), BF16)
        elif op == "matmul":
            args = (_matrix(rows, depth), _matrix(columns, depth).t())
        else:
            bias = draw.choice([None, _matrix(1, columns)[0]])
            activation = draw.choice(["relu", "silu", "gelu", "gelu_tanh"])
            args = (_matrix(rows, depth), _matrix(columns, depth), bias, activation)
        problem = OPS[op].problem(*args, device=H200)
        assert set(programs(problem)) <= kept, problem.key(rows)


def _matrix(height: int, width: int) -> torch.Tensor:
    return torch.empty((height, width), dtype=BF16, device="meta")


def test_a_layer_of_the_space_runs_what_it_would_with_a_compiler(holding: Holding) -> None:
    problem = linear(16, 6144, 4096)
    with_compiler = programs(problem)
    assert with_compiler
    holding(space("linear", H200, BF16))
    assert programs(problem) == with_compiler


@pytest.mark.parametrize("name", [one for one in OTHER_OPS if "cross_entropy" not in one])
def test_conformance_cases_run_without_a_compiler(holding: Holding, name: str) -> None:
    op, count = OPS[name], 0
    found = space(name, H200, BF16)
    problems = [op.problem(*case.make("cpu", 0), device=H200) for case in op.cases()]
    holding(found)
    for problem in problems:
        if problem.rows and "bfloat16" in {value for _, value in problem.dtypes}:
            missing = set(programs(problem)) - found
            count += _is_meant(problem)
            assert not missing or not _is_meant(problem), (problem.key(problem.rows), missing)
    assert count > 5, "the rule means hardly any of them"


def _is_meant(problem: Problem) -> bool:
    """By the rule: dtypes beside one another are one or fp32, weights and rows are aligned."""
    others = {"bfloat16", "float16"} - {problem.dtypes[0][1]}
    if others & {value for _, value in problem.dtypes}:
        return False
    details = problem.layout
    if isinstance(details, Product):
        return _is_plain(problem.op, details)
    if problem.op.startswith("topk_router"):
        return not details.strided and details.access == details.written
    given = [getattr(details, name, None) for name in ("weights", "w13_bias", "w2_bias")]
    mixed = [str(one).removeprefix("torch.") for one in given if one is not None]
    return not set(mixed) & others and getattr(details, "x_access", 16) == 16


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_80", "sm_100a"])
def test_other_architectures(holding: Holding, arch: str) -> None:
    device = KNOWN[arch]
    kept = space("linear", device, BF16)
    holding(kept)
    for sizes in ((1, 4096, 4096), (300, 1000, 520)):
        assert set(programs(linear(*sizes, device=device))) <= kept


def test_the_loss_of_a_linear_layer_has_the_kernels_of_the_loss() -> None:
    for name in ("linear_cross_entropy", "linear_cross_entropy_backward"):
        found = OPS[name].space
        assert found is not None
        first = next(found(OPS[name], H200, BF16))
        assert first.problem.op == name.removeprefix("linear_")


def _is_plain(op: str, product: Product) -> bool:
    """Dense matrices with more than one row and column; of a `matmul` one may be transposed."""
    m, n, k = product.rows, product.columns, product.depth
    a, b = product.a_strides[1:] == (k, 1), product.b_strides[1:] == (n, 1)
    a_turned, b_turned = product.a_strides[1:] == (1, m), product.b_strides[1:] == (1, k)
    if min(m, n, k) < 2:
        return False
    if op != "matmul":
        return a and b_turned
    if product.batch > 1:
        own = product.a_strides[0] == m * k and product.b_strides[0] == n * k
        return a and b and own
    return (a and (b or b_turned)) or (a_turned and b)


@pytest.mark.parametrize("turned", ["neither", "a", "b"])
def test_several_products_side_by_side_may_have_a_side_transposed(
    turned: str, holding: Holding
) -> None:
    """As queries by keys of attention: without a compiler the kernel for any sizes runs."""
    op, sizes = OPS["matmul"], {"a": (32, 1024, 128), "b": (32, 128, 1024)}
    made = {name: torch.empty(size, dtype=BF16, device="meta") for name, size in sizes.items()}
    if turned != "neither":
        made[turned] = made[turned].mT.contiguous().mT
    problem = op.problem(*made.values(), device=H200)
    holding(space("matmul", H200, BF16))
    assert ranked("matmul", op.variants, problem)[0].variant.name.startswith("triton")
    assert set(programs(problem)) <= space("matmul", H200, BF16)
