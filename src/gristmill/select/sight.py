"""What happens when a problem is met for the first time: ranks compare notes, it is tuned if asked.

With GRISTMILL_TUNE=first-call, or inside `gristmill.tune`, a problem that no row speaks for is
timed, and the row then takes part in this and all later choices. Between ranks one times and the
others take its word. Never during the capture of a CUDA graph, and never where the same bits are
asked for on every run: the choice would then depend on the weather.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from gristmill.errors import GristmillError, RanksDisagree
from gristmill.locks import Lock
from gristmill.log import logger, warn_once
from gristmill.select import agreement
from gristmill.select.device import Device
from gristmill.select.group_store import entries
from gristmill.select.overrides import active, token, tuning_region
from gristmill.select.problem import Problem, Span
from gristmill.select.table import Row, Table, row_from_json, row_to_json, stop_of
from gristmill.select.tables import remember, tables_for
from gristmill.select.tuning import Outcome, tune
from gristmill.select.turns import Turns
from gristmill.select.variant import Variant
from gristmill.settings import settings
from gristmill.version import __version__

# More rows than this are not made on first sight: where a length grows with every call, each is a
# problem of its own, and tuning them all would never end.
MOST_ROWS = 10_000

# One problem at a time in a process; threads that meet the same one find its row afterwards.
_TUNING = Turns()
# Of the longest wait for that: other ranks are waiting, and no longer than that.
_RANKS_SHARE = 1 / 3
# Begins the names under which ranks compare what a row covers.
_COVERS = "covers of "


@dataclass
class Region:
    """A `tune` region: what it has measured. `again`: also what a row speaks for already."""

    again: bool = False
    thorough: bool = False
    outcomes: list[Outcome] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    progress: Callable[[str], None] | None = None


_REGIONS: dict[int, Region] = {}
_NUMBERS = count(1)
_LOCK = Lock()


def open_region(region: Region) -> int:
    """Make a region known by a number, which `overrides.tuning` carries to where it is used."""
    with _LOCK:
        number = next(_NUMBERS)
        _REGIONS[number] = region
    return number


def close_region(number: int) -> None:
    with _LOCK:
        _REGIONS.pop(number, None)


def first_sight(
    op_name: str,
    variants: Sequence[Variant],
    problem: Problem,
    args: tuple[Any, ...],
    written: Collection[int] = (),
) -> None:
    """Called before a choice is made that is not remembered yet; may add a row for it."""
    compare_ranks(problem.device)
    region = region_here()
    if region is None and (settings().tune == "off" or problem.deterministic):
        return
    if problem.batch_invariant:
        return  # its choice asks no row that is measured here
    if problem.rows == 0:
        return  # no work: what is fastest at that says nothing of one row, which shares its bucket
    if op_name in active():
        return
    try:
        _tune(op_name, variants, problem, args, written, region)
    except RanksDisagree:
        raise
    except (GristmillError, RuntimeError) as error:
        warn_once(
            f"tuning {op_name} {type(error).__name__}",
            f"{op_name}: {problem.key(problem.rows)} could not be tuned, the usual choice is "
            f"taken: {type(error).__name__}: {error}",
        )


def region_here() -> Region | None:
    """The region around here; in a backward pass that has no context, the one opened last.

    Autograd runs backward passes on CUDA in threads of its own. Ops in eager mode bring along the
    modes of their forward pass; those in a compiled graph cannot.
    """
    number = tuning_region()
    if number is not None or token() is not None or torch._C._current_graph_task_id() == -1:
        return None if number is None else _REGIONS.get(number)
    with _LOCK:
        return next(reversed(_REGIONS.values()), None)


def is_capturing(device: Device) -> bool:
    """Whether a CUDA graph is being captured here: nothing may be timed then."""
    if device.kind != "cuda" or not torch.cuda.is_initialized():
        return False
    return bool(torch.cuda.is_current_stream_capturing())


def spoken_for(problem: Problem, variants: Sequence[Variant]) -> bool:
    """Whether a row of this process or of the user holds for `problem`."""
    sources = [source for source in tables_for(problem.device) if not source.shipped]
    return any(source.table.lookup(problem.asked(), variants) is not None for source in sources)


def placed(problem: Problem) -> tuple[str, Span]:
    """The key of the row that a measurement of `problem` makes, and what that row covers.

    As much as is known to run alike, and nothing across the end of a row that tables have now. Row
    counts that go with the nearest stop keep the row that covers them, if it holds for no other
    stop: where tuning has found a switch between two stops, its place stays. For all row counts
    that such a row would cover the answer is the same, so ranks that begin with different ones
    measure the row once.
    """
    problem, sizes = problem.asked(), problem.sizes
    stop, covers = sizes.stop(problem.rows), sizes.span(problem.rows)
    within: list[Span] = []
    for source in tables_for(problem.device):
        row = source.table.row(problem)
        if row is not None and not sizes.up and sum(one in row.covers for one in sizes.stops) < 2:
            stop, covers = row.stop, row.covers
            break
        within.append(
            row.covers if row is not None else _gap(source.table.family(problem), problem)
        )
    within.append(covers)
    least = max(one.least for one in within)
    most = min((one.most for one in within if one.most is not None), default=None)
    stop = max(stop, least) if most is None else min(max(stop, least), most)
    return problem.key(stop), Span(least, most)


def _gap(rows: Iterable[Row], problem: Problem) -> Span:
    """The row counts between the rows below and above a problem that none of them covers."""
    spans = [row.covers for row in rows]
    below = [int(one.end) + 1 for one in spans if one.end < problem.rows]
    above = [one.least - 1 for one in spans if one.least > problem.rows]
    return Span(max(below, default=0), min(above, default=None))


def _tune(
    op_name: str,
    variants: Sequence[Variant],
    problem: Problem,
    args: tuple[Any, ...],
    written: Collection[int],
    region: Region | None,
) -> None:
    key, covers = placed(problem)
    again = region is not None and region.again and key not in region.seen
    if not again and spoken_for(problem, variants):
        return
    able = not is_capturing(problem.device) and not (region is None and _is_full(problem.device))
    if not able and agreement.alone():
        return

    def measured() -> Row:
        thorough = region is not None and region.thorough
        outcome = tune(
            op_name,
            variants,
            problem,
            args,
            key=key,
            covers=covers,
            written=written,
            thorough=thorough,
        )
        if region is not None:
            region.outcomes.append(outcome)
        row = outcome.row
        logger.info("tuned %s: %s, %.2f us", key, row.launch(), row.us)
        return outcome.row

    if region is not None and able:
        region.seen.add(key)
        if region.progress is not None:
            region.progress(key)
    if agreement.alone():
        with _TUNING.turn() as mine:
            if not mine:
                _warn_of_no_turn(op_name, key)
            elif again or not spoken_for(problem, variants):
                remember(problem.device, [measured()])
        return

    def decide() -> str | None:
        if not able:
            return None  # and then none of the ranks shall tune it in this job
        with _TUNING.turn(_RANKS_SHARE) as mine:
            if not mine:
                _warn_of_no_turn(op_name, key)
                return None
            return row_to_json(measured())

    answer = agreement.agree(_topic(problem.device, key), decide)
    if answer is not None:
        # Each in the table that it reads: with folders of their own, ranks would else have
        # different tables in their next run. In a shared one the first to come writes.
        remember(problem.device, [row_from_json(answer)])


def _warn_of_no_turn(op_name: str, key: str) -> None:
    warn_once(
        "no turn to tune",
        f"{op_name}: {key} is not tuned, the usual choice is taken: another thread has been tuning "
        f"for long, perhaps a kernel that waits for this one",
    )


def _is_full(device: Device) -> bool:
    sources = [source for source in tables_for(device) if not source.shipped]
    full = sum(len(source.table.rows) for source in sources) >= MOST_ROWS
    if full:
        warn_once(
            f"rows {device.name}",
            f"{MOST_ROWS} problems have been tuned on {device.name}: others run by the usual "
            f"choice (GRISTMILL_TUNE)",
        )
    return full


def compare_ranks(device: Device) -> None:
    """Once per process group: what choices depend on must be the same on all ranks."""
    topic = f"choices on {device.name}"
    found = entries()
    if found is None or found.store is None or topic in found.checked:
        return
    current = settings()
    mine = {
        "gristmill": __version__,
        "GRISTMILL_TABLE": current.table,
        "GRISTMILL_TUNE": current.tune,
        "GRISTMILL_BATCH_INVARIANT": str(int(current.batch_invariant)),
        "GRISTMILL_USE": ",".join(f"{op}:{name}" for op, name in sorted(current.use.items())),
    }
    # From the last to the first: a row takes what it covers from those of tables asked later. What
    # is shipped has names of its own: a tuned row takes nothing away from it.
    tuned = Table.for_device(device)
    for source in reversed(tables_for(device)):
        rows = list(source.table.rows.values())
        if source.shipped:
            mine.update(_entries(rows, "shipped "))
        else:
            for row in rows:
                tuned.put(row)
    mine.update(_entries(tuned.rows.values()))

    def settled(name: str, here: str | None, there: str | None) -> bool:
        key = name.removeprefix(_COVERS)
        answer = agreement.published(_topic(device, key))
        if answer is not None:
            row = row_from_json(answer)
            if (row.launch() if key == name else str(row.covers)) == (here or there):
                return True
        if key == name and (answer is not None or None not in (here, there)):
            return False
        # A row that was tuned in this run has taken from what others cover, or their place, and
        # parts of them may have another key.
        news = [
            row
            for row in tuned.beside(key)
            if agreement.published(_topic(device, row.key)) is not None
        ]
        return any(here is not None or stop_of(key) in row.covers for row in news)

    agreement.check_equal(topic, mine, settled=settled)


def _entries(rows: Iterable[Row], name: str = "") -> Iterator[tuple[str, str]]:
    """What ranks compare of these rows: which launch each names, and what it covers."""
    for row in rows:
        yield f"{name}{row.key}", row.launch()
        yield f"{_COVERS}{name}{row.key}", str(row.covers)


def _topic(device: Device, key: str) -> str:
    """What ranks agree under on a row."""
    return f"tune {device.name} {key}"
