"""Cross entropy of logits from 1 to the largest float, by every variant and in every form.

What is judged is what fp32 must lose: tests/cross_entropy_exact.py says for each result how large
the numbers are that it is made of. A distance v - max is rounded once, to half a unit of itself; a
power of it is off by that and its own rounding; a loss is a sum of a distance and the logarithm of
a sum of powers. None of that depends on how large the logits are, only on their distances.
"""

from __future__ import annotations

import itertools
from typing import Any

import cross_entropy_exact as exact
import pytest
import torch
import torch.nn.functional as F
from conformance_helpers import DEVICES, run_by, supporting

import gristmill
from gristmill.distributed.vocab_parallel import Options, combined
from gristmill.ops.registry import OPS

over_devices = pytest.mark.parametrize("device", DEVICES)
SIZES = (1.0, 1e3, 1e6, 1e8, 1e9, 1e20, 1e37, 3e38)
OPTIONS: dict[str, tuple[Any, ...]] = {
    "plain": (None, -100, 0.0, 0.0, None),
    "smooth": (None, -100, 0.1, 0.0, None),
    "weights": ("weight", -100, 0.0, 0.0, None),
    "smooth, weights": ("weight", -100, 0.3, 0.0, None),
    "z-loss": (None, -100, 0.0, 1e-4, None),
    "capped": (None, -100, 0.1, 1e-4, 30.0),
}
# Lanes of a warp, blocks, clusters; rows whose length is odd.
SHAPES = [(9, 64), (7, 1000), (5, 1023), (3, 20001)]
ROUNDINGS = 4.0


def logits_of(
    kind: str, size: float, shape: tuple[int, int], dtype: torch.dtype, device: str
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[1])
    limit = torch.finfo(dtype).max
    if kind == "spread":
        values = torch.randn(shape, generator=generator).double() * size
    elif kind == "offset":  # a few units of the last place apart
        unit = torch.finfo(dtype).eps * size
        values = size - unit * torch.randint(0, 32, shape, generator=generator).double()
    else:  # "equal"
        values = torch.full(shape, size, dtype=torch.float64)
        values[1] = -limit
        values[-1, 1:] = -limit / (2 * shape[1])  # the sum of all distances is finite
    return values.clamp(-limit, limit).to(dtype).to(device)


def call(
    name: str, size: float, shape: tuple[int, int], kind: str, dtype: torch.dtype, device: str
) -> tuple[Any, ...]:
    logits = logits_of(kind, size, shape, dtype, device)
    target = torch.arange(shape[0], device=device) * 7 % shape[1]
    target[2] = -100
    weight, *options = OPTIONS[name]
    if weight is not None:
        weight = torch.linspace(0.2, 1.3, shape[1], device=device)
    return logits, target, weight, *options


def judge(name: str, pairs: Any, results: Any, dtype: torch.dtype) -> None:
    """Within `ROUNDINGS` half units of the accumulator's last place, and one of its own dtype."""
    precise = torch.finfo(torch.promote_types(dtype, torch.float32))
    for (value, terms), result in zip(pairs, results, strict=True):
        own = torch.finfo(result.dtype)
        # What fp32 has no number for is infinite, or 0.
        allowed = precise.eps / 2 * ROUNDINGS * terms + own.eps / 2 * value.abs() + 4 * own.tiny
        fits = (result.double() - value).abs() <= allowed
        same = (result == value) | (result.isnan() & value.isnan())
        over = (value.abs() + allowed > own.max) & ((result == value.sign() * torch.inf) | fits)
        assert bool((fits | same | over).all()), name


@over_devices
@pytest.mark.parametrize("kind", ["spread", "offset", "equal"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", OPTIONS)
def test_forward_and_backward_by_every_variant(
    options: str, size: float, kind: str, device: str
) -> None:
    shapes = SHAPES if device == "cuda" else SHAPES[1:2]
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for shape in shapes:
            args = call(options, size, shape, kind, dtype, device)
            smoothing, z_loss = args[4:6]
            if (z_loss and size > 1e15) or (smoothing and size > 1e33):
                continue  # lse squared is infinite, or the sum of all distances
            if args[2] is not None and kind == "spread" and size > 1e38:
                continue  # a distance is infinite, its product with a weight need not be
            forward = (*args, "none", False)
            for name in ("cross_entropy", "cross_entropy_one_pass"):
                whole = exact.forward if name == "cross_entropy" else exact.one_pass
                for variant in supporting(OPS[name], forward):
                    results = run_by(OPS[name], variant.name, forward)
                    judge(f"{name} {variant.name} {shape}", whole(*forward), results, dtype)
            _, _, denominators, stats = OPS["cross_entropy"].reference(*forward)
            dloss = torch.linspace(0.5, 2.0, shape[0], device=device).to(stats.dtype)
            rest = (stats, denominators, *args[2:], "none", 0, 0)
            backward = (dloss, None, *args[:2], *rest)
            for variant in supporting(OPS["cross_entropy_backward"], backward):
                result = run_by(OPS["cross_entropy_backward"], variant.name, backward)
                value, terms = exact.backward(*backward)
                # A power below the smallest normal number may be 0, whatever it is multiplied by.
                lost = (value - exact.backward(*backward, lost=True)[0]).abs().nan_to_num(0.0)
                half = torch.finfo(torch.promote_types(dtype, torch.float32)).eps / 2
                pairs = [(value, terms + lost / (half * ROUNDINGS))]
                judge(f"backward {variant.name} {shape}", pairs, [result], dtype)


@over_devices
@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize("size", [1e3, 1e6, 1e8, 1e12, 1e33])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_function_is_that_of_torch_in_fp64(
    smoothing: float, size: float, one_pass: bool, device: str
) -> None:
    """Gradients of probabilities: within a few units of the largest."""
    torch.manual_seed(0)
    logits = (torch.randn(64, 1000) * size).to(device).requires_grad_()
    target = torch.randint(0, 1000, (64,), device=device)
    exactly = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(exactly, target, label_smoothing=smoothing)
    (wanted,) = torch.autograd.grad(expected, exactly)
    loss = gristmill.cross_entropy(logits, target, label_smoothing=smoothing, one_pass=one_pass)
    (found,) = torch.autograd.grad(loss, logits)
    assert abs(loss.double() / expected - 1) <= 2e-6
    assert (found - wanted).abs().max() <= 1e-6 / 64


@over_devices
@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_gradient_of_one_class_is_zero(
    weighted: bool, smoothing: float, one_pass: bool, device: str
) -> None:
    logits = torch.tensor([[0.3], [-7.7], [1e8], [3e38], [torch.finfo().min]], device=device)
    logits.requires_grad_()
    target = torch.zeros(5, dtype=torch.int64, device=device)
    weight = torch.tensor([0.3], device=device) if weighted else None
    for reduction in ("mean", "sum", "none"):
        loss = gristmill.cross_entropy(
            logits,
            target,
            weight=weight,
            label_smoothing=smoothing,
            reduction=reduction,
            one_pass=one_pass,
        )
        assert not loss.any()
        slope = torch.full_like(loss, torch.finfo().max)
        (gradient,) = torch.autograd.grad(loss, logits, slope)
        assert not gradient.any()


@over_devices
@pytest.mark.parametrize("name", ["plain", "smooth", "z-loss", "weights"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_gradient_of_the_loss_may_be_the_largest_float(
    reduction: str, name: str, device: str
) -> None:
    for columns in (2, 1000, 1023):
        logits, target, weight, *options = call(
            name, 2.0, (5, columns), "spread", torch.float32, device
        )
        weight = None if weight is None else weight.clamp(max=1.0)
        forward = (logits, target, weight, *options, reduction, False)
        _, _, denominators, stats = OPS["cross_entropy"].reference(*forward)
        for size in (1.8e38, torch.finfo().max):
            shape = target.shape if reduction == "none" else ()
            dloss = torch.full(shape, size, device=device)
            args = (dloss, None, logits, target, stats, denominators, *forward[2:-1], 0, 0)
            value, terms = exact.backward(*args)
            assert value.abs().max() < torch.finfo().max
            for variant in supporting(OPS["cross_entropy_backward"], args):
                result = run_by(OPS["cross_entropy_backward"], variant.name, args)
                assert result.isfinite().all(), variant.name
                judge(variant.name, [(value, terms)], [result], torch.float32)


@over_devices
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("one_pass", [False, True])
def test_a_z_loss_is_finite_where_the_square_of_lse_is_not(
    reduction: str, one_pass: bool, device: str
) -> None:
    logits = torch.tensor([[1e20, 0.0, 0.0, 0.0]] * 4, device=device)
    target = torch.zeros(4, dtype=torch.int64, device=device)
    found = gristmill.cross_entropy(
        logits, target, z_loss=1e-4, reduction=reduction, one_pass=one_pass
    )
    expected = torch.full_like(found, 4e36 if reduction == "sum" else 1e36)
    torch.testing.assert_close(found, expected)
    head = torch.eye(4, device=device)
    found = gristmill.linear_cross_entropy(logits, head, target, z_loss=1e-4, reduction=reduction)
    torch.testing.assert_close(found, expected)


@over_devices
def test_not_finite_as_torch_has_it(device: str) -> None:
    """Whole rows are NaN, or infinite in the loss and finite in the gradient."""
    inf, most = torch.inf, torch.finfo().max
    logits = torch.tensor(
        [
            [1.0, inf, 0.0],
            [inf, inf, inf],
            [-inf, -inf, -inf],
            [-inf, 2.0, 1.0],
            [torch.nan, 1.0, 2.0],
            [most, -most, 0.0],
            [-most, most, -inf],
        ],
        device=device,
    )
    target = torch.zeros(7, dtype=torch.int64, device=device)
    leaf, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    expected = F.cross_entropy(other, target, reduction="none")
    (wanted,) = torch.autograd.grad(expected.sum(), other)
    for one_pass in (False, True):
        loss = gristmill.cross_entropy(leaf, target, reduction="none", one_pass=one_pass)
        torch.testing.assert_close(loss, expected, equal_nan=True)
        (found,) = torch.autograd.grad(loss.sum(), leaf)
        torch.testing.assert_close(found, wanted, equal_nan=True)


@over_devices
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["spread", "offset", "equal"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_shards_of_the_classes(smoothing: float, kind: str, size: float, device: str) -> None:
    """What the ranks send, put together, and the gradient that each makes of it."""
    if smoothing and kind == "spread" and size > 1e35:
        size = 1e35  # else the sum of a shard's distances is infinite
    logits, target, *_ = call("plain", size, (7, 1000), kind, torch.float32, device)
    cuts = (0, 1, 400, 400, 1000)  # one class, and none
    pairs = list(itertools.pairwise(cuts))
    for shard in [one.name for one in OPS["cross_entropy_shard"].variants]:
        sent = []
        for start, stop in pairs:
            part = (logits[:, start:stop], target, start, 1000, -100, None, smoothing > 0)
            known = [one.name for one in supporting(OPS["cross_entropy_shard"], part)]
            own = run_by(OPS["cross_entropy_shard"], shard if shard in known else "reference", part)
            place = own.new_tensor([[start, stop - start, 1000, 0]])[:, : own.shape[-1]]
            sent.append(torch.cat([own, place]))
        options = Options(0, 1000, -100, smoothing, 0.0, None, "none", True)
        loss, lse, denominators, stats = combined(torch.stack(sent), target, options)
        whole = (logits, target, None, -100, smoothing, 0.0, None, "none", True)
        judge(shard, exact.forward(*whole), (loss, lse, denominators, stats), torch.float32)
        dloss = torch.linspace(0.5, 2.0, 7, device=device)
        for start, stop in pairs:
            args = (dloss, None, logits[:, start:stop].contiguous(), target, stats, denominators)
            args = (*args, None, -100, smoothing, 0.0, None, "none", start, 1000)
            judge(
                shard,
                [exact.backward(*args)],
                [OPS["cross_entropy_backward"].run(*args)],
                torch.float32,
            )


@over_devices
@pytest.mark.parametrize("size", [1e3, 1e8, 1e20, 1e37])
@pytest.mark.parametrize("chunk_rows", [None, 2])
def test_linear_cross_entropy(chunk_rows: int | None, size: float, device: str) -> None:
    """One number a row makes logits that no order of additions can change: as cross_entropy."""
    torch.manual_seed(1)
    x = torch.zeros(9, 8, device=device)
    x[torch.arange(9), torch.arange(9) % 8] = size
    weight = torch.randn(1500, 8, device=device)
    target = torch.randint(0, 1500, (9,), device=device)
    leaf = (x @ weight.t()).requires_grad_()
    expected = gristmill.cross_entropy(leaf, target, reduction="none")
    (slopes,) = torch.autograd.grad(expected.sum(), leaf)
    hidden = x.requires_grad_()
    loss = gristmill.linear_cross_entropy(
        hidden, weight, target, reduction="none", chunk_rows=chunk_rows
    )
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    (found,) = torch.autograd.grad(loss.sum(), hidden)
    torch.testing.assert_close(found, slopes @ weight, rtol=1e-5, atol=1e-5)


@over_devices
@pytest.mark.parametrize("size", [1e4, 1e6, 1e8])
def test_logits_that_are_made_twice_give_no_probability_above_one(size: float, device: str) -> None:
    """Rounded otherwise in a block of another shape, they may lie above the largest."""
    torch.manual_seed(2)
    x = (torch.randn(64, 96, device=device) * size).requires_grad_()
    weight = torch.randn(3000, 96, device=device)
    bias = torch.zeros(3000, device=device, requires_grad=True)
    target = torch.randint(0, 3000, (64,), device=device)
    loss = gristmill.linear_cross_entropy(
        x, weight, target, bias=bias, reduction="sum", chunk_rows=7
    )
    dx, dbias = torch.autograd.grad(loss, (x, bias))
    # Of a row its target, and as much as its probabilities add up to; these are rounded, too.
    assert dbias.abs().sum() <= 3 * 64
    assert dx.isfinite().all()


@over_devices
@pytest.mark.parametrize("size", [1e8, 1e20, 3e38])
def test_logits_above_the_saved_largest_one_count_as_the_largest(size: float, device: str) -> None:
    """By every variant: the difference is a rounding, which an exponential would multiply."""
    v = torch.full((3, 64), size)
    for row, steps in zip(v, (1, 2, 3), strict=True):
        for column in range(0, 64, 7):
            for _ in range(steps):
                row[column] = torch.nextafter(row[column], torch.zeros(()))
    v = v.to(device)
    saved = v.amin(-1)  # as large as ten of a row, and one to three roundings below the others
    stats = torch.stack((saved, torch.full_like(saved, 64.0)), -1)
    target = torch.tensor([0, 1, 63], device=device)
    dloss = torch.ones(3, device=device)
    args = (dloss, None, v, target, stats, dloss[:0], *OPTIONS["plain"], "none", 0, 0)
    expected = 1 / 64 - F.one_hot(target, 64).float()
    for variant in supporting(OPS["cross_entropy_backward"], args):
        found = run_by(OPS["cross_entropy_backward"], variant.name, args)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7, msg=variant.name)
