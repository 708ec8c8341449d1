"""Several runs as one: a run that goes on where it was cut short, and files that are merged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gristmill.bench.results import (
    OURS,
    Results,
    Row,
    by_problem,
    failed,
    is_ours,
    label,
    load,
    problem_of,
)
from gristmill.errors import ArgumentError

# What the numbers of two parts of one run must have been made with.
_SAME = ("gpu", "torch", "gristmill", "revision")
# Problems of kernel time, as tasks are written, and other suites, with what was chosen of them.
UNMEASURED = "unmeasured"
_LISTS = ("suites", "notes", "commands", UNMEASURED)
_MAPPINGS = ("peers", "methods", "mm_tflop_per_s")
_COPIES = "copy_tb_per_s_by_mb"
# Of a run that was merged into another.
RUNS = "runs"


def begin(meta: dict[str, Any], path: Path | None, *, resume: bool) -> Results:
    """A new run, or the one in the file at `path`, which goes on; `meta` is that of this process.

    ArgumentError where its numbers would not be those of one run: another GPU, another torch,
    another gristmill.
    """
    if not resume:
        return Results(meta, path=path)
    if path is None:
        raise ArgumentError("--resume continues a file: say which by --json, --output or --report")
    if not path.exists():
        raise ArgumentError(f"--resume: there is no {path} to continue")
    results = load(path)
    before = results.meta
    if RUNS in before:
        raise ArgumentError(f"--resume: {path} was merged of several runs, which cannot go on")
    if differs := _differences(before, meta):
        raise ArgumentError(f"--resume: {path} was measured with {differs}; measure it anew")
    for name in _LISTS:
        before[name] = list(dict.fromkeys([*before.get(name, []), *meta.get(name, [])]))
    before["peers"] = {**before.get("peers", {}), **meta["peers"]}
    missing = {**before.get("missing_peers", {}), **meta["missing_peers"]}
    before["missing_peers"] = {k: v for k, v in missing.items() if k not in before["peers"]}
    before["finished"] = False
    results.path = path
    return results


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """In words; a revision that is not known is no difference."""
    told = []
    for name in _SAME:
        one, other = before.get(name), now.get(name)
        if name == "revision" and None in (one, other):
            continue
        if one != other:
            told.append(f"{name} {one}, and here is {other}")
    changed = {
        name: (version, now["peers"][name])
        for name, version in before.get("peers", {}).items()
        if now["peers"].get(name, version) != version
    }
    told += [f"{name} {one}, and here is {other}" for name, (one, other) in changed.items()]
    return "; ".join(told)


def left(
    results: Results,
    asked: Mapping[tuple[str, str, str], Mapping[str, str]],
    tell: Callable[[str], None],
) -> set[tuple[str, str, str]]:
    """Those to be measured of the problems that are `asked` for, each by implementation -> peer.

    One that lacks an implementation is measured again as a whole, since no ratio is of two runs.
    ArgumentError where that would lose the rows of a peer which is not asked for now.
    """
    there = by_problem(results.kernels())
    found = {key for key, peers in asked.items() if not peers.keys() <= there.get(key, {}).keys()}
    again = [key for key in asked if key in found and key in there]
    named = {peer for peers in asked.values() for peer in peers.values()} - {OURS}
    lacking = {asked[key][impl] for key in again for impl in asked[key].keys() - there[key].keys()}
    if lost := _peers(there, again) - named:
        op, dtype, shape = next(key for key in again if _peers(there, [key]) & lost)
        raise ArgumentError(
            f"--resume: {op} {shape} {dtype} lacks {_listed(lacking)} and would be measured again, "
            f"without {_listed(lost)}, which it has and which takes no part now: let all take part "
            f"(--peers {','.join(sorted(named | lost))}), or measure into another file"
        )
    kept = [key for key in asked if key not in found]
    if kept:
        more = _peers(there, kept) - named
        stay = f"; what they have of {_listed(more)}, not asked for now, stays" if more else ""
        tell(f"{len(kept)} of {len(asked)} problems are there already{stay}")
    if again:
        tell(f"{len(again)} of {len(asked)} lack {_listed(lacking)}, and are measured again whole")
    return found


def _peers(
    there: Mapping[Any, Mapping[str, Row]], keys: Sequence[tuple[str, str, str]]
) -> set[str]:
    """Whose rows there are, beside ours."""
    rows = [row for key in keys for row in there[key].values()]
    return {str(row.get("peer") or row["impl"]) for row in rows} - {OURS}


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))


def unmeasured(results: Results) -> list[str]:
    """What was asked for and is not there: also what only a command before this one asked for."""
    there = {f"{row['op']} {label(row)} {row['dtype']}" for row in results.kernels()}
    return [one for one in results.meta.get(UNMEASURED, []) if one not in there]


def complete(results: Results, asked: str) -> None:
    """A suite that is not of kernel time is done, as far as it was `asked` for: "regret --quick".

    All of a suite, asked for by its name alone, is also every part of it.
    """
    left = results.meta.get(UNMEASURED, [])
    results.meta[UNMEASURED] = [one for one in left if asked not in (one, one.split()[0])]
    results.save()


def finish(results: Results) -> None:
    """A command has ended; the run has, if all that was asked for is there."""
    results.meta[UNMEASURED] = unmeasured(results)
    results.meta["finished"] = not results.meta[UNMEASURED]
    results.save()


def read(paths: Sequence[Path]) -> Results:
    """One file as it is, or several as one."""
    names = [path.name for path in paths]
    if len(set(names)) < len(names):  # results.json of several folders
        names = [str(path) for path in paths]
    return merge([load(path) for path in paths], names)


def merge(several: Sequence[Results], names: Sequence[str]) -> Results:
    """Runs on the same GPU as one: all rows of a problem are those of the last run that has ours.

    So no ratio is of two runs, and which run counts is up to the order that the reader gives. What
    another run has beside, such as more peers, is left out, and a note says so. The meta is that of
    the first, with all peers, suites and commands; "runs" has that of each, and "run" of a row says
    which it is from.
    """
    first = several[0]
    if len(several) == 1 and RUNS not in first.meta:
        return first
    gpus = list(dict.fromkeys(str(one.meta.get("gpu")) for one in several))
    if len(gpus) > 1:
        raise ArgumentError(f"results of different devices are not merged: {', '.join(gpus)}")
    tries: dict[tuple[Any, ...], dict[int, dict[str, Row]]] = {}
    parts: list[dict[str, Any]] = []
    for one, name in zip(several, names, strict=True):
        start = len(parts)
        parts += one.meta.get(RUNS) or [{"file": name, **one.meta}]
        for row in one.rows:
            run = start + row.get("run", 0)
            of_run = tries.setdefault(problem_of(row), {}).setdefault(run, {})
            of_run[row["impl"]] = {**row, "run": run}
    found = Results({**_merged([one.meta for one in several]), RUNS: parts})
    files = [str(part.get("file", index + 1)) for index, part in enumerate(parts)]
    for runs in tries.values():
        counts = _that_counts(runs)
        found.rows += runs[counts].values()
        for text in _left_out(runs, counts, files):
            found.note(text)
    for index, part in enumerate(parts):
        part["rows"] = sum(row["run"] == index for row in found.rows)
    return found


def _that_counts(runs: Mapping[int, Mapping[str, Row]]) -> int:
    """The last run that has ours, timed or failed; where none has, the last."""
    return max([run for run, rows in runs.items() if any(map(is_ours, rows.values()))] or runs)


def _left_out(
    runs: Mapping[int, Mapping[str, Row]], counts: int, files: Sequence[str]
) -> Iterator[str]:
    """A note for each other run: what it measured of a problem, and the one that counts did not."""
    measured = {impl for impl, row in runs[counts].items() if not failed(row)}
    for run, rows in runs.items():
        more = [impl for impl, row in rows.items() if not failed(row) and impl not in measured]
        if run == counts or not more:
            continue
        row = rows[more[0]]
        words = [row.get("suite"), row["op"], label(row)]
        words += [row.get(key) for key in ("dtype", "mode", "cache")]
        about = " ".join(str(word) for word in words if word)
        who = ", ".join(more)
        yield f"{about}: {who} left out, with {files[run]}, which {files[counts]} replaces"


def _merged(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    made = dict(metas[0])
    for name in _LISTS:
        made[name] = list(dict.fromkeys(one for meta in metas for one in meta.get(name, [])))
    for name in (*_MAPPINGS, _COPIES):
        pairs = [pair for meta in reversed(metas) for pair in meta.get(name, {}).items()]
        if pairs:
            made[name] = dict(pairs)
    if _COPIES in made:
        made["copy_tb_per_s"] = max(made[_COPIES].items(), key=lambda one: float(one[0]))[1]
    missing = {name: why for meta in metas for name, why in meta.get("missing_peers", {}).items()}
    made["missing_peers"] = {k: v for k, v in missing.items() if k not in made.get("peers", {})}
    made["finished"] = all(meta.get("finished", True) for meta in metas)
    return made
