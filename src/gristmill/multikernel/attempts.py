"""The first call of its kind: kernels are tried in the order in which they are chosen."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from gristmill.errors import VariantUnavailable
from gristmill.log import logger
from gristmill.multikernel.problem import CallProblem, Leaf, tensors_of
from gristmill.multikernel.variant import UserKernel
from gristmill.select.chooser import resolve
from gristmill.select.counters import count_fallback

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
        function = next(one.function for one in left if one is choice.variant)
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            if choice.source == "forced" or _versions(found) != before:
                raise
            # Or what it had made so far would be there while the next one runs.
            traceback.clear_frames(error.__traceback__)
            errors[choice.variant.name] = error
            count_fallback(name, choice.variant.name)
            logger.info(
                "%s: kernel %s raised %s: %s; the next one is tried for %s",
                name,
                choice.variant.name,
                type(error).__name__,
                error,
                problem.key(problem.rows),
            )
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
