from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import gristmill as gm
from gristmill import nvtx
from gristmill.errors import DriverError
from gristmill.log import forget_warnings
from gristmill.multikernel import forget_plans
from gristmill.ops.registry import OPS
from gristmill.ops.rms_norm import RMS_NORM
from gristmill.select.chooser import resolve
from gristmill.settings import reload_settings


class Ranges:
    """Stands for NVTX: the ranges in the order in which they were opened, with their depth."""

    def __init__(self) -> None:
        self.opened: list[tuple[int, str]] = []
        self.depth = 0

    def push(self, name: str) -> int:
        self.opened.append((self.depth, name))
        self.depth += 1
        return self.depth

    def pop(self) -> int:
        assert self.depth > 0
        self.depth -= 1
        return self.depth

    def runs(self) -> list[str]:
        """Those around ops, not those around the making of plans."""
        assert self.depth == 0
        names = [name for _, name in self.opened if not name.startswith("gristmill.plan ")]
        return [name for name in names if name != "gristmill"]


def _forget() -> None:
    reload_settings()
    forget_warnings()
    forget_plans()
    for op in OPS.values():
        op.forget_plans()


@pytest.fixture(autouse=True)
def clean_slate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(nvtx, "_works", None)
    _forget()
    yield
    monkeypatch.undo()
    _forget()


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> Ranges:
    """GRISTMILL_NVTX=1, with a fake of the two functions of torch."""
    made = Ranges()
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", made.push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", made.pop)
    monkeypatch.setenv("GRISTMILL_NVTX", "1")
    _forget()
    return made


def test_each_call_is_a_range_named_by_op_variant_shape_and_dtype(ranges: Ranges) -> None:
    x = torch.ones(2, 3, 8, dtype=torch.bfloat16)
    for _ in range(2):
        gm.rms_norm(x)
    gm.softmax(x.float())
    assert ranges.runs() == [
        "gristmill.rms_norm library 6x8 bf16",
        "gristmill.rms_norm library 6x8 bf16",
        "gristmill.softmax library 6x8 fp32",
    ]


def test_making_a_plan_is_a_range_of_its_own_before_the_first_run(ranges: Ranges) -> None:
    gm.rms_norm(torch.ones(2, 8))
    gm.rms_norm(torch.ones(2, 8))
    assert ranges.opened == [
        (0, "gristmill"),
        (0, "gristmill.plan rms_norm library"),
        (0, "gristmill.rms_norm library 2x8 fp32"),
        (0, "gristmill.rms_norm library 2x8 fp32"),
    ]


def test_gradients_have_ranges_too(ranges: Ranges) -> None:
    x = torch.ones(2, 8, requires_grad=True)
    gm.rms_norm(x).sum().backward()
    assert [name.split()[0] for name in ranges.runs()] == [
        "gristmill.rms_norm",
        "gristmill.rms_norm_backward",
    ]
    assert x.grad is not None


def test_a_range_ends_when_the_op_raises(ranges: Ranges, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(problem: Any, config: Any) -> Callable[..., Any]:
        def plan(*args: Any) -> Any:
            raise torch.OutOfMemoryError("too large")

        return plan

    for variant in RMS_NORM.variants:
        monkeypatch.setattr(variant, "bind", fails)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            gm.rms_norm(torch.ones(2, 8))
    assert len(ranges.runs()) == 2


def test_a_plan_that_cannot_be_made_ends_its_range(
    ranges: Ranges, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(problem: Any, config: Any) -> Callable[..., Any]:
        raise DriverError("no driver")

    library = next(one for one in RMS_NORM.variants if one.name == "library")
    monkeypatch.setattr(library, "bind", fails)
    gm.rms_norm(torch.ones(2, 8))
    assert ranges.runs() == ["gristmill.rms_norm reference 2x8 fp32"]
    planned = [name for _, name in ranges.opened if name.startswith("gristmill.plan")]
    assert planned == ["gristmill.plan rms_norm library", "gristmill.plan rms_norm reference"]


def test_compiled_graphs_have_ranges_when_they_run(ranges: Ranges) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return gm.rms_norm(x) * 2

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 8)
    for _ in range(2):
        assert torch.equal(compiled(x), step(x))
    assert len(ranges.runs()) == 4
    torch._dynamo.reset()


def test_functions_of_a_multikernel_have_ranges(ranges: Ranges) -> None:
    def refuses(x: torch.Tensor, *, by: float) -> torch.Tensor:
        raise ValueError("not here")

    def scales(x: torch.Tensor, *, by: float) -> torch.Tensor:
        return x * by

    both = gm.MultiKernel("nvtx_toy", {"refuses": refuses, "scales": scales})
    for _ in range(2):
        assert both(torch.ones(3), by=2.0).tolist() == [2.0] * 3
    assert [name.split()[:3] for name in ranges.runs()] == [
        ["gristmill.nvtx_toy", "refuses", "3"],
        ["gristmill.nvtx_toy", "scales", "3"],
        ["gristmill.nvtx_toy", "scales", "3"],
    ]


def test_off_the_plan_is_the_variants_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a call costs what it did."""

    def plan(*args: Any) -> Any:
        return args[0]

    def forbidden(*args: Any) -> None:
        raise AssertionError("a range, and nobody has asked for one")

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", forbidden)
    library = next(one for one in RMS_NORM.variants if one.name == "library")
    monkeypatch.setattr(library, "bind", lambda problem, config: plan)
    x = torch.ones(2, 8)
    problem = RMS_NORM.problem(*RMS_NORM.bind_arguments(x))
    assert resolve("rms_norm", [library], problem)[1] is plan
    gm.rms_norm(x)
    assert list(RMS_NORM._plans.values()) == [plan]


def test_a_torch_without_nvtx_costs_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(*args: Any) -> None:
        raise RuntimeError("NVTX functions not installed")

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", missing)
    monkeypatch.setenv("GRISTMILL_NVTX", "1")
    _forget()
    for columns in (8, 16):
        assert gm.rms_norm(torch.ones(2, columns)).shape == (2, columns)
    assert caplog.messages == ["no ranges, though GRISTMILL_NVTX=1: NVTX functions not installed"]


@pytest.mark.gpu
def test_on_a_gpu_ranges_disturb_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real ranges, counted on their way: eager, gradients, compiled, captured."""
    x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    expected = gm.rms_norm(x, weight)
    expected.sum().backward()
    gradient, weight.grad = weight.grad, None

    counted = Ranges()
    push, pop = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop

    def counting_push(name: str) -> Any:
        counted.push(name)
        return push(name)

    def counting_pop() -> Any:
        counted.pop()
        return pop()

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", counting_push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", counting_pop)
    monkeypatch.setenv("GRISTMILL_NVTX", "1")
    _forget()

    found = gm.rms_norm(x, weight)
    found.sum().backward()
    torch.cuda.synchronize()
    assert torch.equal(found, expected)
    assert torch.equal(weight.grad, gradient)
    forward, backward = counted.runs()
    assert forward.startswith("gristmill.rms_norm cuda_")
    assert forward.endswith(" 64x1024 bf16")
    assert backward.startswith("gristmill.rms_norm_backward ")

    still = weight.detach()
    compiled = torch.compile(lambda value: gm.rms_norm(value, still), fullgraph=True)
    assert torch.equal(compiled(x), expected)

    graph = torch.cuda.CUDAGraph()
    gm.rms_norm(x, still)
    before = len(counted.runs())
    with torch.cuda.graph(graph):
        captured = gm.rms_norm(x, still)
    assert len(counted.runs()) == before + 1
    captured.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)
    assert len(counted.runs()) == before + 1
    torch._dynamo.reset()
