"""gristmill.cross_entropy where there is nothing to do, and of what is not finite or no class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conformance_helpers import DEVICES, run_by, supporting

import gristmill
from gristmill.ops.registry import OPS
from gristmill.settings import reload_settings

OP = OPS["cross_entropy"]
over_devices = pytest.mark.parametrize("device", DEVICES)


def inputs(device: str = "cpu", *, ignored: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (2 * torch.randn(9, 33, generator=generator)).to(device)
    target = torch.randint(0, 33, (9,), generator=generator)
    if ignored:
        target[::4] = -100
    return logits.requires_grad_(), target.to(device)


@over_devices
@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_all_rows_ignored(z_loss: float, weighted: bool, one_pass: bool, device: str) -> None:
    logits, target = inputs(device)
    target = torch.full_like(target, -100)
    weight = torch.rand(33, device=device) if weighted else None
    for reduction in ("mean", "sum", "none"):
        own: dict[str, Any] = {"weight": weight, "reduction": reduction, "label_smoothing": 0.1}
        loss = gristmill.cross_entropy(logits, target, z_loss=z_loss, one_pass=one_pass, **own)
        expected = F.cross_entropy(logits, target, **own)
        assert torch.equal(loss.isnan(), expected.isnan())
        assert bool(loss.isnan().all()) == (reduction == "mean")
        assert not loss.nan_to_num().any()
        (gradient,) = torch.autograd.grad(loss.sum(), logits)
        assert not gradient.any()


@over_devices
def test_no_rows_and_no_classes(device: str) -> None:
    nothing = torch.randn(0, 8, device=device, requires_grad=True)
    target = torch.zeros(0, dtype=torch.int64, device=device)
    assert gristmill.cross_entropy(nothing, target).isnan()  # as torch
    assert gristmill.cross_entropy(nothing, target, reduction="sum") == 0
    assert gristmill.cross_entropy(nothing, target, reduction="none").shape == (0,)
    (gradient,) = torch.autograd.grad(
        gristmill.cross_entropy(nothing, target, reduction="sum"), nothing
    )
    assert gradient.shape == (0, 8)
    empty = torch.randn(3, 0, device=device)
    target = torch.tensor([0, -100, 5], device=device)
    for one_pass in (False, True):
        loss, lse = gristmill.cross_entropy(
            empty, target, reduction="none", return_lse=True, one_pass=one_pass
        )
        assert loss.isnan().tolist() == [True, False, True]
        assert (lse == -torch.inf).all()


@over_devices
def test_one_class_is_certain(device: str) -> None:
    logits = torch.randn(5, 1, device=device, requires_grad=True)
    target = torch.zeros(5, dtype=torch.int64, device=device)
    loss = gristmill.cross_entropy(logits, target)
    assert loss == 0
    assert not torch.autograd.grad(loss, logits)[0].any()


SHAPES = [(5, 64), (5, 1000), (5, 4096), (3, 20000), (3, 50257), (2, 131072)]
over_shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))


def _results(name: str, variant: str, logits: torch.Tensor, target: torch.Tensor) -> list[Any]:
    """Losses of the rows and their gradient, by one variant of an op."""
    options = (None, -100, 0.0, 0.0, None, "none")
    if name == "cross_entropy_one_pass":
        loss, _, gradient = run_by(OPS[name], variant, (logits, target, *options, False))
        return [loss, gradient]
    if name == "cross_entropy":
        return [run_by(OPS[name], variant, (logits, target, *options, False))[0]]
    loss, _, denominators, stats = OP.reference(logits, target, *options, False)
    args = (torch.ones_like(loss), None, logits, target, stats, denominators, *options, 0, 0)
    return [run_by(OPS[name], variant, args)]


def _each(
    logits: torch.Tensor, target: torch.Tensor
) -> list[tuple[str, torch.Tensor | None, torch.Tensor | None]]:
    """(op and variant, losses, gradient) of every variant that runs here."""
    found = []
    for name in ("cross_entropy", "cross_entropy_one_pass", "cross_entropy_backward"):
        op = OPS[name]
        args = op.example(tuple(logits.shape), logits.dtype, logits.device)
        for variant in supporting(op, args):
            results = _results(name, variant.name, logits.clone(), target)
            loss = None if name == "cross_entropy_backward" else results[0]
            gradient = None if name == "cross_entropy" else results[-1]
            found.append((f"{name} {variant.name}", loss, gradient))
    return found


@over_devices
@over_shapes
def test_targets_that_are_no_class_give_nan_and_spoil_nothing_else(
    shape: tuple[int, int], device: str
) -> None:
    rows, classes = shape
    logits = torch.randn(shape, device=device).bfloat16()
    for bad in (-1, classes, -(2**31), 2**31 - 1, 2**40, -(2**62), 2**63 - 1):
        target = torch.randint(0, classes, (rows,), device=device)
        target[1] = bad
        fine = [row for row in range(rows) if row != 1]
        for name, loss, gradient in _each(logits, target):
            if loss is not None:
                assert loss[1].isnan(), name
                assert loss[fine].isfinite().all(), name
            if gradient is not None:
                assert gradient[1].isnan().all(), name
                assert gradient[fine].isfinite().all(), name


@over_devices
def test_a_wrong_target_makes_the_mean_nan_and_its_own_gradient_only(device: str) -> None:
    logits, target = inputs(device, ignored=False)
    target[3] = 33
    for weight in (None, torch.rand(33, device=device)):
        for one_pass in (False, True):
            loss = gristmill.cross_entropy(logits, target, weight=weight, one_pass=one_pass)
            assert loss.isnan()
            (gradient,) = torch.autograd.grad(loss, logits)
            assert gradient[3].isnan().all()
            assert gradient[[row for row in range(9) if row != 3]].isfinite().all()


def test_debug_mode_stops_at_a_wrong_target(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, target = inputs(ignored=False)
    monkeypatch.setenv("GRISTMILL_DEBUG", "1")
    reload_settings()
    gristmill.cross_entropy(logits, target)
    target[3] = 33
    with pytest.raises(RuntimeError, match="a target is no class"):
        gristmill.cross_entropy(logits, target)


@over_devices
@over_shapes
def test_masked_classes_never_make_nan(shape: tuple[int, int], device: str) -> None:
    """A vocabulary of which most is minus infinity: whole warps and blocks see nothing else."""
    rows, classes = shape
    for keep in (1, 3, classes // 2):
        logits = torch.full(shape, -torch.inf, device=device)
        logits[:, classes - keep :] = torch.randn(rows, keep, device=device)
        logits = logits.bfloat16()
        target = torch.full((rows,), classes - 1, device=device)
        expected = F.cross_entropy(logits.double(), target, reduction="none")
        for name, loss, gradient in _each(logits, target):
            if loss is not None:
                torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
            if gradient is not None:
                assert gradient.isfinite().all(), name
                assert not gradient[:, : classes - keep].any(), name
        # A masked target costs infinitely much, and that is all.
        target[0] = 0
        for name, loss, gradient in _each(logits, target):
            if loss is not None:
                assert loss[0] == torch.inf, name
                assert loss[1:].isfinite().all(), name
            if gradient is not None:
                assert gradient.isfinite().all(), name


@over_devices
@over_shapes
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_give_nan_in_their_row_as_torch_does(
    value: float, shape: tuple[int, int], device: str
) -> None:
    rows, classes = shape
    logits = torch.randn(shape, device=device).bfloat16()
    logits[1, classes // 3] = value
    target = torch.randint(0, classes, (rows,), device=device)
    assert F.cross_entropy(logits.double(), target, reduction="none")[1].isnan()
    fine = [row for row in range(rows) if row != 1]
    for name, loss, gradient in _each(logits, target):
        if loss is not None:
            assert loss[1].isnan(), name
            assert loss[fine].isfinite().all(), name
        if gradient is not None:
            assert gradient[1].isnan().any(), name
            assert gradient[fine].isfinite().all(), name


@over_devices
def test_ignored_rows_may_hold_anything(device: str) -> None:
    logits, target = inputs(device)
    with torch.no_grad():
        logits[target == -100] = float("nan")
    for one_pass in (False, True):
        loss = gristmill.cross_entropy(logits, target, one_pass=one_pass)
        assert loss.isfinite()
        (gradient,) = torch.autograd.grad(loss, logits)
        assert not gradient[target == -100].any()
        assert gradient.isfinite().all()


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_no_nan_of_an_ignored_row_reaches_a_gradient(reduction: str) -> None:
    """Nor where autograd looks into the reference."""
    logits = torch.randn(4, 9, dtype=torch.float64)
    target = torch.tensor([3, -100, 0, 8])

    def loss(values: torch.Tensor) -> torch.Tensor:
        return gristmill.cross_entropy(values, target, z_loss=0.1, reduction=reduction).sum()

    expected = torch.func.grad(loss)(logits)
    logits[1] = float("nan")
    assert torch.equal(torch.func.grad(loss)(logits), expected)
    leaf = logits.clone().requires_grad_()
    loss(leaf).backward()
    torch.testing.assert_close(leaf.grad, expected)
    assert not expected[1].any()
