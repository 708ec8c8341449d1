"""gristmill.nn.RMSNorm and LayerNorm in the place of torch.nn's."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from conformance_helpers import DEVICES, same_bits

import gristmill
from gristmill.errors import DtypeError, GristmillError

KINDS = ["RMSNorm", "LayerNorm"]
over_kinds = pytest.mark.parametrize("kind", KINDS)


def both(kind: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Ours and torch's, with the same random parameters."""
    ours, theirs = (getattr(module, kind)(*args, **kwargs) for module in (gristmill.nn, torch.nn))
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def gradients(norm: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in norm.parameters() if parameter.grad is not None]


@over_kinds
def test_it_is_torchs_class_with_the_same_words(kind: str) -> None:
    ours, theirs = both(kind, 16, eps=1e-4)
    assert isinstance(ours, getattr(torch.nn, kind))
    assert ours.extra_repr() == theirs.extra_repr()
    assert repr(ours) == repr(theirs)
    names = {"RMSNorm": ["weight"], "LayerNorm": ["weight", "bias"]}[kind]
    assert list(ours.state_dict()) == list(theirs.state_dict()) == names


@over_kinds
def test_state_dicts_go_both_ways(kind: str) -> None:
    ours, theirs = both(kind, 16)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter)
    theirs.load_state_dict(ours.state_dict())
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert same_bits(one.detach(), other.detach())
    x = torch.randn(3, 16)
    torch.testing.assert_close(ours(x), theirs(x))


@over_kinds
def test_a_fresh_module_starts_as_torchs_does(kind: str) -> None:
    for options in ({}, {"elementwise_affine": False}, {"dtype": torch.bfloat16}):
        ours, theirs = (getattr(module, kind)(8, **options) for module in (gristmill.nn, torch.nn))
        assert ours.eps == theirs.eps
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert same_bits(one.detach(), other.detach())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("eps", [None, 1e-6, 0.1])
@pytest.mark.parametrize("affine", [True, False])
@over_kinds
def test_results_and_gradients_are_torchs(
    kind: str, affine: bool, eps: float | None, dtype: torch.dtype, device: str
) -> None:
    """In fp64, where both round alike; small inputs, so that eps shows."""
    torch.manual_seed(0)
    eps = 1e-5 if kind == "LayerNorm" and eps is None else eps
    ours, theirs = both(kind, 48, eps=eps, elementwise_affine=affine, device=device, dtype=dtype)
    x = (torch.randn(2, 5, 48, device=device) * 1e-3).to(dtype)
    results, slopes = [], []
    for norm in (ours, theirs):
        leaf = x.clone().requires_grad_()
        y = norm(leaf)
        assert y.dtype == dtype
        y.backward(torch.linspace(-1, 1, y.numel(), device=device).view(y.shape).to(dtype))
        results.append(y.detach())
        slopes.append([leaf.grad, *gradients(norm)])
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(results[0], results[1], rtol=2 * rounding, atol=2 * rounding)
    # The gradient of x is what is left of terms of this size.
    terms = float(torch.rsqrt(x.double().square().mean(-1) + (eps or 0.0)).max())
    for one, other in zip(*slopes, strict=True):
        scale = max(float(other.abs().max()), terms if other.shape == x.shape else 0.0)
        assert float((one - other).abs().max()) <= 4 * rounding * scale


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 4, 6)], ids=str)
@pytest.mark.parametrize("leading", [(), (3,), (3, 2), (0,), (2, 1, 2, 3)], ids=str)
@over_kinds
def test_any_normalized_shape_and_leading_dims(
    kind: str, leading: tuple[int, ...], shape: tuple[int, ...], device: str
) -> None:
    ours, theirs = both(kind, shape, device=device)
    x = torch.randn((*leading, *shape), device=device)
    y = ours(x)
    assert y.shape == x.shape
    torch.testing.assert_close(y, theirs(x))
    y.sum().backward()
    theirs(x).sum().backward()
    for one, other in zip(gradients(ours), gradients(theirs), strict=True):
        assert one.shape == shape
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@over_kinds
def test_several_dims_of_a_view_that_cannot_be_flattened_in_place(kind: str) -> None:
    ours, theirs = both(kind, (4, 6))
    x = torch.randn(3, 6, 4).transpose(1, 2)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("shape", [(6,), (4, 6)], ids=str)
def test_layer_norm_without_a_bias(shape: tuple[int, ...]) -> None:
    ours, theirs = both("LayerNorm", shape, bias=False)
    assert ours.bias is None
    assert list(ours.state_dict()) == ["weight"]
    x = torch.randn(5, *shape)
    torch.testing.assert_close(ours(x), theirs(x))
    ours(x).square().sum().backward()
    theirs(x).square().sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_a_large_mean_costs_layer_norm_no_digits() -> None:
    """By our kernels: torch's own rounds the mean."""
    torch.manual_seed(0)
    ours, _ = both("LayerNorm", 512, device="cuda")
    x = torch.randn(7, 512, device="cuda") + 1e4
    exact = torch.nn.functional.layer_norm(
        x.double(), (512,), ours.weight.double(), ours.bias.double(), ours.eps
    )
    torch.testing.assert_close(ours(x).double(), exact, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("normalized", "shape"), [(8, (3, 7)), ((4, 8), (3, 8, 4)), ((4, 8), (32,)), ((4, 8), (8,))]
)
@pytest.mark.parametrize("affine", [True, False])
@over_kinds
def test_an_input_of_the_wrong_shape(
    kind: str, normalized: Any, shape: tuple[int, ...], affine: bool
) -> None:
    norm = getattr(gristmill.nn, kind)(normalized, elementwise_affine=affine)
    words = rf"({kind}: (x|input) must end in|(rms|layer)_norm:).*8"
    with pytest.raises(GristmillError, match=words) as caught:
        norm(torch.randn(shape))
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("normalized", [8, (2, 4)])
@pytest.mark.parametrize("affine", [True, False])
@over_kinds
def test_an_input_that_is_no_tensor(kind: str, normalized: Any, affine: bool) -> None:
    norm = getattr(gristmill.nn, kind)(normalized, elementwise_affine=affine)
    with pytest.raises(DtypeError, match=r"(x|input) must be a torch\.Tensor, got list"):
        norm([1.0] * 8)


@over_kinds
def test_forward_has_torchs_names(kind: str) -> None:
    ours, theirs = both(kind, 8)
    names = [list(inspect.signature(norm.forward).parameters) for norm in (ours, theirs)]
    assert names[0] == names[1]


@over_kinds
def test_a_model_survives_deepcopy_pickle_and_to(kind: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), getattr(gristmill.nn, kind)(8))
    x = torch.randn(2, 8)
    expected = model(x)
    assert same_bits(copy.deepcopy(model)(x), expected)
    assert same_bits(pickle.loads(pickle.dumps(model))(x), expected)
    assert model.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16


@over_kinds
def test_an_optimizer_step_follows_torchs(kind: str) -> None:
    ours, theirs = both(kind, 32)
    x, target = torch.randn(16, 32), torch.randn(16, 32)
    for norm in (ours, theirs):
        optimizer = torch.optim.SGD(norm.parameters(), lr=0.5)
        for _ in range(5):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(norm(x), target).backward()
            optimizer.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@over_kinds
def test_mixed_dtypes_of_input_and_weight(kind: str) -> None:
    norm = getattr(gristmill.nn, kind)(16, dtype=torch.float32)
    x = torch.randn(3, 16).bfloat16()
    y = norm(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), norm(x.float()), rtol=1e-2, atol=1e-2)


@over_kinds
def test_compiled_it_is_one_graph(kind: str) -> None:
    torch._dynamo.reset()
    for shape in ((6,), (4, 6)):
        norm, _ = both(kind, shape)
        x = torch.randn(3, *shape)
        compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
        assert same_bits(compiled(x), norm(x))
