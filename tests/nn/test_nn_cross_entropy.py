"""gristmill.nn.CrossEntropyLoss in the place of torch's."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import gristmill
from gristmill.errors import ArgumentError, DtypeError


def pair(**options: Any) -> tuple[Any, Any]:
    return gristmill.nn.CrossEntropyLoss(**options), torch.nn.CrossEntropyLoss(**options)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"ignore_index": 2},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"reduction": "none"},
    {"weight": torch.tensor([0.5, 1.0, 2.0, 0.1, 1.5])},
    {"weight": torch.tensor([0.5, 1.0, 2.0, 0.1, 1.5]), "label_smoothing": 0.2, "ignore_index": 0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
@pytest.mark.parametrize("shape", [(5,), (3, 5), (3, 5, 4), (2, 5, 4, 3)], ids=str)
def test_loss_and_gradient_are_torchs(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    """Classes in dim 1, as torch has them, or in the only one."""
    ours, theirs = pair(**options)
    torch.manual_seed(0)
    rows = () if len(shape) == 1 else (shape[0], *shape[2:])
    target = torch.randint(0, 5, rows)
    results = []
    for module in (ours, theirs):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
        loss = module(x, target)
        loss.sum().backward()
        results.append((loss.detach(), x.grad))
    torch.testing.assert_close(*results)
    assert results[0][1].stride() == results[1][1].stride()


def test_it_is_torchs_class_with_the_same_state() -> None:
    weight = torch.rand(5)
    ours, theirs = pair(weight=weight, ignore_index=1, label_smoothing=0.1)
    assert isinstance(ours, torch.nn.CrossEntropyLoss)
    assert list(ours.state_dict()) == list(theirs.state_dict()) == ["weight"]
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        x, target = torch.randn(3, 5), torch.tensor([0, 1, 4])
        torch.testing.assert_close(other(x, target), theirs(x, target))
    with pytest.warns(UserWarning, match="size_average and reduce args will be deprecated"):
        assert gristmill.nn.CrossEntropyLoss(size_average=False).reduction == "sum"


def test_what_torch_does_not_have() -> None:
    x, target = torch.randn(3, 5), torch.tensor([0, 1, 4])
    module = gristmill.nn.CrossEntropyLoss(z_loss=0.1, softcap=3.0, return_lse=True)
    expected = gristmill.cross_entropy(x, target, z_loss=0.1, softcap=3.0, return_lse=True)
    torch.testing.assert_close(module(x, target), expected)
    assert repr(module) == "CrossEntropyLoss(z_loss=0.1, softcap=3.0, return_lse=True)"


@pytest.mark.parametrize("shape", [(3, 5), (3, 5, 4)])
@pytest.mark.parametrize("inplace", [False, True])
def test_one_pass(shape: tuple[int, ...], inplace: bool) -> None:
    module = gristmill.nn.CrossEntropyLoss(one_pass=True, inplace=inplace)
    target = torch.randint(0, 5, (shape[0], *shape[2:]))
    x = torch.randn(shape, requires_grad=True)
    (found,) = torch.autograd.grad(module(x * 2, target) * 3, x)
    (expected,) = torch.autograd.grad(torch.nn.CrossEntropyLoss()(x * 2, target) * 3, x)
    torch.testing.assert_close(found, expected)


def test_bf16_gives_an_fp32_loss() -> None:
    x, target = torch.randn(64, 500).bfloat16(), torch.randint(0, 500, (64,))
    loss = gristmill.nn.CrossEntropyLoss()(x, target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, torch.nn.CrossEntropyLoss()(x.float(), target))


def test_class_probabilities_and_wrong_shapes_are_refused() -> None:
    module = gristmill.nn.CrossEntropyLoss()
    with pytest.raises(DtypeError, match=r"CrossEntropyLoss: .*class probabilities are not"):
        module(torch.randn(3, 5), torch.rand(3, 5))
    with pytest.raises(ArgumentError, match=r"CrossEntropyLoss: target .* \(3, 4\), got \(3, 5\)"):
        module(torch.randn(3, 5, 4), torch.zeros(3, 5).long())
    with pytest.raises(ArgumentError, match="CrossEntropyLoss: input must have a dim"):
        module(torch.tensor(1.0), torch.tensor(0))
    with pytest.raises(DtypeError, match="CrossEntropyLoss: input and target must be tensors"):
        module([1.0], torch.tensor(0))


def test_compiled() -> None:
    module = gristmill.nn.CrossEntropyLoss(label_smoothing=0.1)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x, target = torch.randn(3, 5, 4, requires_grad=True), torch.randint(0, 5, (3, 4))
    torch.testing.assert_close(compiled(x, target), module(x, target))
