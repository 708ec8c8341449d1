"""What is hard for a chooser, each with either kernel as the winner: nothing but the time differs.

Every call is compared bit by bit with the winning kernel called alone, and so is all that it wrote
to and every random number that came after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from multikernel_cases import BY_NAME, CASES, Case, batch_norm_library
from multikernel_helpers import (
    chosen,
    copied,
    fake_timing,
    forget_choices,
    same_bits,
    set_tuning,
)

import gristmill as gm
from gristmill.multikernel import MultiKernel
from gristmill.settings import reload_settings

WINNERS = [(case, winner) for case in CASES for winner in case.possible]
IDS = [f"{case.name}-{winner}" for case, winner in WINNERS]


def alone(case: Case, winner: str, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...], Any]:
    """What a kernel gives by itself, its arguments afterwards, and the next random number."""
    mine = copied(args)
    torch.manual_seed(7)
    result = case.kernels[winner](*mine)
    return result, mine, torch.rand(1)


def check(case: Case, winner: str, call: Callable[..., Any], rows: int = 50) -> None:
    args = case.make(rows)
    expected, after, following = alone(case, winner, args)
    torch.manual_seed(7)
    result = call(*args)
    assert same_bits(result, expected)
    assert same_bits(args, after)
    assert same_bits(torch.rand(1), following)


def winning(monkeypatch: pytest.MonkeyPatch, winner: str) -> list[str]:
    others = {"a": 20.0, "b": 20.0}
    return fake_timing(monkeypatch, {**others, winner: 5.0}).runs


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels_of_a_case_compute_the_same(case: Case) -> None:
    """What the cases stand on: but for rounding (and for dropout, luck) they agree."""
    args = case.make(50)
    results = [alone(case, winner, args) for winner in case.possible]
    for result, mine, _ in results[1:]:
        for one, other in ((result, results[0][0]), *zip(mine, results[0][1], strict=True)):
            if one is not None and case.name != "scratch":
                torch.testing.assert_close(one, other, rtol=0, atol=case.tolerance)
    if case.name == "scratch":
        torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=case.tolerance)


@pytest.mark.parametrize("table", ["on", "off"])
@pytest.mark.parametrize(("case", "winner"), WINNERS, ids=IDS)
def test_winner_runs_as_if_it_were_alone(
    case: Case, winner: str, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tuned by the first call, then by what is remembered; with the user's table and without."""
    monkeypatch.setenv("GRISTMILL_TABLE", table)
    set_tuning(monkeypatch)
    runs = winning(monkeypatch, winner)
    one = MultiKernel(f"case_{case.name}", case.kernels)
    check(case, winner, one)
    assert sorted(runs) == ["a", "b"]
    check(case, winner, one)
    check(case, winner, one, rows=55)  # another shape of the same bucket
    assert len(runs) == 2 or case.possible == ("b",)

    # What a fresh process finds: the row in the file, or nothing at all.
    forget_choices()
    set_tuning(monkeypatch, "off")
    runs.clear()
    first = case.possible[0]
    check(case, winner if table == "on" else first, one)
    assert runs == []


@pytest.mark.parametrize(("case", "winner"), WINNERS, ids=IDS)
def test_forced_kernel_runs_alone(case: Case, winner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed, and what was measured does not count."""
    one = MultiKernel(f"case_{case.name}", case.kernels)
    set_tuning(monkeypatch)
    other = next(kernel for kernel in case.kernels if kernel != winner)
    runs = winning(monkeypatch, other)
    with one.use(winner):
        check(case, winner, one)
    with gm.use(one.name, winner):
        check(case, winner, one)
    monkeypatch.setenv("GRISTMILL_USE", f"{one.name}:{winner}")
    reload_settings()
    one.forget_plans()
    check(case, winner, one)
    assert runs == []


@pytest.mark.parametrize(("case", "winner"), WINNERS, ids=IDS)
def test_explicit_tuning_leaves_everything_as_it_was(
    case: Case, winner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    winning(monkeypatch, winner)
    one = MultiKernel(f"case_{case.name}", case.kernels)
    args = case.make(50)
    before = copied(args)
    torch.manual_seed(7)
    following = torch.rand(1)
    torch.manual_seed(7)
    outcome = one.tune(*args)
    assert outcome is not None
    assert outcome.row.variant == winner
    assert same_bits(args, before)
    assert same_bits(torch.rand(1), following)
    assert chosen(one, *args) == winner


def test_only_one_kernel_is_possible_without_fuss(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It falls back with no warning, does not try again, and says why when asked."""
    case = BY_NAME["sort"]
    calls = []

    def network(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return case.kernels["a"](x)

    one = MultiKernel("sorting", {"a": network, "b": case.kernels["b"]})
    x = torch.randn(50, 100)
    for _ in range(3):
        assert same_bits(one(x), case.kernels["b"](x))
    assert len(calls) == 1
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    found = one.explain(x)
    assert found.chosen == "b"
    assert "raised NotImplementedError: a network sorts powers of two" in str(found)
    # Another shape may work: it is tried there, once.
    one(torch.randn(64, 128))
    assert len(calls) == 2


def test_mixed_layouts_are_warned_about_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case = BY_NAME["mixed_layouts"]
    one = MultiKernel("images", case.kernels)
    x, y = case.make(4)

    def warnings() -> Iterator[str]:
        return (it.getMessage() for it in caplog.records if it.levelname == "WARNING")

    one(y, y)
    one(x, x)
    one(x[:, :1], y[:, :1])  # one channel: both orders at once
    assert not list(warnings())
    one(x, y)
    one(x[:3], y[:3])
    (message,) = warnings()
    assert "x is channels_last, y is contiguous" in message
    one(y, x)
    assert len(list(warnings())) == 2

    alone = MultiKernel("images_alone", {"a": case.kernels["a"]})
    alone(x, y)
    assert len(list(warnings())) == 2


def test_layouts_never_share_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME["mixed_layouts"]
    x, y = case.make(4)
    one = MultiKernel("images", case.kernels)

    def us(name: str, given: Any) -> float:
        flat = given[1][0].is_contiguous()
        return 5.0 if name == ("a" if flat else "b") else 20.0

    fake_timing(monkeypatch, us)
    for first in (x, y):
        for second in (x, y):
            one.tune(first, second)
    assert [chosen(one, first, y) for first in (x, y)] == ["b", "a"]
    assert [chosen(one, first, x) for first in (x, y)] == ["b", "a"]


def test_statistics_after_tuning_and_one_call_are_those_of_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the clock, and with the statistics in a module: nobody's arguments."""
    set_tuning(monkeypatch)
    x = torch.randn(32, 24)
    module, truth = torch.nn.BatchNorm1d(24), torch.nn.BatchNorm1d(24)
    one = MultiKernel(
        "norm_modules",
        {"module": module, "method": module.forward, "typed": lambda x: module(x.float())},
    )
    assert same_bits(one(x), truth(x))
    assert same_bits(list(module.buffers()), list(truth.buffers()))
    one(x)
    truth(x)
    assert same_bits(list(module.buffers()), list(truth.buffers()))

    as_argument = MultiKernel(
        "norm_argument",
        {
            "a": lambda module, x: module(x),
            "b": lambda m, x: batch_norm_library(
                x, m.running_mean, m.running_var, m.weight, m.bias
            ),
        },
    )
    expected = copied([truth.running_mean, truth.running_var])
    as_argument.tune(module, x)
    assert same_bits([module.running_mean, module.running_var], list(expected))


def test_same_tensor_in_two_places_is_updated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read and written, and two overlapping views of one buffer: the copies overlap as well."""
    case = BY_NAME["in_place"]
    set_tuning(monkeypatch)
    for winner in "ab":
        winning(monkeypatch, winner)
        one = MultiKernel(f"twice_{winner}", case.kernels)
        x = torch.arange(12.0).view(3, 4)
        one(x, x)
        assert same_bits(x, 2 * torch.arange(12.0).view(3, 4))
        buffer = torch.arange(20.0)
        expected = buffer.clone()
        case.kernels[winner](expected[:8].view(2, 4), expected[8:16].view(2, 4))
        one(buffer[:8].view(2, 4), buffer[8:16].view(2, 4))
        assert same_bits(buffer, expected)
