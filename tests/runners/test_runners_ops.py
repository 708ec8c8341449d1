"""The torch ops over runners, in eager mode."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from runners_helpers import Experts, Returns, Times, linear_gemm, moe_gemm, weight
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from gristmill.errors import ArgumentError, DtypeError, NoGradientError
from gristmill.runners import register_runner

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
NOBODY = 12345


def routed(rows: int, experts: int = 4, topk: int = 2) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 8, generator=generator)
    scores = torch.rand(rows, experts, generator=generator)
    weights, ids = scores.topk(topk)
    return hidden, weights, ids


# --- results


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 1, 3, 8), (0, 8), (2, 0, 8)], ids=str)
def test_linear_runs_the_runner(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    runner = Times(weight())
    x = torch.randn(shape).to(dtype)
    result = linear_gemm(x, register_runner(runner), 6)
    assert result.dtype == dtype
    assert result.is_contiguous()
    assert torch.equal(result, x @ runner.weight.to(dtype))


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_moe_runs_the_runner(rows: int) -> None:
    runner = Experts(torch.randn(4, 8, 8))
    args = routed(rows)
    result = moe_gemm(*args, register_runner(runner), 8)
    assert torch.equal(result, runner._run_impl(*args))


def test_ids_choose_the_layer() -> None:
    runners = [Times(weight(seed=seed)) for seed in range(5)]
    ids = [register_runner(runner) for runner in runners]
    x = torch.randn(3, 8)
    for runner, runner_id in zip(runners, ids, strict=True):
        assert torch.equal(linear_gemm(x, runner_id, 6), x @ runner.weight)


def test_arguments_have_names() -> None:
    runner = Times(weight())
    x = torch.randn(3, 8)
    result = torch.ops.gristmill.nvfp4_linear_gemm(
        x=x, runner_id=register_runner(runner), out_features=6
    )
    assert torch.equal(result, x @ runner.weight)
    experts = Experts(torch.randn(4, 8, 8))
    hidden, weights, ids = routed(3)
    result = torch.ops.gristmill.nvfp4_moe_gemm(
        hidden_states=hidden,
        topk_weights=weights,
        topk_ids=ids,
        runner_id=register_runner(experts),
        hidden_size=8,
    )
    assert torch.equal(result, experts._run_impl(hidden, weights, ids))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Callable[[], Any]) -> None:
    runner = Times(weight().requires_grad_())
    x = torch.randn(3, 8, requires_grad=True)
    runner_id = register_runner(runner)
    with mode():
        result = linear_gemm(x, runner_id, 6)
        assert torch.equal(result, x @ runner.weight)
    assert not result.requires_grad
    assert result.is_inference() == (mode is torch.inference_mode)


def test_autocast_leaves_the_dtype_alone() -> None:
    """The fake cannot know of autocast, so the runner does not either."""
    runner = Times(weight())
    x = torch.randn(3, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ runner.weight).dtype == torch.bfloat16
        result = linear_gemm(x, register_runner(runner), 6)
    assert torch.equal(result, x @ runner.weight)


def test_an_error_of_the_runner_comes_out_as_it_is() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("out of flour")

    runner = Returns(fails)
    with pytest.raises(KeyError, match="out of flour"):
        linear_gemm(torch.ones(1, 2), register_runner(runner), 2)


def test_opcheck() -> None:
    runner, experts = Times(weight()), Experts(torch.randn(4, 8, 8))
    for shape in [(3, 8), (2, 3, 8), (0, 8)]:
        torch.library.opcheck(linear_gemm.default, (torch.randn(shape), register_runner(runner), 6))
    for rows in (0, 5):
        torch.library.opcheck(moe_gemm.default, (*routed(rows), register_runner(experts), 8))


# --- fakes


def test_fakes_never_look_for_the_runner() -> None:
    for shape in [(3, 8), (8,), (2, 0, 8)]:
        meta = linear_gemm(torch.empty(shape, device="meta", dtype=torch.bfloat16), NOBODY, 6)
        assert (meta.shape, meta.dtype) == ((*shape[:-1], 6), torch.bfloat16)
    with FakeTensorMode() as mode:
        x = torch.empty(5, 8, dtype=torch.float16)
        fake = linear_gemm(x.t().contiguous().t(), NOBODY, 6)
        assert (fake.shape, fake.stride(), fake.dtype) == ((5, 6), (6, 1), torch.float16)
        hidden, weights, ids = (mode.from_tensor(tensor) for tensor in routed(7))
        fake = moe_gemm(hidden, weights, ids, NOBODY, 8)
        assert (fake.shape, fake.stride(), fake.dtype) == ((7, 8), (8, 1), torch.float32)


def test_fakes_refuse_what_has_no_rows() -> None:
    with pytest.raises(ArgumentError, match=r"nvfp4_linear_gemm: .* must have at least one dim"):
        linear_gemm(torch.empty((), device="meta"), NOBODY, 6)


# --- what runners may not return


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "no tensor": (lambda x: [x], DtypeError, r"list; it must return a tensor"),
    "nothing": (lambda x: None, DtypeError, r"NoneType; it must return a tensor"),
    "dtype": (lambda x: x.double(), DtypeError, "torch.float64; it must be torch.float32"),
    "columns": (
        lambda x: x[:, :5].clone(),
        ArgumentError,
        r"shape (3, 5); the call promises (3, 8)",
    ),
    "rows": (lambda x: x[:2].clone(), ArgumentError, r"shape (2, 8); the call promises (3, 8)"),
    "dims": (
        lambda x: x[None].clone(),
        ArgumentError,
        r"shape (1, 3, 8); the call promises (3, 8)",
    ),
    "device": (lambda x: x.to("meta"), ArgumentError, "a tensor on meta; its input is on cpu"),
    "strides": (
        lambda x: x.t().clone(memory_format=torch.contiguous_format).t(),
        ArgumentError,
        "strides (1, 3) for shape (3, 8); it must be contiguous",
    ),
    "input": (lambda x: x, ArgumentError, "memory of its own input"),
    "view": (lambda x: x.view(-1).view(3, 8), ArgumentError, "memory of its own input"),
}


@pytest.mark.parametrize(("result", "error", "message"), WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("name", [None, "sloppy"])
def test_a_wrong_result_is_named(
    name: str | None, result: Any, error: type[Exception], message: str
) -> None:
    runner = Returns(result)
    runner_id = register_runner(runner, name)
    who = f"runner {runner_id}" if name is None else f"runner {name!r}"
    whole = f"nvfp4_linear_gemm: {who} (Returns) returned {message}"
    with pytest.raises(error, match=re.escape(whole)):
        linear_gemm(torch.randn(3, 8), runner_id, 8)


@pytest.mark.parametrize("which", [0, 1])
def test_no_input_of_moe_may_come_back(which: int) -> None:
    runner = Returns(lambda *tensors: tensors[which])
    hidden = torch.randn(3, 8)
    with pytest.raises(ArgumentError, match=r"nvfp4_moe_gemm: .* memory of its own input"):
        moe_gemm(hidden, torch.rand(3, 8), torch.zeros(3, 8).int(), register_runner(runner), 8)


def test_a_runner_of_the_other_op_is_an_error() -> None:
    runner, experts = Times(weight()), Experts(torch.randn(4, 8, 8))
    runner_id = register_runner(runner)
    whole = (
        f"nvfp4_moe_gemm: runner {runner_id} (Times) is no runner for this op, which calls "
        f"_run_impl with 3 tensors; it takes (x)"
    )
    with pytest.raises(DtypeError, match=re.escape(whole)):
        moe_gemm(*routed(3), runner_id, 8)
    with pytest.raises(
        DtypeError,
        match=r"nvfp4_linear_gemm: runner 'experts' \(Experts\) .* with 1 tensor; it takes "
        r"\(hidden_states, topk_weights, topk_ids\)",
    ):
        linear_gemm(torch.ones(3, 8), register_runner(experts, "experts"), 8)


def test_a_type_error_inside_a_runner_comes_out_as_it_is() -> None:
    """Also out of one whose decorator names another signature than its own."""

    def adds(x: torch.Tensor) -> Any:
        return x + object()

    def takes_two(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        return one + two

    runner, wrapped, inner = Returns(adds), Times(weight()), Returns(takes_two)
    wrapped._run_impl = functools.wraps(takes_two)(lambda *tensors: adds(*tensors))  # type: ignore
    for one in (runner, wrapped):
        with pytest.raises(TypeError, match="unsupported operand") as caught:
            linear_gemm(torch.ones(1, 2), register_runner(one), 2)
        assert type(caught.value) is TypeError
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'two'") as caught:
        linear_gemm(torch.ones(1, 2), register_runner(inner), 2)
    assert type(caught.value) is TypeError


# --- gradients


@pytest.mark.parametrize("leaf", [0, 1], ids=["hidden_states", "topk_weights"])
def test_moe_has_no_gradient(leaf: int) -> None:
    runner = Experts(torch.randn(4, 8, 8))
    args = list(routed(3))
    args[leaf].requires_grad_()
    result = moe_gemm(*args, register_runner(runner), 8)
    assert torch.equal(result, runner._run_impl(*args))
    with pytest.raises(
        NoGradientError, match=r"nvfp4_moe_gemm: a runner has no gradient; gristmill\.nvfp4\.moe"
    ):
        result.sum().backward()


@pytest.mark.parametrize("compiled", [False, True])
def test_linear_has_no_gradient(compiled: bool) -> None:
    """The forward pass works, compiled too; it is the backward pass that cannot be."""
    runner = Times(weight())
    runner_id = register_runner(runner)

    def function(x: torch.Tensor) -> torch.Tensor:
        return linear_gemm(x * 2, runner_id, 6) + 1

    run = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
    x = torch.randn(3, 8, requires_grad=True)
    result = run(x)
    torch.testing.assert_close(result, (x * 2) @ runner.weight + 1)
    with pytest.raises(
        NoGradientError, match=r"nvfp4_linear_gemm: a runner has no gradient; gristmill\.nvfp4\.li"
    ):
        result.sum().backward()
    assert x.grad is None


def test_a_gradient_beside_it_goes_through() -> None:
    runner = Times(weight())
    scale = torch.ones(6, requires_grad=True)
    x = torch.randn(3, 8)
    result = linear_gemm(x, register_runner(runner), 6)
    (result * scale).sum().backward()
    torch.testing.assert_close(scale.grad, (x @ runner.weight).sum(0))


def test_a_tangent_is_not_lost() -> None:
    runner = Times(weight())
    runner_id = register_runner(runner)
    with forward_ad.dual_level(), pytest.raises(ArgumentError, match="forward-mode tangent"):
        linear_gemm(forward_ad.make_dual(torch.randn(3, 8), torch.randn(3, 8)), runner_id, 6)


# --- on a GPU


@pytest.mark.gpu
def test_capture_and_replay() -> None:
    runner, experts = Times(weight().cuda()), Experts(torch.randn(4, 8, 8).cuda())
    linear_id, moe_id = register_runner(runner), register_runner(experts)
    x, weights, ids = (tensor.cuda() for tensor in routed(5))

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        return linear_gemm(x, linear_id, 6), moe_gemm(x, weights, ids, moe_id, 8)

    with torch.inference_mode():
        both()  # cuBLAS makes its handle and workspace
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = both()
        for seed in range(3):
            x.copy_(weight(5, 8, seed))
            graph.replay()
            for result, expected in zip(results, both(), strict=True):
                torch.testing.assert_close(result, expected)


@pytest.mark.gpu
def test_a_result_on_another_device_is_named() -> None:
    runner = Returns(lambda x: x.cpu())
    with pytest.raises(ArgumentError, match="a tensor on cpu; its input is on cuda:0"):
        linear_gemm(torch.randn(3, 8, device="cuda"), register_runner(runner), 8)
