"""The variant that every op has: its reference; and results laid out as the op promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gristmill.select.problem import Problem
from gristmill.select.variant import Variant


class Reference(Variant):
    """The formula in plain PyTorch, wherever PyTorch runs.

    `by_row`: the same with every row computed alone (by_row.py), for where rows must not depend on
    the batch.
    """

    name = "reference"
    summary = "the formula in plain PyTorch"
    is_reference = True

    def __init__(
        self,
        function: Callable[..., Any],
        outputs: Callable[..., Any],
        by_row: Callable[..., Any] | None = None,
    ) -> None:
        self._function = function
        self._outputs = outputs
        self._by_row = by_row

    def supports(self, problem: Problem) -> str | None:
        return None

    def declines(self, problem: Problem) -> str | None:
        """Every kernel is better then, even one that torch's own op would be preferred to."""
        return "computes one row at a time" if problem.batch_invariant else None

    def varies_with_batch(self, problem: Problem) -> str | None:
        if self._by_row is None:
            return "torch computes all rows at once"
        if problem.device.kind == "cuda" and problem.rows >= 2**31:
            return f"for fewer than {2**31} rows there are kernels, which make other bits"
        return None

    def bind(self, problem: Problem, config: None) -> Callable[..., Any]:
        alone = self._by_row if problem.batch_invariant else None
        return laid_out(alone or self._function, self._outputs)


def laid_out(function: Callable[..., Any], outputs: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the dtypes and strides that the op promises; copies only where they differ.

    `outputs` is evaluated at the first call, and again when strides change that the plan's key
    leaves out (see `key_function`): those of contiguous tensors, in dims of one element or none.
    """
    known: tuple[Any, Any, Any] | None = None

    def plan(*args: Any) -> Any:
        nonlocal known
        result = function(*args)
        if result is None:
            return None
        # Read and bound as a whole: other threads may call at the same time.
        now = known
        if now is None:
            known = now = _promised(outputs, args)
        for at, stride in now[0]:
            if args[at].stride() != stride:
                known = now = _promised(outputs, args)
                break
        if isinstance(result, torch.Tensor):
            return _as(result, now[1][0], now[2][0])
        return tuple(map(_as, result, now[1], now[2]))  # 0.5 us less than a comprehension

    return plan


def _promised(outputs: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """Strides of arguments that the plan's key leaves out; strides and dtypes of results."""
    expected = outputs(*args)
    expected = (expected,) if isinstance(expected, torch.Tensor) else expected
    given = [
        (at, arg.stride())
        for at, arg in enumerate(args)
        if isinstance(arg, torch.Tensor) and arg.is_contiguous() and min(arg.shape, default=2) < 2
    ]
    return given, [one.stride() for one in expected], [one.dtype for one in expected]


def _as(result: torch.Tensor, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if result.stride() == stride and result.dtype == dtype:
        return result
    out = torch.empty_strided(result.shape, stride, dtype=dtype, device=result.device)
    return out.copy_(result)
