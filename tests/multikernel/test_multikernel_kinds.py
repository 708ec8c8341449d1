"""Calls that look alike and are not, and what is left behind when kernels fail."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from multikernel_helpers import chosen, fake_timing, make_two, minus, pair, plus, ran, set_tuning

import gristmill as gm
from gristmill.errors import ArgumentError, VariantUnavailable
from gristmill.multikernel import MultiKernel
from gristmill.select.copies import rotate
from gristmill.select.device import Device
from gristmill.select.tuning import Candidate, candidates
from gristmill.settings import reload_settings


@pytest.fixture
def no_collection() -> Iterator[None]:
    """What is freed is freed at once, as memory of a GPU must be."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x]], ids=["tensor", "list"])
@pytest.mark.parametrize("order", [("cpu", "meta"), ("meta", "cpu")])
def test_a_tensor_without_memory_is_not_one_of_the_cpu(wrap: Any, order: tuple[str, str]) -> None:
    met: list[tuple[str, str]] = []

    def real(x: Any) -> None:
        device = x[0].device.type
        if device == "meta":
            raise RuntimeError("has no numbers")
        met.append(("real", device))

    def either(x: Any) -> None:
        met.append(("either", x[0].device.type))

    one = MultiKernel("placed", {"real": real, "either": either})
    for device in (*order, *order):
        one(wrap(torch.ones(2, 3, device=device)))
    expected = {"cpu": ("real", "cpu"), "meta": ("either", "meta")}
    assert met == [expected[device] for device in (*order, *order)]


@pytest.mark.parametrize("wrap", [lambda x: (x,), lambda x: ([x],)], ids=["tensor", "list"])
@pytest.mark.parametrize("first", [True, False])
def test_a_kernel_that_autograd_refuses_runs_without_it(wrap: Any, first: bool) -> None:
    def in_place(x: Any) -> str:
        (x[0] if isinstance(x, list) else x).mul_(1)
        return "in_place"

    def apart(x: Any) -> str:
        return "apart"

    one = MultiKernel("watched", {"in_place": in_place, "apart": apart})
    leaf = torch.ones(3, requires_grad=True)
    found = {}
    for grad in (first, not first, first):
        with torch.set_grad_enabled(grad):
            found[grad] = one(*wrap(leaf))
            assert chosen(one, *wrap(leaf)) == found[grad]
    assert found == {True: "apart", False: "in_place"}
    assert one(*wrap(leaf.detach())) == "in_place"


@pytest.mark.parametrize("name", ["key", "token", "Tensor", "key_", "at_0_", "class", "None"])
def test_keywords_of_any_name(name: str) -> None:
    calls = []

    def kernel(x: torch.Tensor, **rest: Any) -> torch.Tensor:
        calls.append(rest)
        return x + rest[name]

    one = MultiKernel("worded", {"kernel": kernel})
    x = torch.ones(2)
    for _ in range(2):
        assert float(one(x, **{name: torch.ones(2)})[0]) == 2.0
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["key", "token", "Tensor"])
def test_usual_keywords_are_found_by_metadata(name: str) -> None:
    """Describing the problem at every call would cost a hundred times as much."""
    one = MultiKernel("worded", {"kernel": lambda x, **rest: x})
    x = torch.ones(2)
    one(x, **{name: x})
    one.problem = None  # type: ignore[method-assign, assignment]
    one(x, **{name: x})


def test_a_choice_that_is_forgotten_meanwhile_is_not_brought_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that come while a first call runs count from the next call on."""
    fake_timing(monkeypatch, {"slow": 9.0, "quick": 1.0})
    x = torch.ones(4)
    busy = True

    def slow(x: torch.Tensor) -> str:
        nonlocal busy
        if busy:
            busy = False
            one.tune(x)
        return "slow"

    one = MultiKernel("meanwhile", {"slow": slow, "quick": lambda x: "quick"})
    assert [one(x), one(x)] == ["slow", "quick"]


@pytest.mark.usefixtures("no_collection")
def test_what_a_failed_kernel_made_is_gone_when_the_next_runs() -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def greedy(x: torch.Tensor) -> torch.Tensor:
        scratch = torch.ones(1000)
        made.append(weakref.ref(scratch))
        raise torch.OutOfMemoryError("no more")

    def modest(x: torch.Tensor) -> torch.Tensor:
        alive.append(made[0]() is not None)
        return x + 1

    one = MultiKernel("greedy", {"greedy": greedy, "modest": modest})
    x = torch.ones(3)
    argument, result = weakref.ref(x), one(x)
    kept = weakref.ref(result)
    assert alive == [False]
    del x, result
    assert argument() is None
    assert kept() is None


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("all_fail", [False, True])
def test_copies_are_gone_after_tuning(all_fail: bool) -> None:
    copies: list[weakref.ref[torch.Tensor]] = []

    def fails(x: torch.Tensor) -> torch.Tensor:
        copies.append(weakref.ref(x))
        raise RuntimeError("never runs")

    def runs(x: torch.Tensor) -> torch.Tensor:
        copies.append(weakref.ref(x))
        return x + 1

    one = MultiKernel("copies", {"first": fails if all_fail else runs, "second": fails})
    x = torch.ones(3)
    if all_fail:
        with pytest.raises(RuntimeError, match="never runs") as caught:
            one.tune(x)
        del caught
    else:
        one.tune(x)
    assert copies
    assert all(copy() is None for copy in copies)


@pytest.mark.usefixtures("no_collection")
def test_sets_of_arguments_are_gone_with_their_list() -> None:
    x = torch.ones(3)
    sets = rotate(((x, [x]), {"x": x}), 2)
    copies = [weakref.ref(one[0][0]) for one in sets]
    assert sets[0][0][0] is sets[0][0][1][0] is sets[0][1]["x"]
    del sets
    assert [copy() for copy in copies] == [None, None]


def test_a_buffer_that_a_kernel_has_replaced_is_put_back() -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("unused", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = self.count + 1
            return x + 1

    module = Counting()
    before = module.count
    one = MultiKernel("counting", {"module": module, "plain": lambda x: x + 1})
    one.tune(torch.ones(3))
    assert module.count is before
    assert float(before) == 0.0


def test_a_generator_goes_on_as_if_nothing_had_drawn_from_it() -> None:
    def uniform(x: torch.Tensor, generators: list[torch.Generator]) -> torch.Tensor:
        return x + torch.rand(x.shape, generator=generators[0])

    def filled(x: torch.Tensor, generators: list[torch.Generator]) -> torch.Tensor:
        return x + torch.empty_like(x).uniform_(generator=generators[0])

    one = MultiKernel("drawn", {"uniform": uniform, "filled": filled})
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    one.tune(torch.ones(3), [generator])
    assert torch.equal(generator.get_state(), before)


def test_a_kernel_may_be_called_reference() -> None:
    """On a GPU the reference of an op is not worth timing; a user's kernel of that name is."""
    one = MultiKernel("named", {"fused": plus, "reference": minus})
    device = Device("cuda", "H200", "sm_90a", (9, 0), 132, 50_000_000, 227_000)
    problem = replace(one.problem(*pair(4)), device=device)
    found = candidates(one.variants, problem, Candidate(one.variants[0], None), thorough=False)
    assert [str(candidate) for candidate in found] == ["fused", "reference"]


def test_tuning_says_that_it_is_of_no_use_under_batch_invariance() -> None:
    one = make_two(batch_invariant=["plus"])
    with gm.batch_invariant(), pytest.raises(VariantUnavailable, match="under batch_invariant"):
        one.tune(*pair(4))
    assert one.tune(*pair(4)) is not None


def test_recorded_with_other_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    monkeypatch.setenv("GRISTMILL_RECORD", str(path))
    reload_settings()
    assert ran(make_two(), *pair(4)) == "plus"
    monkeypatch.delenv("GRISTMILL_RECORD")
    set_tuning(monkeypatch, "off")
    other = MultiKernel("two", {"plus": lambda x, y, z: x, "minus": lambda x, y, z: y})
    with pytest.raises(ArgumentError, match=r"recorded with 2 arguments, but .*\(x, y, z\)"):
        other.tune_recorded(path)
