"""Ranks agree on a choice: four processes of their own, and stores of every kind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock

from gristmill.errors import GristmillError, RanksDisagree
from gristmill.log import forget_warnings
from gristmill.select import agreement, group_store
from gristmill.select.agreement import agree, alone, check_equal, published, store
from gristmill.select.group_store import Entries, StoreLost

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "src"
RANKS = 4

if not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)


@pytest.fixture(scope="module", params=["tcp", "file"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank has found; they run once, for all workers of a test run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "agreement"
    folder = folder / request.param
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        if not (folder / "done").exists():
            run_ranks(folder, request.param)
            (folder / "done").touch()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def run_ranks(folder: Path, kind: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [sys.executable, str(HERE / "agreement_rank.py"), str(folder), kind],
        env=environment,
        start_new_session=True,
    )
    try:
        process.wait(90)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the ranks as well
        process.wait()
    ends = json.loads((folder / "ends.json").read_text())
    output = "\n".join((folder / f"{rank}.txt").read_text() for rank in range(RANKS))
    assert ends == {**({"0": 0} if kind == "file" else {}), "1": 0, "2": 0, "3": 9}, output


def every(ranks: list[Any], scenario: str, name: str) -> list[Any]:
    """One result of a scenario, of all ranks that took part in it."""
    return [one[scenario][name] for one in ranks if scenario in one]


def test_one_decides_and_all_have_its_answer(ranks: list[Any]) -> None:
    assert sorted(every(ranks, "one answer", "decided")) == [0, 0, 0, 1]
    first = every(ranks, "one answer", "decided").index(1)
    # Whatever is in it: another alphabet, the end of a line.
    answer = f"from {first}, ä {{'x': 1}}\n"
    assert every(ranks, "one answer", "answer") == [answer] * RANKS
    assert every(ranks, "asked again", "decided") == [0] * RANKS
    assert every(ranks, "asked again", "answer") == [answer] * RANKS
    assert every(ranks, "asked again", "published") == [answer] * RANKS
    assert every(ranks, "nobody asked", "published") == [None] * RANKS


def test_a_rank_that_never_calls_is_not_waited_for(ranks: list[Any]) -> None:
    answers = every(ranks, "some never call", "answer")
    assert len(answers) == 2
    assert answers[0] == answers[1] in ("from 1", "from 2")
    assert max(every(ranks, "some never call", "seconds")) < 5


def test_a_decision_that_comes_too_late_is_taken_by_nobody(ranks: list[Any]) -> None:
    assert every(ranks, "slow", "decided") == [0, 1, 0, 0]
    assert every(ranks, "slow", "answer") == [None] * RANKS
    assert every(ranks, "slow", "published") == [None] * RANKS
    seconds = every(ranks, "slow", "seconds")
    assert 1.0 <= max(seconds[:1] + seconds[2:]) < 10.0
    for again in every(ranks, "slow", "again"):
        assert (again["answer"], again["decided"]) == (None, 0)
    texts = [text for one in ranks for text in one["a_claim_from_before warned"]["warned"]]
    assert "rank 1 has not said within 1 s which kernel is best for slow: all ranks" in str(texts)
    assert "rank 1 was too slow in choosing for slow" in str(
        ranks[1]["a_claim_from_before warned"]
    )


def test_after_one_wait_in_vain_nobody_decides_or_waits(ranks: list[Any]) -> None:
    assert every(ranks, "after slow", "decided") == [0] * RANKS
    assert every(ranks, "after slow", "answer") == [None] * RANKS
    assert max(every(ranks, "after slow", "seconds")) < 0.9
    # What was decided or claimed before that is for all.
    assert every(ranks, "before slow", "answer") == ["known"] * RANKS
    assert every(ranks, "claimed before", "answer") == ["from before"] * RANKS
    assert every(ranks, "claimed before", "decided") == [1, 0, 0, 0]
    texts = [text for one in ranks for text in one["a_claim_from_before warned"]["warned"]]
    assert sum("ranks have waited for each other for too long, as rank" in it for it in texts) > 0


def test_a_decision_that_fails(ranks: list[Any]) -> None:
    assert every(ranks, "raising", "decided") == [0, 0, 1, 0]
    assert every(ranks, "raising", "answer") == [None] * RANKS
    raised = every(ranks, "raising", "raised")
    assert raised == [None, None, "ValueError: no kernel could be timed", None]
    assert every(ranks, "undecided", "decided") == [1, 0, 0, 0]
    assert every(ranks, "undecided", "answer") == [None] * RANKS
    # Nobody waited until its patience was at an end, which is 30 s.
    assert max(every(ranks, "raising took", "seconds")) < 10
    assert every(ranks, "raising warned", "warned") == [[]] * RANKS


def test_many_keys_from_many_threads(ranks: list[Any]) -> None:
    answers = [found for one in ranks for found in one["threads"]["answers"]]
    assert len(answers) == 8 * RANKS
    assert all(found == answers[0] for found in answers)
    keys = [f"key {n}" for n in range(30)]
    assert sorted(answers[0]) == sorted(keys)
    assert all(value.startswith(f"{key} by ") for key, value in answers[0].items())
    # Each was decided once, by the rank whose answer was taken.
    decided = [(key, rank) for rank, one in enumerate(ranks) for key in one["threads"]["decided"]]
    assert sorted(decided) == sorted((key, int(value[-1])) for key, value in answers[0].items())


def test_what_differs_is_named_by_the_rank_that_comes_later(ranks: list[Any]) -> None:
    for rank, one in enumerate(ranks):
        assert one["equal"]["same"] == [None, None]
        assert one["equal"]["GPU"] == [None, None]  # each rank had a topic of its own
        if rank < 3:
            assert one["equal"]["H200"] == [None, None]
    first, again = ranks[3]["equal"]["H200"]
    assert first == again
    assert first.startswith(
        "H200: ranks 0 and 3 would run different kernels. linear rows=1 N=4096: triton_tiles "
        "{'m': 0} on rank 0, nothing on rank 3; linear rows=1024 N=4096: triton_tiles {'m': 10} on "
        "rank 0, triton_split {'m': 10} on rank 3; "
    )
    assert first.count(" on rank 3") == 5
    assert "; and 16 more. " in first
    assert first.endswith(
        "Give all ranks the same version of gristmill, the same GRISTMILL_* settings and the same "
        "tuned table: copy the table of one to all, or set GRISTMILL_TABLE=off on all"
    )


def test_what_was_tuned_in_this_run_is_no_difference(ranks: list[Any]) -> None:
    for first in (0, 2):
        scenario = f"tuned meanwhile, {first}"
        assert every(ranks, scenario, "more") == [None] * RANKS
        differing = [2] if first == 0 else [0, 1, 3]
        for name, shown in (("wrong", "cuda_block"), ("unknown", "cuda_warp")):
            for rank, text in enumerate(every(ranks, scenario, name)):
                assert (text is not None) == (rank in differing), text
                assert text is None or f"{shown} on rank 2" in text


def test_a_value_of_another_version_is_an_error(ranks: list[Any]) -> None:
    for raised in every(ranks, "foreign", "raised"):
        assert raised.startswith(
            "RanksDisagree: the store of the process group holds 'gristmill/9 result x' under "
            "gristmill/choice/foreign, which is not"
        )
    for raised in every(ranks, "foreign", "equal"):
        assert "holds 'gristmill/9 equal x'" in raised
    assert every(ranks, "foreign", "decided") == [0] * RANKS


def test_a_thread_that_waits_for_a_key_keeps_nobody_waiting(ranks: list[Any]) -> None:
    """The one that waits does so for 1.5 s, of which 0.1 have passed."""
    assert max(every(ranks, "busy store", "seconds")) < 1.2
    assert len(set(every(ranks, "busy store", "answer"))) == 1


def test_a_fork_has_a_connection_of_its_own(ranks: list[Any]) -> None:
    (answer,) = set(every(ranks, "forked", "answer"))
    assert ranks[1]["forked"]["child"] == f"{answer} 0 True"


def test_without_a_group_and_with_the_next(ranks: list[Any]) -> None:
    assert every(ranks, "destroyed", "answer") == [f"local {rank}" for rank in range(RANKS)]
    assert every(ranks, "destroyed", "store") == [True] * RANKS
    # The store of a destroyed group was let go.
    assert every(ranks, "group 3", "opened") == [0] * RANKS
    # The same store still has its answers; another one has none.
    (earlier,) = set(every(ranks, "one answer", "answer"))
    assert set(every(ranks, "group 2", "answer")) <= {earlier}
    assert every(ranks, "group 3", "answer") == ["group 3"] * RANKS
    for number in (2, 3) if "group 2" in ranks[0] else (3,):
        news = every(ranks, f"group {number}", "new")
        assert [new["answer"] for new in news] == [f"group {number}"] * RANKS
        assert sum(new["decided"] for new in news) == 1
        # Compared anew, and not with what an earlier group had.
        differs = every(ranks, f"group {number}", "differs")
        assert differs[:3] == [None] * 3
        assert "later: 0 on rank 0, 1 on rank 3" in differs[3]


def test_a_rank_that_dies_while_it_decides(ranks: list[Any]) -> None:
    left = ranks[:3]
    assert "dead" not in ranks[3]
    assert every(left, "dead", "answer") == [None] * 3
    assert every(left, "dead", "decided") == [0] * 3
    assert 1.0 <= max(every(left, "dead", "seconds")) < 10.0
    for again in every(left, "dead", "again"):
        assert (again["answer"], again["decided"]) == (None, 0)
    assert every(left, "after a death", "answer") == [None] * 3
    assert every(left, "after a death", "decided") == [0] * 3
    assert max(every(left, "after a death", "seconds")) < 0.9


def test_a_store_that_stops_to_answer(ranks: list[Any]) -> None:
    found = [one["stopped store"] for one in ranks if "stopped store" in one]
    if not found:
        pytest.skip("a file does not stop")
    assert len(found) == 2
    for one in found:
        assert (one["first"]["answer"], one["first"]["decided"]) == (None, 0)
        assert 1.0 <= one["first"]["seconds"] < 10.0
        # It is not asked again.
        assert (one["again"]["answer"], one["again"]["decided"]) == (None, 0)
        assert one["again"]["seconds"] < 0.9
    for one in ranks[1:3]:
        assert "the store of the process group cannot be used (it has not answered for 1 s)" in str(
            one["warned"]
        )


# Below: ranks as threads of this process.


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
    shared.set("default/gristmill/choice/settled/claim", "gristmill/1 claim 0 x")
    shared.add("default/gristmill/choice/settled/claim count", 1)
    shared.add("default/gristmill/choice/settled/outcome count", 1)
    assert agree("settled", lambda: "mine", wait_s=0.1) is None
    for record, place in zip(caplog.records, ("claimed/claim", "settled/outcome"), strict=True):
        assert f"a rank has counted for choice/{place} and not written it" in record.message
    # The store is as good as before.
    assert agree("another", lambda: "mine") == "mine"
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
