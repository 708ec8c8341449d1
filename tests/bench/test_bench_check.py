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


def gradient_of_cross_entropy() -> tuple[torch.Tensor, torch.Tensor]:
    """(p - [j = target]) for rows of 32768 classes, and where the targets are."""
    logits = torch.randn(8, 32768, generator=torch.Generator().manual_seed(1))
    there = torch.zeros_like(logits, dtype=torch.bool)
    there[range(8), range(8)] = True
    return logits.softmax(-1) - there.float(), there


@pytest.mark.parametrize("factor", [0.0, 0.9, 1.1])
def test_one_large_entry_hides_nothing(factor: float) -> None:
    """All that is not the target's is small; a check by root mean square would not look at it."""
    right, there = gradient_of_cross_entropy()
    wrong = torch.where(there, right, factor * right).bfloat16()
    with pytest.raises(WrongResultError):
        check(wrong, right.bfloat16())
    with pytest.raises(WrongResultError):
        check(wrong, right.bfloat16(), coarse=True)


def test_a_wrong_entry_at_the_target_is_caught() -> None:
    right, there = gradient_of_cross_entropy()
    with pytest.raises(WrongResultError):
        check(torch.where(there, 1.1 * right, right).bfloat16(), right.bfloat16())


def test_small_probabilities_count() -> None:
    """Softmax over many columns: all values are far below 1, and a wrong one must still show."""
    y = torch.randn(4, 65536, generator=torch.Generator().manual_seed(1)).softmax(-1)
    wrong = y.clone()
    wrong[2] *= 1.05
    assert check((y * (1 + 2**-9)).bfloat16(), y.bfloat16()) <= 2**-6
    with pytest.raises(WrongResultError):
        check(wrong.bfloat16(), y.bfloat16())


def test_infinities_have_to_be_the_same(right: torch.Tensor) -> None:
    infinite = right.clone()
    infinite[3, 4] = -math.inf
    assert check(infinite.clone(), infinite) == 0.0
    for value in (math.inf, 0.0, math.nan):
        other = infinite.clone()
        other[3, 4] = value
        with pytest.raises(WrongResultError):
            check(other, infinite)
    other = infinite.clone()
    other[0, 0] += 1.0  # one infinity must not make everything else look small
    with pytest.raises(WrongResultError):
        check(other, infinite)


def test_a_coarse_implementation_may_give_a_narrower_dtype(right: torch.Tensor) -> None:
    rounded = right.bfloat16()
    with pytest.raises(WrongResultError, match=r"torch\.bfloat16 instead of .* torch\.float32"):
        check(rounded, right)
    assert 0 < check(rounded, right, coarse=True) < 2**-7
    with pytest.raises(WrongResultError, match="off by"):
        check(right * 1.1, right, coarse=True)
    with pytest.raises(WrongResultError, match="off by"):
        check((right * 1.2).bfloat16(), right, coarse=True)


def test_one_step_of_fp8_is_let_through_and_two_are_not(right: torch.Tensor) -> None:
    codes = right.to(torch.float8_e4m3fn)
    large = codes.float().abs() > 1
    up = (codes.view(torch.uint8) + large).view(torch.float8_e4m3fn)
    assert 0 < check(up, codes) <= 0.125
    further = (codes.view(torch.uint8) + 2 * large).view(torch.float8_e4m3fn)
    with pytest.raises(WrongResultError):
        check(further, codes)


def test_no_rows_is_no_error() -> None:
    assert check(torch.ones(0, 4), torch.ones(0, 4)) == 0.0
