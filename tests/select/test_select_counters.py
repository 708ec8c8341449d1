from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from select_fakes import Fake, problem

from gristmill.jit import counters as jit_counters
from gristmill.select import Device, counters, reset_counters, resolve
from gristmill.select.counters import Counters
from gristmill.select.problem import Span
from gristmill.select.tuning import tune


def test_counts_from_many_threads_add_up() -> None:
    variants = [Fake("first")]
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda _: resolve("toy", variants, problem()), range(400)):
            pass
    assert counters()["plans"] == 400
    assert counters()["choices"] == {"toy:first": 400}


def test_compiler_counters_are_merged_and_reset_with_ours() -> None:
    jit_counters.add("compiles", 3)
    resolve("toy", [Fake("first")], problem())
    found = counters()
    assert (found["compiles"], found["plans"]) == (3, 1)
    reset_counters()
    assert (counters()["compiles"], counters()["plans"], counters()["choices"]) == (0, 0, {})


def test_the_dict_is_the_callers_own() -> None:
    counters()["choices"]["toy:first"] = 99
    assert counters()["choices"] == {}


def test_the_dict_has_the_keys_that_its_type_has_and_starts_at_zero() -> None:
    found = counters()
    assert set(found) == Counters.__required_keys__
    assert not any(found.values())


def test_a_tuning_is_counted_by_its_op() -> None:
    variants = [Fake("first"), Fake("second")]
    solved = problem(device=Device("cpu", "cpu"))
    tune("toy", variants, solved, (torch.ones(3),), key=solved.key(1), covers=Span(0, 4))
    assert counters()["tunings"] == {"toy": 1}
    reset_counters()
    assert counters()["tunings"] == {}
