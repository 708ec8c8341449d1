"""Four ranks that call real ops and tune them as they meet them; each leaves what it saw in a file.

Argument: the folder. The ranks are forks of this process, as in agreement_rank.py, and every
scenario has a process group of its own, on one TCPStore. No two neighbours have the same favourite:
what one rank finds fastest is slow on the next, so that ranks left to themselves would differ.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gristmill
from gristmill import settings
from gristmill.errors import RanksDisagree
from gristmill.select import agreement, device_of, reset_tables, sight, tables_for, tuning
from gristmill.select.table import Table
from gristmill.select.timing import Timing
from gristmill.tune.region import forget_plans

RANKS = 4
LIMIT = timedelta(seconds=30)


def double(x: torch.Tensor) -> torch.Tensor:
    return x + x


def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled = gristmill.MultiKernel("doubled", {"library": double, "reference": twice})


def data(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))


def problems() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """What is called and by what arguments: three sizes share no bucket, the last two do."""
    found: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    for rows in (3, 20, 300, 310):
        x, weight = data(rows, 64), torch.linspace(0.5, 1.5, 64)
        found[f"rms_norm {rows}"] = (gristmill.rms_norm, (x, weight))
        found[f"layer_norm {rows}"] = (gristmill.layer_norm, (x, weight, weight))
        found[f"softmax {rows}"] = (gristmill.softmax, (x,))
        found[f"doubled {rows}"] = (doubled, (x,))
    return found


class Rank:
    """This rank, the store that the groups share, and its results by scenario."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder = rank, folder
        self.raw = self._opened(folder / "port")
        self.results: dict[str, Any] = {}
        self.measured: list[str] = []
        self.warned: list[str] = []
        self.favourite = ("library", "reference")[rank % 2]
        self.before_timing: Callable[[], None] = lambda: None
        self._watch()

    def _opened(self, port: Path) -> Any:
        if self.rank == 0:
            opened = dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, wait_for_workers=False)
            port.with_suffix(".new").write_text(str(opened.port))
            port.with_suffix(".new").rename(port)
            return opened
        while not port.exists():
            time.sleep(0.01)
        return dist.TCPStore("127.0.0.1", int(port.read_text()), None, False, LIMIT)

    def _watch(self) -> None:
        """Note what is measured and warned of, and make the favourite win by far."""
        real_tune, real_time = sight.tune, tuning.time_interleaved

        def tune(*args: Any, **options: Any) -> Any:
            self.measured.append(options["key"])
            return real_tune(*args, **options)

        def timed(*args: Any, **options: Any) -> Mapping[str, Any]:
            self.before_timing()
            found = real_time(*args, **options)
            return {name: self._judged(name, one) for name, one in found.items()}

        def warned(key: str, message: str) -> None:
            self.warned.append(message)

        sight.tune, tuning.time_interleaved = tune, timed
        for module in (agreement, sight):
            module.warn_once = warned

    def _judged(self, name: str, timing: Timing | Exception) -> Timing | Exception:
        if isinstance(timing, Exception):
            return timing
        factor = 1.0 if name.split()[0] == self.favourite else 1000.0
        return replace(timing, us=factor * timing.us, spread_us=0.0)

    def begin(self, scenario: str, cache: str, **environment: str) -> None:
        """A group of its own, and a mind as empty as that of a new process."""
        defaults = {"GRISTMILL_TUNE": "first-call", "GRISTMILL_TABLE": "on", "GRISTMILL_USE": ""}
        os.environ.update({**defaults, **environment})
        os.environ["GRISTMILL_CACHE_DIR"] = str(self.folder / cache)
        settings.reload_settings()
        reset_tables()
        forget_plans()
        self.measured.clear()
        self.warned.clear()
        self.scenario = scenario
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(scenario, self.raw),
            rank=self.rank,
            world_size=RANKS,
            timeout=LIMIT,
        )

    def keep(self, **found: Any) -> None:
        """Write down what was found; at once, as some ranks do not live to the end."""
        known = {"measured": list(self.measured), "warned": list(self.warned)}
        self.results.setdefault(self.scenario, {}).update({**known, **found})
        path = self.folder / f"{self.rank}.json"
        path.with_suffix(".new").write_text(json.dumps(self.results))
        path.with_suffix(".new").rename(path)

    def end(self) -> None:
        dist.barrier()
        dist.destroy_process_group()

    def say(self, word: str) -> None:
        self.raw.set(f"test {self.scenario} {word}", "said")

    def hear(self, *words: str) -> None:
        self.raw.wait([f"test {self.scenario} {word}" for word in words], LIMIT)

    def chosen(self, name: str) -> str:
        function, args = problems()[name]
        found = gristmill.explain(function, *args)
        return f"{found.chosen} by {found.source}"


def called(me: Rank, names: list[str]) -> dict[str, str]:
    """Call each, and what it was run by; that the result is right is checked on the way."""
    found = {}
    for name in names:
        function, args = problems()[name]
        before = gristmill.counters()["choices"]
        result = function(*args)
        after = gristmill.counters()["choices"]
        more = [one for one in after if after[one] > before.get(one, 0)]
        expected = {
            "rms_norm": lambda x, w: torch.nn.functional.rms_norm(x, (64,), w, 1e-6),
            "layer_norm": lambda x, w, b: torch.nn.functional.layer_norm(x, (64,), w, b, 1e-5),
            "softmax": lambda x: torch.softmax(x, -1),
            "doubled": lambda x: x + x,
        }[name.split()[0]]
        torch.testing.assert_close(result, expected(*args))
        found[name] = ", ".join(one.partition(":")[2] for one in more)
    return found


def shuffled(me: Rank) -> list[str]:
    """All problems in an order of this rank's own; no two ranks begin with the same one."""
    names = list(problems())
    first = names.pop(me.rank)
    random.Random(me.rank).shuffle(names)
    return [first, *names]


def together(me: Rank) -> None:
    """All ranks meet all problems, each in an order of its own; and once more in a second run."""

    def begin_together() -> None:
        me.before_timing = lambda: None
        me.say(f"timing {me.rank}")
        me.hear(*[f"timing {rank}" for rank in range(RANKS)])

    me.before_timing = begin_together
    for scenario in ("together", "second run"):
        me.begin(scenario, "shared")
        start = time.monotonic()
        ran = called(me, shuffled(me))
        seconds = time.monotonic() - start
        me.keep(ran=ran, chosen={name: me.chosen(name) for name in problems()}, seconds=seconds)
        me.end()


def threads(me: Rank) -> None:
    """Four threads of each rank; a backward pass as well."""
    me.begin("threads", "threads")
    errors: list[str] = []

    def work(seed: int) -> None:
        try:
            names = list(problems())
            random.Random(seed).shuffle(names)
            for name in names:
                function, args = problems()[name]
                function(*args)
            x = data(20, 64).requires_grad_()
            gristmill.rms_norm(x, torch.ones(64)).sum().backward()
        except Exception as error:
            errors.append(repr(error))

    workers = [threading.Thread(target=work, args=(10 * me.rank + n,)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    table = tables_for(device_of("cpu"))[0].table
    me.keep(errors=errors, rows={key: row.launch() for key, row in table.rows.items()})
    me.end()


def absent(me: Rank) -> None:
    """Rank 2 calls nothing until the others are done."""
    me.begin("absent", "absent")
    if me.rank == 2:
        me.hear(*[f"done {rank}" for rank in range(RANKS) if rank != 2])
    start = time.monotonic()
    ran = called(me, ["rms_norm 20", "softmax 300"])
    me.keep(ran=ran, seconds=time.monotonic() - start)
    me.say(f"done {me.rank}")
    me.end()


def unequal(me: Rank) -> None:
    """Rank 3 has a table of its own, in which one row is another; rank 1 another setting."""
    cache = "unequal" if me.rank == 3 else "shared"
    shared = Table.load(me.folder / "shared" / "tables" / "cpu.json")
    key, row = next((key, row) for key, row in shared.rows.items() if "softmax rows=256" in key)
    other = "reference" if row.variant == "library" else "library"
    if me.rank == 3:
        shared.put(replace(row, variant=other))
        shared.save(me.folder / cache / "tables" / "cpu.json")
    me.begin("unequal", cache, GRISTMILL_USE="layer_norm:library" if me.rank == 1 else "")
    raised = []
    if me.rank == 0:
        called(me, ["rms_norm 20"])
        me.say("first")
    me.hear("first")
    for _ in range(2):
        try:
            called(me, ["rms_norm 20"])
            raised.append(None)
        except RanksDisagree as error:
            raised.append(str(error))
    me.keep(raised=raised, key=key, here=other, there=row.variant)
    me.end()


def stale(me: Rank) -> None:
    """All rows of the shared table are stale; ranks 2 and 3 read it when others have tuned anew."""
    if me.rank == 0:
        table = Table.load(me.folder / "shared" / "tables" / "cpu.json")
        for row in list(table.rows.values()):
            other = "reference" if row.variant == "library" else "library"
            table.put(replace(row, variant=other, source_hash="of an older version"))
        table.save(me.folder / "stale" / "tables" / "cpu.json")
        me.raw.set("test stale written", "yes")
    me.raw.wait(["test stale written"], LIMIT)
    me.begin("stale", "stale")
    if me.rank > 1:
        me.hear("done 0", "done 1")
    try:
        ran, raised = called(me, ["rms_norm 20", "layer_norm 20"]), None
    except RanksDisagree as error:
        ran, raised = {}, str(error)
    me.say(f"done {me.rank}")
    me.keep(ran=ran, raised=raised)
    me.end()


def apart(me: Rank) -> None:
    """Every rank has a cache folder of its own, as on as many nodes; and a second run there."""
    for scenario in ("apart", "apart again"):
        me.begin(scenario, f"apart {me.rank}")
        try:
            ran, raised = called(me, shuffled(me)), None
        except RanksDisagree as error:
            ran, raised = {}, str(error)
        me.keep(ran=ran, raised=raised)
        me.end()


def dead(me: Rank) -> None:
    """Rank 3 ends while it times; those that are left agree, and do not wait for the next."""
    me.begin("dead", "dead")
    agreement.agree.__kwdefaults__["wait_s"] = 1.5
    if me.rank == 3:

        def die() -> None:
            me.say("dying")
            os._exit(9)

        me.before_timing = die
    else:
        me.hear("dying")
    start = time.monotonic()
    ran = called(me, ["rms_norm 20"])
    seconds = time.monotonic() - start
    start = time.monotonic()
    ran.update(called(me, ["rms_norm 300", "softmax 20"]))
    later = time.monotonic() - start
    rows = list(tables_for(device_of("cpu"))[0].table.rows)
    found = {"seconds": seconds, "later seconds": later, "rows": rows}
    me.keep(ran=ran, chosen=me.chosen("rms_norm 20"), **found)
    # The one that serves the store is the last to go.
    me.say(f"done {me.rank}")
    if me.rank == 0:
        me.hear("done 1", "done 2")


def run(me: Rank) -> None:
    for scenario in (together, threads, absent, unequal, stale, apart, dead):
        scenario(me)


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    ranks = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            output = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            return run(Rank(rank, folder))
        ranks.append(pid)
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    (folder / "ends.json").write_text(json.dumps(ends))
    return None


if __name__ == "__main__":
    main()
