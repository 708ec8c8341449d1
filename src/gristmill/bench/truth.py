"""What a task should give, and how far from it a result is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from gristmill.bench.check import check, check_lines
from gristmill.bench.inputs import Arguments, compared, terms_of
from gristmill.bench.precision import in_fp64, precision
from gristmill.bench.suites import Task
from gristmill.ops.registry import OPS


class Truth(Protocol):
    """Asked about the outputs of every implementation before it is timed."""

    def precision(self, outputs: Any) -> dict[str, float | None]:
        """Keys for its row of results: how far it is from fp64; nothing where nobody tells."""

    def check(self, outputs: Any, *, coarse: bool = False) -> float:
        """The largest relative error; WrongResultError if the outputs are not right.

        `coarse`: this implementation is known to round in between.
        """


class ByReference:
    """The op's reference, in fp64 where errors against that are told."""

    def __init__(
        self,
        expected: Any,
        exact: torch.Tensor | None,
        loose: float | None,
        terms: Callable[[], torch.Tensor | None],
    ) -> None:
        self._expected, self._exact, self._loose, self._terms = expected, exact, loose, terms

    def precision(self, outputs: Any) -> dict[str, float | None]:
        return {} if self._exact is None else precision(outputs, self._exact)

    def check(self, outputs: Any, *, coarse: bool = False) -> float:
        if self._loose is not None:
            return check_lines(outputs, self._expected, limit=self._loose)
        terms = self._terms() if coarse else None
        return check(outputs, self._expected, coarse=coarse, terms=terms)


def by_reference(task: Task, args: Arguments) -> ByReference:
    op = OPS[task.op]
    exact = in_fp64(op, args) if task.kind.fp64 else None
    outputs = op.reference(*args) if exact is None else exact.to(args[0].dtype)
    return ByReference(
        compared(task, outputs), exact, task.kind.loose, lambda: terms_of(task, args)
    )
