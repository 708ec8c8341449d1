"""Transformer Engine's four fused softmaxes, each by its contract (docs/ops/softmax.md).

What they compute is written here as they do it: fp32 inside, 16 bits outside, a sentinel of -10000
for what is masked, zeros for a row that is masked whole.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conformance_helpers import DEVICES

import gristmill

HALVES = [torch.float16, torch.bfloat16]
SENTINEL = -10000.0
SCALES = [1.0, 0.125, 0.5]  # exact in 16 bits, as TE wants them
over_devices = pytest.mark.parametrize("device", DEVICES)
over_halves = pytest.mark.parametrize("dtype", HALVES)
over_scales = pytest.mark.parametrize("scale", SCALES)


def te_scaled(x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.softmax(scale * x.float(), -1).to(x.dtype)


def te_scaled_masked(x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """A mask of 1 hides."""
    values = (scale * x.float()).masked_fill(mask == 1, SENTINEL)
    whole = values.amax(-1, keepdim=True) == SENTINEL
    return torch.softmax(values, -1).masked_fill(whole, 0.0).to(x.dtype)


def te_upper_triangular(x: torch.Tensor, scale: float) -> torch.Tensor:
    hidden = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    return torch.softmax((scale * x.float()).masked_fill(hidden, float("-inf")), -1).to(x.dtype)


def te_aligned_causal(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Keeps column j of row i where j < i + sk - sq + 1."""
    queries, keys = x.shape[-2:]
    hidden = torch.ones(queries, keys, dtype=torch.bool, device=x.device).triu(keys - queries + 1)
    values = (scale * x.float()).masked_fill(hidden, SENTINEL)
    whole = values.amax(-1, keepdim=True) == SENTINEL
    return torch.softmax(values, -1).masked_fill(whole | hidden, 0.0).to(x.dtype)


def te_backward(dy: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    """One formula for all four, from y alone."""
    products = dy.float() * y.float()
    return (scale * (products - y.float() * products.sum(-1, keepdim=True))).to(y.dtype)


def check(
    ours: Callable[[torch.Tensor], torch.Tensor],
    theirs: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    scale: float,
) -> None:
    """The same but for a last bit, forward and backward; zeros exactly where they have zeros."""
    own = x.clone().requires_grad_()
    y, expected = ours(own), theirs(x)
    one_bit = 2 * torch.finfo(x.dtype).eps
    smallest = torch.finfo(x.dtype).tiny
    assert y.dtype == x.dtype
    torch.testing.assert_close(y, expected, rtol=one_bit, atol=smallest)
    hidden = expected == 0
    assert ((y == 0) | (expected.float() < smallest))[hidden].all()
    dy = torch.randn_like(x)
    y.backward(dy)
    # Terms that cancel leave their roundings behind.
    gradient = te_backward(dy, y.detach(), scale)
    assert own.grad is not None
    torch.testing.assert_close(own.grad, gradient, rtol=one_bit, atol=1e-5)
    assert (own.grad[hidden] == 0).all()


@over_devices
@over_scales
@over_halves
@pytest.mark.parametrize("shape", [(2, 4, 16, 128), (1, 2, 8, 1024), (2, 2, 4, 24)])
def test_scaled(shape: tuple[int, ...], dtype: torch.dtype, scale: float, device: str) -> None:
    x = torch.randn(shape, device=device).mul_(4).to(dtype)
    check(lambda x: gristmill.softmax(x, scale=scale), lambda x: te_scaled(x, scale), x, scale)


@over_devices
@over_scales
@over_halves
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("kind", [torch.bool, torch.uint8])
def test_scaled_masked(
    kind: torch.dtype, batches: int, dtype: torch.dtype, scale: float, device: str
) -> None:
    """Their mask hides where it is 1, ours keeps where it is True. Whole rows give zeros."""
    x = torch.randn(2, 3, 16, 128, device=device).mul_(4).to(dtype)
    mask = (torch.rand(batches, 1, 16, 128, device=device) < 0.4).to(kind)
    mask[:, :, 3] = 1
    check(
        lambda x: gristmill.softmax(x, scale=scale, mask=mask != 1),
        lambda x: te_scaled_masked(x, mask, scale),
        x,
        scale,
    )
    assert (gristmill.softmax(x, mask=mask != 1)[:, :, 3] == 0).all()


@over_devices
@over_scales
@over_halves
@pytest.mark.parametrize("size", [32, 128, 200])
def test_upper_triangular(size: int, dtype: torch.dtype, scale: float, device: str) -> None:
    x = torch.randn(8, size, size, device=device).mul_(4).to(dtype)
    check(
        lambda x: gristmill.softmax(x, scale=scale, causal="top_left"),
        lambda x: te_upper_triangular(x, scale),
        x,
        scale,
    )


@over_devices
@over_scales
@over_halves
@pytest.mark.parametrize("sizes", [(32, 32), (8, 128), (1, 64), (128, 40)])
def test_aligned_causal(
    sizes: tuple[int, int], dtype: torch.dtype, scale: float, device: str
) -> None:
    """The last query sees every key; with more queries than keys the first see none: zeros."""
    x = torch.randn(2, 3, *sizes, device=device).mul_(4).to(dtype)
    check(
        lambda x: gristmill.softmax(x, scale=scale, causal="bottom_right"),
        lambda x: te_aligned_causal(x, scale),
        x,
        scale,
    )
    queries, keys = sizes
    if queries > keys:
        y = gristmill.softmax(x, causal="bottom_right")
        assert (y[..., : queries - keys, :] == 0).all()


# --- what differs, and why


@over_devices
def test_the_scale_is_not_rounded_to_16_bits(device: str) -> None:
    """Theirs is rounded to bf16 forward, and not backward."""
    x = torch.randn(64, 512, device=device).mul_(30).bfloat16()
    scale = 1 / 3
    exact = torch.softmax(scale * x.double(), -1)
    rounded = te_scaled(x, float(torch.tensor(scale).bfloat16()))
    ours = gristmill.softmax(x, scale=scale)
    errors = [((y.double() - exact).abs() / exact).max() for y in (ours, rounded)]
    assert errors[0] <= 2**-8  # the rounding of the result
    assert errors[1] > 8 * errors[0]


@over_devices
def test_logits_below_the_sentinel_stay_what_they_are(device: str) -> None:
    """-10000 is a number like others: a row is empty if all of it is masked, and only then."""
    x = torch.full((2, 8), -11000.0, device=device, dtype=torch.float16)
    x[1] = SENTINEL
    mask = torch.zeros(2, 8, device=device, dtype=torch.bool)
    mask[:, 4:] = True
    assert (te_scaled_masked(x, mask, 1.0) == 0).all()  # the largest is the sentinel
    ours = gristmill.softmax(x, mask=~mask)
    assert (ours[:, :4] == 0.25).all()
    assert (ours[:, 4:] == 0).all()


@over_devices
def test_any_length_and_any_number_of_rows(device: str) -> None:
    """No limits of 16384 keys, of multiples of 8, or of rows for a block."""
    for shape in ((1, 1, 3, 17), (3, 1, 1, 16391), (1, 1, 2, 20000)):
        x = torch.randn(shape, device=device).bfloat16()
        y = gristmill.softmax(x, scale=0.5, causal="bottom_right")
        torch.testing.assert_close(y, te_aligned_causal(x, 0.5), rtol=2**-6, atol=1e-30)
