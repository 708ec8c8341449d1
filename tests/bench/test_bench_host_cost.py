from __future__ import annotations

import pytest
import torch

from gristmill.bench import host_cost as host
from gristmill.bench.page import page
from gristmill.bench.report import markdown
from gristmill.bench.results import Results
from gristmill.errors import ArgumentError

CPU = torch.device("cpu")


OPS = ("rms_norm", "layer_norm", "softmax", "cross_entropy", "linear", "nvfp4_linear")


def test_host_measures_three_ways_to_call_each_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SHAPES", ((1, 64),))
    results, steps = Results({}), []
    host.run(CPU, results, steps.append, rounds=1)
    assert [(row["op"], row["mode"], row["impl"]) for row in results.rows] == [
        (op, mode, impl)
        for op in OPS
        for mode in ("forward", "forward with grad", "backward")
        for impl in ("gristmill", "eager")
    ]
    assert all(0.1 < row["host_us"] < 1e5 for row in results.rows)
    assert not results.timed()  # host time is no kernel time
    assert len(steps) == host.steps() == 18
    assert {row["suite"] for row in results.rows} == {"host_cost"}
    products = [row for row in results.rows if row["op"] == "nvfp4_linear"]
    assert {(row["M"], row["N"], row["K"], row["shape"]) for row in products} == {
        (1, 64, 64, "1x64x64")
    }
    # A run that goes on measures what is not there.
    left = [row for row in results.rows if row["mode"] != "backward"]
    gone_on = Results({}, list(left))
    monkeypatch.setattr(host, "time_host", lambda function, args: 7.0)
    host.run(CPU, gone_on, steps.append, rounds=1)
    assert gone_on.rows[: len(left)] == left
    assert {(row["mode"], row["host_us"]) for row in gone_on.rows[len(left) :]} == {
        ("backward", 7.0)
    }
    assert len(gone_on.rows) == len(results.rows)


def test_a_call_that_fails_is_told_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*args: object) -> host.Family:
        raise RuntimeError("no room\nand more")

    monkeypatch.setitem(host.CALLS, "softmax", broken)
    results = Results({"device": "cpu"})
    ops, shapes = ["softmax", "rms_norm"], [(2, 64)]
    host.run(CPU, results, lambda text: None, rounds=1, ops=ops, shapes=shapes)
    failed = [row for row in results.rows if row["op"] == "softmax"]
    assert [(row["impl"], row["error"]) for row in failed] == 3 * [
        ("gristmill", "RuntimeError: no room"),
        ("eager", "RuntimeError: no room"),
    ]
    assert sum("host_us" in row for row in results.rows) == 6
    for text in (markdown(results), page(results)):
        assert "rms_norm" in text
        assert (
            "gristmill was not timed on softmax 2x64 forward, 2x64 forward with grad, "
            "2x64 backward: RuntimeError: no room"
        ) in text


def test_one_op_at_shapes_by_hand() -> None:
    assert host.problems(["softmax", "linear"], [(2, 64), (3, 32, 32)]) == [
        ("softmax", (2, 64)),
        ("softmax", (3, 32)),
        ("linear", (2, 64)),
        ("linear", (3, 32)),
    ]
    assert host.steps(["softmax"], [(2, 64)]) == 3
    with pytest.raises(ArgumentError, match=r"unknown op 'sofmax' \(did you mean softmax\?\)"):
        host.problems(["sofmax"])


@pytest.mark.parametrize("op", OPS)
def test_both_sides_of_a_host_call_compute_the_same(op: str) -> None:
    calls = host.host_calls(op, "forward", (4, 32), torch.float32, CPU)
    (ours, args), (eager, eager_args) = calls["gristmill"], calls["eager"]
    assert args == eager_args
    torch.testing.assert_close(ours(*args), eager(*args))
    assert not any(arg.requires_grad for arg in args if isinstance(arg, torch.Tensor))
    graded = host.host_calls(op, "forward with grad", (4, 32), torch.float32, CPU)
    for function, arguments in graded.values():
        assert function(*arguments).requires_grad


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_host_backward_computes_every_gradient(op: str, dtype: torch.dtype) -> None:
    calls = host.host_calls(op, "backward", (4, 32), dtype, CPU)
    (ours, our_args), (eager, eager_args) = calls["gristmill"], calls["eager"]
    tolerance = {"rtol": 0.05, "atol": 0.02} if dtype == torch.bfloat16 else {}
    for _ in range(2):  # as a loop calls it
        gradients = zip(ours(*our_args), eager(*eager_args), strict=True)
        for left, right in gradients:
            torch.testing.assert_close(left, right, **tolerance)
            assert left.abs().max() > 0
