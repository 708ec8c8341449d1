"""Linear cross entropy: right gradients for every option, whatever the chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conformance_graphs import Recorder, ours
from conformance_helpers import DEVICES, run_by, same_bits, supporting
from conformance_truth import truth_of
from torch._dynamo.testing import CompileCounterWithBackend

import gristmill
from gristmill.errors import ArgumentError, DoubleBackwardError, VariantUnavailable
from gristmill.ops.linear_cross_entropy import library
from gristmill.ops.registry import OPS

FORWARD, BACKWARD = OPS["linear_cross_entropy"], OPS["linear_cross_entropy_backward"]


@pytest.fixture(autouse=True)
def fresh_start() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(
    rows: int = 12,
    classes: int = 70,
    columns: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight, bias and a target with rows that are ignored."""
    x = torch.randn(rows, columns).to(device, dtype)
    weight = (torch.randn(classes, columns) / 2).to(device, dtype)
    bias = torch.randn(classes).to(device, dtype)
    target = torch.randint(0, classes, (rows,))
    target[1::4] = -100
    return x, weight, bias, target.to(device)


def leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def formula(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    *,
    class_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """As documented, row by row where a sentence speaks of a row."""
    v = F.linear(x, weight, bias)
    if softcap is not None:
        v = softcap * torch.tanh(v / softcap)
    weights = torch.ones(v.shape[-1], dtype=v.dtype) if class_weight is None else class_weight
    losses, squares, counted = [], [], []
    for row, t in zip(v, target.tolist(), strict=True):
        if t == ignore_index:
            losses.append(row.sum() * 0)
            squares.append(row.sum() * 0)
            continue
        lse = torch.logsumexp(row, 0)
        loss = (1 - label_smoothing) * weights[t] * (lse - row[t])
        loss = loss + label_smoothing / len(row) * (weights * (lse - row)).sum()
        losses.append(loss)
        squares.append(z_loss * lse.square())
        counted.append(weights[t])
    if reduction == "none":
        return torch.stack(losses) + torch.stack(squares)
    if reduction == "sum":
        return torch.stack(losses).sum() + torch.stack(squares).sum()
    return torch.stack(losses).sum() / sum(counted) + torch.stack(squares).sum() / len(counted)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.2},
    "z_loss": {"z_loss": 0.01},
    "softcap": {"softcap": 2.0},
    "all": {"label_smoothing": 0.1, "z_loss": 0.02, "softcap": 3.0},
}


@pytest.mark.parametrize("chunk_rows", [None, 1, 5])
@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_gradients_in_fp64(
    options: dict[str, Any], reduction: str, weighted: bool, chunk_rows: int | None
) -> None:
    """Against autograd over the formula, with a gradient of the loss that is not one."""
    x, weight, bias, target = inputs(dtype=torch.float64)
    class_weight = torch.rand(70, dtype=torch.float64) if weighted else None
    options = {**options, "class_weight": class_weight, "reduction": reduction}
    own = leaves(x, weight, bias)
    loss = gristmill.linear_cross_entropy(
        own[0], own[1], target, bias=own[2], chunk_rows=chunk_rows, **options
    )
    theirs = leaves(x, weight, bias)
    expected = formula(*theirs, target, **options)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    grad = torch.randn(loss.shape, dtype=torch.float64) * 3
    found = torch.autograd.grad(loss, own, grad)
    wanted = torch.autograd.grad(expected, theirs, grad)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk_rows", [None, 3])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_as_torch_does(
    reduction: str, dtype: torch.dtype, chunk_rows: int | None, device: str
) -> None:
    x, weight, bias, target = inputs(24, 1030, 32, device=device)
    class_weight = torch.rand(1030, device=device) + 0.1
    for smoothing in (0.0, 0.3):
        for weights in (None, class_weight):
            own, theirs = leaves(x, weight, bias), leaves(x, weight, bias)
            loss = gristmill.linear_cross_entropy(
                own[0],
                own[1],
                target.to(dtype),
                bias=own[2],
                class_weight=weights,
                label_smoothing=smoothing,
                reduction=reduction,
                chunk_rows=chunk_rows,
            )
            expected = F.cross_entropy(
                F.linear(*theirs),
                target,
                weight=weights,
                label_smoothing=smoothing,
                reduction=reduction,
            )
            torch.testing.assert_close(loss, expected, rtol=2e-6, atol=2e-6)
            grad = torch.randn_like(loss)
            found = torch.autograd.grad(loss, own, grad)
            wanted = torch.autograd.grad(expected, theirs, grad)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_chunks_change_nothing_but_roundings(dtype: torch.dtype, device: str) -> None:
    """Any number of rows at a time, for the loss and for each gradient, within the truth."""
    x, weight, bias, target = inputs(37, 2051, 24, dtype, device)
    for chunk_rows in (1, 2, 3, 7, 16, 36, 37, 1000, None):
        options = (-100, 0.1, 1e-3, 4.0, "mean", chunk_rows)
        args = (x, weight, target, bias, None, *options)
        results = run_by(FORWARD, "chunked", args)
        for truth, result in zip(truth_of(FORWARD.name, args), results, strict=True):
            assert truth.roundings(result) <= 4.0, chunk_rows
        dloss = torch.tensor(1.5, device=device)
        _, _, denominators, stats = results
        more = (x, weight, target, bias, None, dloss, None, stats, denominators)
        args = (*more, *options, True, True, True)
        results = run_by(BACKWARD, "chunked", args)
        for truth, result in zip(truth_of(BACKWARD.name, args), results, strict=True):
            assert truth.roundings(result) <= 4.0, chunk_rows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_stats_are_those_of_the_logits(dtype: torch.dtype, device: str) -> None:
    """A number near the largest logit, and the sum of powers relative to it; 0 of ignored rows."""
    x, weight, bias, target = inputs(37, 515, 24, dtype, device)
    target[::5] = -100
    for softcap in (None, 4.0):
        args = (x, weight, target, bias, None, -100, 0.0, 0.0, softcap, "mean", 8)
        truth = truth_of(FORWARD.name, args)[1]
        for variant in supporting(FORWARD, args):
            _, _, _, stats = run_by(FORWARD, variant.name, args)
            largest, total = stats.double().unbind(-1)
            assert not stats[target == -100].any()
            counted = target != -100
            lse = torch.where(counted, largest + total.log(), 0.0)
            assert truth.roundings(lse) <= 4.0, variant.name
            assert (total[counted] >= (0.99 if variant.name == "library" else 1.0)).all()


def test_sums_over_chunks_are_not_rounded_on_the_way() -> None:
    """Every row adds the same to dweight: in bf16 the sum would soon stand still."""
    rows, classes = 1024, 1100
    x = torch.ones(rows, 4, dtype=torch.bfloat16)
    weight = torch.zeros(classes, 4, dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(rows, dtype=torch.int64)
    loss = gristmill.linear_cross_entropy(x, weight, target, reduction="sum", chunk_rows=1)
    loss.backward()
    exact = rows * (1 / classes - 1)
    assert weight.grad is not None
    assert abs(float(weight.grad[0, 0]) / exact - 1) < 2**-8
    each = torch.tensor(1 / classes).bfloat16().double() * rows
    torch.testing.assert_close(
        weight.grad[1:].double(), each.expand(classes - 1, 4), rtol=2**-8, atol=0
    )


def test_targets_at_the_edges() -> None:
    x, weight, _, target = inputs()
    for reduction, expected in (("mean", math.nan), ("sum", 0.0)):
        own = leaves(x, weight)
        loss = gristmill.linear_cross_entropy(*own, target * 0 - 100, reduction=reduction)
        theirs = F.cross_entropy(x @ weight.t(), target * 0 - 100, reduction=reduction)
        assert loss.item() == pytest.approx(expected, nan_ok=True)
        assert theirs.item() == pytest.approx(expected, nan_ok=True)
        loss.backward()
        assert all(not leaf.grad.any() for leaf in own)
    nobody = gristmill.linear_cross_entropy(x[:0], weight, target[:0])
    assert nobody.isnan()
    own = leaves(x[:0], weight)
    gristmill.linear_cross_entropy(*own, target[:0], reduction="sum").backward()
    assert own[1].grad is not None
    assert not own[1].grad.any()


@pytest.mark.parametrize("variant", ["chunked", "reference"])
def test_no_classes(variant: str) -> None:
    """No target is one of none: NaN, but for ignored rows; and nothing to hand a gradient to."""
    own = leaves(torch.randn(3, 4), torch.randn(0, 4))
    with (
        gristmill.use("linear_cross_entropy", variant),
        gristmill.use("linear_cross_entropy_backward", variant),
    ):
        loss = gristmill.linear_cross_entropy(*own, torch.tensor([0, -100, 1]), reduction="none")
        loss.sum().backward()
    assert loss.isnan().tolist() == [True, False, True]
    assert loss[1] == 0
    assert own[0].grad is not None
    assert not own[0].grad.any()


@pytest.mark.parametrize("variant", ["chunked", "library", "reference"])
@pytest.mark.parametrize("wrong", [-1, 70, 2**31, -(2**40)])
def test_a_target_that_is_no_class_gives_nan_in_its_row_alone(wrong: int, variant: str) -> None:
    if variant == "library" and library._TORCH is None:
        pytest.skip("this torch has no linear_cross_entropy")
    x, weight, _, target = inputs()
    target[4] = wrong
    own = leaves(x, weight)
    with (
        gristmill.use("linear_cross_entropy", variant),
        gristmill.use("linear_cross_entropy_backward", variant),
    ):
        loss = gristmill.linear_cross_entropy(*own, target, reduction="none", chunk_rows=3)
        loss.sum().backward()
    assert loss.isnan().nonzero().tolist() == [[4]]
    assert own[0].grad is not None
    assert own[1].grad is not None
    assert own[0].grad.isnan().any(-1).nonzero().tolist() == [[4]]
    assert own[0].grad[4].isnan().all()
    assert own[1].grad.isnan().all()


def test_only_what_needs_a_gradient_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, ...]] = []
    run = BACKWARD.run
    monkeypatch.setattr(BACKWARD, "run", lambda *args: asked.append(tuple(args[-3:])) or run(*args))
    x, weight, bias, target = inputs()
    for needed in ((True, False, False), (False, True, False), (False, False, True), (True,) * 3):
        tensors = [
            tensor.clone().requires_grad_(wanted)
            for tensor, wanted in zip((x, weight, bias), needed, strict=True)
        ]
        loss = gristmill.linear_cross_entropy(tensors[0], tensors[1], target, bias=tensors[2])
        loss.backward()
        assert asked[-1] == needed
        assert tuple(tensor.grad is not None for tensor in tensors) == needed


def test_again_and_again() -> None:
    """Nothing is used up: a second backward pass gives the same bits."""
    x, weight, bias, target = inputs()
    own = leaves(x, weight, bias)
    loss = gristmill.linear_cross_entropy(own[0], own[1], target, bias=own[2], chunk_rows=4)
    first = torch.autograd.grad(loss, own, retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(loss, own), strict=True):
        assert same_bits(one, other)


def test_the_lse_of_the_registered_op_has_a_gradient() -> None:
    x, weight, bias, target = inputs(dtype=torch.float64)
    own, theirs = leaves(x, weight, bias), leaves(x, weight, bias)
    for chunk_rows in (None, 2):
        _, lse, *_ = FORWARD.overload(
            own[0], own[1], target, own[2], None, -100, 0.1, 0.0, 2.0, "none", chunk_rows
        )
        v = 2.0 * torch.tanh(F.linear(*theirs) / 2.0)
        expected = torch.logsumexp(v, -1).masked_fill(target == -100, 0.0)
        torch.testing.assert_close(lse, expected)
        grad = torch.randn_like(lse)
        torch.testing.assert_close(
            torch.autograd.grad(lse, own, grad), torch.autograd.grad(expected, theirs, grad)
        )


def test_a_second_gradient_is_refused() -> None:
    x, weight, _, target = inputs()
    own = leaves(x, weight)
    loss = gristmill.linear_cross_entropy(*own, target)
    (dx,) = torch.autograd.grad(loss, own[:1], create_graph=True)
    with pytest.raises(DoubleBackwardError, match="linear_cross_entropy_backward: this gradient"):
        dx.sum().backward()


def test_class_weights_have_no_gradient() -> None:
    x, weight, _, target = inputs()
    class_weight = torch.rand(70, requires_grad=True)
    for call in (gristmill.linear_cross_entropy, torch.compile(gristmill.linear_cross_entropy)):
        with pytest.raises(Exception, match=r"class_weight requires grad.*\.detach\(\)"):
            call(x, weight, target, class_weight=class_weight)
    with pytest.raises(ArgumentError, match="class_weight"):
        gristmill.linear_cross_entropy(x, weight, target, class_weight=class_weight)
    with torch.no_grad():
        assert gristmill.linear_cross_entropy(x, weight, target, class_weight=class_weight) > 0


# --- autocast and transforms


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_as_linear_and_cross_entropy(dtype: torch.dtype, device: str) -> None:
    x, weight, bias, target = inputs(device=device)
    own = leaves(x, weight, bias)
    with torch.autocast(device, dtype):
        loss = gristmill.linear_cross_entropy(own[0], own[1], target, bias=own[2])
    assert loss.dtype == torch.float32
    lowered = [tensor.to(dtype) for tensor in (x, weight, bias)]
    leaf = leaves(*lowered)
    plain = gristmill.linear_cross_entropy(leaf[0], leaf[1], target, bias=leaf[2])
    assert same_bits(loss, plain)
    loss.backward()
    plain.backward()
    for one, other in zip(own, leaf, strict=True):
        assert one.grad.dtype == torch.float32
        assert torch.equal(one.grad, other.grad.float())
    with torch.autocast(device, dtype):
        theirs = F.cross_entropy(F.linear(x, weight, bias).float(), target)
    torch.testing.assert_close(loss, theirs, rtol=1e-2, atol=1e-2)


def test_transforms_see_the_formula() -> None:
    x, weight, _, target = inputs(dtype=torch.float64)
    each = torch.vmap(
        lambda row, t: gristmill.linear_cross_entropy(row, weight, t, reduction="none")
    )(x, target)
    torch.testing.assert_close(
        each, gristmill.linear_cross_entropy(x, weight, target, reduction="none")
    )
    found = torch.func.grad(lambda x: gristmill.linear_cross_entropy(x, weight, target))(x)
    leaf = leaves(x)[0]
    gristmill.linear_cross_entropy(leaf, weight, target).backward()
    torch.testing.assert_close(found, leaf.grad)


# --- compilers


def step(
    function: Callable[..., torch.Tensor], *tensors: torch.Tensor, **options: Any
) -> list[torch.Tensor]:
    x, weight, bias, target = tensors
    own = leaves(x, weight, bias)
    loss = function(own[0], own[1], target, bias=own[2], **options)
    (loss * 2).sum().backward()
    return [loss.detach(), *(leaf.grad for leaf in own)]


def test_one_op_is_one_node() -> None:
    recorder = Recorder()
    compiled = torch.compile(
        gristmill.linear_cross_entropy, backend=recorder, fullgraph=True, dynamic=False
    )
    tensors = inputs()
    torch.testing.assert_close(
        step(compiled, *tensors), step(gristmill.linear_cross_entropy, *tensors)
    )
    assert ours(recorder.traced) == ours(recorder.forward) == ["gristmill.linear_cross_entropy"]
    assert ours(recorder.backward) == ["gristmill.linear_cross_entropy_backward"]
    # Neither logits nor a matmul that could make them.
    assert not any("mm" in name for name in recorder.forward + recorder.backward)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_rows_are_symbolic(reduction: str, device: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        gristmill.linear_cross_entropy, backend=counter, fullgraph=True, dynamic=True
    )
    options: dict[str, Any] = {"reduction": reduction, "z_loss": 1e-3, "chunk_rows": 8}
    first = 0
    for rows in (8, 2, 3, 17, 100):
        tensors = inputs(rows, device=device)
        torch.testing.assert_close(
            step(compiled, *tensors, **options),
            step(gristmill.linear_cross_entropy, *tensors, **options),
        )
        first = first or counter.frame_count
        assert counter.frame_count == first, rows


# --- torch's own


def test_library_is_torch_where_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, _, target = inputs()
    if library._TORCH is not None:
        calls: list[dict[str, Any]] = []
        own = library._TORCH

        def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
            calls.append(kwargs)
            return own(*args, **kwargs)

        monkeypatch.setattr(library, "_TORCH", counted)
        with gristmill.use("linear_cross_entropy", "library"):
            gristmill.linear_cross_entropy(x, weight, target, chunk_rows=5)
        assert [call["options"].batch_chunk_size for call in calls] == [5]
    monkeypatch.setattr(library, "_TORCH", None)
    FORWARD.forget_plans()
    text = str(gristmill.explain("linear_cross_entropy", x, weight, target))
    assert "has no linear_cross_entropy" in text
    with (
        gristmill.use("linear_cross_entropy", "library"),
        pytest.raises(VariantUnavailable, match="has no linear_cross_entropy"),
    ):
        gristmill.linear_cross_entropy(x, weight, target)


@pytest.mark.skipif(library._TORCH is None, reason="this torch has no linear_cross_entropy")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"softcap": 3.0}, "knows no softcap"),
        ({"z_loss": 0.1}, "knows no z_loss"),
        ({"label_smoothing": 0.1}, "knows no label smoothing"),
        ({"class_weight": torch.ones(70)}, "knows no class weights"),
    ],
)
def test_library_says_what_it_cannot_do(changes: dict[str, Any], reason: str) -> None:
    x, weight, _, target = inputs()
    for args, options, words in (
        ((x, weight, target), changes, reason),
        ((x, weight, target.int()), {}, "int64 targets"),
        ((x.bfloat16(), weight.bfloat16(), target), {}, "too few bits in bfloat16"),
    ):
        with (
            gristmill.use("linear_cross_entropy", "library"),
            pytest.raises(VariantUnavailable, match=words),
        ):
            gristmill.linear_cross_entropy(*args, **options)


def test_the_truth_notices_a_small_error() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for op in (FORWARD, BACKWARD):
            args = op.example((16, 96, 32), dtype, "cpu")
            for position, (truth, result) in enumerate(
                zip(truth_of(op.name, args), op.reference(*args), strict=True)
            ):
                if not result.numel() or result.shape[-1:] == (2,):
                    continue  # stats: see the test of them
                assert truth.roundings(result) <= 2.5
                wrong = result.clone().view(-1)
                wrong[wrong.abs().argmax()] *= 1 + 2.0**-5
                assert truth.roundings(wrong.view(result.shape)) > 2.5, (op.name, position)


@pytest.mark.parametrize("variant", ["chunked", "library", "reference"])
def test_gradients_of_a_negative_view(variant: str) -> None:
    """The dispatcher resolves it, and calls the backward op below autograd."""
    op = OPS["linear_cross_entropy_backward"]
    args = op.example((6, 64), torch.float32, "cpu")
    if variant == "library" and library._TORCH is None:
        pytest.skip("torch has no such function")
    x, *rest = args
    with gristmill.use(op.name, variant):
        expected = op.run(x, *rest)
        found = op.run(torch._neg_view(-x), *rest)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
