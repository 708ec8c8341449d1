"""The first call of its kind: kernels are tried in the order in which they are chosen."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from gristmill import nvtx
from gristmill.errors import VariantUnavailable
from gristmill.log import log_once, one_line
from gristmill.multikernel.problem import CallProblem, Leaf, tensors_of
from gristmill.multikernel.variant import UserKernel
from gristmill.select.chooser import Choice, range_name, resolve
from gristmill.select.counters import count_fallback
from gristmill.select.history import withdraw_plan

Function = Callable[..., Any]


def run_first(
    name: str,
    kernels: Sequence[UserKernel],
    problem: CallProblem,
    found: Sequence[Leaf],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[Function | None, Any]:
    """The function that runs this call and all like it, and what it gave.

    A kernel that raises is passed over, and is not asked again for this problem. Three errors are
    the caller's to see: that of a kernel asked for by name; that of one which had begun to write to
    its arguments, as nobody else can start from there; and if all fail, that of the first choice:
    then it is the call that is wrong, and nothing is remembered. One that runs out of memory is
    passed over in this call alone: at another time there may be enough. The function is then None.
    """
    errors: dict[str, Exception] = {}
    before = _versions(found)
    while left := [kernel for kernel in kernels if kernel.name not in errors]:
        try:
            choice, _ = resolve(name, left, problem)
        except VariantUnavailable:
            if not errors:
                raise
            break
        kernel = next(one for one in left if one is choice.variant)
        function = nvtx.ranged(range_name(name, choice, problem), kernel.function)
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            if choice.source == "forced" or _versions(found) != before:
                raise
            # Or what it had made so far would be there while the next one runs.
            traceback.clear_frames(error.__traceback__)
            errors[choice.variant.name] = error
            _note_failure(name, choice, problem, error)
            continue
        lasting = {
            name: error
            for name, error in errors.items()
            if not isinstance(error, torch.OutOfMemoryError)
        }
        remember_failures(kernels, problem, lasting)
        passing = len(lasting) < len(errors)
        # They know this frame: the two would keep each other, and the tensors here.
        errors.clear()
        lasting.clear()
        return None if passing else function, result
    try:
        raise next(iter(errors.values()))
    finally:
        errors.clear()


def _note_failure(name: str, choice: Choice, problem: CallProblem, error: Exception) -> None:
    kernel = choice.variant.name
    count_fallback(name, kernel)
    withdraw_plan(name, problem, kernel, choice.config, choice.source)
    reason = f"{type(error).__name__}: {error}"
    # No warning: kernels are allowed to refuse a call by an error.
    log_once(
        logging.INFO,
        f"fallback {name} {kernel} {reason}",
        f"fallback {name}: kernel {kernel} raised, the next one is tried for "
        f"{problem.key(problem.rows)}: {one_line(reason)}",
        kind=f"fallback {name} {kernel}",
    )


def remember_failures(
    kernels: Sequence[UserKernel], problem: CallProblem, errors: Mapping[str, Exception]
) -> None:
    for kernel in kernels:
        if kernel.name in errors:
            kernel.remember_failure(problem, errors[kernel.name])


def _versions(found: Sequence[Leaf]) -> list[int | None]:
    """What torch counts of writes to tensors."""
    return [_version(tensor) for _, tensor in tensors_of(found)]


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
