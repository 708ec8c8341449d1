"""Many threads with many shapes get their own choice each, in bounded memory and little time."""

from __future__ import annotations

import random
import threading
import timeit
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from multikernel_helpers import fake_timing, set_tuning

import gristmill as gm
from gristmill.multikernel import MultiKernel
from gristmill.multikernel.variant import _FAILURES_KEPT
from gristmill.ops.op import PLANS_KEPT
from gristmill.ops.registry import OPS
from gristmill.select import Problem, Row, device_of, remember
from gristmill.select.sight import placed

THREADS, SHAPES, CALLS = 64, 200, 10_000


def measured(problem: Problem, variant: str, source_hash: str) -> Row:
    key, covers = placed(problem)
    return Row(
        key=key,
        covers=covers,
        variant=variant,
        config=None,
        us=1.0,
        spread_us=0.0,
        second=None,
        date="2026-11-15",
        source_hash=source_hash,
        rows=problem.rows,
        times={variant: 1.0},
        candidates=2,
        torch=torch.__version__,
    )


def hammer(call: Callable[[int], bool]) -> None:
    """CALLS calls with random shapes from THREADS threads; each must say that it was right."""
    start = threading.Barrier(THREADS)

    def work(seed: int) -> int:
        order = random.Random(seed)
        start.wait()
        return sum(not call(order.randrange(SHAPES)) for _ in range(CALLS // THREADS + 1))

    with ThreadPoolExecutor(THREADS) as pool:
        assert sum(pool.map(work, range(THREADS))) == 0


def test_every_call_gets_the_choice_of_its_own_shape() -> None:
    """Who ran is what the call returns, so it cannot be mistaken."""
    names = ["a", "b", "c"]
    kernels = {name: (lambda x, name=name: (name, len(x), x.shape[1])) for name in names}
    one = MultiKernel("hammered", kernels, hints=[8, 64])
    inputs = [torch.zeros(4 + 90 * (at % 2), 1 + at // 2) for at in range(SHAPES)]
    picks = [random.Random(at).choice(names) for at in range(SHAPES)]
    problems = [one.problem(x) for x in inputs]
    remember(
        device_of("cpu"),
        [
            measured(problem, pick, one.fingerprint)
            for problem, pick in zip(problems, picks, strict=True)
        ],
    )
    assert len({placed(problem)[0] for problem in problems}) == SHAPES
    hammer(lambda at: one(inputs[at]) == (picks[at], *inputs[at].shape))


def test_every_call_of_an_op_gets_the_choice_of_its_own_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    op = OPS["rms_norm"]
    variants = [one for one in op.variants if one.name in ("library", "reference")]
    inputs = [torch.ones(1 + at % 2 * 63, 8 + at // 2) for at in range(SHAPES)]
    picks = [random.Random(at).choice(variants) for at in range(SHAPES)]
    local = threading.local()
    for variant in variants:

        def bind(
            problem: Any, config: Any, variant: Any = variant, plain: Any = variant.bind
        ) -> Any:
            plan = plain(problem, config)

            def run(*args: Any) -> Any:
                local.ran = (variant.name, problem.rows, problem.dim("N"))
                return plan(*args)

            return run

        monkeypatch.setattr(variant, "bind", bind)
    problems = [op.problem(*op.bind_arguments(x)) for x in inputs]
    remember(
        device_of("cpu"),
        [
            measured(problem, pick.name, pick.source_hash(problem, None))
            for problem, pick in zip(problems, picks, strict=True)
        ],
    )

    def call(at: int) -> bool:
        gm.rms_norm(inputs[at])
        return bool(local.ran == (picks[at].name, *inputs[at].shape))

    try:
        hammer(call)
    finally:
        op.forget_plans()


def test_threads_with_names_of_their_own_do_not_see_each_other() -> None:
    one = MultiKernel("each", {"a": lambda x: "a", "b": lambda x: "b", "c": lambda x: "c"})
    x = torch.zeros(4)

    def work(seed: int) -> bool:
        name = "abc"[seed % 3]
        with one.use(name):
            return all(one(x) == name for _ in range(200))

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(48)))
    assert one(x) == "a"


def test_threads_that_meet_a_call_at_once_tune_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    set_tuning(monkeypatch)
    clock = fake_timing(monkeypatch, {"a": 9.0, "b": 1.0})
    one = MultiKernel("at_once", {"a": lambda x: "a", "b": lambda x: "b"})
    x, start = torch.zeros(4), threading.Barrier(16)

    def work(_: int) -> str:
        start.wait()
        return str(one(x))

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(work, range(16))) == {"b"}
    assert sorted(clock.runs) == ["a", "b"]


def test_memory_is_bounded() -> None:
    def never(x: torch.Tensor, word: str = "") -> torch.Tensor:
        raise ValueError("never")

    one = MultiKernel("bounded", {"never": never, "ever": lambda x, word="": x})
    x = torch.zeros(1)
    for at in range(PLANS_KEPT + 100):
        one(x, str(at))
    assert len(one._plans) <= PLANS_KEPT
    assert len(one.variants[0]._failures) <= _FAILURES_KEPT
    assert len(one._routes) == len(one._routes_by_kind) == 1
    # A tensor, a module, an object among the arguments is not kept alive by its plan.
    holder = MultiKernel("holder", {"a": lambda *args: None, "b": lambda *args: None})
    for _ in range(20):
        holder(torch.zeros(1), torch.nn.Linear(1, 1), object(), [torch.zeros(1)])
    assert len(holder._plans) == 1


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_call_costs_little_beyond_the_function(count: int) -> None:
    """Below 1.5 us on an H200's host; here only that nothing slow has crept in, in units of what
    Python needs to read a tensor's metadata: the bulk of it.
    """

    def bare(*tensors: torch.Tensor) -> None:
        return None

    one = MultiKernel("quick", {"a": bare, "b": bare})
    tensors = [torch.zeros(64, 128) for _ in range(count)]

    def metadata() -> list[Any]:
        return [
            (x.dtype, x.shape, x.is_contiguous(), x.get_device(), x.data_ptr()) for x in tensors
        ]

    def best(function: Callable[[], Any]) -> float:
        return min(timeit.repeat(function, number=200, repeat=200)) / 200 * 1e6

    one(*tensors)
    extra = best(lambda: one(*tensors)) - best(lambda: bare(*tensors))
    assert extra < 3.0 * best(metadata)
