"""How much of the benchmark the committed run has, and by which shapes it wins and loses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pages_text import Page, joined
from pages_text import table as written

from gristmill.bench.page.headline import against
from gristmill.bench.problems import Problem, problems_of
from gristmill.bench.results import OURS, Results
from gristmill.bench.shapes import SETS
from gristmill.bench.suites import KERNEL_SUITES, SUITES, tasks

# What the rows of a suite that times no kernel are called, where it is not the suite's own name.
ALSO = {"regret": ("regret", "matrix")}


def coverage(page: Page, results: Results) -> str:
    """A line for each suite: how many of its problems were timed, of which ops, against whom."""
    whole = Counter(task.name for task in tasks("cuda")[0])
    timed = [one for one in problems_of(results) if one.ours is not None]
    rows = []
    for suite in KERNEL_SUITES:
        some = [one for one in timed if one.suite == suite]
        ops = [task.name for task in tasks("cuda", suites=(suite,))[0]]
        found = Counter(one.op for one in some)
        told = [f"`{name}` {_of(found[name], whole[name])}" for name in dict.fromkeys(ops)]
        peers = dict.fromkeys(name for one in some for name in one.peers)
        rows.append((f"`{suite}`", _of(len(some), len(ops)), ", ".join(told), joined(list(peers))))
    total = _of(len(timed), sum(whole.values()))
    rows.append(("all", total, "", ""))
    for suite in SUITES:
        if suite not in KERNEL_SUITES:
            rows.append((f"`{suite}`", _rows_of(suite, results), "", ""))
    tabled = sum(str(one.row_of[OURS].get("source")).endswith("table") for one in timed)
    head = ("suite", "problems timed", "of these", "peers that were timed")
    return (
        f"{written(head, rows)}\n\nOn {tabled} of the {len(timed)} problems gristmill ran a launch "
        f"of its shipped table, on {len(timed) - tabled} one by its order of preference."
    )


def by_set(page: Page, results: Results) -> str:
    """A line for each named set of shapes: the mean against the best peer, and what is lost."""
    rows = []
    for name, ratios in ratios_by_set(results).items():
        one = against(ratios)
        worst = f"{min(ratios):.2f}x"
        rows.append((f"`{name}`", str(one.problems), f"{one.ratio:.2f}x", str(one.behind), worst))
    head = ("shapes", "problems", "best peer", "behind", "worst")
    return written(head, rows, right=range(1, len(head)))


def ratios_by_set(results: Results) -> dict[str, list[float]]:
    """Of each set that was measured the times of the best peer over ours; the most lost first."""
    found: dict[str, list[float]] = {}
    for one in problems_of(results):
        if one.ratio is not None:
            for name in one.row_of[OURS].get("sets", ()):
                found.setdefault(name, []).append(one.ratio)
    order = {name: place for place, name in enumerate(SETS)}
    return dict(
        sorted(found.items(), key=lambda item: (-_share_lost(item[1]), order.get(item[0], 99)))
    )


def blocks(page: Page, results: Results) -> str:
    """The suite `end_to_end`: ms of each step, by what is exchanged in it."""
    found = [row for row in results.rows if row.get("suite") == "end_to_end"]
    names = list(dict.fromkeys(row["impl"] for row in found))
    steps: dict[tuple[str, str], dict[str, str]] = {}
    for row in found:
        timed = f"{row['ms']:.3g}" if "ms" in row else "not timed"
        steps.setdefault((row["op"], row["shape"]), {})[row["impl"]] = timed
    lines = [
        (f"`{op}`, {shape}", *(ms.get(name, "") for name in names))
        for (op, shape), ms in steps.items()
    ]
    failed = [
        f"`{row['impl']}` in `{row['op']}`: {str(row['error']).partition(': ')[2]}"
        for row in found
        if "ms" not in row
    ]
    note = (
        f"\n\nNot timed, because its result failed the check: {joined(failed)}." if failed else ""
    )
    head = ("ms", *(f"`{name}`" for name in names))
    return written(head, lines, right=range(1, len(head))) + note


def lost(results: Results) -> str:
    """In words: of each set of shapes how many problems are behind, and the worst of them."""
    told = [
        f"`{name}` {against(ratios).behind} of {len(ratios)} (worst {min(ratios):.2f}x)"
        for name, ratios in ratios_by_set(results).items()
        if against(ratios).behind
    ]
    return joined(told)


def measured_of(suite: str, results: Results) -> str:
    """How many problems of a suite were timed, of how many."""
    timed = [one for one in problems_of(results) if one.ours is not None]
    suites = KERNEL_SUITES if suite == "all" else (suite,)
    return _of(sum(one.suite in suites for one in timed), len(tasks("cuda", suites=suites)[0]))


def how_much(results: Results) -> str:
    """In words: how many of a whole run's problems, and of which suites of kernel time none."""
    timed = [one for one in problems_of(results) if one.ours is not None]
    whole = len(tasks("cuda")[0])
    if len(timed) >= whole:
        return f"all {len(timed)} problems"
    absent = [f"`{suite}`" for suite in KERNEL_SUITES if not _any_of(suite, timed)]
    none = f", and none of {joined(absent)}" if absent else ""
    cut = "; a time limit cut the run short" if results.meta.get("finished") is False else ""
    return f"{len(timed)} of {whole} problems{none}{cut}"


def _any_of(suite: str, problems: Sequence[Problem]) -> bool:
    return any(one.suite == suite for one in problems)


def _of(some: int, whole: int) -> str:
    if some == 0:
        return "none"
    return f"all {whole}" if some == whole else f"{some} of {whole}"


def _rows_of(suite: str, results: Results) -> str:
    names = ALSO.get(suite, (suite,))
    count = sum(row.get("suite") in names for row in results.rows)
    return f"{count} rows" if count else "not in this run"


def _share_lost(ratios: Sequence[float]) -> float:
    one = against(ratios)
    return one.behind / one.problems
