"""Four ranks that agree, through a TCPStore or a FileStore; each leaves what it found in a file.

Arguments: the folder, "tcp" or "file". The ranks are forks of this process, which saves three of
four imports. Each scenario starts together, at a barrier, and its results are written at once:
some ranks do not live to the end.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gristmill.errors import RanksDisagree
from gristmill.select import agreement, group_store
from gristmill.select.agreement import agree, check_equal, published, store

RANKS = 4
LIMIT = timedelta(seconds=30)
ROWS = {f"linear rows={2**n} N=4096": f"triton_tiles {{'m': {n}}}" for n in range(20)}


class Rank:
    """This rank, its store as torch has it, and its results by scenario."""

    def __init__(self, rank: int, ranks: int, folder: Path, kind: str) -> None:
        self.rank, self.ranks, self.folder, self.kind = rank, ranks, folder, kind
        self.raw = self._opened(folder / "port")
        self.results: dict[str, Any] = {}
        self.join(self.raw)

    def _opened(self, port: Path) -> Any:
        if self.kind == "file":
            return dist.FileStore(str(self.folder / "store"), self.ranks)
        if self.rank == 0:
            opened = dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, wait_for_workers=False)
            port.with_suffix(".new").write_text(str(opened.port))
            port.with_suffix(".new").rename(port)
            return opened
        while not port.exists():
            time.sleep(0.01)
        return dist.TCPStore("127.0.0.1", int(port.read_text()), None, False, LIMIT)

    def join(self, raw: Any) -> None:
        dist.init_process_group(
            "gloo", store=raw, rank=self.rank, world_size=self.ranks, timeout=LIMIT
        )

    def forget_gloo(self) -> bool:
        """Let a second group begin on the same store; False where that cannot be.

        gloo would take the addresses that ranks had in the first one for those they have now.
        """
        if self.kind == "file" or not hasattr(self.raw, "list_keys"):
            return False
        self.say(f"destroyed {self.rank}")
        self.hear(*[f"destroyed {rank}" for rank in range(self.ranks)])
        if self.rank == 0:
            for key in self.raw.list_keys():
                if "gristmill" not in key and "test " not in key:
                    self.raw.delete_key(key)
            self.say("forgotten")
        self.hear("forgotten")
        return True

    def keep(self, name: str, **found: Any) -> None:
        self.results[name] = found
        path = self.folder / f"{self.rank}.json"
        path.with_suffix(".new").write_text(json.dumps(self.results))
        path.with_suffix(".new").rename(path)

    def say(self, word: str) -> None:
        self.raw.set(f"test {word}", "said")

    def hear(self, *words: str) -> None:
        self.raw.wait([f"test {word}" for word in words], LIMIT)

    def ask(self, key: str, decide: Callable[[], str | None], **options: float) -> dict[str, Any]:
        """`agree`, with whether this rank decided, how long it took and what was raised."""
        decided = 0

        def counted() -> str | None:
            nonlocal decided
            decided += 1
            return decide()

        start, answer, raised = time.monotonic(), None, None
        try:
            answer = agree(key, counted, **options)
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - start
        return {"answer": answer, "decided": decided, "seconds": seconds, "raised": raised}

    def after(self, first: int, word: str, decide: Callable[[], str | None]) -> Callable[[], Any]:
        """`decide` for rank `first`, which the others let go first: they go on when it decides."""
        if self.rank != first:
            self.hear(word)
            return lambda: f"rank {self.rank} decided too"

        def told() -> str | None:
            self.say(word)
            return decide()

        return told


def one_answer(me: Rank) -> None:
    def decide() -> str:
        time.sleep(0.2)
        return f"from {me.rank}, ä {{'x': 1}}\n"

    me.keep("one answer", **me.ask("one", decide))
    me.keep("asked again", **me.ask("one", decide), published=published("one"))
    me.keep("nobody asked", published=published("nobody asked this"))


def some_never_call(me: Rank) -> None:
    if me.rank in (1, 2):
        me.keep("some never call", **me.ask("some", lambda: f"from {me.rank}"))


def slow(me: Rank) -> None:
    """Rank 1 decides only when all others have given up."""
    others = [f"gave up {rank}" for rank in range(me.ranks) if rank != 1]

    def decide() -> str:
        me.hear(*others)
        return "late"

    found = me.ask("slow", me.after(1, "slow", decide), wait_s=1.0)
    if me.rank != 1:
        me.say(f"gave up {me.rank}")
    me.keep("slow", **found, again=me.ask("slow", lambda: "other"), published=published("slow"))
    # From here on nobody decides or waits; what has been agreed on holds.
    me.keep("after slow", **me.ask("after slow", lambda: f"from {me.rank}"))
    me.keep("before slow", **me.ask("before slow", lambda: "other"))


def a_claim_from_before(me: Rank) -> None:
    """Rank 0 has begun to decide before the ranks stop, on a thread of its own."""
    agree("before slow", lambda: "known")
    found: list[dict[str, Any]] = []
    # Not words in the store: who waits for one keeps out the other threads of this rank.
    begun, over = threading.Event(), threading.Event()

    def decide() -> str:
        begun.set()
        over.wait(20)
        return "from before"

    if me.rank == 0:
        worker = threading.Thread(target=lambda: found.append(me.ask("under way", decide)))
        worker.start()
        begun.wait(20)
        me.say("under way")
    me.hear("under way")
    slow(me)
    if me.rank == 0:
        over.set()
        worker.join()
    else:
        found.append(me.ask("under way", lambda: "other"))
    me.keep("claimed before", **found[0])
    dist.barrier()
    dist.destroy_process_group()
    me.join(dist.PrefixStore("last of all", me.raw))


def raising(me: Rank) -> None:
    def decide() -> str:
        raise ValueError("no kernel could be timed")

    me.keep("raising", **me.ask("raising", me.after(2, "raising", decide)))
    me.keep("undecided", **me.ask("undecided", me.after(0, "undecided", lambda: None)))


def threads(me: Rank) -> None:
    """Eight threads ask for the same thirty keys, each in an order of its own."""
    answers: list[dict[str, str | None]] = [{} for _ in range(8)]
    decided: list[str] = []

    def work(mine: dict[str, str | None], seed: int) -> None:
        keys = [f"key {n}" for n in range(30)]
        random.Random(seed).shuffle(keys)
        for key in keys:

            def decide(key: str = key) -> str:
                decided.append(key)
                return f"{key} by {me.rank}"

            mine[key] = agree(key, decide)

    workers = [
        threading.Thread(target=work, args=(mine, 100 * me.rank + n))
        for n, mine in enumerate(answers)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    me.keep("threads", answers=answers, decided=decided)


def equal(me: Rank) -> None:
    """Rank 0 comes first; rank 3 has another table, and another of another GPU."""
    mine = dict(ROWS)
    if me.rank == 3:
        mine = {key: value.replace("tiles", "split") for key, value in ROWS.items()}
        del mine["linear rows=1 N=4096"]
        mine["softmax"] = "library"
    found = {}
    for topic, rows in (("same", ROWS), ("H200", mine), (f"GPU of rank {me.rank}", mine)):
        if me.rank == 0:
            check_equal(topic, rows)
        dist.barrier()
        found[topic] = [
            _raised(lambda topic=topic, rows=rows: check_equal(topic, rows)) for _ in range(2)
        ]
    me.keep("equal", **{topic.partition(" of")[0]: texts for topic, texts in found.items()})


def settled(name: str, here: str | None, there: str | None) -> bool:
    return published(name) == (here or there)


def tuned_meanwhile(me: Rank) -> None:
    """Rank 2 has read a table with a row that was tuned in this run, and one that was not."""
    agree("tuned", lambda: "cuda_warp")
    more = {"tuned": "cuda_warp"} if me.rank == 2 else {}
    wrong = {"tuned": "cuda_block"} if me.rank == 2 else {}
    unknown = {"unknown": "cuda_warp"} if me.rank == 2 else {}
    for first in (0, 2):
        found = {}
        for name, rows in (("more", more), ("wrong", wrong), ("unknown", unknown)):
            topic = f"{name}, rank {first} first"
            if me.rank == first:
                check_equal(topic, {**ROWS, **rows}, settled=settled)
            dist.barrier()
            found[name] = _raised(
                lambda topic=topic, rows=rows: check_equal(topic, {**ROWS, **rows}, settled=settled)
            )
        me.keep(f"tuned meanwhile, {first}", **found)


def foreign(me: Rank) -> None:
    if me.rank == 1:
        store().set("choice/foreign", "gristmill/9 result x")
        store().set(f"equal/{group_store.entries().generation}/foreign", "gristmill/9 equal x")
    dist.barrier()
    found = me.ask("foreign", lambda: "mine")
    me.keep("foreign", **found, equal=_raised(lambda: check_equal("foreign", ROWS)))


def busy_store(me: Rank) -> None:
    """Another thread waits for a key, as torch's own do; a TCPStore lets nobody by meanwhile."""

    def wait() -> None:
        with suppress(dist.DistStoreError):
            me.raw.wait(["test never said"], timedelta(seconds=1.5))

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.1)
    me.keep("busy store", **me.ask("busy", lambda: f"from {me.rank}"))
    waiting.join()


def forked(me: Rank) -> None:
    """Rank 1 forks; the child asks, and what it is told leaves its parent's connection alone."""
    child = None
    found = me.ask("forked", lambda: f"from {me.rank}")
    if me.rank == 1:
        path = me.folder / "child"
        parents = group_store.entries()
        pid = os.fork()
        if pid == 0:
            told = me.ask("forked", lambda: "from the child")
            own = group_store.entries() is not parents
            path.write_text(f"{told['answer']} {told['decided']} {own}")
            os._exit(0)
        os.waitpid(pid, 0)
        child = path.read_text()
    me.keep("forked", **{**found, "child": child, "answer": published("forked")})


def destroyed(me: Rank) -> None:
    """Without a group all is local; a second group on the same store, and one on another."""
    dist.barrier()
    dist.destroy_process_group()
    me.keep("destroyed", **me.ask("one", lambda: f"local {me.rank}"), store=store() is None)
    check_equal("same", {"local": str(me.rank)})
    opened = len(group_store._OPEN)
    for number in (2, 3):
        if number == 2 and not me.forget_gloo():
            continue
        raw = me.raw
        if number == 3:
            raw = dist.FileStore(str(me.folder / "another store"), me.ranks)
        me.join(raw)
        check_equal("same", {"now": str(number)})
        dist.barrier()
        rows = {"later": str(me.rank // 3)}
        if me.rank == 0:
            check_equal("later", rows)
        dist.barrier()
        me.keep(
            f"group {number}",
            **me.ask("one", lambda number=number: f"group {number}"),
            new=me.ask(f"new {number}", lambda number=number: f"group {number}"),
            differs=_raised(lambda rows=rows: check_equal("later", rows)),
            opened=opened,
        )
        dist.barrier()
        dist.destroy_process_group()
    me.join(dist.PrefixStore("last", me.raw))


def dead(me: Rank) -> None:
    """Rank 3 ends when it is to decide."""
    found = me.ask("dead", me.after(3, "dead", lambda: os._exit(9)), wait_s=1.0)
    me.keep("dead", **found, again=me.ask("dead", lambda: "other"))
    # The three that are left go on, and do not wait again.
    me.keep("after a death", **me.ask("after", lambda: f"from {me.rank}"))


def stopped_store(me: Rank) -> None:
    """The process that serves the store stops to answer, without closing a connection."""
    if me.rank == 0:
        me.raw.set("test pid", str(os.getpid()))
        me.hear("ready 1", "ready 2")
        os.kill(os.getpid(), signal.SIGSTOP)
    group_store.PATIENCE_S = 1.0
    status = Path("/proc", me.raw.get("test pid").decode(), "stat")
    me.say(f"ready {me.rank}")
    while status.read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    first = me.ask("stopped", lambda: f"from {me.rank}")
    again = me.ask("stopped too", lambda: f"from {me.rank}")
    check_equal("stopped", ROWS)
    me.keep("stopped store", first=first, again=again)


def _raised(call: Callable[[], object]) -> str | None:
    try:
        call()
    except RanksDisagree as error:
        return str(error)
    return None


TOGETHER = (
    one_answer,
    some_never_call,
    raising,
    threads,
    equal,
    tuned_meanwhile,
    foreign,
    busy_store,
    forked,
    destroyed,
    a_claim_from_before,
)


def run(me: Rank) -> None:
    warned: list[str] = []
    agreement.warn_once = lambda key, message: warned.append(message)
    for scenario in TOGETHER:
        dist.barrier()
        before, start = len(warned), time.monotonic()
        scenario(me)
        me.keep(f"{scenario.__name__} warned", warned=warned[before:])
        me.keep(f"{scenario.__name__} took", seconds=time.monotonic() - start)
    dist.barrier()
    dead(me)
    if me.kind == "tcp":
        stopped_store(me)
    me.keep("warned", warned=warned)


def main() -> None:
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    ranks = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            output = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            # Ends as any program does, also where a thread still waits for a store.
            return run(Rank(rank, RANKS, folder, kind))
        ranks.append(pid)
    # With a TCPStore the first rank is stopped for good, as the last scenario.
    ends = {rank: os.waitpid(ranks[rank], 0)[1] for rank in range(RANKS) if rank or kind == "file"}
    if kind == "tcp":
        os.kill(ranks[0], signal.SIGKILL)
        os.waitpid(ranks[0], 0)
    (folder / "ends.json").write_text(
        json.dumps({rank: os.waitstatus_to_exitcode(end) for rank, end in ends.items()})
    )
    return None


if __name__ == "__main__":
    main()
