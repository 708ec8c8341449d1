"""Many threads with many shapes never get each other's choice, and nothing grows without end."""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from select_fakes import H200, Fake, problem, row_of, table_of

import gristmill
from gristmill import log
from gristmill.errors import DriverError
from gristmill.log import warn_once
from gristmill.ops import op as op_module
from gristmill.ops.rms_norm import RMS_NORM
from gristmill.select import (
    Problem,
    Variant,
    chooser,
    device_of,
    ranked,
    register_variants,
    remember,
    reset_tables,
    tables_for,
)
from gristmill.select.sight import placed
from gristmill.select.tables import user_table_path

THREADS, SHAPES, CALLS = 64, 200, 10_000
NAMES = ("one", "two", "three", "four")
CPU = device_of("cpu")


class Telling(Variant):
    """Its plan says who was bound, and for which problem, whatever it is called with."""

    summary = "tells who it is"

    def __init__(self, name: str) -> None:
        self.name = name

    def supports(self, problem: Problem) -> str | None:
        return None

    def bind(self, problem: Problem, config: Any) -> Callable[..., Any]:
        found = (self.name, problem.rows, problem.dim("N"))
        return lambda *args: found


@pytest.fixture
def telling(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Telling]]:
    """RMSNorm with variants that tell which they are."""
    variants = [Telling(name) for name in NAMES]
    monkeypatch.setattr(RMS_NORM, "variants", tuple(variants))
    RMS_NORM.forget_plans()
    register_variants("rms_norm", NAMES)
    # Threads take turns as often as can be.
    pause = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield variants
    sys.setswitchinterval(pause)
    monkeypatch.undo()
    register_variants("rms_norm", [variant.name for variant in RMS_NORM.variants])
    RMS_NORM.forget_plans()


def shapes() -> list[tuple[int, int]]:
    """Several rows of the table for each length: neighbours share keys but for one word."""
    return [
        (rows, columns)
        for columns in range(8, 208, 8)
        for rows in (1, 9, 20, 64, 90, 256, 700, 3000)
    ]


def asked(rows: int, columns: int) -> Problem:
    return RMS_NORM.problem(*RMS_NORM.bind_arguments(torch.empty(rows, columns)))


def run_threads(work: Callable[[int], None]) -> None:
    barrier = threading.Barrier(THREADS)
    errors: list[BaseException] = []

    def begin(number: int) -> None:
        try:
            barrier.wait(60)
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.parametrize("kept", [op_module.PLANS_KEPT, 50], ids=["all kept", "often forgotten"])
def test_every_call_gets_the_choice_of_its_own_shape(
    telling: list[Telling], monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    monkeypatch.setattr(op_module, "PLANS_KEPT", kept)
    expected: dict[tuple[int, int], str] = {}
    winners: dict[str, Telling] = {}
    for rows, columns in shapes():
        # 9 and 20 rows are covered by one row of the table, as are 64 and 90.
        key = placed(asked(rows, columns))[0]
        winner = winners.setdefault(key, telling[len(winners) % len(telling)])
        expected[rows, columns] = winner.name
    rows_of = {}
    for rows, columns in shapes():
        row = row_of(asked(rows, columns), winners[placed(asked(rows, columns))[0]])
        rows_of[row.key] = row
    assert set(rows_of) == set(winners)
    table_of(*rows_of.values(), device=CPU).save(user_table_path(CPU))
    reset_tables()
    assert len(expected) == SHAPES
    assert len(set(expected.values())) == len(NAMES)

    inputs = {shape: torch.empty(shape) for shape in expected}
    wrong: list[Any] = []
    counts: Counter[tuple[int, int]] = Counter()
    lock = threading.Lock()

    def call(number: int) -> None:
        order = random.Random(number)
        share = CALLS // THREADS + (number < CALLS % THREADS)
        mine: Counter[tuple[int, int]] = Counter()
        for _ in range(share):
            rows, columns = shape = order.choice(list(inputs))
            found: Any = gristmill.rms_norm(inputs[shape])
            if found != (expected[shape], rows, columns):
                wrong.append((shape, expected[shape], found))
            mine[shape] += 1
        with lock:
            counts.update(mine)

    run_threads(call)
    assert wrong == []
    assert counts.total() == CALLS
    assert len(counts) == SHAPES
    assert len(RMS_NORM._plans) <= kept + THREADS


def test_rows_that_come_while_others_choose_are_never_half_there(telling: list[Telling]) -> None:
    """One thread adds rows that take from each other; the others must find the row of their size.

    What is covered from the beginning is covered at every moment.
    """
    splits = [
        row_of(asked(size, 64), telling[1], stop=size, covers=(size, 2048))
        for size in range(300, 900, 7)
    ]
    remember(CPU, [row_of(asked(1000, 64), telling[2], stop=1, covers=(0, 2048))], keep=False)
    allowed = {"two", "three"}
    seen: set[str] = set()

    def work(number: int) -> None:
        if number == 0:
            for row in splits:
                remember(CPU, [row], keep=False)
            return
        for size in range(300, 900, 29):
            seen.add(ranked("rms_norm", telling, asked(size, 64))[0].variant.name)

    run_threads(work)
    assert seen <= allowed
    for size in range(300, 2049, 7):
        assert ranked("rms_norm", telling, asked(size, 64))[0].variant.name == "two"
    assert ranked("rms_norm", telling, asked(299, 64))[0].variant.name == "three"


def test_a_choice_in_flight_does_not_bring_back_what_is_forgotten(
    telling: list[Telling], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row comes, and plans are forgotten, after a first call has chosen and before it is done."""
    x = torch.empty(20, 64)
    resolve = op_module.resolve

    def interrupted(*args: Any) -> Any:
        found = resolve(*args)
        remember(CPU, [row_of(asked(20, 64), telling[1])], keep=False)
        RMS_NORM.forget_plans()
        return found

    monkeypatch.setattr(op_module, "resolve", interrupted)
    assert gristmill.rms_norm(x)[0] == "one"
    monkeypatch.setattr(op_module, "resolve", resolve)
    assert gristmill.rms_norm(x)[0] == "two"
    assert len(RMS_NORM._plans) == 1


# nothing grows without end


def test_plans_are_bounded(telling: list[Telling], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_module, "PLANS_KEPT", 100)
    for rows in range(1, 350):
        gristmill.rms_norm(torch.empty(rows, 8))
    assert len(RMS_NORM._plans) <= 100


def test_failures_are_bounded_and_the_last_ones_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chooser, "_FAILURES_KEPT", 20)
    broken, good = Fake("first", failure=DriverError("no")), Fake("second")
    problems = [problem(dims=(("N", number),)) for number in range(60)]
    for one in problems:
        chooser.resolve("toy", [broken, good], one)
    assert len(chooser._FAILURES) == 20
    assert chooser.failure_of(problems[-1], broken) == "DriverError: no"
    assert chooser.failure_of(problems[0], broken) is None


def test_reasons_for_ignored_rows_are_bounded_by_the_rows() -> None:
    stale = row_of(problem(), Fake("first"), source_hash="0" * 16)
    table = table_of(stale)
    for rows in range(1, 3000):
        table.lookup(problem(rows), [Fake("first")])
        table.lookup(problem(rows, dims=(("N", rows),)), [Fake("first")])
    assert list(table.ignored) == [stale.key]


def test_warnings_are_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log, "_GIVEN_KEPT", 10)
    for number in range(50):
        warn_once(f"key {number}", "a warning")
        warn_once(f"key {number}", "not again")
    assert len(log._given) == 10
    assert caplog.messages == ["a warning"] * 50


def test_tables_are_held_once_per_kind_of_device() -> None:
    for index in range(16):
        tables_for(replace(H200, index=index))
    assert tables_for(replace(H200, index=3)) is tables_for(H200)
