from __future__ import annotations

import asyncio
import threading

import pytest

from gristmill.errors import UnknownVariant
from gristmill.select import active, register_variants, token, use
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
