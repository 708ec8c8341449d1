from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from select_fakes import Fake, problem

from gristmill.jit import counters as jit_counters
from gristmill.select import counters, reset_counters, resolve


def test_counts_from_many_threads_add_up() -> None:
    variants = [Fake("first")]
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda _: resolve("toy", variants, problem()), range(400)):
            pass
    assert counters()["plans"] == 400
    assert counters()["choices"] == {"toy:first": 400}


def test_compiler_counters_are_merged_and_reset_with_ours() -> None:
    before = set(jit_counters.snapshot())
    jit_counters.add("compiles", 3)
    resolve("toy", [Fake("first")], problem())
    found = counters()
    assert before | {"plans", "choices", "fallbacks"} == set(found)
    assert (found["compiles"], found["plans"]) == (3, 1)
    reset_counters()
    assert (counters()["compiles"], counters()["plans"], counters()["choices"]) == (0, 0, {})


def test_the_dict_is_the_callers_own() -> None:
    counters()["choices"]["toy:first"] = 99
    assert counters()["choices"] == {}
