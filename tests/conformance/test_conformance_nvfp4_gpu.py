"""What only a GPU can show of the NVFP4 ops: capture, waiting, memory, order of sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance_helpers import copied, run_by, same_bits, supporting
from conformance_truth import results_of
from test_conformance_gpu import answer, fill

import gristmill
from gristmill.ops.nvfp4_common import PIECE_BYTES
from gristmill.ops.op import Op
from gristmill.ops.registry import OPS

pytestmark = pytest.mark.gpu

# Few rows, many, and weights of more than one piece; for mixtures few slots and many as well.
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "linear": [(1, 512, 1024), (37, 4096, 2048), (700, 1000, 4096)],
    "moe": [(1, 16, 4, 512, 256), (50, 16, 4, 512, 256), (300, 40, 8, 1024, 2048)],
}
PARAMETERS = [
    pytest.param(OPS[f"nvfp4_{kind}{end}"], shape, id=f"{kind}{end}-{'x'.join(map(str, shape))}")
    for kind, shapes in SHAPES.items()
    for end in ("", "_backward")
    for shape in shapes
]
over_calls = pytest.mark.parametrize(("op", "shape"), PARAMETERS)


def example(op: Op, shape: tuple[int, ...], seed: int = 0) -> tuple[Any, ...]:
    torch.manual_seed(seed)
    return op.example(shape, torch.bfloat16, "cuda")


@over_calls
def test_capture_and_replay(op: Op, shape: tuple[int, ...]) -> None:
    """With other weights and another routing, too: nothing of them is known to the host."""
    first, second = example(op, shape, 0), example(op, shape, 1)
    for variant in supporting(op, first):
        static = copied(first)
        run_by(op, variant.name, copied(first))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            returned = run_by(op, variant.name, static)
        captured = results_of(op.name, static, returned)
        for values in (second, first):
            fill(static, values)
            graph.replay()
            for result, want in zip(captured, answer(op, variant.name, values), strict=True):
                assert same_bits(result, want), variant.name


@over_calls
def test_a_call_waits_for_nothing_and_leaves_nothing(op: Op, shape: tuple[int, ...]) -> None:
    args = example(op, shape)
    for variant in supporting(op, args):
        run_by(op, variant.name, args)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run_by(op, variant.name, args)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_allocated() == before, variant.name


@over_calls
def test_many_runs_give_the_same_bits(op: Op, shape: tuple[int, ...]) -> None:
    args = example(op, shape)
    for variant in supporting(op, args):
        first = answer(op, variant.name, args)
        noise = torch.empty(1 << 22, device="cuda")
        for turn in range(8):
            noise.fill_(float("nan") if turn % 2 else turn)  # what the next call's memory holds
            for one, other in zip(answer(op, variant.name, args), first, strict=True):
                assert same_bits(one, other), variant.name


@pytest.mark.parametrize("shape", [(16, 28672, 4096), (8192, 4096, 4096)], ids=str)
@pytest.mark.parametrize("name", ["nvfp4_linear", "nvfp4_linear_backward"])
def test_a_linear_stays_within_a_piece(name: str, shape: tuple[int, ...]) -> None:
    op = OPS[name]
    args = example(op, shape)
    result = op.outputs(*args)
    peak = _peak(op, args) - result.nbytes
    # The allocator rounds large tensors up, each by up to 2 MB.
    assert peak <= PIECE_BYTES + (8 << 20)


def test_experts_stay_within_a_piece() -> None:
    op, shape = OPS["nvfp4_moe"], (512, 64, 4, 2048, 1024)
    args = example(op, shape)
    rows, _, topk, hidden, inner = shape
    slots = rows * topk * (hidden + inner) * 2 + rows * hidden * 2
    assert _peak(op, args) - slots <= PIECE_BYTES + (12 << 20)


def _peak(op: Op, args: tuple[Any, ...]) -> int:
    run_by(op, "library", args)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run_by(op, "library", args)
    return torch.cuda.max_memory_allocated() - before


def test_a_mixture_goes_over_from_few_to_many_without_a_step() -> None:
    """The same tokens, alone and among others; bf16 products on one side, fp32 on the other."""
    op = OPS["nvfp4_moe"]
    args = example(op, (200, 16, 4, 1024, 512))
    whole = op.run(*args)
    for row in (0, 77, 199):
        alone = tuple(arg[row : row + 1] if at < 3 else arg for at, arg in enumerate(args))
        expected = whole[row : row + 1]
        # Several roundings to bf16 on the way, of terms that may be larger than their sum.
        close = float(expected.float().std()) * 2**-5
        torch.testing.assert_close(op.run(*alone), expected, rtol=2**-7, atol=close)


def test_a_training_step_is_captured() -> None:
    torch.manual_seed(0)
    layer = gristmill.nn.NVFP4Linear.from_linear(torch.nn.Linear(512, 256)).to("cuda")
    x = torch.randn(64, 512, device="cuda", requires_grad=True)

    def step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(layer(x).square().sum(), (x, layer.bias))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.normal_()
    graph.replay()
    for one, other in zip(captured, step(), strict=True):
        assert same_bits(one, other)
