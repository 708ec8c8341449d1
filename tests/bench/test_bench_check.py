from __future__ import annotations

import math

import pytest
import torch

from gristmill.bench.check import WrongResultError, check


@pytest.fixture
def right() -> torch.Tensor:
    return torch.randn(64, 33, generator=torch.Generator().manual_seed(1))


def test_one_rounding_more_is_let_through(right: torch.Tensor) -> None:
    rounded = right.bfloat16()
    shifted = (rounded.float() * (1 + 2**-8)).bfloat16()
    assert not torch.equal(rounded, shifted)
    assert 0 < check(shifted, rounded) <= 2**-7


def test_equal_is_zero(right: torch.Tensor) -> None:
    assert check((right, right), (right.clone(), right.clone())) == 0.0


def test_one_wrong_element_is_caught(right: torch.Tensor) -> None:
    wrong = right.bfloat16()
    wrong[63, 32] += 0.1
    with pytest.raises(WrongResultError, match="output 1 is off by"):
        check((right, wrong), (right, right.bfloat16()))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_number_that_is_none_is_caught(right: torch.Tensor, bad: float) -> None:
    wrong = right.clone()
    wrong[0, 0] = bad
    with pytest.raises(WrongResultError):
        check(wrong, right)


def test_near_zero_the_size_of_the_tensor_counts(right: torch.Tensor) -> None:
    left, expected = right.clone(), right.clone()
    left[0, 0], expected[0, 0] = 1e-6, 0.0
    assert check(left, expected) < 1e-5


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        ((torch.ones(2, 2),), "1 outputs instead of 2"),
        ((torch.ones(2, 2), torch.ones(3)), r"output 1 is \(3,\)"),
        ((torch.ones(2, 2), torch.ones(2).half()), "torch.float16"),
    ],
)
def test_another_form_is_caught(outputs: tuple[torch.Tensor, ...], reason: str) -> None:
    with pytest.raises(WrongResultError, match=reason):
        check(outputs, (torch.ones(2, 2), torch.ones(2)))


def test_no_rows_is_no_error() -> None:
    assert check(torch.ones(0, 4), torch.ones(0, 4)) == 0.0
