"""`gristmill.tune`: problems met in a region of code are tuned where they are met."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, overload

from gristmill import multikernel
from gristmill.errors import ArgumentError, DtypeError
from gristmill.ops.registry import OPS
from gristmill.select.overrides import tuning
from gristmill.select.sight import Region, close_region, open_region
from gristmill.tune.report import TuneReport

Progress = Callable[[str], None]


@overload
def tune(
    fn: None = None, *, again: bool = ..., thorough: bool = ..., progress: Progress | None = ...
) -> AbstractContextManager[TuneReport]: ...
@overload
def tune(
    fn: Callable[..., Any],
    *args: Any,
    again: bool = ...,
    thorough: bool = ...,
    progress: Progress | None = ...,
    **kwargs: Any,
) -> TuneReport: ...
def tune(
    fn: Callable[..., Any] | None = None,
    *args: Any,
    again: bool = False,
    thorough: bool = False,
    progress: Progress | None = None,
    **kwargs: Any,
) -> TuneReport | AbstractContextManager[TuneReport]:
    """Run `fn(*args, **kwargs)` once and tune every problem it meets; or a `with` block.

    ``report = gristmill.tune(step, batch)``, or ``with gristmill.tune() as report: step(batch)``.

    A problem that no measured row covers is timed when it is met, on copies of its arguments,
    and the row is kept in the user's table; from then on the winner runs, here and in later
    processes. Backward passes take part, and so do compiled functions: an op chooses when it runs.
    Nothing is timed while a CUDA graph is captured, nor where `batch_invariant` is in force.

    Args:
        fn: what to run; without it, the result is a context manager.
        again: also tune what a row covers already.
        thorough: time all launches that variants think worth it, not only their usual ones.
        progress: called with the name of each problem before it is timed.

    Returns:
        A :class:`TuneReport`: what was measured, and in `result` what `fn` returned. Print it. An
        error in `fn` is raised as it is; what was tuned before is kept.
    """
    if fn is None:
        if args or kwargs:
            raise ArgumentError("tune: arguments were given, but no function to call with them")
        return _tuning(Region(again=again, thorough=thorough, progress=progress))
    if not callable(fn):
        raise DtypeError(f"tune: fn must be a callable, got {type(fn).__name__}")
    with _tuning(Region(again=again, thorough=thorough, progress=progress)) as report:
        report.result = fn(*args, **kwargs)
    return report


@contextmanager
def _tuning(region: Region) -> Iterator[TuneReport]:
    number = open_region(region)
    # What is remembered would be run and not looked at: backward passes of compiled functions, in
    # threads that autograd has made, know the region only by its being open.
    forget_plans()
    try:
        with tuning(number):
            yield TuneReport(region.outcomes)
    finally:
        close_region(number)
        forget_plans()


def forget_plans() -> None:
    """Let everyone choose anew: rows have come that earlier choices did not know."""
    for op in OPS.values():
        op.forget_plans()
    multikernel.forget_plans()
