"""Dense experts beyond their cases: gradients, graphs, autocast, numbers that are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conformance_graphs import Recorder, ours
from conformance_helpers import DEVICES, allowed, composed, copied, run_by, same_bits, supporting
from conformance_truth import results_of, truth_of
from torch._dynamo.testing import CompileCounterWithBackend

import gristmill
from gristmill import nvfp4
from gristmill.errors import DoubleBackwardError
from gristmill.ops import nvfp4_common
from gristmill.ops.moe import moe_backward
from gristmill.ops.moe.library import operand
from gristmill.ops.nvfp4_moe import moe_of
from gristmill.ops.op import Op
from gristmill.ops.registry import OPS

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
MOE, BACKWARD = OPS["moe"], OPS["moe_backward"]
both_ops = pytest.mark.parametrize(
    "op", [pytest.param(one, id=one.name) for one in (MOE, BACKWARD)]
)
both_ways = pytest.mark.parametrize("how", ["direct", "registered"])
TRAINED = (0, 1, 3, 4, 5, 6)  # positions of what has a gradient


def call(how: str, *args: Any) -> torch.Tensor:
    result: torch.Tensor
    if how == "registered":
        result = torch.ops.gristmill.moe(*args)
    else:
        names = ("w13_bias", "w2_bias", "activation", "limit", "expert_map", "alpha")
        result = gristmill.moe(*args[:5], **dict(zip(names, args[5:], strict=True)))
    return result


def example(
    rows: int, dtype: torch.dtype, device: str, *, activation: str = "silu", bias: bool = True
) -> list[Any]:
    torch.manual_seed(0)
    args = list(MOE.example((rows, 6, 2, 64, 48), dtype, device))
    args[2][0, 0] = -1
    args[2] = torch.where(args[2] == 4, 1, args[2])  # an expert with nothing to do
    if bias:
        args[5] = torch.randn(6, 96, device=device)
        args[6] = torch.randn(6, 64, device=device).to(dtype)
    args[7], args[8] = activation, 1.5
    if activation == "swiglu_oai":
        args[10] = 1.3
    return args


# --- gradients


@pytest.mark.parametrize("device", DEVICES)
@both_ways
@pytest.mark.parametrize("rows", [1, 25])
@pytest.mark.parametrize("activation", ["silu", "gelu", "swiglu_oai"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP64], ids=["fp32", "bf16", "fp64"])
def test_gradients(dtype: torch.dtype, activation: str, rows: int, how: str, device: str) -> None:
    """Of tokens, routing, weights and biases, by every variant of the backward op."""
    made = example(rows, dtype, device, activation=activation)
    dy = torch.randn(rows, 64, device=device).to(dtype)
    backward = (dy, *made, True)
    truths = truth_of("moe_backward", backward)
    limits = allowed(BACKWARD, backward, truths)
    for variant in supporting(BACKWARD, backward):
        args = [
            arg.detach().clone().requires_grad_() if at in TRAINED else arg
            for at, arg in enumerate(made)
        ]
        with gristmill.use("moe_backward", variant.name):
            call(how, *args).backward(dy)
        rounding = composed(BACKWARD, variant.name, backward)
        for position, truth, limit in zip(TRAINED, truths, limits, strict=True):
            gradient = args[position].grad
            assert gradient.dtype == made[position].dtype
            error = truth.roundings(gradient, composed=rounding)
            assert error <= limit, f"{variant.name} {position}: {error} > {limit}"
        assert args[1].grad[0, 0] == 0
        for position in (3, 4, 5, 6):
            assert not args[position].grad[4].any()
            assert args[position].grad.any()


@both_ways
@pytest.mark.parametrize("limit", [None, 0.7])
@pytest.mark.parametrize("activation", ["silu", "gelu", "swiglu_oai"])
def test_gradcheck(activation: str, limit: float | None, how: str) -> None:
    torch.manual_seed(1)
    args = list(MOE.example((3, 4, 3, 8, 6), FP64, "cpu"))
    args[2][1] = torch.tensor([2, 2, -1])  # twice the same, and nobody
    args[5], args[6] = torch.randn(4, 12, dtype=FP64), torch.randn(4, 8, dtype=FP64)
    args[7], args[8] = activation, limit
    args[10] = 0.9 if activation == "swiglu_oai" else None
    leaves = [args[at].requires_grad_() for at in TRAINED]

    def function(x: Any, weights: Any, *others: Any) -> Any:
        return call(how, x, weights, args[2], *others, *args[7:])

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


@both_ways
def test_only_what_is_asked_for_is_made(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of frozen weights cost nothing."""
    asked: list[bool] = []
    backward = BACKWARD.call_in_backward

    def spy(tensors: Any, args: Any) -> Any:
        asked.append(args[-1])
        return backward(tensors, args)

    monkeypatch.setattr(BACKWARD, "call_in_backward", spy)
    for trained, wanted in (((0,), False), ((1,), False), ((0, 3), True), ((6,), True)):
        args = example(9, FP32, "cpu")
        for position in trained:
            args[position].requires_grad_()
        call(how, *args).sum().backward()
        assert asked.pop() is wanted
        assert not asked
        for position, arg in enumerate(args):
            if isinstance(arg, torch.Tensor):
                assert (arg.grad is not None) == (position in trained)


@both_ways
def test_double_backward_raises_and_names_the_way_out(how: str) -> None:
    args = example(3, FP32, "cpu")
    args[0].requires_grad_()
    (first,) = torch.autograd.grad(call(how, *args).square().sum(), args[0], create_graph=True)
    with pytest.raises(DoubleBackwardError, match=r"moe_backward.*functional\.linear"):
        first.sum().backward()


def test_transforms_see_the_formula() -> None:
    args = example(4, FP64, "cpu", bias=False)

    def loss(x: Any, w13: Any) -> Any:
        return call("direct", x, args[1], args[2], w13, *args[4:]).square().sum()

    found = torch.func.grad(loss, argnums=(0, 1))(args[0], args[3])
    leaves = [args[at].clone().requires_grad_() for at in (0, 3)]
    loss(*leaves).backward()
    for one, leaf in zip(found, leaves, strict=True):
        torch.testing.assert_close(one, leaf.grad)


def test_training_follows_torch() -> None:
    """A few steps of a mixture written with torch's own ops, and the same ones here."""

    def plain(x: Any, weights: Any, ids: Any, w13: Any, w2: Any) -> torch.Tensor:
        y = torch.zeros_like(x)
        for expert in range(len(w13)):
            gate, up = (x @ w13[expert].t()).chunk(2, -1)
            share = (weights * (ids == expert)).sum(-1, keepdim=True)
            y = y + share * ((torch.nn.functional.silu(gate) * up) @ w2[expert].t())
        return y

    def trained(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x, weights, ids, w13, w2 = MOE.example((20, 5, 2, 32, 16), FP32, "cpu")[:5]
        weights, target = weights.float(), torch.randn(20, 32)
        leaves = [w13.requires_grad_(), w2.requires_grad_()]
        optimiser = torch.optim.SGD(leaves, lr=0.1)
        for _ in range(5):
            optimiser.zero_grad()
            (function(x, weights, ids, *leaves) - target).square().mean().backward()
            optimiser.step()
        return leaves

    for one, other in zip(trained(gristmill.moe), trained(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


# --- one function for all kinds of weights


@pytest.mark.parametrize("arch", ["cpu", "sm_90a", "sm_100a"])
def test_packed_weights_go_to_their_own_op(arch: str) -> None:
    torch.manual_seed(0)
    x, (weights, ids) = torch.randn(20, 64), torch.rand(20, 4).topk(2)
    w13 = nvfp4.quantize(torch.randn(4, 96, 64) / 8)
    w2 = nvfp4.quantize(torch.randn(4, 64, 48) / 8)
    options: dict[str, Any] = {"activation": "swiglu_oai", "limit": 2.0, "alpha": 0.8}
    held = (w13.prepare(arch, pairs=True), w2.prepare(arch))
    packed = gristmill.moe(x, weights, ids, *held, **options)
    assert same_bits(packed, nvfp4.moe(x, weights, ids, *held, **options))
    dense = gristmill.moe(x, weights, ids, *(nvfp4.dequantize(one) for one in (w13, w2)), **options)
    torch.testing.assert_close(packed, dense, rtol=1e-4, atol=1e-5)
    assert float(dense.std()) > 0.05


def test_alpha_of_nvfp4_experts() -> None:
    """1.702 where nobody says otherwise."""
    args = list(OPS["nvfp4_moe"].example((9, 4, 2, 64, 48), FP32, "cpu"))
    args[11] = "swiglu_oai"
    usual = moe_of(*args)
    assert same_bits(usual, moe_of(*args[:-1], 1.702))
    other = moe_of(*args[:-1], 0.4)
    assert not torch.allclose(usual, other, rtol=1e-2)


# --- graphs


def test_one_op_is_one_node_and_rows_are_symbolic() -> None:
    torch._dynamo.reset()
    recorder, counter = Recorder(), CompileCounterWithBackend("aot_eager")
    w13, w2 = (one.requires_grad_() for one in example(8, FP32, "cpu", bias=False)[3:5])

    def function(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return gristmill.moe(torch.relu(x), weights, ids, w13, w2).sum()

    torch.compile(function, backend=recorder, fullgraph=True)(*routed(8)).backward()
    assert ours(recorder.forward) == ["gristmill.moe"]
    assert ours(recorder.backward) == ["gristmill.moe_backward"]
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for rows in (8, 2, 3, 40):
        args, made = routed(rows), []
        for each in (compiled, function):
            w13.grad = w2.grad = None
            loss = each(*args)
            loss.backward()
            made.append((loss.detach(), w13.grad, w2.grad))
        torch.testing.assert_close(*made)
    assert counter.frame_count == 1
    torch._dynamo.reset()


def routed(rows: int) -> tuple[torch.Tensor, ...]:
    return MOE.example((rows, 6, 2, 64, 48), FP32, "cpu")[:3]


# --- autocast


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lower", [BF16, FP16], ids=["bf16", "fp16"])
def test_autocast_takes_its_dtype(lower: torch.dtype, device: str) -> None:
    """As torch's linear does: tokens and weights; gradients come back in their own dtypes."""
    args = example(9, FP32, device)
    for position in TRAINED:
        args[position].requires_grad_()
    with torch.autocast(device, lower):
        y = call("direct", *args)
    assert y.dtype == lower
    own = [arg.detach().to(lower) if at in (0, 3, 4) else arg for at, arg in enumerate(args)]
    own = [arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in own]
    assert same_bits(y.detach(), call("direct", *own))
    y.float().sum().backward()
    for position in TRAINED:
        assert args[position].grad.dtype == args[position].dtype
    mixed = [args[0].detach().to(BF16), *own[1:3], *args[3:]]
    with torch.autocast(device, lower):
        assert call("direct", *mixed).dtype == lower


# --- pieces and layouts of weights


def test_pieces_of_experts_are_one_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where weights are converted on the way, some experts at a time."""
    monkeypatch.setattr(nvfp4_common, "PIECE_BYTES", 30 << 10)
    for op in (MOE, BACKWARD):
        for case in op.cases():
            args = case.make("cpu", 3)
            truths = truth_of(op.name, args)
            limits = allowed(op, args, truths)
            for variant in supporting(op, args):
                results = results_of(op.name, args, run_by(op, variant.name, args))
                for truth, result, limit in zip(truths, results, limits, strict=True):
                    assert truth.roundings(result) <= max(limit, 2.5), case.name


def test_what_grouped_mm_takes_is_not_copied() -> None:
    weight = torch.randn(3, 32, 64)
    same = weight[:1].expand(3, 32, 64)
    for one in (weight, weight.mT, weight[1:], weight[:, :16], weight[:, :, 4:36], same):
        assert operand(one) is one
    odd = torch.randn(3, 32, 65)
    rows = weight[:, :1].expand(3, 32, 64)
    for one in (rows, odd[..., 1:], odd[..., :64], weight[:, ::2, ::2], weight[..., 1:33]):
        copy = operand(one)
        assert copy.is_contiguous()
        assert copy.data_ptr() % 16 == 0
        assert copy.data_ptr() != one.data_ptr()
        assert torch.equal(copy, one)


# --- numbers that are none


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@both_ops
def test_nan_and_inf_stay_in_their_row(op: Op, value: float, device: str) -> None:
    args = op.example((40, 8, 2, 64, 32), BF16, device)
    spoiled = copied(args)
    spoiled[0][7, 5] = value
    healthy = [row for row in range(40) if row != 7]
    for variant in supporting(op, args):
        clean = results_of(op.name, args, run_by(op, variant.name, args))
        dirty = results_of(op.name, spoiled, run_by(op, variant.name, spoiled))
        for one, other in zip(clean[:2], dirty[:2], strict=True):
            assert same_bits(one[healthy], other[healthy]), variant.name
            assert not other[7].isfinite().all(), variant.name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [2, 40])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@both_ops
def test_an_expert_harms_nobody_it_does_not_serve(
    op: Op, dtype: torch.dtype, rows: int, device: str
) -> None:
    """NaN in an idle expert, and values that overflow in the wrong one."""
    args = list(op.example((rows, 8, 2, 64, 32), dtype, device))
    at = 1 if op is BACKWARD else 0
    args[at + 2] = torch.where(args[at + 2] == 5, -1, args[at + 2])
    ids = args[at + 2]
    args[at + 3][5], args[at + 4][5] = float("nan"), float("nan")
    args[at + 3][3] = 1e36  # what this one makes of a token overflows
    served = ~(ids == 3).any(-1)
    for variant in supporting(op, tuple(args)):
        results = results_of(op.name, tuple(args), run_by(op, variant.name, tuple(args)))
        for result in results[:2]:
            assert result[served].isfinite().all(), variant.name
        for result in results[2:4]:
            # The idle one has no gradient, and those of the others are their own.
            assert not result[5].any(), variant.name
            others = [number for number in range(8) if number not in (3, 5)]
            assert result[others].isfinite().all(), variant.name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 4, 2, 32, 16), (3, 4, 0, 32, 16), (3, 0, 2, 32, 16)])
@both_ops
def test_an_empty_mixture(op: Op, shape: tuple[int, ...], device: str) -> None:
    args = op.example(shape, BF16, device)
    for variant in supporting(op, args):
        results = results_of(op.name, args, run_by(op, variant.name, args))
        for result, want in zip(results, results_of(op.name, args, op.outputs(*args)), strict=True):
            assert (result.shape, result.dtype) == (want.shape, want.dtype)
            assert not result.any()


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 50, 700])
def test_a_training_step_is_captured(rows: int) -> None:
    """Nothing waits for the host; a replay with other tokens and another routing is right."""
    args = list(MOE.example((rows, 16, 4, 512, 256), BF16, "cuda"))
    leaves = [args[at].requires_grad_() for at in (0, 3, 4)]

    def step() -> tuple[torch.Tensor, ...]:
        y = call("direct", *args)
        return y.detach(), *torch.autograd.grad(y.float().square().sum(), leaves)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        args[0].normal_()
        args[2].copy_(torch.randint(-1, 16, args[2].shape, device="cuda"))
    graph.replay()
    for one, other in zip(captured, step(), strict=True):
        assert same_bits(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 64, 500])
@pytest.mark.parametrize("name", ["moe", "moe_backward"])
def test_large_shapes_are_right(name: str, rows: int) -> None:
    op = OPS[name]
    torch.manual_seed(rows)
    args = op.example((rows, 32, 4, 1024, 768), BF16, "cuda")
    truths = truth_of(name, args)
    limits = allowed(op, args, truths)
    for variant in supporting(op, args):
        results = results_of(name, args, run_by(op, variant.name, args))
        rounding = composed(op, variant.name, args)
        for truth, result, limit in zip(truths, results, limits, strict=True):
            error = truth.roundings(result, composed=rounding)
            assert error <= max(limit, 2.5), f"{variant.name}: {error} > {limit}"


def test_backward_alone() -> None:
    """The public names of the folder: what autograd calls can be called."""
    args = example(5, FP32, "cpu")
    found = moe_backward(torch.ones(5, 64), *args, False)
    assert [one.numel() for one in found[2:]] == [0] * 4
    assert found[0].shape == (5, 64)
