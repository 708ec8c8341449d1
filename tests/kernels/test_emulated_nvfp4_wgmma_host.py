"""The plan of variant `cuda_wgmma` with the launches that a GPU would get, run on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulated_host import EmulatedHost, Run
from emulation.harness import maps_of_rows
from exact import Range
from nvfp4_wgmma_cases import BF16, F16, F32, problem_of
from nvfp4_wgmma_cases import Problem as Product

from gristmill.formats.nvfp4 import fragments
from gristmill.ops.nvfp4_linear import wgmma
from gristmill.ops.nvfp4_linear.problem import forward_problem
from gristmill.ops.nvfp4_linear.wgmma import Wgmma
from gristmill.ops.nvfp4_linear.wgmma_configs import WgmmaConfig
from gristmill.select.device import KNOWN, Device
from gristmill.select.problem import Problem

DEVICE = KNOWN["sm_90a"]
PLAIN = WgmmaConfig(64, 1, 2, 4, 2)
# Tokens, rows, columns: tails of all; few, some and many tokens, so that every kind is first once.
SIZES = ((1, 16, 16), (9, 200, 1040), (50, 272, 592), (90, 64, 80), (300, 208, 144))


@pytest.fixture(autouse=True)
def _maps_of_the_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgmma, "maps_of_rows", maps_of_rows)


def _arguments(
    product: Product, out: torch.dtype | None = None, x: torch.Tensor | None = None
) -> tuple[object, ...]:
    codes, scales = fragments.pack(product.codes, product.scales)
    x = product.x if x is None else x
    return (x, codes, scales, product.row_scale, product.bias, "fragments", out, None)


def _problem(args: tuple[object, ...], device: Device = DEVICE) -> Problem:
    problem = forward_problem(device, *args)  # type: ignore[arg-type]
    assert Wgmma().supports(problem) is None
    return problem


def _run(host: EmulatedHost, args: tuple[object, ...], config: WgmmaConfig, order: int = 0) -> Run:
    return host.run(Wgmma(), _problem(args), config, args, order=order)


def _some(configs: tuple[WgmmaConfig, ...]) -> list[WgmmaConfig]:
    """The first two, and the first of each special kind."""
    kinds = (
        lambda one: one.split > 1,
        lambda one: one.persistent,
    )
    special = [next(filter(kind, configs), configs[0]) for kind in kinds]
    return list(dict.fromkeys([*configs[:2], *special]))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_configs_that_would_be_timed(
    host: EmulatedHost, size: tuple[int, int, int], dtype: torch.dtype
) -> None:
    args = _arguments(product := problem_of(*size, dtype, whole=True, bias=F32), F32)
    problem = _problem(args)
    configs = _some(tuple(Wgmma().configs(problem)))
    host.build([Wgmma().program(problem, config) for config in configs])
    for config in configs:
        run = _run(host, args, config)
        assert torch.equal(run.outputs, product.exact.float()), config
        assert [call.dependent for call in run.calls] == [True]


@pytest.mark.parametrize("resident", [1, 3])
def test_a_persistent_grid_is_no_larger_than_the_device(host: EmulatedHost, resident: int) -> None:
    device = replace(DEVICE, multiprocessors=2)
    args = _arguments(product := problem_of(40, 400, 80, BF16, whole=True), F32)
    config = replace(PLAIN, tokens=16, persistent=True)
    host.resident = resident
    run = host.run(Wgmma(), _problem(args, device), config, args)
    assert torch.equal(run.outputs, product.exact.float())
    assert run.calls[0].grid == 2 * resident  # of 21 tiles


@pytest.mark.parametrize("bias", [None, F32, BF16, F16], ids=str)
@pytest.mark.parametrize("out", [None, F32, BF16, F16], ids=str)
def test_bias_and_results_of_every_type(
    host: EmulatedHost, bias: torch.dtype | None, out: torch.dtype | None
) -> None:
    product = problem_of(5, 80, 208, BF16, bias=bias, seed=1)
    y = _run(host, _arguments(product, out), PLAIN).outputs
    assert y.dtype == (out or BF16)
    Range(product.exact - product.slack, product.exact + product.slack).check(y, "y")


@pytest.mark.parametrize(
    ("config", "most", "fewer"),
    [
        (PLAIN, 64, (1, 8, 9, 20)),
        (WgmmaConfig(128, 1, 1, 2, 2, split=3), 130, (1, 33, 70)),
        (WgmmaConfig(192, 3, 1, 1, 2), 193, (1, 90, 100)),  # 100: a tile of 192, as of 193
    ],
    ids=str,
)
def test_how_many_tokens_there_are_changes_no_sum(
    host: EmulatedHost, config: WgmmaConfig, most: int, fewer: tuple[int, ...]
) -> None:
    """Tiles of 8 to 192 tokens add alike."""
    product = problem_of(most, 80, 464, BF16, seed=2)
    together = _run(host, _arguments(product, F32), config).outputs
    for tokens in fewer:
        some = _run(host, _arguments(product, F32, product.x[:tokens]), config).outputs
        assert torch.equal(some, together[:tokens])


def test_depth_and_stages_change_no_sum(host: EmulatedHost) -> None:
    """So they may be lowered where shared memory is short."""
    args = _arguments(problem_of(10, 80, 1040, BF16, seed=4), F32)
    answers = [
        _run(host, args, replace(PLAIN, depth=depth, stages=stages)).outputs
        for depth, stages in ((4, 2), (2, 3), (8, 2))
    ]
    assert all(torch.equal(answers[0], other) for other in answers[1:])


@pytest.mark.parametrize("layout", ["rows", "odd stride", "odd start", "columns", "nested"])
def test_x_of_any_strides(host: EmulatedHost, layout: str) -> None:
    product = problem_of(12, 80, 208, BF16, whole=True)
    dense = product.x.contiguous()
    wide = torch.full((14, 233), float("nan"), dtype=BF16)
    if layout == "rows":
        x = dense.view(3, 4, 208)
    elif layout == "odd stride":
        x = wide[:12, :208].copy_(dense)
    elif layout == "odd start":
        x = wide.view(-1)[1 : 1 + 12 * 216].view(12, 216)[:, :208].copy_(dense)
    elif layout == "columns":
        x = dense.t().contiguous().t()
    else:
        x = dense.view(3, 4, 208).transpose(0, 1).contiguous().transpose(0, 1)
    y = _run(host, _arguments(product, F32, x), PLAIN).outputs
    assert y.shape == (*x.shape[:-1], 80)
    assert torch.equal(y.view(12, 80), product.exact.float())


@pytest.mark.parametrize("layout", ["one row", "one of many", "expanded"])
def test_x_of_strides_that_no_map_has(host: EmulatedHost, layout: str) -> None:
    """The stride of a single row says nothing; rows that are all the same have none."""
    product = problem_of(3, 80, 208, BF16, whole=True)
    row = torch.full((2, 233), float("nan"), dtype=BF16)[:1, :208].copy_(product.x[:1])
    x = {"one row": row, "one of many": row[:, None], "expanded": row.expand(9, 208)}[layout]
    args = _arguments(product, F32, x)
    assert _problem(args).layout.copied == (layout == "expanded")
    y = _run(host, args, PLAIN).outputs
    assert torch.equal(y.view(-1, 80), product.exact[:1].float().expand(x.shape[0], 80))


def test_tokens_that_are_not_finite_leave_the_others_alone(host: EmulatedHost) -> None:
    product = problem_of(5, 80, 208, BF16, seed=3)
    expected = _run(host, _arguments(product), PLAIN).outputs
    x = product.x.clone()
    x[1], x[3] = float("nan"), float("inf")
    y = _run(host, _arguments(product, x=x), PLAIN).outputs
    assert torch.equal(y[[0, 2, 4]], expected[[0, 2, 4]])
    assert not y[[1, 3]].isfinite().any()
