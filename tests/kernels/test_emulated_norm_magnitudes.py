"""Norms of rows of every magnitude whose squares fp32 can add up, in every launch, against fp64."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance_truth import results_of, truth_of
from emulated_host import EmulatedHost
from emulation import harness

from gristmill.ops.op import Op
from gristmill.ops.registry import OPS
from gristmill.ops.rows.config import AHEAD, ASYNC, STRAIGHT, TWICE, RowConfig
from gristmill.select.device import KNOWN

F32, BF16 = torch.float32, torch.bfloat16
DEVICE = replace(KNOWN["sm_90a"], multiprocessors=4)
# The range that docs/ops/rms_norm.md promises.
EXPONENTS = (-17, -15, -12, -9, -5, 0, 5, 9.5, 10, 12, 15, 16, 17, 17.5)
# As for ordinary rows.
ROUNDINGS = 3.0
LAUNCHES = (
    ("cuda_warp", RowConfig(64, items=8, lanes=4)),
    ("cuda_warp", RowConfig(64, items=1, lanes=32)),
    ("cuda_block", RowConfig(64, items=1, feed=STRAIGHT)),
    ("cuda_block", RowConfig(32, items=2, feed=ASYNC, hold=False)),
    ("cuda_block", RowConfig(32, items=1, feed=TWICE, hold=False)),
    ("cuda_cluster", RowConfig(32, items=1, cluster=2, feed=2)),
    ("cuda_cluster", RowConfig(32, items=1, cluster=2, feed=3, hold=False)),
    ("cuda_cooperative", RowConfig(32, items=1, cluster=2, feed=AHEAD)),
)
OP_NAMES = [name for name in OPS if "rms_norm" in name or "layer_norm" in name]


def _rows(columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(len(EXPONENTS), columns, generator=generator, dtype=torch.float64)
    sizes = torch.tensor(EXPONENTS, dtype=torch.float64)[:, None]
    return (values.clamp(-3, 3) * 10.0**sizes).to(dtype)


def _arguments(op: Op, x: torch.Tensor, eps: float) -> tuple[Any, ...]:
    """The op's example with these rows; a residual is as large as they are."""
    torch.manual_seed(1)
    args = list(op.example(tuple(x.shape), x.dtype, "cpu"))
    at = 1 if op.name.endswith("_backward") else 0
    args[at] = x
    if op.name.startswith(("add_", "fused_add_")):
        args[1] = x.flip(-1) / 4
    args[next(i for i, arg in enumerate(args) if isinstance(arg, float))] = eps
    return tuple(args)


def _check(
    host: EmulatedHost, name: str, args: tuple[Any, ...], variant: str, config: RowConfig
) -> None:
    op = OPS[name]
    problem = op.problem(*args, device=DEVICE)
    chosen = next(one for one in op.variants if one.name == variant)
    written = (0, 1) if name == "fused_add_rms_norm_" else ()
    truths = truth_of(name, args)
    own = tuple(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args)
    returned = host.run(chosen, problem, config, own, written=written).outputs
    for truth, result in zip(truths, results_of(name, own, returned), strict=True):
        error = truth.roundings(result)
        assert error <= ROUNDINGS, f"{error:.2f} roundings"


@pytest.mark.parametrize("eps", [1e-5, 1e-35], ids=str)
@pytest.mark.parametrize(
    ("variant", "config"), LAUNCHES, ids=[f"{v}-{c.lanes}-{c.feed}-{c.hold:d}" for v, c in LAUNCHES]
)
@pytest.mark.parametrize("name", OP_NAMES)
def test_rows_of_every_magnitude(
    host: EmulatedHost, name: str, variant: str, config: RowConfig, eps: float
) -> None:
    if config.feed == TWICE and (name.endswith("_backward") or name == "fused_add_rms_norm_"):
        pytest.skip("rows are kept there")
    columns = 32 if config.lanes == 4 else 64
    _check(host, name, _arguments(OPS[name], _rows(columns, F32), eps), variant, config)


@pytest.mark.parametrize("name", OP_NAMES)
def test_narrow_rows_of_every_magnitude(host: EmulatedHost, name: str) -> None:
    """bf16 has the exponents of fp32."""
    variant, config = LAUNCHES[2]
    _check(host, name, _arguments(OPS[name], _rows(64, BF16), 1e-5), variant, config)


@pytest.mark.parametrize("size", [1e-38, 1e-20, 1.0, 1e19, 1e25, 1e36, 3.4e38])
@pytest.mark.parametrize("columns", [1, 2, 3, 9])
def test_equal_values_give_the_bias(host: EmulatedHost, columns: int, size: float) -> None:
    """And of one column the gradient is zero, whatever stands beside it."""
    x, weight, bias = torch.full((3, columns), size), torch.rand(columns) + 0.3, torch.rand(columns)
    dy = torch.rand(3, columns) + 0.1
    for op, args in (
        ("layer_norm", (x, weight, bias, 1e-5, 0.0, None)),
        ("layer_norm_backward", (dy, x, weight, None, 1e-5, 0.0, True, F32)),
    ):
        problem = OPS[op].problem(*args, device=DEVICE)
        for variant in OPS[op].variants:
            if variant.supports(problem) is not None or not variant.name.startswith("cuda_"):
                continue
            outputs = host.run(variant, problem, variant.config(problem), args).outputs
            if op == "layer_norm":
                assert torch.equal(outputs, bias.expand_as(x)), variant.name
                continue
            assert not outputs[1].any(), variant.name
            assert torch.equal(outputs[2], dy.sum(0)), variant.name
            if columns == 1:
                assert not outputs[0].any(), variant.name


@pytest.mark.parametrize("name", ["cuda_warp", "cuda_block"])
def test_the_center_of_the_largest_numbers(host: EmulatedHost, name: str) -> None:
    """A sum of the first values of a warp's lanes would be infinite."""
    size = torch.tensor([3.4e38, -3.4e38, torch.finfo().max])[:, None]
    x, weight, bias = size.expand(3, 256).contiguous(), torch.rand(256) + 0.3, torch.rand(256)
    args = (x, weight, bias, 1e-5, 0.0, None)
    problem = OPS["layer_norm"].problem(*args, device=DEVICE)
    variant = next(one for one in OPS["layer_norm"].variants if one.name == name)
    config = RowConfig(64, items=2, lanes=32) if name == "cuda_warp" else RowConfig(64, items=1)
    outputs = host.run(variant, problem, config, args).outputs
    assert torch.equal(outputs, bias.expand_as(x))


@pytest.fixture
def contracting_host(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> EmulatedHost:
    """The emulation with multiplications and additions contracted to FMAs, as nvcc does."""
    flags = [flag for flag in harness.FLAGS if not flag.startswith("-ffp-contract")]
    flags += ["-ffp-contract=fast", "-fexpensive-optimizations"]  # g++ needs both
    flags += ["-mfma"] if platform.machine() == "x86_64" else []
    if "-mfma" in flags and "fma" not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip("needs a CPU with FMA instructions")
    monkeypatch.setattr(harness, "FLAGS", tuple(flags))
    return EmulatedHost(harness.emulator_for(pytestconfig), monkeypatch)


@pytest.mark.parametrize("name", ["cuda_warp", "cuda_block"])
def test_the_gradient_of_one_column_is_zero(contracting_host: EmulatedHost, name: str) -> None:
    """g - mean(g) leaves the rounding error of g = dy * weight where it becomes an FMA."""
    torch.manual_seed(0)
    dy, x, weight = torch.randn(64, 1), torch.randn(64, 1), torch.rand(1) + 0.3
    args = (dy, x, weight, None, 1e-5, 0.0, True, F32)
    problem = OPS["layer_norm_backward"].problem(*args, device=DEVICE)
    variant = next(one for one in OPS["layer_norm_backward"].variants if one.name == name)
    outputs = contracting_host.run(variant, problem, variant.config(problem), args).outputs
    assert not outputs[0].any()


def test_a_row_that_overflows_leaves_its_neighbours_alone(host: EmulatedHost) -> None:
    """Those that share a warp with it, too."""
    config = RowConfig(64, items=1, lanes=4)
    for name in OP_NAMES:
        op = OPS[name]
        x = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))
        answers = []
        for factor in (1.0, 1e25):
            rows = x.clone()
            rows[5] *= factor
            args = _arguments(op, rows, 1e-5)
            problem = op.problem(*args, device=DEVICE)
            variant = next(one for one in op.variants if one.name == "cuda_warp")
            written = (0, 1) if name == "fused_add_rms_norm_" else ()
            returned = host.run(variant, problem, config, args, written=written).outputs
            answers.append(results_of(name, args, returned)[0].float())
        others = [row for row in range(24) if row != 5]
        assert torch.equal(answers[0][others], answers[1][others]), name


@pytest.mark.parametrize("dy", [1e-18, 1e-12, 1e12, 1e18])
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("name", ["rms_norm_backward", "layer_norm_backward"])
def test_gradients_of_every_magnitude(
    host: EmulatedHost, name: str, size: float, dy: float
) -> None:
    args = list(_arguments(OPS[name], torch.randn(6, 64) * size, 1e-30))
    args[0] = args[0].clamp(-3, 3) * dy
    variant, config = LAUNCHES[2]
    _check(host, name, tuple(args), variant, config)
