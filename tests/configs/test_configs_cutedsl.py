"""The launches of rms_norm's variant in the CuTe DSL, by a model of who has what of a row.

The kernel itself runs only where the DSL is installed. How it deals vectors to threads tells
which launches are right: vector i of thread t has number t + i * lanes in the row.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from row_problems import H200

hypothesis = pytest.importorskip("hypothesis")

from gristmill.ops.registry import OPS  # noqa: E402
from gristmill.ops.rms_norm import cutedsl  # noqa: E402
from gristmill.ops.rms_norm.cutedsl import CUTEDSL, CuteConfig  # noqa: E402
from gristmill.select.problem import Problem  # noqa: E402

st = hypothesis.strategies
COLUMNS = (1, 2, 7, 31, 64, 129, 256, 520, 1000, 1024, 4095, 5120, 8192, 16383, 16384, 32766, 32768)
HUGE = 10**4000  # JSON has integers of 4300 digits at most
ODD = (0, -1, -32, 3, 5, 33, 1056, 2**31, HUGE, -HUGE)


@pytest.fixture(autouse=True)
def _as_if_the_dsl_were_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutedsl, "why_missing", lambda: None)


def problem_of(columns: int, dtype: torch.dtype = torch.bfloat16) -> Problem:
    op = OPS["rms_norm"]
    return op.problem(*op.example((64, columns), dtype, "meta"), device=H200)


def check(problem: Problem, config: CuteConfig) -> None:
    """Each vector of a row is one thread's, and a block's threads agree in ways the kernel has."""
    layout = problem.layout.layout
    threads, lanes, items = config.threads, config.lanes, config.items
    owners = [t + i * lanes for t in range(lanes) for i in range(items)]
    assert len(owners) == len(set(owners))
    assert set(range(layout.vectors)) <= set(owners)
    assert threads % 32 == 0
    assert 32 <= threads <= 1024
    assert threads % lanes == 0
    # Lanes of a warp agree by shuffles at distances that are powers of two; else a whole block.
    assert lanes in (4, 8, 16, 32) or lanes == threads
    assert items * layout.vector <= 32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_its_own_launches_are_accepted(dtype: torch.dtype) -> None:
    for columns in COLUMNS:
        problem = problem_of(columns, dtype)
        assert CUTEDSL.supports(problem) is None
        for config in CUTEDSL.configs(problem):
            assert CUTEDSL.rejects(problem, config) is None, (columns, config)
            check(problem, config)


@hypothesis.settings(max_examples=1000, deadline=None, derandomize=True, database=None)
@hypothesis.given(data=st.data())
def test_what_is_accepted_covers_each_row_once(data: Any) -> None:
    problem = problem_of(
        data.draw(st.sampled_from(COLUMNS)),
        data.draw(st.sampled_from([torch.bfloat16, torch.float32])),
    )
    own = data.draw(st.sampled_from(CUTEDSL.configs(problem)))
    anything = st.one_of(st.sampled_from(ODD), st.integers(-2, 40), st.sampled_from([64, 128, 256]))
    values = {
        name: data.draw(st.one_of(st.just(getattr(own, name)), anything))
        for name in ("threads", "lanes", "items")
    }
    config = CuteConfig(**values)
    reason = CUTEDSL.rejects(problem, config)
    if reason is None:
        check(problem, config)
    else:
        assert config not in CUTEDSL.configs(problem)
        assert 0 < len(reason) < 100


def test_reasons() -> None:
    problem = problem_of(4096)
    assert CUTEDSL.config(problem) == CuteConfig(256, 256, 2)
    for values, reason in (
        ((256, 256, 1), "threads=256 is not 512 with items=1"),
        ((256, 128, 2), "lanes=128 is not 256 with items=2, threads=256"),
        ((512, 512, 2), "threads=512 is not 256 with items=2"),
        ((256, 256, 0), "items=0 is not 1, 2, 3 or 4"),
        ((256, 0, 2), "lanes=0 is not 256 with items=2, threads=256"),
        ((0, 256, 2), "threads=0 is not 256 with items=2"),
    ):
        assert CUTEDSL.rejects(problem, CuteConfig(*values)) == reason
    few = CUTEDSL.rejects(problem_of(16384), CuteConfig(1024, 1024, 1))
    assert few == "items=1 is not 2, 3 or 4"
