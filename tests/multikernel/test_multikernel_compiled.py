"""The same behaviours inside a compiled graph, through Inductor's C++ wrapper.

The graph holds one op, and the kernel is chosen when it runs: one compile serves both winners.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from multikernel_cases import BY_NAME, CASES, Case
from multikernel_helpers import fake_timing, forget_choices, same_bits, set_tuning
from test_multikernel_behaviours import alone
from torch._dynamo.testing import CompileCounterWithBackend

from gristmill.multikernel import MultiKernel
from gristmill.select import counters

# One whose result is used, one that writes, one where a kernel fails; the others are `long`.
QUICK = ("layer_norm", "in_place", "sort")
MARKED = [
    pytest.param(case, marks=() if case.name in QUICK else pytest.mark.long, id=case.name)
    for case in CASES
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def compiled(one: MultiKernel, backend: str = "inductor") -> Callable[..., Any]:
    """A graph in which something happens before and after: scaled by powers of two, exactly."""

    def function(*args: torch.Tensor) -> Any:
        first = args[0] * 2
        result = one(first * 0.5, *args[1:])
        return None if result is None else (result * 4) * 0.25

    return torch.compile(function, fullgraph=True, backend=backend)


def check(case: Case, winner: str, call: Callable[..., Any]) -> None:
    args = case.make(50)
    expected, after, following = alone(case, winner, args)
    torch.manual_seed(7)
    result = call(*args)
    assert same_bits(result, expected)
    assert same_bits(args, after)
    assert same_bits(torch.rand(1), following)


@pytest.mark.parametrize("case", MARKED)
def test_winner_runs_in_a_graph_as_if_it_were_alone(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = MultiKernel(f"compiled_{case.name}", case.kernels, schema=case.schema, fake=case.fake)
    with torch._inductor.config.patch(cpp_wrapper=True):
        call = compiled(one)
        for table in ("off", "on"):
            monkeypatch.setenv("GRISTMILL_TABLE", table)
            for winner in case.possible:
                set_tuning(monkeypatch)
                fake_timing(monkeypatch, {"a": 20.0, "b": 20.0, winner: 5.0})
                forget_choices()
                if table == "on":
                    one.tune(*case.make(50))  # over the row of the winner before
                check(case, winner, call)
                check(case, winner, call)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_winner_runs_in_a_traced_graph_as_if_it_were_alone(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them quickly: the same graph with all of torch.compile but the code it writes."""
    one = MultiKernel(f"traced_{case.name}", case.kernels, schema=case.schema, fake=case.fake)
    monkeypatch.setenv("GRISTMILL_TABLE", "off")
    set_tuning(monkeypatch)
    call = compiled(one, backend="aot_eager")
    for winner in case.possible:
        fake_timing(monkeypatch, {"a": 20.0, "b": 20.0, winner: 5.0})
        forget_choices()
        check(case, winner, call)
        check(case, winner, call)


def test_size_is_symbolic_and_chosen_for_when_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME["softmax"]
    one = MultiKernel("symbolic", case.kernels, hints=[4, 64], schema=case.schema, fake=case.fake)
    fake_timing(
        monkeypatch, lambda name, given: 5.0 if (name == "a") == (len(given[1][0]) < 16) else 9.0
    )
    one.tune_at_hints(case.make)
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(lambda x: one(x * 2), fullgraph=True, dynamic=True, backend=counter)
    before = counters()["choices"]
    for rows in (3, 10, 20, 33, 64):
        x = case.make(rows)[0]
        winner = "a" if rows <= 16 else "b"
        assert same_bits(call(x), case.kernels[winner](x * 2))
    made = counters()["choices"]
    assert counter.frame_count == 1
    assert made["symbolic:a"] - before.get("symbolic:a", 0) == 2
    assert made["symbolic:b"] - before.get("symbolic:b", 0) == 3


def test_without_a_schema_a_graph_says_what_is_missing() -> None:
    case = BY_NAME["softmax"]
    one = MultiKernel("no_schema", case.kernels)
    x = case.make(8)[0]
    whole = torch.compile(lambda x: one(x) * 2, fullgraph=True, backend="eager")
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"give MultiKernel.* schema= and a fake="
    ):
        whole(x)
    # Where graphs may break it runs between them, and chooses as ever.
    broken = torch.compile(lambda x: one(x * 2) * 2, backend="eager")
    with one.use("b"):
        assert same_bits(broken(x), case.kernels["b"](x * 2) * 2)
    assert same_bits(broken(x), case.kernels["a"](x * 2) * 2)
