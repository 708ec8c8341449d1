"""Ids: which runner they mean, for how long, and what is said when they mean none."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from runners_helpers import Returns, Times, linear_gemm, weight

from gristmill.errors import ArgumentError, DtypeError, UnknownRunner
from gristmill.runners import register_runner, registry
from gristmill.runners.registry import NAMED, Registry, id_of

x = torch.ones(2, 8)


def found(runner_id: int) -> float:
    """What the runner behind an id says."""
    return float(linear_gemm(x, runner_id, 1)[0, 0])


def says(value: float) -> Returns:
    return Returns(lambda x: x.new_full((*x.shape[:-1], 1), value))


# --- ids


def test_named_ids_are_positive_marked_and_spread_out() -> None:
    ids = [id_of(f"model.layers.{number}.mlp") for number in range(1000)] + [id_of("ü")]
    assert all(NAMED <= runner_id < 2**63 for runner_id in ids)
    assert len({runner_id >> 42 for runner_id in ids}) > 990


def test_a_named_id_never_changes() -> None:
    """Saved graphs hold these numbers: another hash would orphan every one of them."""
    assert id_of("model.layers.0.mlp.down_proj") == 7274876398453412748
    assert id_of("layer") != id_of("layer ")


def test_unnamed_ids_count_up_in_the_other_half() -> None:
    runner = says(1)
    first, second = register_runner(runner), register_runner(runner)
    assert second == first + 1
    assert 0 < first < second < NAMED
    assert found(first) == found(second) == 1.0


def test_unnamed_ids_begin_at_random() -> None:
    starts = {Registry().add(x, None, False) for _ in range(8) for x in [says(1)]}
    assert len(starts) == 8
    assert max(starts) - min(starts) > 2**40


def test_a_name_and_no_name_can_lead_to_one_runner() -> None:
    runner = says(3)
    assert found(register_runner(runner)) == found(register_runner(runner, "both ways")) == 3.0


# --- names


def test_the_same_object_can_have_its_name_again() -> None:
    runner = says(1)
    assert register_runner(runner, "again") == register_runner(runner, "again") == id_of("again")


def test_a_name_in_use_is_refused() -> None:
    one, two = says(1), says(2)
    runner_id = register_runner(one, "taken")
    with pytest.raises(ArgumentError, match=r"'taken' belongs to another Returns.*replace=True"):
        register_runner(two, "taken")
    assert found(runner_id) == 1.0


def test_replace_takes_the_name_over() -> None:
    one, two = says(1), says(2)
    runner_id = register_runner(one, "passed on")
    assert register_runner(two, "passed on", replace=True) == runner_id
    assert found(runner_id) == 2.0
    del one
    gc.collect()
    assert found(runner_id) == 2.0  # the end of the first does not end the second


def test_a_freed_name_is_free() -> None:
    runner = says(1)
    runner_id = register_runner(runner, "reborn")
    del runner
    runner = says(2)
    assert register_runner(runner, "reborn") == runner_id
    assert found(runner_id) == 2.0


def test_replace_works_where_there_is_nothing_to_replace() -> None:
    runner = says(5)
    assert found(register_runner(runner, "first of its name", replace=True)) == 5.0


@pytest.mark.parametrize("alive", [True, False])
def test_two_names_with_one_id_are_refused(alive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even after the first is freed: a graph that means the one must not run the other."""
    monkeypatch.setattr(registry, "id_of", lambda name: NAMED + 17 + alive)
    one, two = says(1), says(2)
    runner_id = register_runner(one, "one")
    if not alive:
        del one
    for replace in (False, True):
        with pytest.raises(ArgumentError, match=r"'one' and 'two' have one id, 46\d+"):
            register_runner(two, "two", replace=replace)
    if alive:
        assert found(runner_id) == 1.0


# --- lifetimes


@pytest.mark.parametrize(
    ("name", "who"),
    [(None, r"runner \d+ \(Returns\)"), ("passing", r"runner 'passing' \(Returns\)")],
)
def test_a_freed_runner_is_named(name: str | None, who: str) -> None:
    runner = says(1)
    runner_id = register_runner(runner, name)
    assert found(runner_id) == 1.0
    del runner
    with pytest.raises(UnknownRunner, match=rf"nvfp4_linear_gemm: {who} was freed.*keep a ref"):
        found(runner_id)


def test_a_runner_that_nobody_keeps_is_freed_at_once() -> None:
    with pytest.raises(UnknownRunner, match="was freed"):
        found(register_runner(says(1)))


def test_a_runner_is_alive_while_it_runs() -> None:
    """The registry's reference is weak, that of a call in flight is not."""

    class Last:
        def _run_impl(self, x: torch.Tensor) -> torch.Tensor:
            kept.clear()
            gc.collect()
            return x * self.factor

    kept = [Last()]
    kept[0].factor = 4  # type: ignore[attr-defined]
    runner_id = register_runner(kept[0])
    assert torch.equal(linear_gemm(x, runner_id, 8), x * 4)
    with pytest.raises(UnknownRunner, match="was freed"):
        linear_gemm(x, runner_id, 8)


def test_unknown_ids_say_where_they_may_come_from() -> None:
    with pytest.raises(UnknownRunner, match=r"runner 5 is unknown.*ids of unnamed runners are val"):
        found(5)
    with pytest.raises(UnknownRunner, match="is unknown in this process: the id is that of a name"):
        found(id_of("nobody"))
    for runner_id in (0, -1, -(2**63)):
        with pytest.raises(UnknownRunner, match="is unknown in this process"):
            found(runner_id)
    with pytest.raises(RuntimeError, match="unknown in this process"):  # the built-in name for it
        found(5)


def test_freed_runners_take_bounded_memory() -> None:
    """Unnamed ids are known to be freed all the same; a name that was forgotten is unknown."""
    own = Registry(keep=10)
    stays = says(0)
    named = own.add(says(1), "goes", False)
    ids = [own.add(says(1), None, False) for _ in range(500)]
    assert own.find("op", own.add(stays, "stays", False)) is stays
    assert len(own._entries) <= 12
    with pytest.raises(UnknownRunner, match=f"op: runner {ids[0]} was freed"):
        own.find("op", ids[0])
    with pytest.raises(UnknownRunner, match="no runner has that name here"):
        own.find("op", named)
    with pytest.raises(UnknownRunner, match="valid only in the process"):
        own.find("op", ids[-1] + 1)


def test_live_runners_are_never_forgotten() -> None:
    own = Registry(keep=4)
    kept = [says(number) for number in range(100)]
    ids = [own.add(runner, None, False) for runner in kept]
    assert [own.find("op", runner_id) for runner_id in ids] == kept


# --- what can be registered


def test_anything_with_run_impl_can_be_registered() -> None:
    module = types.ModuleType("plain")
    module._run_impl = lambda x: x + 1  # type: ignore[attr-defined]

    class Layer(torch.nn.Linear):
        def _run_impl(self, x: torch.Tensor) -> torch.Tensor:
            return self(x)

    layer = Layer(8, 8)
    assert torch.equal(linear_gemm(x, register_runner(module), 8), x + 1)
    assert torch.equal(linear_gemm(x, register_runner(layer), 8), layer(x))


class Slotted:
    __slots__ = ()

    def _run_impl(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.mark.parametrize(
    ("runner", "message"),
    [
        (object(), "must have a method _run_impl; object has none"),
        (None, "must have a method _run_impl; NoneType has none"),
        (types.SimpleNamespace(_run_impl=3), "SimpleNamespace has none"),
        (Returns, "got the class Returns itself"),
        (Slotted(), "Slotted does not allow; add '__weakref__'"),
    ],
    ids=["object", "None", "no method", "class", "no weak references"],
)
def test_what_is_no_runner_is_refused(runner: Any, message: str) -> None:
    with pytest.raises(DtypeError, match=f"register_runner: .*{message}"):
        register_runner(runner)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"name": 3}, DtypeError, "name must be None or a str, got int"),
        ({"name": ""}, ArgumentError, "name is empty"),
        ({"replace": True}, ArgumentError, "replace=True takes over a name, and none was given"),
    ],
    ids=["number", "empty", "replace nothing"],
)
def test_bad_names_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"register_runner: {message}"):
        register_runner(says(1), **options)


@pytest.mark.parametrize(
    "make", [copy.copy, copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))]
)
def test_copies_are_not_registered(make: Callable[[Times], Times]) -> None:
    """The id stays with the first; a copy is a runner of its own, to be registered as such."""
    runner = Times(weight())
    runner_id = register_runner(runner, "copied")
    again = make(runner)
    with pytest.raises(ArgumentError, match="'copied' belongs to another Times"):
        register_runner(again, "copied")
    own = register_runner(again)
    assert torch.equal(linear_gemm(x, own, 6), linear_gemm(x, runner_id, 6))
    del runner
    with pytest.raises(UnknownRunner, match="was freed"):
        linear_gemm(x, runner_id, 6)


# --- threads and forks


def test_threads_register_and_run_at_once() -> None:
    """Eight threads, each with names and unnamed runners that come and go, and one they share."""
    shared = says(-1)
    shared_id = register_runner(shared, "shared by threads")
    barrier = threading.Barrier(8)

    def work(thread: int) -> set[int]:
        barrier.wait()
        ids = set()
        for turn in range(60):
            value = float(thread * 1000 + turn)
            unnamed, named = says(value), says(-value)
            one = register_runner(unnamed)
            two = register_runner(named, f"thread {thread} turn {turn % 7}", replace=True)
            assert (found(one), found(two), found(shared_id)) == (value, -value, -1.0)
            ids.add(one)
        return ids

    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(work, range(8)))
    assert len(set().union(*ids)) == 8 * 60


def test_one_name_goes_to_one_of_many_threads() -> None:
    barrier = threading.Barrier(8)
    runners = [says(number) for number in range(8)]

    def work(number: int) -> int | None:
        barrier.wait()
        try:
            register_runner(runners[number], "contested")
        except ArgumentError:
            return None
        return number

    with ThreadPoolExecutor(8) as pool:
        (winner,) = [number for number in pool.map(work, range(8)) if number is not None]
    assert found(id_of("contested")) == winner


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_knows_what_was_registered_and_gives_other_ids() -> None:
    """And has a lock of its own: here another thread holds the parent's while it forks."""
    before = says(1)
    before_id = register_runner(before)
    gone_id = register_runner(says(1))
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with registry.REGISTRY._lock:
            held.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # a child that waits for a lock would wait for ever
        try:
            answer = _in_the_child(before_id, gone_id)
        except BaseException as error:
            answer = repr(error)
        os.write(writer, answer.encode())
        os._exit(0)
    done.set()
    holder.join()
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    child_id = int(answer)

    after = says(2)
    after_id = register_runner(after)
    assert after_id == gone_id + 1
    assert abs(child_id - after_id) > 2**20
    with pytest.raises(UnknownRunner, match="valid only in the process that registered them"):
        found(child_id)


def _in_the_child(before_id: int, gone_id: int) -> str:
    """The id of a new runner, once everything else has been seen to hold."""
    entry = registry.REGISTRY._entries[before_id].reference()
    assert entry is not None
    assert entry._run_impl(x)[0, 0] == 1.0
    with pytest.raises(UnknownRunner, match="was freed"):
        registry.REGISTRY.find("op", gone_id)
    with pytest.raises(UnknownRunner, match="valid only in the process that registered them"):
        registry.REGISTRY.find("op", gone_id + 1)  # what the parent will hand out next
    runner = says(2)
    runner_id = register_runner(runner)
    assert registry.REGISTRY.find("op", runner_id) is runner
    return str(runner_id)
