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

    A plan serves calls of one layout, so what is promised is found out once, at the first call.
    """
    promised: tuple[torch.Tensor, ...] = ()

    def plan(*args: Any) -> Any:
        nonlocal promised
        result = function(*args)
        if result is None:
            return None
        results = (result,) if isinstance(result, torch.Tensor) else result
        if not promised:
            expected = outputs(*args)
            expected = (expected,) if isinstance(expected, torch.Tensor) else expected
            # Bound at once and whole: other threads may make their first call now, too.
            promised = tuple(
                torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta")
                for one in expected
            )
        laid_out = tuple(_as(one, other) for one, other in zip(results, promised, strict=True))
        return laid_out[0] if isinstance(result, torch.Tensor) else laid_out

    return plan


def _as(result: torch.Tensor, promised: torch.Tensor) -> torch.Tensor:
    if result.stride() == promised.stride() and result.dtype == promised.dtype:
        return result
    out = torch.empty_strided(
        promised.shape, promised.stride(), dtype=promised.dtype, device=result.device
    )
    return out.copy_(result)
