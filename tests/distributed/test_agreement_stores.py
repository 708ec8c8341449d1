"""Ranks agree on a choice, in stores of every kind: ranks are threads of this process."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gristmill.errors import GristmillError, RanksDisagree
from gristmill.log import forget_warnings
from gristmill.select import agreement, group_store
from gristmill.select.agreement import agree, alone, check_equal, published, store
from gristmill.select.group_store import Entries, StoreLost

RANKS = 4

if not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)


class CountingStore(dist.Store):
    """A store without compare-and-set, as that of etcd is."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, bytes] = {}
        self.lock = threading.Lock()

    def set(self, key: str, value: Any) -> None:
        self.held[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        return self.held[key]  # never waits: a missing key is a mistake

    def add(self, key: str, amount: int) -> int:
        with self.lock:
            self.held[key] = str(int(self.held.get(key, b"0")) + amount).encode()
            return int(self.held[key])

    def check(self, keys: list[str]) -> bool:
        return all(key in self.held for key in keys)


@pytest.fixture(params=["hash", "file", "tcp", "counting"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return {
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(str(tmp_path / "store"), RANKS),
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False),
        "counting": CountingStore,
    }[request.param]()


class Group:
    """Runs a function on four threads, each a rank of a group over one store."""

    def __init__(self, shared: Any) -> None:
        self.shared = shared
        self.here = threading.local()
        self.begin()

    def begin(self, job: str = "default") -> None:
        """The group is destroyed, and there is another, perhaps of another job."""
        self.entries = [Entries(dist.PrefixStore(job, self.shared), rank) for rank in range(RANKS)]

    def __call__(self, work: Callable[[int], Any]) -> list[Any]:
        def on(rank: int) -> Any:
            self.here.entries = self.entries[rank]
            return work(rank)

        with ThreadPoolExecutor(RANKS) as pool:
            return list(pool.map(on, range(RANKS)))


@pytest.fixture
def as_ranks(any_store: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    group = Group(any_store)
    monkeypatch.setattr(agreement, "entries", lambda: group.here.entries)
    yield group
    forget_warnings()


def test_any_store_has_one_answer(as_ranks: Group) -> None:
    decided: list[str] = []

    def work(rank: int) -> list[str | None]:
        def decide(key: int) -> str:
            decided.append(str(key))
            return f"{key} by {rank}"

        return [agree(str(key), lambda key=key: decide(key)) for key in range(25)]

    answers = as_ranks(work)
    assert all(one == answers[0] for one in answers)
    assert None not in answers[0]
    assert len(decided) == len(set(decided)) == 25


def test_any_store_may_outlive_a_group(as_ranks: Group) -> None:
    """What was compared belongs to the group, what was agreed to the store."""
    for number in range(3):
        as_ranks(lambda rank, number=number: check_equal("topic", {"now": str(number)}))
        answers = as_ranks(lambda rank, number=number: agree("key", lambda: f"group {number}"))
        assert answers == ["group 0"] * RANKS
        # Compared once: it may change later.
        as_ranks(lambda rank: check_equal("topic", {"later": str(rank)}))
        as_ranks.begin()


def test_in_any_store_a_decision_can_be_late(as_ranks: Group) -> None:
    given_up = threading.Barrier(RANKS)
    claimed = threading.Event()

    def work(rank: int) -> str | None:
        if rank == 2:

            def decide() -> str:
                claimed.set()
                given_up.wait(20)
                return "late"

            return agree("late", decide)
        claimed.wait(20)
        answer = agree("late", lambda: "not claimed", wait_s=0.3)
        given_up.wait(20)
        return answer

    assert as_ranks(work) == [None] * RANKS
    assert as_ranks(lambda rank: agree("late", lambda: "again")) == [None] * RANKS
    # Nobody decides any more, in this group or the next; only another job begins anew.
    for number in range(2):
        later = as_ranks(lambda rank, number=number: agree(f"later {number}", lambda: "decided"))
        assert later == [None] * RANKS
        as_ranks.begin()
    as_ranks.begin("another")
    assert as_ranks(lambda rank: agree("late", lambda: "again")) == ["again"] * RANKS


def test_in_any_store_a_late_decider_stops_all_if_the_one_that_gave_up_did_not(
    as_ranks: Group,
) -> None:
    """As where it has ended between the two steps."""

    def work(rank: int) -> str | None:
        def decide() -> str:
            held = as_ranks.entries[0].read("choice/late")
            as_ranks.entries[3].settle("choice/late", held, "gristmill/1 untuned")
            return "late"

        return agree("late", decide) if rank == 0 else None

    assert as_ranks(work) == [None] * RANKS
    assert as_ranks(lambda rank: agree("later", lambda: "decided")) == [None] * RANKS


@pytest.mark.parametrize("round_", range(3))
def test_in_any_store_the_last_moment_has_one_outcome(as_ranks: Group, round_: int) -> None:
    """A result and ends of patience at about the same time: either may win, for all."""
    for number in range(6):
        as_ranks.begin(f"job {number}")
        start = threading.Barrier(RANKS)

        def work(rank: int, number: int = number, start: threading.Barrier = start) -> str | None:
            def decide() -> str:
                time.sleep(0.03 + 0.002 * number)
                return "in time"

            start.wait(20)
            return agree(f"close {number}", decide, wait_s=0.036)

        assert len(set(as_ranks(work))) == 1


def test_any_store_compares_large_tables(as_ranks: Group) -> None:
    rows = {f"linear bf16 rows={n} N={n * 7}": f"triton_tiles {{'n': {n}}}" for n in range(20_000)}

    def work(rank: int) -> str | None:
        mine = {**rows, **({"linear bf16 rows=5 N=35": "library"} if rank == 2 else {})}
        try:
            check_equal("large", mine)
        except RanksDisagree as error:
            return str(error)
        return None

    raised = as_ranks(work)
    named = "linear bf16 rows=5 N=35: "
    # Whichever was first: rank 2 stands against the others, or they against it.
    if raised[2] is None:
        assert all(text is not None and named in text for text in raised[:2] + raised[3:])
    else:
        assert named in raised[2]
        assert "library on rank 2" in raised[2]
        assert "more" not in raised[2].partition(" Give ")[0]
        assert raised[:2] + raised[3:] == [None] * 3


def test_a_rank_that_dies_while_it_counts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Between counting and writing, where a store cannot do both at once."""
    forget_warnings()
    shared = CountingStore()
    entries = Entries(dist.PrefixStore("default", shared), 1)
    shared.add("default/gristmill/choice/claimed/claim count", 1)
    monkeypatch.setattr(agreement, "entries", lambda: entries)
    monkeypatch.setattr(group_store, "PATIENCE_S", 0.2)
    assert agree("claimed", lambda: "mine") is None
    # The store is as good as before.
    assert agree("another", lambda: "mine") == "mine"
    shared.set("default/gristmill/choice/settled/claim", "gristmill/1 claim 0 x")
    shared.add("default/gristmill/choice/settled/claim count", 1)
    shared.add("default/gristmill/choice/settled/outcome count", 1)
    assert agree("settled", lambda: "mine", wait_s=0.1) is None
    for record, place in zip(caplog.records, ("claimed/claim", "settled/outcome"), strict=True):
        assert f"a rank has counted for choice/{place} and not written it" in record.message
    assert published("another") == "mine"
    # The second was waited for in vain.
    assert agree("later", lambda: "mine") is None
    forget_warnings()


def test_the_server_of_the_store_is_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forget_warnings()
    limit = timedelta(seconds=2)
    server = dist.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, None, False, limit)
    entries = Entries(client, 1)
    monkeypatch.setattr(agreement, "entries", lambda: entries)
    assert agree("here", lambda: "mine") == "mine"

    def decide() -> str:
        nonlocal server
        del server
        return "mine"

    # What cannot be published is not taken either.
    assert agree("gone", decide) is None
    assert agree("later", lambda: "mine") is None
    assert published("here") is None
    check_equal("gone", {"a": "b"})
    (text,) = [record.message for record in caplog.records]
    assert text.startswith("the store of the process group cannot be used (DistNetworkError: ")
    assert "\n" not in text
    forget_warnings()


def test_a_group_without_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = Entries(None, 0)
    monkeypatch.setattr(agreement, "entries", lambda: entries)
    assert agree("key", lambda: "mine") is None
    check_equal("topic", {"a": "b"})
    with pytest.raises(StoreLost, match="the process group has no store"):
        entries.read("key")
    forget_warnings()


def test_a_store_that_can_do_nothing() -> None:
    """The one that goes with torch's fake process group."""
    with pytest.raises(StoreLost, match="RuntimeError"):
        Entries(dist.Store(), 0).read("key")


def check_local() -> None:
    assert alone()
    assert store() is None
    assert agree("key", lambda: "mine") == "mine"
    assert agree("key", lambda: None) is None
    assert published("key") is None
    with pytest.raises(ZeroDivisionError):
        agree("key", lambda: str(1 / 0))
    for value in "ab":
        check_equal("topic", {"key": value})
    assert not len(group_store._OPEN)


def test_not_initialised_is_local() -> None:
    check_local()


def test_no_distributed_package_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    # A torch that is built without the package has none of its other names.
    monkeypatch.delattr(torch.distributed, "is_initialized")
    check_local()
    monkeypatch.delitem(sys.modules, "torch.distributed")
    check_local()


def test_one_rank_is_local() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        check_local()
    finally:
        dist.destroy_process_group()


def test_asking_whether_one_is_alone_is_cheap() -> None:
    start = time.process_time()
    for _ in range(10_000):
        agree("key", str)
    assert time.process_time() - start < 0.3  # 30 us each, where it was written 0.5


def test_the_error_is_one_of_ours() -> None:
    assert issubclass(RanksDisagree, GristmillError)
    assert issubclass(RanksDisagree, RuntimeError)
