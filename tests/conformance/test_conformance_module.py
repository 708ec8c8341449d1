"""gristmill.nn.RMSNorm in the place of torch.nn.RMSNorm."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from conformance_helpers import DEVICES, same_bits

import gristmill
from gristmill.errors import GristmillError


def both(*args: Any, **kwargs: Any) -> tuple[gristmill.nn.RMSNorm, torch.nn.RMSNorm]:
    ours, theirs = gristmill.nn.RMSNorm(*args, **kwargs), torch.nn.RMSNorm(*args, **kwargs)
    if theirs.weight is not None:
        torch.nn.init.normal_(theirs.weight)
        ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def test_it_is_torchs_class_with_the_same_words() -> None:
    ours, theirs = both(16, eps=1e-5)
    assert isinstance(ours, torch.nn.RMSNorm)
    assert ours.extra_repr() == theirs.extra_repr()
    assert repr(ours) == repr(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict()) == ["weight"]


def test_state_dicts_go_both_ways() -> None:
    ours, theirs = both(16)
    torch.nn.init.normal_(ours.weight)
    theirs.load_state_dict(ours.state_dict())
    assert same_bits(ours.weight.detach(), theirs.weight.detach())
    x = torch.randn(3, 16)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("eps", [None, 1e-6, 0.1])
@pytest.mark.parametrize("affine", [True, False])
def test_results_and_gradients_are_torchs(
    affine: bool, eps: float | None, dtype: torch.dtype, device: str
) -> None:
    """In fp64, where both round alike; small inputs, so that eps shows."""
    torch.manual_seed(0)
    ours, theirs = both(48, eps=eps, elementwise_affine=affine, device=device, dtype=dtype)
    x = (torch.randn(2, 5, 48, device=device) * 1e-3).to(dtype)
    results, gradients = [], []
    for norm in (ours, theirs):
        leaf = x.clone().requires_grad_()
        y = norm(leaf)
        assert y.dtype == dtype
        y.backward(torch.linspace(-1, 1, y.numel(), device=device).view(y.shape).to(dtype))
        results.append(y.detach())
        gradients.append([leaf.grad] if norm.weight is None else [leaf.grad, norm.weight.grad])
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(results[0], results[1], rtol=2 * rounding, atol=2 * rounding)
    for one, other in zip(*gradients, strict=True):
        scale = float(other.abs().max())
        assert float((one - other).abs().max()) <= 4 * rounding * scale


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 4, 6)], ids=str)
@pytest.mark.parametrize("leading", [(), (3,), (3, 2), (0,), (2, 1, 2, 3)], ids=str)
def test_any_normalized_shape_and_leading_dims(
    leading: tuple[int, ...], shape: tuple[int, ...], device: str
) -> None:
    ours, theirs = both(shape, device=device)
    x = torch.randn((*leading, *shape), device=device)
    y = ours(x)
    assert y.shape == x.shape
    torch.testing.assert_close(y, theirs(x))
    y.sum().backward()
    theirs(x).sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-5, atol=1e-5)


def test_several_dims_of_a_view_that_cannot_be_flattened_in_place() -> None:
    ours, theirs = both((4, 6))
    x = torch.randn(3, 6, 4).transpose(1, 2)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize(
    ("normalized", "shape"), [(8, (3, 7)), ((4, 8), (3, 8, 4)), ((4, 8), (32,)), ((4, 8), (8,))]
)
@pytest.mark.parametrize("affine", [True, False])
def test_an_input_of_the_wrong_shape(normalized: Any, shape: tuple[int, ...], affine: bool) -> None:
    norm = gristmill.nn.RMSNorm(normalized, elementwise_affine=affine)
    with pytest.raises(GristmillError, match=r"(RMSNorm: x must end in|rms_norm:).*8") as caught:
        norm(torch.randn(shape))
    assert isinstance(caught.value, ValueError)


def test_a_model_survives_deepcopy_pickle_and_to() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), gristmill.nn.RMSNorm(8))
    x = torch.randn(2, 8)
    expected = model(x)
    assert same_bits(copy.deepcopy(model)(x), expected)
    assert same_bits(pickle.loads(pickle.dumps(model))(x), expected)
    assert model.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16


def test_an_optimizer_step_follows_torchs() -> None:
    ours, theirs = both(32)
    x, target = torch.randn(16, 32), torch.randn(16, 32)
    for norm in (ours, theirs):
        optimizer = torch.optim.SGD(norm.parameters(), lr=0.5)
        for _ in range(5):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(norm(x), target).backward()
            optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight)


def test_mixed_dtypes_of_input_and_weight() -> None:
    norm = gristmill.nn.RMSNorm(16, dtype=torch.float32)
    x = torch.randn(3, 16).bfloat16()
    y = norm(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), norm(x.float()), rtol=1e-2, atol=1e-2)
