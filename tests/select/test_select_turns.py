"""A thread that waits for its turn to tune does not wait for ever: its turn may depend on it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from select_sight import CPU, KEY, norm

import gristmill
from gristmill.select import sight, tables_for, tuning, turns
from gristmill.select.turns import Turns

WAIT_S = 0.3


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "WAIT_S", WAIT_S)


@contextmanager
def taken_by_another(taken: Turns) -> Iterator[None]:
    """Another thread has its turn, and keeps it until the end of the block."""
    begun, over = threading.Event(), threading.Event()

    def keep() -> None:
        with taken.turn() as mine:
            assert mine
            begun.set()
            over.wait(60)

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    assert begun.wait(10)
    try:
        yield
    finally:
        over.set()
        thread.join()


def in_time(work: Callable[[], Any], limit_s: float = 20.0) -> Any:
    """What `work` gives on a thread of its own, which must end: a test must not hang."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(limit_s)
    assert not thread.is_alive(), "it waits for ever"
    return results[0]


def test_one_at_a_time_in_any_depth() -> None:
    taken, inside, most = Turns(), 0, 0

    def work() -> None:
        nonlocal inside, most
        with taken.turn() as outer, taken.turn() as inner:
            assert outer
            assert inner
            inside += 1
            most = max(most, inside)
            time.sleep(0.005)
            inside -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_a_wait_has_an_end_and_the_next_one_does_not_wait_as_well() -> None:
    taken = Turns()
    with taken_by_another(taken):
        start = time.monotonic()
        with taken.turn() as mine:
            assert not mine
        first = time.monotonic() - start
        for _ in range(20):
            with taken.turn() as mine:
                assert not mine
        assert WAIT_S <= first < 20 * WAIT_S
        assert time.monotonic() - start - first < WAIT_S
    with taken.turn() as mine:
        assert mine
    # What happened once is forgotten: the next one is waited for again.
    with taken_by_another(taken):
        start = time.monotonic()
        with taken.turn(0.5) as mine:
            assert not mine
        assert time.monotonic() - start >= 0.5 * WAIT_S


def test_an_error_ends_a_turn() -> None:
    taken = Turns()
    with pytest.raises(ValueError, match="no"), taken.turn():
        raise ValueError("no")

    def has_turn() -> bool:
        with taken.turn() as mine:
            return mine

    assert in_time(has_turn)


def test_who_gets_no_turn_runs_the_usual_choice_with_one_warning(
    first_call: Any, tuned: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    first_call()
    with taken_by_another(sight._TUNING), caplog.at_level(logging.WARNING, logger="gristmill"):
        for rows in (20, 500):
            found = in_time(lambda rows=rows: norm(rows))
            assert torch.allclose(found, torch.ones(rows, 64))
    assert tuned == []
    (record,) = caplog.records
    assert f"rms_norm: {KEY} is not tuned, the usual choice is taken" in record.getMessage()
    # What was not tuned then is not tried again, all else is.
    norm(20)
    assert tuned == []
    norm(5000)
    assert tuned == [KEY.replace("rows=16", "rows=4096")]


def test_with_ranks_it_says_so_to_all(
    first_call: Any, tuned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has claimed the problem: others wait for its word, and not longer than they would."""
    first_call()
    said: dict[str, Any] = {}
    seconds: list[float] = []

    def agree(topic: str, decide: Callable[[], str | None]) -> str | None:
        start = time.monotonic()
        said[topic] = decide()
        seconds.append(time.monotonic() - start)
        return said[topic]

    pretended = SimpleNamespace(alone=lambda: False, agree=agree)
    monkeypatch.setattr(sight, "agreement", pretended)
    with taken_by_another(sight._TUNING):
        assert torch.allclose(in_time(norm), torch.ones(20, 64))
    assert said == {f"tune cpu {KEY}": None}
    assert tuned == []
    assert tables_for(CPU)[0].table.rows == {}
    assert seconds[0] >= sight._RANKS_SHARE * WAIT_S


def test_a_measurement_that_gets_no_turn_is_made_all_the_same(
    first_call: Any, tuned: list[str]
) -> None:
    first_call()
    with taken_by_another(tuning._MEASURING):
        start = time.monotonic()
        in_time(norm)
        assert time.monotonic() - start >= WAIT_S
    assert tuned == [KEY]
    assert list(tables_for(CPU)[0].table.rows) == [KEY]


def test_a_kernel_that_waits_for_a_thread_which_meets_a_new_problem(
    first_call: Any, tuned: list[str]
) -> None:
    """As a backward pass on CUDA does inside a kernel that is being timed."""
    first_call()

    def elsewhere(x: torch.Tensor) -> torch.Tensor:
        results: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: results.append(gristmill.rms_norm(x)), daemon=True)
        thread.start()
        thread.join()
        return results[0]

    def here(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6)

    one = gristmill.MultiKernel("elsewhere", {"elsewhere": elsewhere, "here": here})
    x = torch.randn(20, 64)
    torch.testing.assert_close(in_time(lambda: one(x)), here(x))
    (key,) = tuned
    assert key.startswith("multikernel/elsewhere ")
