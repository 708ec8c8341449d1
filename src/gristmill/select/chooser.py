"""Which variant runs a problem, and the plan that runs it.

Order of the decision: forced by name, what this process has tuned, the user's table, the shipped
table, the op's own order of preference. Nothing is ever timed here. What cannot be built degrades
to the next in that order, with one warning; what was asked for by name raises instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gristmill import nvtx
from gristmill.errors import (
    CompileError,
    CompilerUnavailable,
    DriverError,
    UnknownVariant,
    VariantUnavailable,
)
from gristmill.locks import Lock
from gristmill.log import log_once, logger, one_line, warn_once
from gristmill.select.configs import config_to_json
from gristmill.select.counters import count_choice, count_fallback
from gristmill.select.history import note_plan
from gristmill.select.overrides import active
from gristmill.select.problem import Problem
from gristmill.select.tables import tables_for
from gristmill.select.variant import Variant


@dataclass(frozen=True)
class Choice:
    """A variant with its config, and where that choice comes from."""

    variant: Variant
    config: Any
    source: str
    reason: str


def ranked(op_name: str, variants: Sequence[Variant], problem: Problem) -> list[Choice]:
    """The choices for `problem`: the first is what runs, the others stand in if it is not built."""
    return list(choices(op_name, variants, problem))


def choices(op_name: str, variants: Sequence[Variant], problem: Problem) -> Iterator[Choice]:
    """As `ranked`, one by one: to find the config of a product takes milliseconds.

    Forced: exactly that one, or VariantUnavailable with its reason. Variants that decline the
    problem come after all that do not.
    """
    name = active().get(op_name)
    if name is not None:
        yield _forced(op_name, name, variants, problem)
        return
    allowed = [variant for variant in variants if refusal(variant, problem) is None]
    if not allowed:
        refusals = "; ".join(f"{one.name}: {refusal(one, problem)}" for one in variants)
        raise VariantUnavailable(
            f"{op_name}: no variant runs {problem.key(problem.rows)} on {problem.device}"
            f"{_modes(problem)}: {refusals}"
        )
    left = list(allowed)
    for choice in _from_tables(allowed, problem):
        left = [variant for variant in left if variant is not choice.variant]
        yield choice
    asked = problem.asked()
    unwilling = []
    for variant in left:
        if variant.declines(asked):
            unwilling.append(variant)
        else:
            yield _preferred(variant, variants, asked)
    for variant in unwilling:
        yield _preferred(variant, variants, asked)


def by_heuristics(op_name: str, variants: Sequence[Variant], problem: Problem) -> Choice | None:
    """The first choice where no table has an entry; None if no variant runs `problem`.

    A variant that is forced by name is the only one considered.
    """
    name, asked = active().get(op_name), problem.asked()
    declined = None
    for variant in variants:
        if name not in (None, variant.name) or refusal(variant, problem) is not None:
            continue
        if name is None and variant.declines(asked) is not None:
            declined = declined or variant
            continue
        return _preferred(variant, variants, asked)
    return None if declined is None else _preferred(declined, variants, asked)


def _preferred(variant: Variant, variants: Sequence[Variant], asked: Problem) -> Choice:
    position = 1 + list(variants).index(variant)
    rank = f"number {position} of {len(variants)} in the order of preference"
    return Choice(variant, variant.config(asked), "preference", rank)


def refusal(variant: Variant, problem: Problem) -> str | None:
    """Why `variant` may not run `problem`, as asked for here; None if it may."""
    reason = variant.supports(problem)
    if reason is None and problem.deterministic:
        reason = _because("not deterministic", variant.indeterminate(problem))
    if reason is None and problem.batch_invariant:
        reason = _because("not batch-invariant", variant.varies_with_batch(problem))
    return reason


def _because(what: str, reason: str | None) -> str | None:
    return None if reason is None else f"{what}: {reason}"


def _modes(problem: Problem) -> str:
    words = ["deterministic"] * problem.deterministic + [
        "batch-invariant"
    ] * problem.batch_invariant
    return f" as asked for ({' and '.join(words)})" if words else ""


def _from_tables(variants: Sequence[Variant], problem: Problem) -> Iterator[Choice]:
    asked = problem.asked()
    for source in tables_for(problem.device):
        if problem.batch_invariant and not source.shipped:
            # What is tuned may change while a program runs, and a row's bits with it.
            continue
        found = source.table.lookup(asked, variants)
        if found is not None:
            yield Choice(*found, source.label, source.note)


def resolve(
    op_name: str, variants: Sequence[Variant], problem: Problem
) -> tuple[Choice, Callable[..., Any]]:
    """Choose for `problem` and build the plan: a callable over the op's positional arguments."""
    failures: dict[str, str] = {}
    for choice in choices(op_name, variants, problem):
        variant = choice.variant
        _warn_if_capturing(op_name, choice, problem)
        try:
            with nvtx.span(f"gristmill.plan {op_name} {variant.name}"):
                plan = variant.bind(problem, choice.config)
        except (CompileError, CompilerUnavailable, DriverError) as error:
            if choice.source == "forced":
                raise
            if isinstance(error, DriverError) and error.is_lack_of_memory:
                raise  # passes, where a plan without this variant would stay
            reason = f"{type(error).__name__}: {error}"
            failures[variant.name] = reason
            _remember_failure(problem, variant, reason)
            count_fallback(op_name, variant.name)
            continue
        _forget_failure(problem, variant)
        count_choice(op_name, variant.name)
        note_plan(op_name, problem, variant.name, choice.config, choice.source)
        _log_choice(op_name, choice, problem)
        _warn_of_fallbacks(op_name, failures, choice, problem)
        _warn_of_reference(op_name, variants, failures, choice, problem)
        return choice, nvtx.ranged(range_name(op_name, choice, problem), plan)
    raise VariantUnavailable(
        f"{op_name}: none of the variants that support {problem.key(problem.rows)} could be built "
        f"on {problem.device}: "
        + "; ".join(f"{name}: {reason}" for name, reason in failures.items())
    )


def range_name(op_name: str, choice: Choice, problem: Problem) -> str:
    """What the NVTX range around a call is called."""
    shape = (problem.rows, *(size for _, size in problem.dims))
    dtype = next((dtype for _, dtype in problem.dtypes), None)
    return nvtx.range_name(op_name, choice.variant.name, shape, dtype)


def _log_choice(op_name: str, choice: Choice, problem: Problem) -> None:
    if problem.device.kind == "meta" or not logger.isEnabledFor(logging.DEBUG):
        return
    values = config_to_json(choice.config) or {}
    launch = " ".join([choice.variant.name, *(f"{name}={it}" for name, it in values.items())])
    logger.debug(
        "chose %s: %s by %s (%s) for %s on %s",
        op_name,
        launch,
        choice.source,
        one_line(choice.reason),
        problem.key(problem.rows),
        problem.device,
    )


def _warn_of_fallbacks(
    op_name: str, failures: Mapping[str, str], choice: Choice, problem: Problem
) -> None:
    for name, reason in failures.items():
        warn_once(
            f"fallback {op_name} {name} {problem.device} {reason}",
            f"fallback {op_name}: variant {name} cannot be built on {problem.device}, "
            f"{choice.variant.name} runs instead: {one_line(reason)}",
            kind=f"fallback {op_name} {name}",
        )


def _warn_of_reference(
    op_name: str,
    variants: Sequence[Variant],
    failures: Mapping[str, str],
    choice: Choice,
    problem: Problem,
) -> None:
    """On a GPU the reference is slow, and somebody may be looking for the reason."""
    if not choice.variant.is_reference or problem.device.kind != "cuda":
        return
    if choice.source == "forced" or len(variants) == 1 or _is_empty(problem):
        return
    reasons: dict[str, list[str]] = {}
    for one in variants:
        if one is not choice.variant:
            why = "cannot be built" if one.name in failures else refusal(one, problem)
            if why is None:
                return  # another could run: the reference is measured to be better, or preferred
            reasons.setdefault(one_line(why, 300), []).append(one.name)
    words = "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items())
    # Who computes in fp64 wants it exact and knows that it is slow.
    exact = any(dtype == "float64" for _, dtype in problem.dtypes)
    log_once(
        logging.INFO if exact else logging.WARNING,
        f"slow {op_name} {problem.device} {words}",
        f"slow {op_name}: {choice.variant.name} runs {problem.key(problem.rows)} on "
        f"{problem.device}: {words}",
        kind=f"slow {op_name}",
    )


def _is_empty(problem: Problem) -> bool:
    return problem.rows == 0 or any(size == 0 for _, size in problem.dims)


# Why a variant could not be built, for `explain`; one entry per variant and table key, and of too
# many the oldest go: a growing length has ever new ones.
_FAILURES: dict[tuple[str, str, str], str] = {}
_FAILURES_KEPT = 1024
_FAILURES_LOCK = Lock()


def failure_of(problem: Problem, variant: Variant) -> str | None:
    """Why `variant` could not be built when a problem like this was last resolved, if so."""
    return _FAILURES.get(_failure_key(problem, variant))


def forget_failures() -> None:
    with _FAILURES_LOCK:
        _FAILURES.clear()


def _remember_failure(problem: Problem, variant: Variant, reason: str) -> None:
    with _FAILURES_LOCK:
        _FAILURES[_failure_key(problem, variant)] = reason
        if len(_FAILURES) > _FAILURES_KEPT:
            del _FAILURES[next(iter(_FAILURES))]


def _forget_failure(problem: Problem, variant: Variant) -> None:
    with _FAILURES_LOCK:
        _FAILURES.pop(_failure_key(problem, variant), None)


def _failure_key(problem: Problem, variant: Variant) -> tuple[str, str, str]:
    return problem.device.name, problem.key(problem.sizes.stop(problem.rows)), variant.name


def _forced(op_name: str, name: str, variants: Sequence[Variant], problem: Problem) -> Choice:
    variant = next((one for one in variants if one.name == name), None)
    if variant is None:
        known = ", ".join(one.name for one in variants)
        raise UnknownVariant(f"{op_name} has no variant {name!r}; there are: {known}")
    reason = refusal(variant, problem)
    if reason is not None:
        raise VariantUnavailable(
            f"{op_name}: variant {name!r} was asked for by name, but cannot run "
            f"{problem.key(problem.rows)} on {problem.device}: {reason}"
        )
    # A name says which kernel, not how: a measured config of that very variant still applies.
    for choice in _from_tables(variants, problem):
        if choice.variant is variant:
            detail = f"asked for by name; config from the {choice.source}"
            return Choice(variant, choice.config, "forced", detail)
    return Choice(variant, variant.config(problem.asked()), "forced", "asked for by name")


def _warn_if_capturing(op_name: str, choice: Choice, problem: Problem) -> None:
    """Compiling inside a capture is legal and right, but a stall where nobody expects one."""
    if problem.device.kind != "cuda" or not torch.cuda.is_initialized():
        return
    if not torch.cuda.is_current_stream_capturing():
        return
    if choice.variant.programs(problem, choice.config):
        warn_once(
            f"capture {op_name}",
            f"capture {op_name}: a kernel is compiled or loaded during CUDA graph capture; call "
            f"gristmill.warmup for {problem.key(problem.rows)} before capturing",
        )
