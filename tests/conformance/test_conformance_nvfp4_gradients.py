"""Gradients through frozen NVFP4 weights: against fp64, under autocast, and what has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance_helpers import DEVICES, allowed, composed, same_bits
from conformance_truth import truth_of

import gristmill
from gristmill import nvfp4
from gristmill.errors import ArgumentError, DoubleBackwardError
from gristmill.formats.nvfp4 import e2m1
from gristmill.ops import op as op_module
from gristmill.ops.nvfp4_linear import linear_of
from gristmill.ops.nvfp4_linear.cases import random_weight
from gristmill.ops.nvfp4_moe import moe_of
from gristmill.ops.registry import OPS

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LINEAR, MOE = OPS["nvfp4_linear"], OPS["nvfp4_moe"]
LINEAR_BACKWARD, MOE_BACKWARD = OPS["nvfp4_linear_backward"], OPS["nvfp4_moe_backward"]
both_ways = pytest.mark.parametrize("how", ["direct", "registered"])


def linear(how: str, *args: Any) -> torch.Tensor:
    return linear_of(*args) if how == "direct" else torch.ops.gristmill.nvfp4_linear(*args)


def moe(how: str, *args: Any) -> torch.Tensor:
    return moe_of(*args) if how == "direct" else torch.ops.gristmill.nvfp4_moe(*args)


def differentiable(args: tuple[Any, ...], *positions: int) -> list[Any]:
    return [
        arg.detach().clone().requires_grad_() if at in positions and arg is not None else arg
        for at, arg in enumerate(args)
    ]


NAMES = (
    "x float32 bias float32",
    "x bfloat16 bias bfloat16",
    "x float16 bias None",
    "x float64 bias float32",
    "out float32",
    "out bfloat16 from fp32",
    "2x3 by 33x80",
    "vector by 48x32",
    "0 by 16x32",
    "tiles",
    "tiles per row",
    "fragments, 9 by 130x208",
    "fragments, x float64 bias float32",
    "fragments, out float32",
    "fragments, vector",
    "fragments, 4 by 24x0",
    "fragments, per row fp16",
    "fragments, fp8",
    "per row fp16",
    "columns strided",
)


@pytest.mark.parametrize("device", DEVICES)
@both_ways
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_linear(name: str, how: str, device: str) -> None:
    """Of x by every backward variant, and of the bias."""
    case = next(case for case in LINEAR.cases() if case.name == name)
    made = case.make(device, 0)
    y = linear(how, *made)
    generator = torch.Generator().manual_seed(5)
    dy = torch.randn(y.shape, generator=generator).to(y.dtype).to(device)
    x, codes, scales, row_scale, bias, layout, _, _ = made
    backward = (dy, codes, scales, row_scale, layout, x.shape[-1], x.dtype)
    (truth,) = truth_of("nvfp4_linear_backward", backward)
    (limit,) = allowed(LINEAR_BACKWARD, backward, [truth])
    problem = LINEAR_BACKWARD.problem(*backward)
    for variant in LINEAR_BACKWARD.variants:
        if variant.supports(problem) is not None:
            continue
        args = differentiable(made, 0, 4)
        with gristmill.use("nvfp4_linear_backward", variant.name):
            linear(how, *args).backward(dy)
        gradient = args[0].grad
        assert (gradient.dtype, gradient.shape) == (x.dtype, x.shape)
        rounding = composed(LINEAR_BACKWARD, variant.name, backward)
        assert truth.roundings(gradient, composed=rounding) <= limit, variant.name
        if bias is not None:
            assert args[4].grad.dtype == bias.dtype
            expected = dy.double().reshape(-1, dy.shape[-1]).sum(0)
            # Summed in fp32 and rounded once, whatever dy and the bias are.
            eps = torch.finfo(bias.dtype).eps
            torch.testing.assert_close(args[4].grad.double(), expected, rtol=eps, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@both_ways
@pytest.mark.parametrize("rows", [1, 25])
@pytest.mark.parametrize("activation", ["silu", "gelu", "swiglu_oai"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP64], ids=["fp32", "bf16", "fp64"])
def test_gradients_of_moe(
    dtype: torch.dtype, activation: str, rows: int, how: str, device: str
) -> None:
    torch.manual_seed(0)
    made = list(MOE.example((rows, 6, 2, 64, 48), dtype, device))
    made[2][0, 0] = -1
    made[9] = torch.randn(6, 96, device=device)
    made[10] = torch.randn(6, 64, device=device)
    made[11], made[12] = activation, 1.5
    dy = torch.randn(rows, 64, device=device).to(dtype)
    truths = truth_of("nvfp4_moe_backward", (dy, *made))
    limits = allowed(MOE_BACKWARD, (dy, *made), truths)
    problem = MOE_BACKWARD.problem(dy, *made)
    for variant in MOE_BACKWARD.variants:
        if variant.supports(problem) is not None:
            continue
        args = differentiable(tuple(made), 0, 1)
        with gristmill.use("nvfp4_moe_backward", variant.name):
            moe(how, *args).backward(dy)
        for position, (truth, limit) in enumerate(zip(truths, limits, strict=True)):
            gradient = args[position].grad
            assert gradient.dtype == made[position].dtype
            rounding = composed(MOE_BACKWARD, variant.name, (dy,))
            assert truth.roundings(gradient, composed=rounding) <= limit, variant.name
        assert args[1].grad[0, 0] == 0


@both_ways
@pytest.mark.parametrize("layout", ["rows", "tiles", "fragments"])
def test_gradcheck_of_linear(layout: str, how: str) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = random_weight((7, 32), "cpu", layout=layout, generator=generator, per_row=True)[:3]
    x, bias = (
        torch.randn(shape, generator=generator, dtype=FP64, requires_grad=True)
        for shape in ((2, 3, 32), (7,))
    )

    def function(x: Any, bias: Any) -> Any:
        return linear(how, x, *parts, bias, layout)

    assert torch.autograd.gradcheck(function, (x, bias))
    assert torch.autograd.gradcheck(lambda x: function(x, None), (x,))
    assert torch.autograd.gradcheck(lambda bias: function(x.detach(), bias), (bias,))


@both_ways
@pytest.mark.parametrize("limit", [None, 0.7])
@pytest.mark.parametrize("activation", ["silu", "gelu", "swiglu_oai"])
def test_gradcheck_of_moe(activation: str, limit: float | None, how: str) -> None:
    torch.manual_seed(1)
    args = list(MOE.example((3, 4, 3, 16, 16), FP64, "cpu"))
    args[1] = args[1].double()
    args[2][1] = torch.tensor([2, 2, -1])  # twice the same, and nobody
    args[9], args[10] = torch.randn(4, 32), torch.randn(4, 16)
    args[11], args[12] = activation, limit
    leaves = [args[0].requires_grad_(), args[1].requires_grad_()]

    def function(x: Any, weights: Any) -> Any:
        return moe(how, x, weights, *args[2:])

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    alone = leaves[1:]
    assert torch.autograd.gradcheck(lambda weights: function(args[0].detach(), weights), alone)


def test_transforms_see_the_formula() -> None:
    """vmap, grad and jvp go through the reference, which is made of ops that know them."""
    weight = nvfp4.quantize(torch.randn(8, 32))
    values = nvfp4.dequantize(weight)
    x, tangent = torch.randn(2, 5, 32, dtype=FP64)
    found = torch.func.grad(lambda x: nvfp4.linear(x, weight).square().sum())(x)
    expected = 2 * (x @ values.double().t()) @ values.double()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    rows = torch.vmap(lambda x: nvfp4.linear(x, weight))(x)
    torch.testing.assert_close(rows, nvfp4.linear(x, weight))
    _, moved = torch.func.jvp(lambda x: nvfp4.linear(x, weight), (x,), (tangent,))
    torch.testing.assert_close(moved, nvfp4.linear(tangent, weight))
    args = MOE.example((4, 4, 2, 32, 16), FP64, "cpu")
    by_transform = torch.func.grad(lambda x: moe_of(x, *args[1:]).square().sum())(args[0])
    leaf = args[0].clone().requires_grad_()
    moe_of(leaf, *args[1:]).square().sum().backward()
    torch.testing.assert_close(by_transform, leaf.grad)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.vmap, torch.func.functionalize])
def test_nothing_of_a_transform_is_kept(transform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of the elements' values, made in a transform, is no tensor outside of it."""
    monkeypatch.setattr(e2m1, "_tables", {})
    weight = nvfp4.quantize(torch.randn(8, 32))
    x = torch.randn(2, 32)
    transform(lambda x: nvfp4.linear(x, weight).sum())(x)
    expected = x @ nvfp4.dequantize(weight).t()
    torch.testing.assert_close(nvfp4.linear(x, weight), expected)


def test_transforms_are_not_harmed_by_other_experts() -> None:
    """An expert that would overflow gives no NaN to the gradient of a token it does not serve."""
    args = list(MOE.example((6, 4, 2, 32, 16), FP32, "cpu"))
    args[2] = torch.where(args[2] == 3, 0, args[2])
    expected = torch.func.grad(lambda x: moe_of(x, *args[1:]).sum())(args[0])
    args[5][3] = 1e37
    found = torch.func.grad(lambda x: moe_of(x, *args[1:]).sum())(args[0])
    assert same_bits(found, expected)


@both_ways
def test_double_backward_raises_and_names_the_way_out(how: str) -> None:
    args = differentiable(LINEAR.example((3, 32), FP32, "cpu"), 0)
    (first,) = torch.autograd.grad(linear(how, *args).square().sum(), args[0], create_graph=True)
    with pytest.raises(DoubleBackwardError, match=r"functional\.linear over nvfp4\.dequantize"):
        first.sum().backward()
    args = differentiable(MOE.example((3, 32), FP32, "cpu"), 0, 1)
    (first,) = torch.autograd.grad(moe(how, *args).square().sum(), args[0], create_graph=True)
    with pytest.raises(DoubleBackwardError, match=r"nvfp4_moe_backward.*dequantize"):
        first.sum().backward()


@both_ways
def test_what_is_frozen_says_so(how: str) -> None:
    args = LINEAR.example((3, 32), FP32, "cpu")
    with pytest.raises(
        ArgumentError, match=r"nvfp4_linear: row_scale .*pass row_scale\.detach\(\)"
    ):
        linear(how, *differentiable(args, 3))
    with torch.no_grad():
        assert linear(how, *differentiable(args, 3)).isfinite().all()
    args = list(MOE.example((3, 32), FP32, "cpu"))
    args[9], args[10] = torch.zeros(8, 32), torch.zeros(8, 32)
    for position, name in (
        (5, "w13_row_scale"),
        (8, "w2_row_scale"),
        (9, "w13_bias"),
        (10, "w2_bias"),
    ):
        with pytest.raises(ArgumentError, match=rf"nvfp4_moe: {name} .*pass {name}\.detach\(\)"):
            moe(how, *differentiable(tuple(args), position))
    assert moe(how, *args).isfinite().all()


@both_ways
def test_only_what_is_asked_for_is_computed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    resolve = op_module.resolve

    def spy(name: str, *args: Any) -> Any:
        made.append(name)
        return resolve(name, *args)

    monkeypatch.setattr(op_module, "resolve", spy)
    args = list(LINEAR.example((3, 32), FP32, "cpu"))
    args[4] = torch.zeros(32, requires_grad=True)
    linear(how, *args).sum().backward()
    assert same_bits(args[4].grad, torch.full((32,), 3.0))
    assert made == ["nvfp4_linear"]  # the gradient of a bias needs no product
    args[0].requires_grad_()
    linear(how, *args).sum().backward()
    assert made[-1] == "nvfp4_linear_backward"


@both_ways
def test_backward_follows_the_use_of_its_forward(how: str) -> None:
    args = differentiable(LINEAR.example((3, 32), FP32, "cpu"), 0)
    before = gristmill.counters()["choices"].get("nvfp4_linear_backward:reference", 0)
    with gristmill.use("nvfp4_linear_backward", "reference"):
        loss = linear(how, *args).sum()
    loss.backward()
    after = gristmill.counters()["choices"]["nvfp4_linear_backward:reference"]
    assert after == before + 1


# --- autocast


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lower", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, FP64], ids=["fp32", "bf16", "fp16", "fp64"])
def test_autocast_of_linear_is_torchs(dtype: torch.dtype, lower: torch.dtype, device: str) -> None:
    """x and bias become autocast's dtype, and the result with them; fp64 is left alone."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    weight = nvfp4.quantize(torch.randn(48, 64, device=device))
    values = nvfp4.dequantize(weight, dtype)
    x = torch.randn(5, 64, device=device).to(dtype).requires_grad_()
    bias = torch.randn(48, device=device).to(dtype).requires_grad_()
    with torch.autocast(device, dtype=lower):
        ours = nvfp4.linear(x, weight, bias)
        theirs = torch.nn.functional.linear(x, values, bias)
        wide = nvfp4.linear(x, weight, bias, out_dtype=FP32)
        compiled = torch.compile(nvfp4.linear, backend="aot_eager", fullgraph=True)
        assert same_bits(compiled(x, weight, bias), ours)
    assert ours.dtype == theirs.dtype == (FP64 if dtype == FP64 else lower)
    assert wide.dtype == FP32
    if dtype != FP64:
        plain = nvfp4.linear(x.to(lower), weight, bias.to(lower))
        assert same_bits(ours.detach(), plain.detach())
    ours.sum().backward()
    assert x.grad.dtype == bias.grad.dtype == dtype


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_of_moe(device: str) -> None:
    args = differentiable(MOE.example((4, 32), FP32, device), 0, 1)
    with torch.autocast(device, dtype=BF16):
        y = moe_of(*args)
        assert y.dtype == BF16
        # A backward pass inside the block is not computed in bf16 on that account.
        y.float().square().sum().backward()
    assert args[0].grad.dtype == args[1].grad.dtype == FP32
    own = [
        args[0].detach().bfloat16(),
        *(arg.detach() if at < 2 else arg for at, arg in enumerate(args[1:])),
    ]
    assert same_bits(y.detach(), moe_of(*own))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", ["library", "reference"])
def test_autocast_leaves_a_backward_pass_as_it_was(variant: str, device: str) -> None:
    """Inside the block or after it: the same bits."""
    weight = random_weight((48, 64), "cpu", generator=torch.Generator().manual_seed(0))
    parts = [part.to(device) for part in weight[:3]]
    gradients = []
    for inside in (True, False):
        x = torch.linspace(-2, 2, 256, device=device).view(4, 64).requires_grad_()
        with gristmill.use("nvfp4_linear_backward", variant):
            with torch.autocast(device, dtype=BF16):
                loss = linear_of(x, *parts, out_dtype=FP32).square().sum()
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
        gradients.append(x.grad)
    assert same_bits(*gradients)


@pytest.mark.parametrize("device", DEVICES)
def test_the_reference_under_autocast_stays_precise(device: str) -> None:
    args = LINEAR.example((4, 64), BF16, device)
    with gristmill.use("nvfp4_linear", "reference"):
        expected = linear_of(*args)
        with torch.autocast(device, dtype=BF16):
            assert same_bits(linear_of(*args), expected)


@pytest.mark.parametrize("leading", [(), (4,), (2, 3)], ids=str)
def test_the_bias_of_a_weight_without_rows_has_a_gradient(leading: tuple[int, ...]) -> None:
    weight = random_weight((0, 32), "cpu")
    x = torch.randn(*leading, 32, requires_grad=True)
    bias = torch.zeros(0, requires_grad=True)
    linear_of(x, *weight[:3], bias).sum().backward()
    assert bias.grad is not None
    assert bias.grad.shape == (0,)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.zeros_like(x))


def test_row_scales_of_zero_and_of_the_smallest_numbers() -> None:
    """Their share of the largest one is a number, and together they are what they were."""
    for sizes in ([0.0, 0.0], [2.0**-149, 0.0], [2.0**-130, 2.0**-149], [-2.0, 1.0]):
        weight = random_weight((2, 32), "cpu")._replace(row_scale=torch.tensor(sizes))
        part, top = weight.levelled()
        assert part.abs().max() <= 1
        assert (part.double() * top.double()).tolist() == sizes
