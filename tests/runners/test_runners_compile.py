"""Runners in compiled graphs: one node each, M symbolic, the runner found when it runs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from runners_helpers import Experts, Times, linear_gemm, moe_gemm, weight
from torch._dynamo.testing import CompileCounterWithBackend

from gristmill.errors import UnknownRunner
from gristmill.runners import register_runner
from gristmill.runners.registry import id_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Network(torch.nn.Module):
    """Two linear layers and one of experts, each behind an id."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.up, self.down = (
            Times(weight(8, 12).to(device)),
            Times(weight(12, 8, seed=1).to(device)),
        )
        self.experts = Experts(torch.stack([weight(8, 8, seed) for seed in range(4)]).to(device))
        self.up_id = register_runner(self.up)
        self.down_id = register_runner(self.down)
        self.experts_id = register_runner(self.experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = linear_gemm(x + 1, self.up_id, 12).relu()
        hidden = linear_gemm(hidden, self.down_id, 8)
        weights, ids = hidden[:, :4].softmax(-1).topk(2)
        return moe_gemm(hidden, weights, ids, self.experts_id, 8) * 2

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        hidden = ((x + 1) @ self.up.weight).relu() @ self.down.weight
        weights, ids = hidden[:, :4].softmax(-1).topk(2)
        return self.experts._run_impl(hidden, weights, ids) * 2


class Recorder:
    """A backend that keeps the graph."""

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.calls = [
            (str(node.target), node.args)
            for node in graph.graph.nodes
            if "gemm" in str(node.target)
        ]
        return graph


def test_every_layer_is_one_node_with_its_own_id() -> None:
    network, recorder = Network(), Recorder()
    x = torch.randn(3, 8)
    compiled = torch.compile(network, backend=recorder, fullgraph=True)
    torch.testing.assert_close(compiled(x), network.expected(x))
    assert [(name.split(".")[1], args[-2:]) for name, args in recorder.calls] == [
        ("nvfp4_linear_gemm", (network.up_id, 12)),
        ("nvfp4_linear_gemm", (network.down_id, 8)),
        ("nvfp4_moe_gemm", (network.experts_id, 8)),
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_symbolic(device: str) -> None:
    network = Network(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(network, backend=counter, fullgraph=True, dynamic=True)
    for rows in (5, 2, 3, 17, 64, 255):
        x = torch.randn(rows, 8, device=device)
        torch.testing.assert_close(compiled(x), network.expected(x))
        assert counter.frame_count == 1, rows


def test_layers_that_pass_their_ids_share_a_graph() -> None:
    """The first id is taken for a constant; with the second the graph is made for any."""
    runners = [Times(weight(8, 8, seed)) for seed in range(6)]
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def layer(x: torch.Tensor, runner_id: int) -> torch.Tensor:
        return linear_gemm(x, runner_id, 8).relu()

    x = torch.randn(3, 8)
    for number, runner in enumerate(runners):
        name = f"shared graph {number}" if number % 2 else None
        result = layer(x, register_runner(runner, name))
        torch.testing.assert_close(result, (x @ runner.weight).relu())
    assert counter.frame_count == 2


def test_a_graph_may_be_compiled_before_its_runner_exists() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        return linear_gemm(x * 2, runner_id, 6) + 1

    runner_id = id_of("comes later")
    x = torch.randn(3, 8)
    with pytest.raises(UnknownRunner, match="no runner has that name here"):
        function(x)
    runner = Times(weight())
    register_runner(runner, "comes later")
    torch.testing.assert_close(function(x), (x * 2) @ runner.weight + 1)


def test_a_compiled_graph_follows_its_runner() -> None:
    """The graph keeps an id and nothing else: a runner can be replaced, and can be freed."""
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        return linear_gemm(x * 2, runner_id, 6)

    x = torch.randn(3, 8)
    runner = Times(weight(seed=1))
    runner_id = register_runner(runner, "followed")
    torch.testing.assert_close(function(x), (x * 2) @ runner.weight)
    other = Times(weight(seed=2))
    register_runner(other, "followed", replace=True)
    torch.testing.assert_close(function(x), (x * 2) @ other.weight)
    del other
    with pytest.raises(UnknownRunner, match=r"runner 'followed' .* was freed"):
        function(x)
    assert counter.frame_count == 1


def test_export() -> None:
    network = Network()
    rows = torch.export.Dim("rows", min=2)
    exported = torch.export.export(network, (torch.randn(4, 8),), dynamic_shapes=({0: rows},))
    calls = [node for node in exported.graph.nodes if "gemm" in str(node.target)]
    assert [node.args[-2] for node in calls] == [network.up_id, network.down_id, network.experts_id]
    for count in (2, 9):
        x = torch.randn(count, 8)
        torch.testing.assert_close(exported.module()(x), network.expected(x))


def test_unbacked_rows() -> None:
    """A size that nobody knows, as after a selection by a mask."""
    runner = Times(weight())
    runner_id = register_runner(runner)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return linear_gemm(x[mask], runner_id, 6)

    x, mask = torch.randn(10, 8), torch.arange(10) % 3 == 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.testing.assert_close(function(x, mask), x[mask] @ runner.weight)


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++ here")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor(mode: str, device: str) -> None:
    if (mode, device) == ("reduce-overhead", "cpu"):
        pytest.skip("the same as default without a GPU")
    network = Network(device)
    compiled = torch.compile(network, fullgraph=True, mode=mode, dynamic=mode == "default")
    for rows in (5, 9):
        x = torch.randn(rows, 8, device=device)
        for _ in range(3):  # reduce-overhead captures on the second call, replays on the third
            torch.compiler.cudagraph_mark_step_begin()
            with torch.inference_mode():
                torch.testing.assert_close(compiled(x), network.expected(x))
