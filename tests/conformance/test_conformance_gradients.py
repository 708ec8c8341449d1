"""Gradients by every way autograd can take, against fp64 autograd of the reference."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conformance_helpers import DEVICES, allowed, same_bits, supporting
from conformance_truth import Truth, truth_of

import gristmill
from gristmill.errors import DoubleBackwardError, VariantUnavailable
from gristmill.ops import op as op_module
from gristmill.ops.registry import OPS
from gristmill.ops.rms_norm import reference
from gristmill.select import active
from gristmill.select.device import device_of

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
BACKWARD = OPS["rms_norm_backward"]


@dataclass(frozen=True)
class Setup:
    """A training step: dtypes, what needs a gradient, which results the loss depends on."""

    x: torch.dtype = BF16
    weight: torch.dtype | None = BF16
    residual: torch.dtype | None = None
    shape: tuple[int, ...] = (12, 320)
    eps: float | None = 1e-6
    offset: float = 0.0
    casting: str = "once"
    out: torch.dtype | None = None
    frozen: tuple[str, ...] = ()
    loss: tuple[str, ...] = ("y", "sum")
    gradient: str = "dense"
    layout: str = "dense"

    def __str__(self) -> str:
        changed = [
            f"{name}={value}".removeprefix("torch.")
            for name, value in vars(self).items()
            if value != getattr(Setup, name)
        ]
        return ",".join(changed).replace(" ", "").replace("torch.", "") or "plain"


PLAIN = [
    Setup(),
    Setup(FP32, FP32),
    Setup(FP16, FP16),
    Setup(FP64, FP64),
    Setup(BF16, FP32),
    Setup(FP32, BF16),
    Setup(FP16, BF16),
    Setup(weight=None),
    Setup(weight=None, gradient="expanded"),
    Setup(gradient="expanded"),
    Setup(gradient="expanded rows"),
    Setup(gradient="transposed", shape=(4, 6, 128)),
    Setup(gradient="strided columns"),
    Setup(layout="sliced"),
    Setup(layout="transposed", shape=(4, 6, 128)),
    Setup(layout="strided columns"),
    Setup(frozen=("weight",)),
    Setup(frozen=("x",)),
    Setup(FP32, BF16, frozen=("x",)),
    Setup(offset=1.0),
    Setup(casting="llama"),
    Setup(BF16, FP32, casting="llama", offset=1.0),
    Setup(out=FP32),
    Setup(FP32, FP32, out=BF16),
    Setup(eps=None),
    Setup(eps=0.5),
    Setup(shape=(64,)),
    Setup(shape=(2, 3, 40)),
    Setup(shape=(0, 64)),
    Setup(shape=(3, 20000)),
    Setup(shape=(700, 96)),
]
ADDED = [
    *(Setup(**{**vars(setup), "residual": setup.x}) for setup in PLAIN),
    Setup(residual=BF16, loss=("y",)),
    Setup(residual=BF16, loss=("sum",)),
    Setup(residual=BF16, frozen=("x",)),
    Setup(residual=BF16, frozen=("residual",)),
    Setup(residual=BF16, frozen=("weight",), loss=("sum",)),
    Setup(residual=BF16, frozen=("x", "residual")),
    Setup(residual=BF16, frozen=("x", "residual"), loss=("y",)),
    Setup(residual=FP32),
    Setup(residual=FP32, loss=("y",)),
    Setup(residual=FP32, loss=("sum",)),
    Setup(FP32, FP32, residual=BF16),
    Setup(FP16, FP32, residual=BF16),
    Setup(residual=BF16, weight=None, loss=("y",)),
]


def _tensor(setup: Setup, dtype: torch.dtype, device: str, seed: int, layout: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(setup.shape, generator=generator).to(dtype)
    if layout == "sliced":
        wide = torch.zeros((*setup.shape[:-1], setup.shape[-1] + 8), dtype=dtype)
        wide[..., : setup.shape[-1]] = values
        return wide.to(device)[..., : setup.shape[-1]]
    if layout == "transposed":
        return values.transpose(0, 1).contiguous().to(device).transpose(0, 1)
    if layout == "strided columns":
        return values.movedim(-1, 0).contiguous().to(device).movedim(0, -1)
    if layout == "expanded":
        return torch.tensor(0.75, dtype=dtype, device=device).expand(setup.shape)
    if layout == "expanded rows":
        return values[:1].to(device).expand(setup.shape)
    return values.to(device)


def _leaf(setup: Setup, name: str, value: torch.Tensor) -> torch.Tensor:
    return value.detach().requires_grad_(name not in setup.frozen)


def _inputs(setup: Setup, device: str) -> dict[str, torch.Tensor]:
    inputs = {"x": _leaf(setup, "x", _tensor(setup, setup.x, device, 0, setup.layout))}
    if setup.residual is not None:
        residual = _tensor(setup, setup.residual, device, 1, "dense")
        inputs["residual"] = _leaf(setup, "residual", residual)
    if setup.weight is not None:
        generator = torch.Generator().manual_seed(2)
        weight = torch.randn(setup.shape[-1], generator=generator).to(setup.weight).to(device)
        inputs["weight"] = _leaf(setup, "weight", weight)
    return inputs


def _gradients_in(setup: Setup, device: str) -> dict[str, torch.Tensor]:
    """What comes from the loss, for each result it depends on."""
    dtypes = {"y": setup.out or setup.x}
    if setup.residual is not None:
        dtypes["sum"] = torch.promote_types(setup.x, setup.residual)
    return {
        name: _tensor(setup, dtype, device, 3 + index, setup.gradient)
        for index, (name, dtype) in enumerate(dtypes.items())
        if name in setup.loss
    }


def _call(setup: Setup, inputs: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    weight = inputs.get("weight")
    options = {
        "weight_offset": setup.offset,
        "casting": setup.casting,
        "out_dtype": setup.out,
    }
    functions = gristmill if how == "direct" else torch.ops.gristmill
    if setup.residual is None:
        return {"y": functions.rms_norm(inputs["x"], weight, setup.eps, **options)}
    y, total = functions.add_rms_norm(inputs["x"], inputs["residual"], weight, setup.eps, **options)
    return {"y": y, "sum": total}


def _step(setup: Setup, device: str, how: str) -> dict[str, torch.Tensor | None]:
    """The gradients of one training step."""
    inputs, incoming = _inputs(setup, device), _gradients_in(setup, device)
    results = _call(setup, inputs, how)
    names = [name for name in incoming if results[name].requires_grad]
    torch.autograd.backward([results[name] for name in names], [incoming[name] for name in names])
    return {name: value.grad for name, value in inputs.items()}


def _truths(setup: Setup, device: str) -> dict[str, tuple[Truth, float]]:
    """What the gradients must be: fp64 autograd of the reference, at the sum as it is rounded.

    With each the roundings that it may be off by.
    """
    inputs, incoming = _inputs(setup, device), _gradients_in(setup, device)
    inputs = {name: value.detach() for name, value in inputs.items()}
    x, weight = inputs["x"], inputs.get("weight")
    if setup.residual is not None:
        x = x + inputs["residual"]
    h = x.to(FP64, copy=True).requires_grad_()
    w = None if weight is None else weight.to(FP64, copy=True).requires_grad_()
    eps = setup.eps
    if eps is None:
        eps = torch.finfo(FP64 if x.dtype == FP64 else FP32).eps
    loss = h.sum() * 0.0
    if "y" in incoming:
        y = reference.rms_norm(h, w, eps, setup.offset, "once", None)
        loss = loss + (y * incoming["y"].double()).sum()
    if "sum" in incoming:
        loss = loss + (h * incoming["sum"].double()).sum()
    loss.backward()
    dy = incoming.get("y", torch.zeros_like(x))
    args = (dy, x, weight, incoming.get("sum"), eps, setup.offset, weight is not None)
    sizes = truth_of("rms_norm_backward", args)
    limits = allowed(BACKWARD, args, sizes)
    # The formula of the backward op against autograd of the formula of the forward op.
    assert torch.allclose(sizes[0].low, h.grad, rtol=1e-9, atol=1e-11)
    found = {"x": (Truth(h.grad, h.grad, sizes[0].terms, sizes[0].accumulator), limits[0])}
    if setup.residual is not None:
        found["residual"] = found["x"]
    if w is not None and w.grad is not None:
        assert torch.allclose(sizes[1].low, w.grad, rtol=1e-9, atol=1e-11)
        truth = Truth(w.grad, w.grad, sizes[1].terms, sizes[1].accumulator)
        found["weight"] = truth, limits[1]
    return found


def _variants(
    device: str, setup: Setup
) -> Iterator[tuple[str, contextlib.AbstractContextManager[None]]]:
    """What is chosen, then each backward variant by name."""
    yield "chosen", contextlib.nullcontext()
    x = _inputs(setup, device)["x"]
    total = x if setup.residual is None else x.to(torch.promote_types(setup.x, setup.residual))
    weight = _inputs(setup, device).get("weight")
    incoming = _gradients_in(setup, device)
    if "y" not in incoming or "weight" in setup.frozen:
        return
    options = (1e-6, setup.offset, weight is not None)
    args = (incoming["y"], total, weight, incoming.get("sum"), *options)
    problem = BACKWARD.problem(*args, device=device_of(total.device))
    for variant in BACKWARD.variants:
        if variant.supports(problem) is None:
            yield variant.name, gristmill.use("rms_norm_backward", variant.name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["direct", "registered"])
@pytest.mark.parametrize("setup", [*PLAIN, *ADDED], ids=str)
def test_gradients(setup: Setup, how: str, device: str) -> None:
    truths = _truths(setup, device)
    needed = any(value.requires_grad for value in _inputs(setup, device).values())
    for variant, forced in _variants(device, setup):
        with forced:
            found = _step(setup, device, how) if needed else {}
        for name, gradient in found.items():
            only_sum = name == "weight" and "y" not in setup.loss
            if name in setup.frozen or only_sum:
                assert gradient is None, name
                continue
            source = _inputs(setup, device)[name]
            assert gradient is not None, name
            assert (gradient.dtype, gradient.shape) == (source.dtype, source.shape)
            # torch's backward (chosen for fp64) rounds dx before dsum is added, its peers after.
            composed = device == "cuda" and (variant == "library" or setup.x == FP64)
            truth, limit = truths[name]
            error = truth.roundings(gradient, composed=composed)
            assert error <= limit, f"{variant}, {name}: {error:.2f} roundings > {limit}"


@pytest.mark.parametrize("device", DEVICES)
def test_both_ways_give_the_same_bits(device: str) -> None:
    for setup in (Setup(), Setup(residual=BF16), Setup(FP32, BF16, residual=BF16, loss=("y",))):
        direct, registered = (_step(setup, device, how) for how in ("direct", "registered"))
        for name, gradient in direct.items():
            assert same_bits(gradient, registered[name]), name


@pytest.mark.parametrize("device", DEVICES)
def test_sum_backward_needs_no_copy_of_its_expanded_gradient(device: str) -> None:
    x = torch.randn(5, 256, device=device, requires_grad=True)
    weight = torch.randn(256, device=device, requires_grad=True)
    gristmill.rms_norm(x, weight).sum().backward()
    h, w = (value.detach().double().requires_grad_() for value in (x, weight))
    torch.nn.functional.rms_norm(h, (256,), w, 1e-6).sum().backward()
    torch.testing.assert_close(x.grad.double(), h.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight.grad.double(), w.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("casting", ["once", "llama"])
@pytest.mark.parametrize("how", ["direct", "registered"])
def test_gradcheck(how: str, casting: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual, weight = (
        torch.randn(shape, generator=generator, dtype=FP64, requires_grad=True)
        for shape in ((3, 2, 5), (3, 2, 5), (5,))
    )
    functions = gristmill if how == "direct" else torch.ops.gristmill

    def norm(x: Any, weight: Any) -> Any:
        return functions.rms_norm(x, weight, 1e-3, weight_offset=0.5, casting=casting)

    def added(x: Any, residual: Any, weight: Any) -> Any:
        return functions.add_rms_norm(x, residual, weight, None, casting=casting)

    assert torch.autograd.gradcheck(norm, (x, weight))
    assert torch.autograd.gradcheck(lambda x: norm(x, None), (x,))
    assert torch.autograd.gradcheck(added, (x, residual, weight))
    assert torch.autograd.gradcheck(lambda x: added(x, residual.detach(), None)[0], (x,))
    assert torch.autograd.gradcheck(lambda x: added(x, residual.detach(), None)[1], (x,))
    strided = torch.randn(5, 4, generator=generator, dtype=FP64).t().requires_grad_()
    assert torch.autograd.gradcheck(norm, (strided, weight))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["direct", "registered"])
@pytest.mark.parametrize("setup", [Setup(FP32, FP32), Setup(FP32, FP32, residual=FP32)], ids=str)
def test_double_backward_raises_and_names_the_way_out(setup: Setup, how: str, device: str) -> None:
    inputs = _inputs(setup, device)
    y = _call(setup, inputs, how)["y"]
    (first,) = torch.autograd.grad(y.square().sum(), inputs["x"], create_graph=True)
    with pytest.raises(DoubleBackwardError, match=r"torch\.nn\.functional\.rms_norm") as caught:
        first.sum().backward()
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize("device", DEVICES)
def test_the_backward_op_itself_has_no_gradient(device: str) -> None:
    args = BACKWARD.example((4, 64), FP32, device)
    args[0].requires_grad_()
    dx, _ = BACKWARD.overload(*args)
    with pytest.raises(DoubleBackwardError):
        dx.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_backward_twice_through_a_kept_graph(device: str) -> None:
    setup = Setup(FP32, FP32, residual=FP32)
    inputs, incoming = _inputs(setup, device), _gradients_in(setup, device)
    results = _call(setup, inputs, "direct")
    loss = sum((results[name] * gradient).sum() for name, gradient in incoming.items())
    loss.backward(retain_graph=True)
    once = {name: value.grad.clone() for name, value in inputs.items()}
    loss.backward()
    for name, value in inputs.items():
        assert same_bits(value.grad, once[name] * 2), name


def test_writing_over_what_backward_needs_is_noticed() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    y, total = gristmill.add_rms_norm(x, torch.randn(3, 8))
    total.data  # noqa: B018 - reading is no write
    with torch.no_grad():
        total.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["direct", "registered"])
@pytest.mark.parametrize("saved", ["x", "residual"])
def test_the_in_place_op_counts_as_a_write(saved: str, how: str, device: str) -> None:
    op = OPS["fused_add_rms_norm_"]
    functions = gristmill if how == "direct" else torch.ops.gristmill
    for variant in supporting(op, op.example((4, 64), FP32, device)):
        args = op.example((4, 64), FP32, device)
        factor = torch.ones(64, device=device, requires_grad=True)
        product = factor * args[("x", "residual").index(saved)]
        before = [tensor._version for tensor in args[:2]]
        with gristmill.use(op.name, variant.name):
            functions.fused_add_rms_norm_(*args)
        assert all(t._version > b for t, b in zip(args[:2], before, strict=True)), variant.name
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


# --- use() and backward passes in threads of their own


def _in_a_thread(work: Callable[[], Any]) -> Any:
    """`work()` where nothing is known of the context here, as in autograd's own threads."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def _loss(setup: Setup, how: str, device: str) -> torch.Tensor:
    results = _call(setup, _inputs(setup, device), how)
    return torch.stack([result.float().sum() for result in results.values()]).sum()


@pytest.fixture
def backward_choices(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Variant and source of every choice that is made for the backward op."""
    made: list[tuple[str, str]] = []
    resolve = op_module.resolve

    def spy(name: str, *args: Any) -> Any:
        choice, plan = resolve(name, *args)
        if name == BACKWARD.name:
            made.append((choice.variant.name, choice.source))
        return choice, plan

    monkeypatch.setattr(op_module, "resolve", spy)
    return made


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["direct", "registered"])
@pytest.mark.parametrize("where", ["here", "elsewhere"])
@pytest.mark.parametrize("setup", [Setup(), Setup(residual=BF16)], ids=str)
def test_backward_follows_the_use_of_its_forward(
    setup: Setup, where: str, how: str, device: str, backward_choices: list[tuple[str, str]]
) -> None:
    def backward() -> dict[str, str]:
        loss.backward()
        return dict(active())

    with gristmill.use(BACKWARD.name, "reference"):
        loss = _loss(setup, how, device)
    left = _in_a_thread(backward) if where == "elsewhere" else backward()
    assert backward_choices == [("reference", "forced")]
    assert left == {}
    # And without a use there is none to follow.
    loss = _loss(setup, how, device)
    _in_a_thread(backward)
    assert [source == "forced" for _, source in backward_choices[1:]] == [False]


@pytest.mark.parametrize("how", ["direct", "registered"])
@pytest.mark.parametrize("setup", [Setup(), Setup(residual=BF16)], ids=str)
def test_a_use_around_the_backward_comes_first(
    setup: Setup, how: str, backward_choices: list[tuple[str, str]]
) -> None:
    with gristmill.use(BACKWARD.name, "cuda_block"):
        loss, other = _loss(setup, how, "cpu"), _loss(setup, how, "cpu")
    with pytest.raises(VariantUnavailable, match=r"'cuda_block'.*needs a CUDA device"):
        _in_a_thread(loss.backward)
    assert backward_choices == []

    def backward() -> None:
        with gristmill.use(BACKWARD.name, "reference"):
            other.backward()

    _in_a_thread(backward)
    assert backward_choices == [("reference", "forced")]


def test_a_use_of_another_op_around_the_backward_changes_nothing(
    backward_choices: list[tuple[str, str]],
) -> None:
    with gristmill.use(BACKWARD.name, "reference"):
        loss = _loss(Setup(), "direct", "cpu")
    with gristmill.use("add_rms_norm", "library"):
        loss.backward()
    assert backward_choices == [("reference", "forced")]


def test_gradients_of_the_two_inputs_of_a_sum_are_tensors_of_their_own() -> None:
    x, residual = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
    y, total = gristmill.add_rms_norm(x, residual)
    (y.sum() + total.sum()).backward()
    kept = residual.grad.clone()
    x.grad.zero_()
    assert same_bits(residual.grad, kept)
    x.grad = residual.grad = None
    gristmill.add_rms_norm(x, residual)[1].sum().backward()
    x.grad.zero_()
    assert bool((residual.grad == 1).all())


def test_no_graph_is_made_where_none_is_wanted() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    with torch.no_grad():
        assert not gristmill.rms_norm(x).requires_grad
    with torch.inference_mode():
        assert gristmill.rms_norm(x).is_inference()
    assert not gristmill.rms_norm(x.detach()).requires_grad
    assert gristmill.rms_norm(x).requires_grad
