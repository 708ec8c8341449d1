"""`linear` and `matmul` beside torch's own: results, layouts, gradients, dtypes, transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conformance_helpers import DEVICES, PRODUCT_NAMES, allowed, run_by, same_bits, supporting
from conformance_truth import truth_of

import gristmill
from gristmill.ops import op as op_module
from gristmill.ops.linear.problem import Product
from gristmill.ops.op import Case, Op
from gristmill.ops.registry import OPS
from gristmill.select.device import KNOWN
from gristmill.select.overrides import batch_invariant

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LINEAR, WITH_PRE, MATMUL = (OPS[name] for name in PRODUCT_NAMES)
TORCH: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda h: h,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"),
}
activations = pytest.mark.parametrize("activation", list(TORCH), ids=str)
CASES = [
    pytest.param(op, case, id=f"{op.name}-{case.name}".replace(" ", "_"))
    for op in (LINEAR, MATMUL)
    for case in op.cases()
]


def drawn(*shape: int, dtype: torch.dtype = FP64, device: str = "cpu", seed: int = 0) -> Any:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FP64)
    return values.to(dtype).to(device)


def called(how: str) -> Callable[..., Any]:
    return gristmill.linear if how == "direct" else LINEAR.overload


both_ways = pytest.mark.parametrize("how", ["direct", "registered"])


# --- results


@activations
@pytest.mark.parametrize("dtype", [FP32, FP64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("shape", [(3, 40), (40,), (2, 3, 40), (0, 40)], ids=str)
def test_it_is_torchs_linear(
    shape: tuple[int, ...], dtype: torch.dtype, activation: str | None
) -> None:
    x, weight, bias = (drawn(*one, dtype=dtype) for one in (shape, (24, 40), (24,)))
    for shift in (None, bias):
        expected = TORCH[activation](F.linear(x, weight, shift))
        found = gristmill.linear(x, weight, shift, activation)
        assert found.is_contiguous()
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        torch.testing.assert_close(found, expected)


def test_the_two_gelus_are_not_the_same() -> None:
    x, weight = torch.linspace(-4, 4, 64).view(-1, 1), torch.ones(1, 1)
    exact = gristmill.linear(x, weight, activation="gelu")
    close = gristmill.linear(x, weight, activation="gelu_tanh")
    torch.testing.assert_close(exact, F.gelu(x), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(close, F.gelu(x, approximate="tanh"), rtol=1e-6, atol=1e-7)
    assert (exact - close).abs().max() > 1e-4


def test_one_rounding_only() -> None:
    """A bias and an activation of sums that bf16 would round: they see the sums unrounded."""
    x, weight = torch.tensor([[1.0, 2**-9]]).to(BF16), torch.ones(1, 2).to(BF16)
    bias = torch.tensor([-1.0]).to(BF16)
    assert gristmill.linear(x, weight, bias).item() == 2**-9  # 1 + 2^-9 is no bf16
    x, weight = drawn(64, 1, dtype=BF16), drawn(64, 1, dtype=BF16, seed=1)
    products = x.double() @ weight.double().t()  # which fp32 holds exactly
    found = gristmill.linear(x, weight, activation="silu")
    assert same_bits(found, F.silu(products).to(BF16))
    assert not same_bits(found, F.silu(products.to(BF16).double()).to(BF16))


@pytest.mark.parametrize("device", DEVICES)
@activations
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_are_torchs(value: float, activation: str | None, device: str) -> None:
    x, weight = drawn(5, 32, dtype=BF16, device=device), drawn(8, 32, dtype=BF16, device=device)
    x[1, 7] = value
    bias = drawn(8, dtype=BF16, device=device)
    for shift in (None, bias):
        args = (x, weight, shift, activation)
        expected = LINEAR.reference(*args)
        for variant in supporting(LINEAR, args):
            found = run_by(LINEAR, variant.name, args)
            assert torch.equal(found.isnan(), expected.isnan()), variant.name
            assert torch.equal(found.isinf(), expected.isinf()), variant.name
            assert found[[0, 2, 3, 4]].isfinite().all(), variant.name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "shapes", [((3, 40), (40, 8)), ((2, 3, 4), (4, 5)), ((4, 1, 3, 8), (5, 8, 2))]
)
def test_it_is_torchs_matmul(shapes: Any, device: str) -> None:
    a, b = (drawn(*shape, dtype=FP32, device=device) for shape in shapes)
    found, expected = gristmill.matmul(a, b), torch.matmul(a, b)
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found, expected)


def test_the_truth_notices_a_small_error() -> None:
    for dtype, step in ((BF16, 2**-5), (FP32, 2**-15)):
        for op in (LINEAR, WITH_PRE, MATMUL):
            args = op.example((4, 24, 64), dtype, "cpu")
            truths = truth_of(op.name, args)
            results = op.run(*args)
            results = [results] if isinstance(results, torch.Tensor) else list(results)
            limits = allowed(op, args, truths)
            for truth, result, limit in zip(truths, results, limits, strict=True):
                assert truth.roundings(result) <= limit
                largest = result.abs().argmax()
                result.view(-1)[largest] *= 1 + step
                assert truth.roundings(result) > limit


# --- what kernels are told


@pytest.mark.parametrize(("op", "case"), CASES)
def test_a_product_says_where_the_matrices_lie(op: Op, case: Case) -> None:
    """A, B and the result put together from nothing but addresses and strides."""
    args = case.make("cpu", 3)
    product: Product = op.problem(*args, device=KNOWN["sm_90a"]).layout
    first, second = args[:2]
    leading = op.outputs(*args).shape[:-2] if op is MATMUL else ()
    a, b = product.a_of(first, leading), product.b_of(second, leading)
    assert (a is first) == (not product.copied)
    assert (b is second) == (not product.b_copied)
    batch, rows, columns, depth = product.batch, product.rows, product.columns, product.depth
    if product.empty:
        assert 0 in op.outputs(*args).shape or depth == 0
        return
    left = a.as_strided((batch, rows, depth), product.a_strides, a.storage_offset())
    right = b.as_strided((batch, depth, columns), product.b_strides, b.storage_offset())
    expected = first.double() @ (second.double() if op is MATMUL else second.double().t())
    found = (left.double() @ right.double()).view(expected.shape)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)
    for aligned, tensor, strides in (
        (product.a_aligned, a, product.a_strides),
        (product.b_aligned, b, product.b_strides),
    ):
        if aligned:
            assert tensor.data_ptr() % 16 == 0
            others = sorted(strides)
            if 1 in strides[1:]:
                others.remove(1)
            assert not any(step * tensor.element_size() % 16 for step in others)


def test_what_is_copied_and_what_is_not() -> None:
    def layout(op: Op, *args: Any) -> Product:
        found: Product = op.problem(*args, device=KNOWN["sm_90a"]).layout
        return found

    weight = drawn(16, 64, dtype=BF16)
    rows = drawn(3, 4, 64, dtype=BF16)
    assert layout(LINEAR, rows, weight, None, None).a_strides == (0, 64, 1)
    assert layout(LINEAR, rows, weight, None, None).b_strides == (0, 1, 64)
    assert layout(LINEAR, rows[:, :1], weight, None, None).a_strides == (0, 256, 1)
    assert not layout(LINEAR, rows[:, :1], weight, None, None).copied
    assert layout(LINEAR, rows[:, :2], weight, None, None).copied
    assert not layout(LINEAR, rows[0], weight.t().contiguous().t(), None, None).copied
    # One matrix for all batches: their rows are rows of one product.
    folded = layout(MATMUL, rows, weight.t())
    assert (folded.batch, folded.rows, folded.b_strides) == (1, 12, (0, 1, 64))
    # Where they cannot be, every batch reads the same matrix.
    apart = layout(MATMUL, rows[:, :2], weight.t())
    assert (apart.batch, apart.rows, apart.b_strides) == (3, 2, (0, 1, 64))
    assert not apart.copied
    assert not apart.b_copied
    # Two levels of batches that lie in neither order: that one is copied, whole.
    crossed = layout(MATMUL, drawn(2, 1, 3, 8), drawn(5, 8, 4))
    assert (crossed.batch, crossed.copied, crossed.b_copied) == (10, True, True)


def test_a_problem_names_what_a_choice_depends_on() -> None:
    x, weight, bias = drawn(3, 64, dtype=BF16), drawn(16, 64, dtype=BF16), drawn(16, dtype=BF16)
    problem = LINEAR.problem(x, weight, bias, "silu", device=KNOWN["sm_90a"])
    words = "x=bfloat16 weight=bfloat16 bias=bfloat16 out=bfloat16"
    assert problem.key(4) == f"linear rows=4 N=16 K=64 {words} silu"
    pre = WITH_PRE.problem(x, weight, None, "gelu", device=KNOWN["sm_90a"])
    assert pre.flags == ("gelu", "pre")
    turned = LINEAR.problem(x, weight.t().contiguous().t(), None, None, device=KNOWN["sm_90a"])
    assert turned.flags == ("weight_transposed",)
    odd = LINEAR.problem(x[:, 1:], weight[:, 1:], None, None, device=KNOWN["sm_90a"])
    assert odd.flags == ("unaligned",)
    stack = MATMUL.problem(drawn(5, 2, 8), drawn(5, 8, 4), device=KNOWN["sm_90a"])
    assert (stack.rows, stack.dims) == (2, (("N", 4), ("K", 8), ("batch", 5)))


def test_explain_takes_the_functions() -> None:
    x, weight = drawn(3, 64, dtype=FP32), drawn(16, 64, dtype=FP32)
    found = gristmill.explain(gristmill.linear, x, weight, activation="relu").as_dict()
    assert (found["op"], found["chosen"], found["flags"]) == ("linear", "library", ["relu"])
    assert gristmill.explain(gristmill.matmul, x, weight.t()).as_dict()["op"] == "matmul"


# --- gradients


def grads(function: Callable[..., torch.Tensor], *tensors: Any, dy: Any = None) -> list[Any]:
    leaves = [None if one is None else one.detach().requires_grad_() for one in tensors]
    result = function(*leaves)
    given = torch.ones_like(result) if dy is None else dy
    return list(torch.autograd.grad(result, [leaf for leaf in leaves if leaf is not None], given))


@both_ways
@activations
def test_gradcheck(activation: str | None, how: str) -> None:
    """Once and twice, also of x or weight or bias alone, and without a bias."""
    linear = called(how)
    x, weight, bias = drawn(2, 2, 6), drawn(3, 6, seed=1), drawn(3, seed=2)
    leaves = [one.requires_grad_() for one in (x, weight, bias)]

    def function(*args: Any) -> Any:
        return linear(*args, activation)

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)
    assert torch.autograd.gradcheck(lambda x, w: linear(x, w, None, activation), leaves[:2])
    for alone in range(3):
        others = [one if at == alone else one.detach() for at, one in enumerate(leaves)]
        assert torch.autograd.gradcheck(function, others)
        assert torch.autograd.gradgradcheck(function, others)


@pytest.mark.parametrize(
    "shapes",
    [((2, 3), (3, 4)), ((2, 2, 3), (3, 4)), ((2, 3), (2, 3, 4)), ((2, 1, 2, 3), (3, 3, 4))],
    ids=str,
)
def test_gradcheck_of_matmul(shapes: Any) -> None:
    leaves = [drawn(*shape).requires_grad_() for shape in shapes]
    assert torch.autograd.gradcheck(gristmill.matmul, leaves)
    assert torch.autograd.gradgradcheck(gristmill.matmul, leaves)
    for alone in range(2):
        others = [one if at == alone else one.detach() for at, one in enumerate(leaves)]
        assert torch.autograd.gradcheck(gristmill.matmul, others)


@pytest.mark.parametrize("device", DEVICES)
@both_ways
@activations
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=["fp32", "bf16", "fp16"])
def test_gradients_against_fp64(
    dtype: torch.dtype, activation: str | None, how: str, device: str
) -> None:
    """Off by what rounding the sums and dh to the dtype makes of the terms, and no more."""
    x, weight = drawn(2, 17, 96, dtype=dtype), drawn(40, 96, dtype=dtype, seed=1) / 8
    bias, dy = drawn(40, dtype=dtype, seed=2), drawn(2, 17, 40, dtype=dtype, seed=3)
    found = grads(
        lambda *args: called(how)(*args, activation),
        *(one.to(device) for one in (x, weight, bias)),
        dy=dy.to(device),
    )
    x, weight, bias, dy = (one.double() for one in (x, weight, bias, dy))
    expected = grads(lambda *args: TORCH[activation](F.linear(*args)), x, weight, bias, dy=dy)
    # |slope| < 1.13 and its own slope < 1, so a rounding of h or of dh is one of these terms.
    h = F.linear(x.abs(), weight.abs(), bias.abs())
    terms = (1.13 * dy.abs() + dy.abs() * h).flatten(0, 1)
    sizes = [(terms @ weight.abs()).view(x.shape), terms.t() @ x.abs().flatten(0, 1), terms.sum(0)]
    for gradient, want, size in zip(found, expected, sizes, strict=True):
        assert gradient.dtype == dtype
        off = (gradient.double().cpu() - want).abs()
        assert (off <= torch.finfo(dtype).eps * size).all()


def test_relus_gradient_at_zero_and_nan_is_torchs() -> None:
    x = torch.tensor([[-1.0], [0.0], [2.0], [float("nan")]])
    weight = torch.ones(1, 1)
    found = grads(lambda x: gristmill.linear(x, weight, None, "relu"), x)
    assert torch.equal(found[0], grads(lambda x: F.relu(F.linear(x, weight)), x)[0])


@pytest.mark.parametrize("activation", ["relu", "silu", None])
def test_what_needs_no_gradient_costs_nothing(
    activation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    resolve = op_module.resolve

    def spy(name: str, *args: Any) -> Any:
        made.append(name)
        return resolve(name, *args)

    monkeypatch.setattr(op_module, "resolve", spy)
    x, weight, bias = (drawn(*shape, dtype=FP32) for shape in ((3, 8), (4, 8), (4,)))
    bias.requires_grad_()
    forward = "linear_with_pre" if activation == "silu" else "linear"
    gristmill.linear(x, weight, bias, activation).sum().backward()
    assert made == [forward]  # the gradient of a bias is no product
    x.requires_grad_()
    gristmill.linear(x, weight, bias, activation).sum().backward()
    assert made == [forward, "matmul"]
    assert weight.grad is None
    LINEAR.forget_plans()
    with torch.no_grad():
        gristmill.linear(x, weight, bias, activation)
    assert made[-1] == "linear"  # keeps no sums


@pytest.mark.parametrize(("activation", "kept"), [(None, 2), ("relu", 3), ("silu", 3)])
def test_what_is_kept_for_the_gradient(activation: str | None, kept: int) -> None:
    x, weight = drawn(5, 8).requires_grad_(), drawn(4, 8).requires_grad_()
    saved: list[Any] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = gristmill.linear(x, weight, None, activation)
    assert len(saved) == kept
    if activation == "silu":
        torch.testing.assert_close(saved[-1], F.linear(x, weight).detach())
    assert y.grad_fn is not None


def test_the_op_that_keeps_the_sums_gives_them() -> None:
    x, weight, bias = drawn(5, 8), drawn(4, 8), drawn(4)
    y, h = WITH_PRE.overload(x, weight, bias, "gelu")
    torch.testing.assert_close(h, F.linear(x, weight, bias))
    torch.testing.assert_close(y, F.gelu(h))
    leaf = x.requires_grad_()
    y, h = WITH_PRE.overload(leaf, weight, bias, "gelu")
    (found,) = torch.autograd.grad(y.sum() + h.square().sum(), leaf)
    h = F.linear(leaf, weight, bias)
    (expected,) = torch.autograd.grad(F.gelu(h).sum() + h.square().sum(), leaf)
    torch.testing.assert_close(found, expected)


@both_ways
def test_backward_follows_the_use_of_its_forward(how: str) -> None:
    x, weight = drawn(3, 8).requires_grad_(), drawn(4, 8)
    before = gristmill.counters()["choices"].get("matmul:reference", 0)
    with gristmill.use("matmul", "reference"):
        loss = called(how)(x, weight).sum()
    loss.backward()
    assert gristmill.counters()["choices"]["matmul:reference"] == before + 1


# --- autocast and transforms


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lower", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, FP64], ids=["fp32", "bf16", "fp16", "fp64"])
def test_autocast_is_torchs(dtype: torch.dtype, lower: torch.dtype, device: str) -> None:
    torch._dynamo.reset()
    shapes = ((5, 32), (16, 32), (16,))
    tensors = [drawn(*one, dtype=dtype, device=device).requires_grad_() for one in shapes]
    with torch.autocast(device, dtype=lower):
        ours = gristmill.linear(*tensors, "silu")
        theirs = F.silu(F.linear(*tensors))
        product = gristmill.matmul(tensors[0], tensors[1].t())
        compiled = torch.compile(gristmill.linear, backend="aot_eager", fullgraph=True)
        assert same_bits(compiled(*tensors, "silu"), ours)
    assert ours.dtype == theirs.dtype == product.dtype == (FP64 if dtype == FP64 else lower)
    lowered = [one.detach().to(ours.dtype) for one in tensors]
    assert same_bits(ours.detach(), gristmill.linear(*lowered, "silu"))
    ours.sum().backward()
    assert all(one.grad.dtype == dtype for one in tensors)


def test_autocast_converts_tensors_of_several_dtypes() -> None:
    x, weight = drawn(5, 32, dtype=FP32), drawn(16, 32, dtype=BF16)
    with torch.autocast("cpu", dtype=BF16):
        assert gristmill.linear(x, weight).dtype == BF16
        rows = torch.vmap(lambda row: gristmill.linear(row, weight))(x)
        assert rows.dtype == BF16


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_leaves_a_backward_pass_as_it_was(device: str) -> None:
    found = []
    for inside in (True, False):
        x, weight = (drawn(*one, dtype=FP32, device=device) for one in ((4, 64), (16, 64)))
        loss = gristmill.linear(x.requires_grad_(), weight.requires_grad_(), None, "gelu").sum()
        with torch.autocast(device, dtype=BF16, enabled=inside):
            loss.backward()
        found += [(x.grad, weight.grad)]
    assert all(same_bits(*pair) for pair in zip(*found, strict=True))


@activations
def test_transforms_see_the_formula(activation: str | None) -> None:
    x, weight, tangent = drawn(5, 8), drawn(4, 8, seed=1), drawn(5, 8, seed=2)

    def ours(x: torch.Tensor) -> torch.Tensor:
        return gristmill.linear(x, weight, None, activation)

    def theirs(x: torch.Tensor) -> torch.Tensor:
        return TORCH[activation](F.linear(x, weight))

    torch.testing.assert_close(torch.vmap(ours)(x), theirs(x))
    for one, other in zip(
        torch.func.jvp(ours, (x,), (tangent,)),
        torch.func.jvp(theirs, (x,), (tangent,)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    found = torch.func.grad(lambda x: ours(x).square().sum())(x)
    torch.testing.assert_close(found, torch.func.grad(lambda x: theirs(x).square().sum())(x))


# --- rows that do not depend on the batch


@pytest.mark.parametrize("depth", [64, 257, 1])
def test_what_a_choice_sees_does_not_depend_on_the_batch(depth: int) -> None:
    """Neither on the number of rows nor on where they lie; every layout is made the same."""
    flat = drawn(7 * 3 * (depth + 5) + 1, dtype=BF16)
    wide = flat[:-1].view(7, 3, depth + 5)
    rows = [
        wide[..., :depth].contiguous(),
        wide[..., :depth],
        wide[:2, 1, 3 : 3 + depth],
        wide[:1, 0, :depth],
        wide[0, 0, :depth],
        wide[..., :depth].contiguous().transpose(0, 1),
        flat[1 : 1 + 6 * depth].view(6, depth),
    ]
    weight = drawn(16, depth, dtype=BF16)

    def seen(op: Op, *args: Any) -> tuple[Any, ...]:
        problem = op.problem(*args, device=KNOWN["sm_90a"])
        product: Product = problem.layout
        supported = [variant.supports(problem) for variant in op.variants]
        return problem.family(), product.a_strides[1:], product.a_aligned, supported

    with batch_invariant():
        assert len({str(seen(LINEAR, x, weight, None, "silu")) for x in rows}) == 1
        stacks = [x for x in rows if x.dim() > 1]
        assert len({str(seen(MATMUL, x, weight.t())) for x in stacks}) == 1
    assert len({str(seen(LINEAR, x, weight, None, "silu")) for x in rows}) > 1


@pytest.mark.parametrize("unaligned", [False, True])
def test_a_copy_for_the_batch_is_packed(unaligned: bool) -> None:
    flat = drawn(6 * 64 + 1, dtype=BF16)
    x, weight = flat[unaligned : 6 * 64 + unaligned].view(6, 64), drawn(16, 64, dtype=BF16)
    with batch_invariant():
        product: Product = LINEAR.problem(x, weight, None, None, device=KNOWN["sm_90a"]).layout
    assert (product.copied, product.a_aligned) == (unaligned, True)
    taken = product.a_of(x)
    assert taken.data_ptr() % 16 == 0
    assert torch.equal(taken, x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_row_alone_has_the_bits_it_has_in_a_batch(
    activation: str | None, dtype: torch.dtype
) -> None:
    x = drawn(130, 520, dtype=dtype, device="cuda")
    weight = drawn(96, 520, dtype=dtype, device="cuda", seed=1)
    with batch_invariant():
        whole = gristmill.linear(x, weight, None, activation)
        for count in (1, 2, 17, 64, 129):
            part = gristmill.linear(x[-count:], weight, None, activation)
            assert same_bits(part, whole[-count:]), count
        assert same_bits(gristmill.matmul(x[:3], weight.t()), gristmill.matmul(x, weight.t())[:3])
