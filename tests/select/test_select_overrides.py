from __future__ import annotations

import asyncio
import threading

import pytest

from gristmill.errors import UnknownVariant
from gristmill.select import active, batch_invariant, register_variants, token, use
from gristmill.select.overrides import (
    forget_variants,
    is_batch_invariant,
    restored,
    tuning,
    tuning_region,
)
from gristmill.settings import reload_settings


def test_use_nests_and_unwinds() -> None:
    register_variants("other", ["library"])
    assert dict(active()) == {}
    with use("toy", "first"):
        with use("other", "library"), use("toy", "second"):
            assert dict(active()) == {"toy": "second", "other": "library"}
        assert dict(active()) == {"toy": "first"}
    assert dict(active()) == {}


def test_use_unwinds_on_an_error() -> None:
    def fail() -> None:
        with use("toy", "first"):
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert dict(active()) == {}


def test_use_decorates() -> None:
    @use("toy", "third")
    def inner() -> dict[str, str]:
        return dict(active())

    assert [inner(), inner()] == [{"toy": "third"}] * 2


def test_token_changes_with_the_overrides_and_returns() -> None:
    register_variants("other", ["library"])
    outside = token()
    with use("toy", "first"):
        first = token()
        with use("other", "library"):
            both = token()
        assert token() == first
    with use("other", "library"), use("toy", "first"):
        assert token() == both
    assert token() == outside
    assert len({outside, first, both}) == 3


def test_unknown_names_raise_before_the_block_and_list_what_exists() -> None:
    with pytest.raises(UnknownVariant, match=r"no op 'tuy' \(did you mean 'toy'\?\).*toy"):
        use("tuy", "first")
    with pytest.raises(
        UnknownVariant,
        match=r"toy has no variant 'frist' \(did you mean 'first'\?\).*second, third",
    ):
        use("toy", "frist")


def test_threads_do_not_see_each_other() -> None:
    entered, looked = threading.Event(), threading.Event()
    seen: list[dict[str, str]] = []

    def hold() -> None:
        with use("toy", "first"):
            entered.set()
            looked.wait(10)
            seen.append(dict(active()))

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(10)
    seen.append(dict(active()))
    looked.set()
    thread.join()
    assert seen == [{}, {"toy": "first"}]


def test_async_tasks_do_not_see_each_other() -> None:
    async def under(name: str, mine: asyncio.Event, other: asyncio.Event) -> str:
        with use("toy", name):
            mine.set()
            await other.wait()
            return active()["toy"]

    async def both() -> list[str]:
        one, two = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(under("first", one, two), under("second", two, one))

    assert asyncio.run(both()) == ["first", "second"]


def test_environment_is_the_outermost_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    register_variants("other", ["library"])
    monkeypatch.setenv("GRISTMILL_USE", "toy:second,other:library")
    reload_settings()
    assert dict(active()) == {"toy": "second", "other": "library"}
    with use("toy", "first"):
        assert dict(active()) == {"toy": "first", "other": "library"}
    assert active()["toy"] == "second"


def test_unknown_name_in_the_environment_names_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GRISTMILL_USE", "toy:nothing")
    reload_settings()
    with pytest.raises(UnknownVariant, match=r"GRISTMILL_USE=toy:nothing.*there are: first"):
        active()


def test_a_name_that_is_not_there_yet_is_warned_about_and_a_mistyped_one_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A MultiKernel may be made after the first choice; what is mistyped never will."""
    register_variants("tool_max", ["library"])
    monkeypatch.setenv("GRISTMILL_USE", "my_tool_max:mine,toy:second")
    reload_settings()
    with caplog.at_level("WARNING", logger="gristmill"):
        assert [active()["toy"], active()["my_tool_max"]] == ["second", "mine"]
    (record,) = caplog.records
    assert "GRISTMILL_USE=my_tool_max:mine" in record.getMessage()
    monkeypatch.setenv("GRISTMILL_USE", "tool_mxa:library")
    reload_settings()
    with pytest.raises(UnknownVariant, match="did you mean 'tool_max'"):
        active()


def test_names_that_are_not_there_are_warned_about_a_few_times(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GRISTMILL_USE", ",".join(f"zzz{at}:v" for at in range(1000)))
    reload_settings()
    with caplog.at_level("WARNING", logger="gristmill"):
        for _ in range(2):
            assert len(active()) == 1000
    assert len(caplog.records) == 16


def test_batch_invariance_nests_unwinds_and_keeps_what_is_used() -> None:
    assert not is_batch_invariant()
    with use("toy", "first"), batch_invariant():
        assert is_batch_invariant()
        assert active()["toy"] == "first"
        with batch_invariant(False):
            assert not is_batch_invariant()
        with use("toy", "second"):
            assert is_batch_invariant()
    assert not is_batch_invariant()


def test_batch_invariance_by_the_environment_and_out_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRISTMILL_BATCH_INVARIANT", "1")
    reload_settings()
    assert is_batch_invariant()
    with use("toy", "first"):
        assert is_batch_invariant()
    with batch_invariant(False):
        assert not is_batch_invariant()


def test_modes_are_part_of_the_token() -> None:
    tokens = [token()]
    with batch_invariant():
        tokens.append(token())
        with tuning(1):
            tokens.append(token())
        with tuning(2):
            tokens.append(token())
    with batch_invariant(False):
        tokens.append(token())
    assert len(set(tokens)) == 5
    assert token() == tokens[0]


def test_regions_nest() -> None:
    assert tuning_region() is None
    with tuning(1):
        with tuning(2), use("toy", "first"):
            assert tuning_region() == 2
        assert tuning_region() == 1
    assert tuning_region() is None


def test_batch_invariance_holds_for_its_own_thread() -> None:
    seen: list[bool] = []
    with batch_invariant():
        thread = threading.Thread(target=lambda: seen.append(is_batch_invariant()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_modes_of_an_earlier_moment_lie_beneath_those_of_now() -> None:
    """As a backward pass has them: those of its forward pass, where nothing else is said."""
    register_variants("other", ["library"])
    with batch_invariant(), use("toy", "first"), use("other", "library"), tuning(3):
        before = token()
    with restored(before):
        assert (is_batch_invariant(), tuning_region()) == (True, 3)
        assert dict(active()) == {"toy": "first", "other": "library"}
    with use("toy", "second"), batch_invariant(False), restored(before):
        assert (is_batch_invariant(), tuning_region()) == (False, 3)
        assert dict(active()) == {"toy": "second", "other": "library"}
    with restored(None):
        assert (is_batch_invariant(), dict(active())) == (False, {})


def test_what_is_gone_cannot_be_asked_for() -> None:
    register_variants("passing", ["one"])
    with use("passing", "one"):
        pass
    forget_variants("passing")
    forget_variants("passing")
    with pytest.raises(UnknownVariant, match="no op 'passing'"):
        use("passing", "one")
