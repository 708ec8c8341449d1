from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gristmill.bench import host
from gristmill.bench.results import Results
from gristmill.bench.suites import OPS
from gristmill.errors import GristmillError

CPU = torch.device("cpu")


def test_host_measures_three_ways_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SHAPES", ((1, 64),))
    results, steps = Results({}), []
    host.run_host(CPU, results, steps.append, rounds=1)
    assert [(row["mode"], row["impl"]) for row in results.rows] == [
        (mode, impl)
        for mode in ("forward", "forward with grad", "backward")
        for impl in ("gristmill", "eager")
    ]
    assert all(0.1 < row["host_us"] < 1e5 for row in results.rows)
    assert not results.timed()  # host time is no kernel time
    assert len(steps) == 3


def test_host_backward_computes_both_gradients() -> None:
    calls = host._host_calls("backward", 4, 32, torch.float32, CPU)
    (ours, our_args), (eager, eager_args) = calls["gristmill"], calls["eager"]
    for left, right in zip(ours(*our_args), eager(*eager_args), strict=True):
        torch.testing.assert_close(left, right)
        assert left.abs().max() > 0


def test_start_measures_a_fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "OPS", {"rms_norm": OPS["rms_norm"]})
    results = Results({})
    host.run_start(CPU, results, lambda text: None, repeats=1)
    assert [row["cache"] for row in results.rows] == ["empty", "warm"]
    for row in results.rows:
        assert row["error"] is None
        assert 0 < row["first_call_s"] < 60
        assert row["import_s"] > 0.001  # the import really happened there
        assert row["variant"] in ("library", "reference")
        assert row["compiles"] == 0
        assert "us" not in row


def test_a_child_that_fails_is_told(tmp_path: Path) -> None:
    with pytest.raises(GristmillError, match=r"first call of no_op failed .*KeyError"):
        host._first_call("no_op", (1, 64), "bfloat16", CPU, tmp_path)
