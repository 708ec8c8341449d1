"""Timing the variants of a problem, and keeping the winner as a row of a table.

Candidates take turns, hopeless ones are dropped early, and what runs at neighbouring row counts or
runs now (the incumbent) stays unless something beats it by more than noise: of many equal
candidates one always looks best.
Everything runs on copies, under no_grad and with the random generators put back.
"""

from __future__ import annotations

import datetime
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from gristmill.errors import CompileError, CompilerUnavailable, DriverError, VariantUnavailable
from gristmill.log import logger
from gristmill.select.chooser import by_heuristics, ranked, refusal
from gristmill.select.configs import config_to_json
from gristmill.select.copies import Arguments, sets_for_tuning, tensors_in
from gristmill.select.counters import count_tuning
from gristmill.select.problem import Problem, Span
from gristmill.select.table import Row, RunnerUp
from gristmill.select.timing import Timing, time_interleaved
from gristmill.select.turns import Turns
from gristmill.select.variant import Variant

Function = Callable[..., Any]
Elsewhere = Callable[..., list[Arguments]]

# What the incumbent must be beaten by, at least; a spread larger than that counts instead.
NOISE = 0.01
# A candidate this many times slower than the best after two samples gets no more of them.
HOPELESS = 1.3
# Where there are more candidates than this, a short round picks those that go into the last one.
FINALISTS = 4
# Graphs of this many candidates are held at once: each keeps memory for its outputs.
GROUP = 16
HEAT_SAMPLES, _FINAL_SAMPLES = 3, 9

# One measurement at a time: two would time each other. Who does not get its turn measures anyway.
_MEASURING = Turns()


@dataclass(frozen=True)
class Measured:
    """Who won, who was second, and the times of all that ran; `failures` say why others did not.

    `last`: the times of the last round, which alone are compared.
    """

    winner: str
    second: str | None
    timings: Mapping[str, Timing]
    last: Mapping[str, Timing]
    failures: Mapping[str, str]


@dataclass(frozen=True)
class Race:
    """Times by name: of the first round, where there was one, and of the last; and what failed."""

    first: Mapping[str, Timing]
    last: Mapping[str, Timing]
    errors: Mapping[str, Exception]


@dataclass(frozen=True)
class Candidate:
    """A variant with one of its configs."""

    variant: Variant
    config: Any

    def __str__(self) -> str:
        values = config_to_json(self.config) or {}
        return " ".join([self.variant.name, *(f"{name}={it}" for name, it in values.items())])


@dataclass(frozen=True)
class Outcome:
    """What tuning one problem gave: the row, what ran before and how long that took.

    `launches` and `timings` are by name: all that took part in the last round.
    """

    row: Row
    before: str
    before_us: float | None
    failures: Mapping[str, str]
    launches: Mapping[str, Candidate] = field(default_factory=dict)
    timings: Mapping[str, Timing] = field(default_factory=dict)

    @property
    def won(self) -> float:
        """The part of the time that is saved now."""
        return 0.0 if not self.before_us else 1 - self.row.us / self.before_us


def measure(
    functions: Mapping[str, Function],
    args: Sequence[Any],
    *,
    incumbent: str,
    preferred: Sequence[str] = (),
    kept: Sequence[str] = (),
    l2_bytes: int = 0,
    written: Collection[int] | None = None,
    elsewhere: Elsewhere | None = None,
) -> Measured:
    """Time `function(*args)` of each on copies of `args`, and say which to keep.

    The first of `preferred` and then the incumbent that is not beaten by more than noise, else the
    fastest. These and `kept` take part in the last round, if they run.

    `written`: positions of the arguments that they write to (None: perhaps all); `l2_bytes`: the
    cache that calls must not find their arguments in; `elsewhere` makes of one call several that
    read other parts of what is too large to be copied. An exception in a candidate is no more than
    its failure; if all fail, the incumbent's is raised (or the first).
    """
    timed = race(
        functions,
        args,
        always=[*preferred, *kept, incumbent],
        l2_bytes=l2_bytes,
        written=written,
        elsewhere=elsewhere,
    )
    last, errors = timed.last, timed.errors
    lacked = isinstance(errors.get(incumbent), torch.OutOfMemoryError)
    if not last or lacked:  # beside the copies there was no room: that proves nothing, for good
        raise errors.get(incumbent) or next(iter(errors.values()))
    order = sorted(last, key=lambda name: last[name].us)
    winner = unbeaten(last, [*preferred, incumbent])
    others = [name for name in order if name != winner]
    return Measured(
        winner=winner,
        second=others[0] if others else None,
        timings={**timed.first, **last},
        last=last,
        failures={name: f"{type(error).__name__}: {error}" for name, error in errors.items()},
    )


def race(
    functions: Mapping[str, Function],
    args: Sequence[Any],
    *,
    always: Collection[str],
    finalists: int = FINALISTS,
    samples: int = _FINAL_SAMPLES,
    hopeless: float | None = HOPELESS,
    l2_bytes: int = 0,
    written: Collection[int] | None = None,
    elsewhere: Elsewhere | None = None,
) -> Race:
    """Time `function(*args)` of each on copies of `args`: a short round of all, then a last one.

    Into the last round go `always` and as many of the fastest as `finalists`, with `samples` of
    each; those `hopeless` times slower than the best get fewer there. With no more functions than
    `finalists` it is the only round. The other arguments are those of `measure`.
    """
    first: dict[str, Timing] = {}
    last: dict[str, Timing] = {}
    errors: dict[str, Exception] = {}
    names = list(functions)
    with _MEASURING.turn(), _undisturbed(args):
        sets = sets_for_tuning(args, l2_bytes, written=written)
        if elsewhere is not None:
            sets = [other for one in sets for other in elsewhere(*one)]
        if len(names) > finalists:
            for group in _groups(names):
                some = {name: functions[name] for name in group}
                _time(some, sets, HEAT_SAMPLES, HOPELESS, first, errors)
            best = {*always, *sorted(first, key=lambda name: first[name].us)[:finalists]}
            names = [name for name in names if name in best and name not in errors]
        # Only what took part in the last round is compared: times of one round are of one moment.
        if names:
            chosen = {name: functions[name] for name in names}
            _time(chosen, sets, samples, hopeless, last, errors)
    sets.clear()  # an error that is raised by the caller knows this frame
    return Race(first, last, errors)


def tune(
    op_name: str,
    variants: Sequence[Variant],
    problem: Problem,
    args: Arguments,
    *,
    key: str,
    covers: Span,
    written: Collection[int] = (),
    thorough: bool = False,
    elsewhere: Elsewhere | None = None,
    neighbours: Sequence[Candidate] = (),
) -> Outcome:
    """Measure the variants of `problem` on `args` and make the row named `key` of it.

    Each variant takes part with its usual config, with `thorough` with all that it thinks worth
    timing. `elsewhere`: calls like one that read other parts of the same tensors. `neighbours`: the
    launches of other row counts, which are preferred where times are alike, so that row counts
    share kernels. Nothing is stored here.
    """
    choice = ranked(op_name, variants, problem)[0]
    incumbent = Candidate(choice.variant, choice.config)
    preferred = list(neighbours)
    rule = by_heuristics(op_name, variants, problem)
    # Without tables this would run: a row must not be slower.
    least = [] if rule is None else [Candidate(rule.variant, rule.config)]
    plans: dict[str, Function] = {}
    named: dict[str, Candidate] = {}
    failures: dict[str, str] = {}
    more = [*preferred, *least]
    for candidate in candidates(variants, problem, incumbent, thorough=thorough, more=more):
        try:
            plans[str(candidate)] = candidate.variant.bind(problem, candidate.config)
            named[str(candidate)] = candidate
        except (CompileError, CompilerUnavailable, DriverError) as error:
            failures[str(candidate)] = f"{type(error).__name__}: {error}"
    if not plans:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
        raise VariantUnavailable(f"{op_name}: no variant could be built: {reasons}")
    measured = measure(
        plans,
        args,
        incumbent=str(incumbent),
        preferred=[str(one) for one in preferred],
        kept=[str(one) for one in least],
        l2_bytes=problem.device.l2_bytes,
        written=written,
        elsewhere=elsewhere,
    )
    count_tuning(op_name)
    before = measured.timings.get(str(incumbent))
    return Outcome(
        row=_row(key, covers, problem, named, measured),
        before=str(incumbent),
        before_us=None if before is None else before.us,
        failures={**failures, **measured.failures},
        launches={name: named[name] for name in measured.last},
        timings=measured.last,
    )


def can_run(candidate: Candidate, problem: Problem) -> bool:
    """Whether a launch that was chosen for other row counts is one for `problem`."""
    variant = candidate.variant
    if refusal(variant, problem) is not None:
        return False
    return candidate.config is None or variant.rejects(problem, candidate.config) is None


def candidates(
    variants: Sequence[Variant],
    problem: Problem,
    incumbent: Candidate,
    *,
    thorough: bool,
    more: Sequence[Candidate] = (),
) -> list[Candidate]:
    """What is timed for a problem, the incumbent first, and then `more`.

    The reference takes part only where nothing else does, or on a CPU: elsewhere it never wins.
    """
    allowed = [variant for variant in variants if refusal(variant, problem) is None]
    if problem.device.kind == "cuda":
        fast = [variant for variant in allowed if not variant.is_reference]
        allowed = fast or allowed
    asked = problem.asked()
    found = [incumbent, *more]
    for variant in allowed:
        configs = variant.configs(asked) if thorough else (variant.config(asked),)
        found += [Candidate(variant, config) for config in configs]
    return list({str(candidate): candidate for candidate in found}.values())


def _row(
    key: str,
    covers: Span,
    problem: Problem,
    named: Mapping[str, Candidate],
    measured: Measured,
) -> Row:
    winner, timing = named[measured.winner], measured.timings[measured.winner]
    times: dict[str, float] = {}
    for name, one in measured.timings.items():
        variant = named[name].variant.name
        times[variant] = round(min(one.us, times.get(variant, one.us)), 3)
    second = None
    if measured.second is not None:
        other = named[measured.second]
        us = round(measured.timings[measured.second].us, 3)
        second = RunnerUp(other.variant.name, us, config_to_json(other.config))
    return Row(
        key=key,
        covers=covers,
        variant=winner.variant.name,
        config=config_to_json(winner.config),
        us=round(timing.us, 3),
        spread_us=round(timing.spread_us, 3),
        second=second,
        date=datetime.date.today().isoformat(),
        source_hash=winner.variant.source_hash(problem, winner.config),
        rows=problem.rows,
        times=dict(sorted(times.items())),
        candidates=len(measured.timings),
        torch=torch.__version__,
    )


def _time(
    functions: Mapping[str, Function],
    sets: Sequence[Arguments],
    samples: int,
    hopeless: float | None,
    timings: dict[str, Timing],
    errors: dict[str, Exception],
) -> None:
    results = time_interleaved(functions, sets, samples=samples, hopeless=hopeless)
    for name, result in results.items():
        if isinstance(result, Timing):
            timings[name] = result
        else:
            errors[name] = result
            # Or the copies would live as long as the error, which knows the frames that hold them.
            traceback.clear_frames(result.__traceback__)
            logger.debug("tuning: %s failed: %s", name, result)


def unbeaten(timings: Mapping[str, Timing], preferred: Sequence[str]) -> str:
    """The first of `preferred` that nothing beats by more than noise, else the fastest."""
    best = min(timings, key=lambda name: timings[name].us)
    for name in preferred:
        if name in timings and not _beats(timings[best], timings[name]):
            return name
    return best


def _beats(challenger: Timing, incumbent: Timing) -> bool:
    spread = (challenger.spread_us + incumbent.spread_us) / 2
    return incumbent.us - challenger.us > max(NOISE * incumbent.us, spread)


def _groups(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), GROUP):
        yield names[start : start + GROUP]


@contextmanager
def _undisturbed(args: Sequence[Any]) -> Iterator[None]:
    """No gradients, and random numbers go on afterwards as if nothing had drawn any."""
    devices = {tensor.device.index for tensor in tensors_in(args) if tensor.is_cuda}
    with torch.no_grad(), torch.random.fork_rng(devices=sorted(devices)):
        yield
