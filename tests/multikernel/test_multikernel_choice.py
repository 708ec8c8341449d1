"""Which kernel runs: order, hints, families, failures, and what is said about it."""

from __future__ import annotations

import gc
import json
import time
import weakref
from typing import Any

import pytest
import torch
from multikernel_helpers import (
    chosen,
    fake_timing,
    make_two,
    minus,
    pair,
    plus,
    ran,
    same_bits,
    set_tuning,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import gristmill as gm
from gristmill.errors import UnknownVariant, VariantUnavailable
from gristmill.multikernel import MultiKernel
from gristmill.select import HINTS, counters
from gristmill.select.problem import Sizes
from gristmill.settings import reload_settings


def test_first_runs_where_nothing_is_known_and_nothing_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = fake_timing(monkeypatch, {"plus": 1.0, "minus": 1.0})
    one = make_two()
    assert ran(one, *pair(5)) == "plus"
    assert ran(one, x=pair(5)[0], y=pair(5)[1]) == "plus"
    assert clock.runs == []
    assert counters()["choices"]["two:plus"] == 2


def test_the_clock_decides_between_a_sleeper_and_the_other() -> None:
    def sleeper(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return x + 1

    one = MultiKernel("sleepy", {"sleeper": sleeper, "quick": lambda x: x + 1})
    x = torch.zeros(4, 4)
    assert chosen(one, x) == "sleeper"
    start = time.perf_counter()
    outcome = one.tune(x)
    assert time.perf_counter() - start < 5
    assert outcome is not None
    assert (outcome.before, outcome.row.variant) == ("sleeper", "quick")
    assert outcome.won > 0.5
    assert outcome.row.times["sleeper"] >= 20_000
    assert chosen(one, x) == "quick"


def test_sizes_go_with_the_nearest_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 and 256 meet at 128, 256 and 4096 at 1024; these hints and no others."""
    fake_timing(
        monkeypatch,
        lambda name, given: 5.0 if (name == "minus") == (given[1][0].shape[0] == 256) else 9.0,
    )
    one = make_two(hints=[4096, 64, 256, 64])
    assert one.hints == (64, 256, 4096)
    assert len(one.tune_at_hints(pair)) == 3
    sizes = [0, 1, 20, 127, 128, 129, 200, 600, 1023, 1024, 1025, 5000, 100_000]
    hints = Sizes((64, 256, 4096))
    expected = ["minus" if hints.stop(size) == 256 else "plus" for size in sizes]
    assert [chosen(one, *pair(size)) for size in sizes] == expected
    assert [ran(one, *pair(size)) for size in sizes[1:10]] == expected[1:10]
    found = one.explain(*pair(600))
    assert found.measured_at == 256
    assert found.covers == (129, 1024)
    assert "rows=600" in str(found)
    assert "129 to 1024 rows share the choice measured at rows=256" in str(found)


def test_hints_that_lie_close_have_rows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are nearest to the same of the usual hints."""
    one = make_two(hints=[50, 100])
    for winner, size in (("minus", 50), ("plus", 100)):
        fake_timing(monkeypatch, {"plus": 9.0, "minus": 9.0, winner: 1.0})
        one.tune(*pair(size))
    assert [chosen(one, *pair(size)) for size in (40, 50, 70, 71, 100, 10_000)] == [
        *["minus"] * 3,
        *["plus"] * 3,
    ]


def test_more_hints_make_more_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of the only hint covered all sizes."""
    fake_timing(monkeypatch, {"plus": 1.0, "minus": 9.0})
    make_two(hints=[64]).tune_at_hints(pair)
    one = make_two(hints=[16, 64, 1024])
    found = {}
    for size in one.hints:
        fake_timing(monkeypatch, {"plus": 5.0, "minus": 1.0 if size == 64 else 9.0})
        one.tune(*pair(size))
    for size in one.hints:
        explained = one.explain(*pair(size))
        found[size] = (explained.chosen, explained.measured_at, explained.covers)
    assert found == {
        16: ("plus", 16, (0, 32)),
        64: ("minus", 64, (33, 256)),
        1024: ("plus", 1024, (257, None)),
    }


def test_everything_but_the_size_is_in_the_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tuned for one kind of call speaks for no other."""

    def plus(x: Any, y: Any, flag: Any = None, *, scale: float = 1.0) -> torch.Tensor:
        return x + y

    def minus(x: Any, y: Any, flag: Any = None, *, scale: float = 1.0) -> torch.Tensor:
        return x - y

    fake_timing(monkeypatch, {"plus": 9.0, "minus": 1.0})
    one = MultiKernel("family", {"plus": plus, "minus": minus})
    x, y = pair(64)
    one.tune(x, y)
    same: list[tuple[Any, ...]] = [
        (x, y),
        (x[:50].clone(), y[:50].clone()),
        pair(100),
        (x, y, None),
    ]
    other: list[tuple[Any, ...]] = [
        (x.double(), y),
        (x, y.half()),
        pair(64, 9),
        (x, y[:1]),
        (x, y[0]),
        (x.t().contiguous().t(), y),
        (torch.ones(64, 16)[:, ::2], y),
        (torch.ones(64 * 8 + 1)[1:].view(64, 8), y),
        (x[:1].expand(64, 8), y),
        (x[None], y[None]),
        (x, y, True),
        (x, y, 1),
        (x, y, "1"),
        (x.to("meta"), y.to("meta")),
    ]
    assert [chosen(one, *args) for args in same] == ["minus"] * len(same)
    assert [chosen(one, *args) for args in other] == ["plus"] * len(other)
    assert chosen(one, x, y=y, scale=1.0) == "minus"
    assert chosen(one, x, y, scale=2.0) == "plus"
    # And so say the plans, which are found another way.
    assert [ran(one, *args) for args in same] == ["minus"] * len(same)
    assert [ran(one, *args) for args in other[:13]] == ["plus"] * 13
    assert [ran(one, *args) for args in same] == ["minus"] * len(same)
    assert ran(one, x, y, scale=2.0) == "plus"
    assert ran(one, x, y, scale=1.0) == "minus"
    # Values that are equal are not the same.
    one.tune(x, y, 1)
    assert [ran(one, x, y, flag) for flag in (1, True, 1.0, 1)] == [
        "minus",
        "plus",
        "plus",
        "minus",
    ]


def test_lists_and_dicts_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    def plus(xs: Any, named: Any, options: Any = ()) -> torch.Tensor:
        return xs[0] + named["y"]

    def minus(xs: Any, named: Any, options: Any = ()) -> torch.Tensor:
        xs[0].add_(0)  # writes to what nobody has named
        return xs[0] - named["y"]

    fake_timing(monkeypatch, {"plus": 9.0, "minus": 1.0})
    one = MultiKernel("nested", {"plus": plus, "minus": minus})
    x, y = pair(64)
    one.tune([x, x], {"y": y})
    assert ran(one, [x, x], {"y": y}) == "minus"
    assert ran(one, [x, x], {"y": y}) == "minus"
    assert ran(one, [x], {"y": y}) == "plus"
    assert ran(one, [x, x[:5]], {"y": y}) == "plus"
    assert ran(one, [x, x], {"y": y, "z": y}) == "plus"
    assert ran(one, [x, x], {"y": y}, [1, 2]) == "plus"
    assert ran(one, [x, x], {"y": y}) == "minus"
    many = [torch.ones(64, 8) for _ in range(200)]
    assert ran(one, many, {"y": y}) == "plus"
    assert len(one.explain(many, {"y": y}).problem.key("*")) < 200


def test_size_of_other_tensors_and_values_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(x: Any, y: Any, rows: int) -> Any:
        return x

    fake_timing(monkeypatch, {"a": 9.0, "b": 1.0})
    one = MultiKernel("rows", {"a": first, "b": first})
    one.tune(torch.ones(64, 8), torch.ones(64), 64)
    assert chosen(one, torch.ones(70, 8), torch.ones(70), 70) == "b"
    assert chosen(one, torch.ones(70, 8), torch.ones(64), 70) == "a"
    assert chosen(one, torch.ones(70, 8), torch.ones(70), 64) == "a"


@pytest.mark.parametrize("first", ["hints", "other size"])
def test_a_dim_that_has_the_size_by_accident(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 64 rows a weight of 64 rows looks like a batch; what is known of others tells it apart."""
    fake_timing(monkeypatch, {"a": 9.0, "b": 1.0})
    product = {"a": torch.nn.functional.linear, "b": lambda x, w: x @ w.t()}
    one = MultiKernel("product", product, hints=[64, 256])
    w = torch.ones(64, 32)
    if first == "hints":
        one.tune_at_hints(lambda size: (torch.ones(size, 32), w))
    else:
        one.tune(torch.ones(60, 32), w)
    for rows in (60, 64, 70):
        assert chosen(one, torch.ones(rows, 32), w) == "b"
    # Another weight is another family, whatever it looks like.
    assert chosen(one, torch.ones(60, 32), torch.ones(60, 32)) == "a"
    assert chosen(one, torch.ones(64, 32), torch.ones(65, 32)) == "a"


def test_key_says_what_the_size_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """An int: dims that equal it are open. A tuple: nothing else counts but dtype and layout."""
    fake_timing(monkeypatch, {"plus": 9.0, "minus": 1.0})
    columns = MultiKernel("columns", {"plus": plus, "minus": minus}, key=lambda x, y: x.shape[1])
    columns.tune(*pair(8, 64))
    assert chosen(columns, *pair(8, 70)) == "minus"
    assert chosen(columns, *pair(9, 64)) == "plus"

    tokens = MultiKernel(
        "tokens",
        {"plus": lambda x, y, step=0: x + y, "minus": lambda x, y, step=0: x - y},
        key=lambda x, y, step=0: (x.shape[0] * x.shape[1], x.shape[2], "gelu"),
    )
    x = torch.ones(8, 8, 16)
    tokens.tune(x, x)
    for shape, step in (((4, 16, 16), 1), ((1, 60, 16), 2)):
        assert ran(tokens, torch.ones(shape), torch.ones(shape), step) == "minus"
    assert ran(tokens, torch.ones(8, 8, 17), torch.ones(8, 8, 17)) == "plus"
    assert ran(tokens, x.double(), x) == "plus"
    plans = len(tokens._plans)
    for step in range(100):
        tokens(x, x, step)
    assert len(tokens._plans) <= plans + 1


def test_tuning_mode_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    set_tuning(monkeypatch)
    clock = fake_timing(monkeypatch, {"plus": 9.0, "minus": 1.0})
    one = make_two()
    assert [ran(one, *pair(64)) for _ in range(3)] == ["minus"] * 3
    assert ran(one, *pair(65)) == "minus"
    assert sorted(clock.runs) == ["minus", "plus"]
    # The incumbent stays unless it is beaten by more than noise.
    fake_timing(monkeypatch, {"plus": 1.0, "minus": 0.999})
    assert ran(one, *pair(64, 9)) == "plus"


def test_tuning_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan from before the region is not kept after it."""
    clock = fake_timing(monkeypatch, {"plus": 9.0, "minus": 1.0})
    one = make_two()
    assert ran(one, *pair(64)) == "plus"
    with gm.tune() as report:
        assert ran(one, *pair(64)) == "minus"
    assert ran(one, *pair(64)) == "minus"
    assert len(clock.runs) == 2
    assert [outcome.row.key for outcome in report.outcomes] == [
        "multikernel/two rows=64 x=float32 y=float32 x[*,8] y[*,8]"
    ]
    again = gm.tune(one, *pair(64), again=True)
    assert len(again.outcomes) == 1
    assert same_bits(again.result, minus(*pair(64)))


def test_nothing_is_timed_where_it_must_not_be(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", logger="gristmill")
    set_tuning(monkeypatch)
    clock = fake_timing(monkeypatch, {"plus": 9.0, "minus": 1.0})
    one = make_two()
    with one.use("plus"):
        assert ran(one, *pair(64)) == "plus"
        with pytest.raises(VariantUnavailable, match="'plus' is asked for by name"):
            one.tune(*pair(64))
    torch.use_deterministic_algorithms(True)
    try:
        assert ran(one, *pair(64)) == "plus"
    finally:
        torch.use_deterministic_algorithms(False)
    with FakeTensorMode():
        assert one(*pair(64)).shape == (64, 8)
    torch.func.vmap(one)(torch.ones(3, 64, 8), torch.ones(3, 64, 8))
    with FlopCounterMode(display=False):
        one(*pair(64))
    one(*(x.to("meta") for x in pair(64)))
    assert clock.runs == []
    assert not caplog.records
    monkeypatch.setattr("gristmill.select.sight.is_capturing", lambda device: True)
    monkeypatch.setattr("gristmill.multikernel.tuned.is_capturing", lambda device: True)
    assert ran(one, *pair(63)) == "plus"
    with pytest.raises(VariantUnavailable, match="while a CUDA graph is captured"):
        one.tune(*pair(64))
    assert clock.runs == []


def test_batch_invariance_is_for_those_who_promise_it() -> None:
    unsaid = make_two()
    with gm.batch_invariant(), pytest.raises(VariantUnavailable, match="batch-invariant"):
        unsaid(*pair(64))
    said = MultiKernel("said", {"plus": plus, "minus": minus}, batch_invariant=["minus"])
    assert ran(said, *pair(64)) == "plus"
    with gm.batch_invariant():
        assert [ran(said, *pair(rows)) for rows in (1, 64, 5000)] == ["minus"] * 3
        assert "excluded" in str(said.explain(*pair(64)))


def test_failure_is_remembered_for_that_problem_alone() -> None:
    tried: list[int] = []

    def even(x: torch.Tensor) -> torch.Tensor:
        tried.append(len(x))
        if len(x) % 2:
            raise ValueError(f"{len(x)} is odd")
        return x + 1

    one = MultiKernel("evenly", {"even": even, "any": lambda x: x + 1})
    for _ in range(3):
        one(torch.zeros(64, 4))
        one(torch.zeros(63, 4))
        one(x=torch.zeros(63, 4))
    assert tried.count(63) == 1
    assert tried.count(64) == 3
    assert chosen(one, torch.zeros(63, 4)) == "any"
    assert chosen(one, torch.zeros(64, 4)) == "even"
    assert "raised ValueError: 63 is odd" in str(one.explain(torch.zeros(63, 4)))
    assert counters()["fallbacks"] == {"evenly:even": 1}
    with one.use("even"), pytest.raises(VariantUnavailable, match="63 is odd"):
        one(torch.zeros(63, 4))
    one.forget_failures()
    with one.use("even"), pytest.raises(ValueError, match=r"^63 is odd$"):
        one(torch.zeros(63, 4))


def test_no_memory_at_one_time_is_no_failure_for_good() -> None:
    """It falls back for that call alone; another kernel that fails there is remembered."""
    full, tried = True, []

    def hungry(x: torch.Tensor) -> str:
        tried.append("hungry")
        if full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "hungry"

    def broken(x: torch.Tensor) -> str:
        tried.append("broken")
        raise ValueError("never")

    one = MultiKernel("meals", {"hungry": hungry, "broken": broken, "any": lambda x: "any"})
    x = torch.zeros(8, 4)
    assert [one(x), one(x)] == ["any", "any"]
    assert tried == ["hungry", "broken", "hungry"]
    assert chosen(one, x) == "hungry"
    full = False
    assert [one(x), one(x)] == ["hungry", "hungry"]
    assert "raised ValueError: never" in str(one.explain(x))
    # And it is the plan from then on: its error is the caller's.
    full = True
    with pytest.raises(torch.OutOfMemoryError):
        one(x)
    alone = MultiKernel("alone", {"hungry": hungry})
    with pytest.raises(torch.OutOfMemoryError):
        alone(x)


def test_if_all_fail_the_first_error_is_raised_each_time() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("the first")

    def fails_too(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the second")

    one = MultiKernel("failing", {"a": fails, "b": fails_too})
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^the first$"):
            one(torch.zeros(3))
        with pytest.raises(ValueError, match=r"^the first$"):
            one.tune(torch.zeros(3))
    with pytest.raises(TypeError, match=r"'failing': missing a required argument: 'x'; .*\(x: "):
        one()
    with pytest.raises(TypeError, match="takes 1 positional argument but 2"):
        one(torch.zeros(3), 5)


def test_failure_in_the_middle_of_a_write_is_not_papered_over() -> None:
    def half(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        raise ValueError("half way")

    one = MultiKernel("halfway", {"half": half, "whole": lambda x: x.add_(1)})
    with pytest.raises(ValueError, match="half way"):
        one(torch.zeros(3))
    with torch.inference_mode():
        x = torch.zeros(3)
    one.forget_failures()
    with torch.inference_mode():
        one(x)  # nobody counts writes to inference tensors: the next one is tried


def test_failure_while_timing_is_no_more_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    set_tuning(monkeypatch)
    fake_timing(monkeypatch, {"a": 1.0, "b": 2.0, "c": 3.0})
    calls: list[str] = []

    def failing(x: torch.Tensor) -> torch.Tensor:
        calls.append("a")
        raise ValueError("never")

    one = MultiKernel("timed", {"a": failing, "b": lambda x: x + 1, "c": lambda x: x + 1})
    x = torch.zeros(8, 2)
    assert same_bits(one(x), x + 1)
    assert len(calls) == 1  # while it was timed, and never again
    assert "raised ValueError: never" in str(one.explain(x))


def test_supports_says_who_may_run() -> None:
    one = MultiKernel(
        "able",
        {"narrow": lambda x: x + 1, "even": lambda x: x + 2, "any": lambda x: x + 3},
        supports={
            "narrow": lambda x: None if x.shape[1] < 16 else f"{x.shape[1]} columns are too many",
            "even": lambda x: x.shape[1] % 2 == 0,
        },
    )
    zeros = {columns: torch.zeros(4, columns) for columns in (8, 16, 17)}
    assert [float(one(x)[0, 0]) for x in zeros.values()] == [1.0, 2.0, 3.0]
    found = str(one.explain(zeros[17]))
    assert "17 columns are too many" in found
    assert "its predicate in supports= says no" in found
    with one.use("narrow"), pytest.raises(VariantUnavailable, match="columns are too many"):
        one(zeros[16])


def test_names_that_do_not_exist() -> None:
    one = make_two()
    with pytest.raises(UnknownVariant, match="two has no variant 'times'"):
        one.use("times")
    with pytest.raises(UnknownVariant, match="there is no op 'three'"):
        gm.use("three", "plus")


def test_name_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    one = make_two()
    monkeypatch.setenv("GRISTMILL_USE", "two:minus,rms_norm:reference")
    reload_settings()
    assert ran(one, *pair(4)) == "minus"
    with one.use("plus"):
        assert ran(one, *pair(4)) == "plus"
    found = one.explain(*pair(4))
    assert (found.chosen, found.source) == ("minus", "forced")


def test_explain_by_object_and_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_timing(monkeypatch, {"plus": 9.0, "minus": 1.0})
    one = make_two()
    one.tune(*pair(64))
    found = gm.explain(one, *pair(64))
    assert found.chosen == "minus"
    assert found.as_dict() == gm.explain("two", *pair(64)).as_dict()
    assert json.loads(json.dumps(found.as_dict()))["measured_at"] == 64
    assert found.as_dict()["covers"] == [33, 128]
    text = str(found)
    assert "multikernel/two rows=64" in text
    assert "minus" in text
    assert "9.00" in text
    assert 'with gm.use("two", "plus"): ...' in text
    with one.use("plus"):
        assert gm.explain(one, *pair(64)).source == "forced"


def test_it_is_gone_when_nobody_holds_it() -> None:
    one = make_two()
    gone = weakref.ref(one)
    one(*pair(4))
    one.explain(*pair(4))
    del one
    gc.collect()
    assert gone() is None
    with pytest.raises(UnknownVariant, match="there is no op 'two'"):
        gm.use("two", "plus")


def test_the_later_of_two_has_the_name(caplog: pytest.LogCaptureFixture) -> None:
    first = make_two()
    second = make_two()  # as when a cell of a notebook is run again
    assert not caplog.records
    third = MultiKernel("two", {"times": torch.mul})
    assert "MultiKernel 'two' is made twice, of other functions" in caplog.text
    with gm.use("two", "times"):
        assert float(third(*pair(4))[0, 0]) == 1.0
    assert ran(first, *pair(4)) == "plus"
    del first, second
    gc.collect()
    gm.use("two", "times")
    assert third.hints == HINTS


def test_repr_and_copies() -> None:
    import copy

    one = make_two(hints=[64, 256])
    assert repr(one) == "<MultiKernel two: plus, minus; hints 64, 256>"
    assert copy.deepcopy([one])[0] is one
