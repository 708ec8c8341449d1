"""cross_entropy(one_pass=True): the gradient is made in the forward pass and handed out once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance_graphs import Recorder, ours
from conformance_helpers import DEVICES, memory, same_bits
from torch.utils.checkpoint import checkpoint

import gristmill
from gristmill.errors import ArgumentError, DoubleBackwardError, DtypeError, GradientConsumed
from gristmill.ops.registry import OPS

over_devices = pytest.mark.parametrize("device", DEVICES)
over_places = pytest.mark.parametrize("inplace", [False, True])


def inputs(device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any, Any]:
    """Features, the weight that makes logits of them, and targets."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 16, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.randn(40, 16, generator=generator).to(device, dtype).requires_grad_()
    target = torch.randint(0, 40, (12,), generator=generator).to(device)
    target[3] = -100
    return x, weight, target


@over_devices
@over_places
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("factor", [1.0, 0.25, -3.0])
def test_gradients_of_what_made_the_logits(
    factor: float, reduction: str, inplace: bool, device: str
) -> None:
    x, weight, target = inputs(device)
    options: dict[str, Any] = {"reduction": reduction, "z_loss": 1e-3, "label_smoothing": 0.1}

    def gradients(**mode: bool) -> Any:
        loss = gristmill.cross_entropy(x @ weight.t(), target, **options, **mode)
        scaled = (loss * factor).sum()
        return loss, torch.autograd.grad(scaled, (x, weight))

    loss, found = gradients(one_pass=True, inplace=inplace)
    expected_loss, expected = gradients()
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=1e-6)
    for one, other in zip(found, expected, strict=True):
        # One rounding more, of the gradient that waits.
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-7 * float(other.abs().max()))


@over_devices
@over_places
def test_a_gradient_per_row_is_multiplied_on_the_device(inplace: bool, device: str) -> None:
    x, weight, target = inputs(device, torch.float32)
    factors = torch.rand(12, device=device)
    factors[5] = 1.0
    mode = {"one_pass": True, "inplace": inplace}
    loss = gristmill.cross_entropy(x @ weight.t(), target, reduction="none", **mode)
    found = torch.autograd.grad(loss, (x, weight), factors)
    loss = gristmill.cross_entropy(x @ weight.t(), target, reduction="none")
    expected = torch.autograd.grad(loss, (x, weight), factors)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@over_devices
def test_in_place_the_gradient_is_where_the_logits_were(device: str) -> None:
    x, weight, target = inputs(device)
    logits = x @ weight.t()
    before, place = logits.detach().clone(), logits.data_ptr()
    loss = gristmill.cross_entropy(logits, target, one_pass=True, inplace=True)
    _, _, gradient = OPS["cross_entropy_one_pass"].run(
        before, target, None, -100, 0.0, 0.0, None, "mean", False
    )
    assert logits.data_ptr() == place
    assert same_bits(logits.detach(), gradient)
    seen = []
    logits.register_hook(lambda grad: seen.append(grad))
    loss.backward()
    # A unit gradient of the loss is not multiplied, and nothing is copied.
    assert seen[0].data_ptr() == place
    assert same_bits(seen[0], gradient)


@over_places
def test_functional_leaves_the_logits_alone(inplace: bool) -> None:
    x, weight, target = inputs()
    logits = x @ weight.t()
    before = memory(logits.detach()).clone()
    gristmill.cross_entropy(logits, target, one_pass=True, inplace=inplace)
    assert torch.equal(memory(logits.detach()), before) != inplace


def test_whoever_saved_the_logits_is_told() -> None:
    x, weight, target = inputs(dtype=torch.float32)
    logits = x @ weight.t()
    other = (logits * logits).sum()
    loss = gristmill.cross_entropy(logits, target, one_pass=True, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + other).backward()


@over_places
@pytest.mark.parametrize("retain", [False, True])
def test_a_second_backward_says_that_the_gradient_is_gone(retain: bool, inplace: bool) -> None:
    x, weight, target = inputs()
    logits = x @ weight.t()
    loss = gristmill.cross_entropy(logits, target, one_pass=True, inplace=inplace)
    loss.backward(retain_graph=retain)
    with pytest.raises(GradientConsumed, match="use one_pass=False"):
        loss.backward(retain_graph=retain)


def test_a_second_gradient_is_refused() -> None:
    """At once: else what flows through the probabilities would be missing without a word."""
    x, weight, target = inputs(dtype=torch.float32)
    loss = gristmill.cross_entropy(x @ weight.t(), target, one_pass=True)
    with pytest.raises(DoubleBackwardError, match=r"cross_entropy: .*create_graph"):
        torch.autograd.grad(loss, x, create_graph=True)
    loss = OPS["cross_entropy_one_pass"].overload(x @ weight.t(), target)[0]
    with pytest.raises(DoubleBackwardError, match=r"cross_entropy: .*create_graph"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_lse_comes_along_and_is_a_constant() -> None:
    x, weight, target = inputs()
    logits = x @ weight.t()
    loss, lse = gristmill.cross_entropy(logits, target, one_pass=True, return_lse=True)
    assert loss.requires_grad
    assert not lse.requires_grad
    torch.testing.assert_close(lse, torch.logsumexp(logits.float(), -1))
    compiled = torch.compile(gristmill.cross_entropy, backend="aot_eager", fullgraph=True)
    _, lse = compiled(logits, target, one_pass=True, return_lse=True)
    assert not lse.requires_grad


@over_places
def test_without_a_gradient_it_is_the_forward_alone(inplace: bool) -> None:
    x, weight, target = inputs()
    counted = gristmill.counters()["choices"]
    with torch.no_grad():
        logits = x @ weight.t()
        before = logits.clone()
        mode = {"one_pass": True, "inplace": inplace}
        loss = gristmill.cross_entropy(logits, target, **mode)
        assert same_bits(logits, before)
        assert same_bits(loss, gristmill.cross_entropy(logits, target))
    after = gristmill.counters()["choices"]
    for name in ("cross_entropy_one_pass:reference", "cross_entropy_one_pass_:reference"):
        assert counted.get(name, 0) == after.get(name, 0)


def test_compiled_it_is_the_functional_op() -> None:
    x, weight, target = inputs()
    recorder = Recorder()

    @torch.compile(fullgraph=True, backend=recorder)
    def function(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> Any:
        loss = gristmill.cross_entropy(x @ weight.t(), target, one_pass=True)
        return loss * 0.5

    mine = torch.autograd.grad(function(x, weight, target), (x, weight))
    assert ours(recorder.forward) == ["gristmill.cross_entropy_one_pass"]
    assert ours(recorder.backward) == []
    loss = gristmill.cross_entropy(x @ weight.t(), target, one_pass=True) * 0.5
    expected = torch.autograd.grad(loss, (x, weight))
    torch.testing.assert_close(mine, expected)


def test_compiled_with_growing_rows_compiles_twice_at_most() -> None:
    compiled = 0

    def backend(graph: Any, example: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return graph

    @torch.compile(fullgraph=True, backend=backend)
    def function(logits: torch.Tensor, target: torch.Tensor) -> Any:
        return gristmill.cross_entropy(logits, target, one_pass=True)

    for rows in (3, 5, 8, 13):
        logits = torch.randn(rows, 7)
        target = torch.randint(0, 7, (rows,))
        torch.testing.assert_close(
            function(logits, target), torch.nn.functional.cross_entropy(logits, target)
        )
    assert compiled <= 2


def test_in_place_is_refused_where_it_cannot_be() -> None:
    x, weight, target = inputs()
    mode = {"one_pass": True, "inplace": True}
    leaf = torch.randn(12, 40, requires_grad=True)
    with pytest.raises(ArgumentError, match=r"inplace .* leaf that requires grad"):
        gristmill.cross_entropy(leaf, target, **mode)
    with pytest.raises(ArgumentError, match=r"inplace .* view of a leaf"):
        gristmill.cross_entropy(leaf.view(12, 40), target, **mode)
    with pytest.raises(ArgumentError, match=r"cross_entropy: inplace needs one_pass=True"):
        gristmill.cross_entropy(x @ weight.t(), target, inplace=True)
    rows = (x @ weight.t())[:1].expand(12, 40)
    with pytest.raises(ArgumentError, match=r"overwritten.*expanded"):
        gristmill.cross_entropy(rows, target, **mode)
    with pytest.raises(DtypeError, match="one_pass must be True or False"):
        gristmill.cross_entropy(x @ weight.t(), target, one_pass=1)
    with pytest.raises(Exception, match="plain eager mode alone"):
        torch.compile(
            lambda logits: gristmill.cross_entropy(logits, target, **mode),
            backend="eager",
            fullgraph=True,
        )((x @ weight.t()).detach())
    with pytest.raises(ArgumentError, match="plain eager mode alone"):
        torch.func.grad(lambda logits: gristmill.cross_entropy(logits, target, **mode))(
            torch.randn(12, 40)
        )


@over_places
def test_wrong_arguments_are_told_before_anything_is_written(inplace: bool) -> None:
    x, weight, target = inputs()
    logits = x @ weight.t()
    before = logits.detach().clone()
    with pytest.raises(ArgumentError, match="cross_entropy: reduction"):
        gristmill.cross_entropy(logits, target, reduction="most", one_pass=True, inplace=inplace)
    assert same_bits(logits.detach(), before)


@over_places
def test_checkpointing(inplace: bool) -> None:
    x, weight, target = inputs(dtype=torch.float32)

    def function(x: torch.Tensor) -> Any:
        mode = {"one_pass": True, "inplace": inplace}
        return gristmill.cross_entropy(x @ weight.t(), target, **mode)

    (expected,) = torch.autograd.grad(gristmill.cross_entropy(x @ weight.t(), target), x)
    loss = checkpoint(function, x, use_reentrant=False)
    (found,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_saved_tensor_hooks_see_the_gradient() -> None:
    """So that it can be kept elsewhere until the backward pass."""
    x, weight, target = inputs(dtype=torch.float32)
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = gristmill.cross_entropy(x @ weight.t(), target, one_pass=True)
    assert (12, 40) in kept
    (found,) = torch.autograd.grad(loss, x)
    (expected,) = torch.autograd.grad(gristmill.cross_entropy(x @ weight.t(), target), x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@over_places
def test_nothing_waits_for_the_device_and_all_can_be_captured(inplace: bool) -> None:
    x, weight, target = inputs("cuda")

    def step() -> tuple[torch.Tensor, ...]:
        logits = x @ weight.t()
        mode = {"one_pass": True, "inplace": inplace}
        loss = gristmill.cross_entropy(logits, target, **mode)
        return loss, *torch.autograd.grad(loss * 0.5, (x, weight))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        expected = step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    for one, other in zip(captured, expected, strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("needed", [False, True])
def test_a_gradient_that_nobody_needs_is_not_made_in_a_graph(needed: bool) -> None:
    logits = torch.randn(6, 50, requires_grad=needed)
    target = torch.randint(0, 50, (6,))
    recorder = Recorder()
    compiled = torch.compile(
        lambda x: gristmill.cross_entropy(x, target, one_pass=True),
        fullgraph=True,
        backend=recorder,
    )
    loss = compiled(logits)
    torch.testing.assert_close(loss, gristmill.cross_entropy(logits, target))
    name = "cross_entropy_one_pass" if needed else "cross_entropy"
    assert ours(recorder.forward) == [f"gristmill.{name}"]
