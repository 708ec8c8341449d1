"""The numbers that come first, as data: against every peer, the roof, regret, starts, the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gristmill.bench.problems import Problem, problems_of
from gristmill.bench.product_report import TIE, geometric_mean
from gristmill.bench.regret.report import measured, summarised
from gristmill.bench.results import OURS, Results, Row, label
from gristmill.bench.suites import KERNEL_SUITES

# From here on the L2 and the start of a kernel no longer decide, and a copy is the roof.
ROOF_BYTES = 250_000_000
NOT_MEASURED = "not measured"
CACHES = ("empty", "warm", "bundle")


@dataclass(frozen=True)
class Against:
    """Ours against somebody: the geometric mean of their times over ours.

    `behind`: problems on which ours takes more than 3% longer.
    """

    ratio: float
    problems: int
    behind: int


@dataclass(frozen=True)
class Roof:
    """Shares of the roof where more than 250 MB move: mean, the least, how many."""

    mean: float
    least: float
    problems: int


@dataclass(frozen=True)
class Family:
    """The ops of one suite, or all: against the best peer of each problem, and each by itself."""

    name: str
    best: Against | None
    peers: Mapping[str, Against]
    roof: Roof | None


@dataclass(frozen=True)
class Regret:
    mean: float
    p95: float
    worst: float
    worst_at: str
    problems: int


@dataclass(frozen=True)
class Start:
    """Seconds beyond torch's own start."""

    name: str
    cache: str
    seconds: float
    goal: float | None


@dataclass(frozen=True)
class Host:
    """Host time of our eager calls over torch's own: of all calls, and by what is called."""

    mean: Against
    by_mode: Mapping[str, Against]


@dataclass(frozen=True)
class Headline:
    """What a reader wants first; None and empty mean that it was not measured."""

    peers: tuple[str, ...]
    families: tuple[Family, ...]
    overall: Family
    regret: Regret | None
    starts: tuple[Start, ...]
    host: Host | None

    def started(self, cache: str) -> tuple[Start, ...]:
        return tuple(start for start in self.starts if start.cache == cache)

    def facts(self) -> list[tuple[str, str]]:
        """What is not a ratio to a peer, each as a name and a sentence."""
        return [
            ("Regret", _regret(self.regret)),
            *((f"Start, {cache} cache", _starts(self.started(cache))) for cache in CACHES),
            ("Host time of an eager call", _host(self.host)),
        ]


def headline(results: Results) -> Headline:
    """The headline of a run, or of several that were merged."""
    problems = problems_of(results)
    families = tuple(
        _family(suite, [one for one in problems if one.suite == suite], results)
        for suite in KERNEL_SUITES
    )
    overall = _family("all", problems, results)
    return Headline(
        tuple(overall.peers),
        families,
        overall,
        _regret_of(results),
        _starts_of(results.rows),
        _host_of(results.rows),
    )


def against(ratios: Sequence[float]) -> Against:
    """Of one or more ratios."""
    behind = sum(ratio < TIE for ratio in ratios)
    return Against(geometric_mean(ratios), len(ratios), behind)


def _family(name: str, problems: Sequence[Problem], results: Results) -> Family:
    ratios: dict[str, list[float]] = {}
    for problem in problems:
        if problem.ours is not None:
            for peer, row in problem.peers.items():
                ratios.setdefault(peer, []).append(row["us"] / problem.ours["us"])
    best = [problem.ratio for problem in problems if problem.ratio is not None]
    peers = {peer: against(found) for peer, found in ratios.items()}
    shares = [] if results.meta.get("device") == "cpu" else _shares(problems)
    roof = Roof(sum(shares) / len(shares), min(shares), len(shares)) if shares else None
    return Family(name, against(best) if best else None, peers, roof)


def _shares(problems: Sequence[Problem]) -> list[float]:
    rows = [problem.ours for problem in problems if problem.ours is not None]
    return [
        float(row["roof_share"])
        for row in rows
        if row.get("bytes", 0) > ROOF_BYTES and "roof_share" in row
    ]


def _regret_of(results: Results) -> Regret | None:
    rows = measured(results)
    if not rows:
        return None
    summary = summarised(rows)
    worst = summary.worst
    place = f"{worst['op']} {label(worst)}"
    return Regret(summary.mean, summary.p95, float(worst["regret"]), place, summary.count)


def _starts_of(rows: Sequence[Row]) -> tuple[Start, ...]:
    """Of whole models; where none was started, of everything that was."""
    timed = [row for row in rows if "cache" in row and "beyond_s" in row]
    models = [row for row in timed if "goal_s" in row or "target" in row]
    return tuple(
        Start(_start_name(row), row["cache"], row["beyond_s"], row.get("goal_s"))
        for row in models or timed
    )


def _start_name(row: Row) -> str:
    whole = "goal_s" in row or "target" in row
    return str(row["op"]) if whole else f"{row['op']} {row.get('shape') or ''}".strip()


def _host_of(rows: Sequence[Row]) -> Host | None:
    calls: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        if "mode" in row and row.get("host_us"):
            call = (row["mode"], row["op"], label(row))
            calls.setdefault(call, {})[row["impl"]] = row["host_us"]
    by_mode: dict[str, list[float]] = {}
    for (mode, *_), us in calls.items():
        if OURS in us and "eager" in us:
            by_mode.setdefault(mode, []).append(us["eager"] / us[OURS])
    if not by_mode:
        return None
    every = [ratio for ratios in by_mode.values() for ratio in ratios]
    return Host(against(every), {mode: against(ratios) for mode, ratios in by_mode.items()})


def number(ratio: float) -> str:
    """Two digits after the point, and of a small one two that count."""
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"


def times(ratio: float) -> str:
    return f"{number(ratio)}x"


def _regret(regret: Regret | None) -> str:
    if regret is None:
        return NOT_MEASURED
    return (
        f"mean {regret.mean:.1%}, 95th percentile {regret.p95:.1%}, worst {regret.worst:.1%} "
        f"({regret.worst_at}), over {regret.problems} problems"
    )


def _starts(starts: Sequence[Start]) -> str:
    if not starts:
        return NOT_MEASURED
    told = (f"{one.name} {one.seconds:.2f} s" for one in starts)
    return ", ".join(told) + ", beyond torch's own"


def _host(host: Host | None) -> str:
    if host is None:
        return NOT_MEASURED
    told = (f"{mode} {times(1 / one.ratio)}" for mode, one in host.by_mode.items())
    return (
        f"{times(1 / host.mean.ratio)} that of torch's own over {host.mean.problems} calls "
        f"(geometric mean; {', '.join(told)})"
    )
