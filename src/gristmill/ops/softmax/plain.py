"""The variants that run torch's own ops.

torch gives NaN for a row with nobody in it, where these ops give zeros (or -inf): such rows are
looked for, and put right, at the price of another read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gristmill.ops.plain import laid_out
from gristmill.ops.softmax import semantics
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

_NOBODY = float("-inf")


class Library(Variant):
    """torch.softmax and torch.log_softmax, of rows as they are."""

    name = "library"
    summary = "torch's own softmax"

    def supports(self, problem: Problem) -> str | None:
        if problem.dtype("mask") is not None:
            return "torch's softmax takes no mask"
        narrow = problem.dtype("x") in ("bfloat16", "float16")
        if problem.op == "log_softmax" and problem.device.kind == "cpu" and narrow:
            return "torch's log_softmax rounds 16-bit values on the way on a CPU"
        return _plain(problem)

    def bind(self, problem: Problem, config: None) -> Callable[..., Any]:
        function = _softmax if problem.op == "softmax" else _log_softmax
        return laid_out(function, semantics.outputs)


def _plain(problem: Problem) -> str | None:
    if "scaled" in problem.flags:
        return "torch's softmax has no scale"
    if "causal" in problem.flags:
        return "torch's softmax has no causal limit"
    if problem.rows == 0 or problem.dim("N") == 0:
        return "nothing to compute"
    return None


def _softmax(x: torch.Tensor, *options: Any) -> torch.Tensor:
    return torch.softmax(x, -1).masked_fill_(x.amax(-1, keepdim=True) == _NOBODY, 0.0)


def _log_softmax(x: torch.Tensor, *options: Any) -> torch.Tensor:
    return torch.log_softmax(x, -1).masked_fill_(x.amax(-1, keepdim=True) == _NOBODY, _NOBODY)
