"""A user's function as a variant: what it cannot run is learnt by trying."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from gristmill.locks import Lock
from gristmill.multikernel.problem import Details
from gristmill.select.problem import Problem
from gristmill.select.sight import is_capturing
from gristmill.select.variant import Variant

# A growing length may fail at each of its sizes: of too many the oldest are forgotten.
_FAILURES_KEPT = 1024


class Owner(Protocol):
    """What a kernel asks of its MultiKernel: the fingerprint of all its functions."""

    @property
    def fingerprint(self) -> str: ...


class UserKernel(Variant):
    """One function of a MultiKernel, `owner`."""

    summary = "a function of the user's own"

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        owner: Owner,
        *,
        batch_invariant: bool,
    ) -> None:
        self.name = name
        self.function = function
        # Weakly, or the two would keep each other until the next garbage collection.
        self._owner = weakref.ref(owner)
        self._batch_invariant = batch_invariant
        self._failures: dict[tuple[str, str, bool], str] = {}
        self._lock = Lock()

    def supports(self, problem: Problem) -> str | None:
        details = problem.layout
        refused = details.refusals.get(self.name) if isinstance(details, Details) else None
        return refused or self._failures.get(_place(problem))

    def varies_with_batch(self, problem: Problem) -> str | None:
        if self._batch_invariant:
            return None
        return "is not among the kernels that MultiKernel(..., batch_invariant=[...]) names"

    def bind(self, problem: Problem, config: Any) -> Callable[..., Any]:
        """For timing: takes all tensors of the call (which are in the arguments, too), the
        positional arguments and the keywords. A call runs `function` itself.
        """
        function, details = self.function, problem.layout

        def run(tensors: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            del tensors
            try:
                return function(*args, **kwargs)
            except torch.OutOfMemoryError:
                raise  # the copies that are timed have taken the memory: it proves nothing
            except Exception as error:
                if not is_capturing(problem.device):  # what cannot be captured may run all the same
                    details.failed.setdefault(self.name, error)
                raise

        return run

    def source_hash(self, problem: Problem, config: Any) -> str:
        owner = self._owner()
        return "" if owner is None else owner.fingerprint

    def remember_failure(self, problem: Problem, error: Exception) -> None:
        """It raised where another kernel ran: it cannot run this problem."""
        with self._lock:
            self._failures[_place(problem)] = f"raised {type(error).__name__}: {error}"
            if len(self._failures) > _FAILURES_KEPT:
                del self._failures[next(iter(self._failures))]

    def forget_failures(self) -> None:
        with self._lock:
            self._failures.clear()


def _place(problem: Problem) -> tuple[str, str, bool]:
    details = problem.layout
    grad = isinstance(details, Details) and details.grad
    return problem.device.name, problem.key(problem.rows), grad
