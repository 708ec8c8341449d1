"""Several runs as one: a run that goes on where it was cut short, and files that are merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gristmill.bench.results import Results, Row, identity, label, load
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
    return merge([load(path) for path in paths], [path.name for path in paths])


def merge(several: Sequence[Results], names: Sequence[str]) -> Results:
    """Runs on the same GPU as one: of rows about the same the last counts.

    The meta is that of the first, with all peers, suites and commands; "runs" has that of each, and
    "run" of a row says which it is from.
    """
    first = several[0]
    if len(several) == 1:
        return first
    gpus = list(dict.fromkeys(str(one.meta.get("gpu")) for one in several))
    if len(gpus) > 1:
        raise ArgumentError(f"results of different devices are not merged: {', '.join(gpus)}")
    rows: dict[tuple[Any, ...], Row] = {}
    parts: list[dict[str, Any]] = []
    for one, name in zip(several, names, strict=True):
        start = len(parts)
        parts += one.meta.get(RUNS) or [{"file": name, **one.meta}]
        for row in one.rows:
            rows[identity(row)] = {**row, "run": start + row.get("run", 0)}
    found = list(rows.values())
    for index, part in enumerate(parts):
        part["rows"] = sum(row["run"] == index for row in found)
    return Results({**_merged([one.meta for one in several]), RUNS: parts}, found)


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
