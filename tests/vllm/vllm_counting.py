"""Counts how often each of gristmill's ops ran its kernel, in whatever process imports this.

The library counts plans, not calls, because counting calls would cost time on each. Here every plan
is wrapped when it is made, so a call counts however it came: past torch's dispatcher, through it,
or from a compiled graph.

`Counting` is also a worker extension: `LLM(worker_extension_cls="vllm_counting.Counting")` imports
this in vLLM's worker, and `llm.collective_rpc("gristmill_calls")` asks there.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from gristmill.ops.op import Op

CALLS: Counter[str] = Counter()

_make_plan = Op._plan


def _counted_plan(self: Op, key: Any, args: tuple[Any, ...]) -> Any:
    plan = _make_plan(self, key, args)

    def counted(*args: Any) -> Any:
        CALLS[self.name] += 1
        return plan(*args)

    self._plans[key] = counted
    return counted


if Op._plan is _make_plan:
    Op._plan = _counted_plan  # type: ignore[method-assign]


class Counting:
    """Mixed into vLLM's worker class."""

    def gristmill_calls(self) -> dict[str, int]:
        return dict(CALLS)

    def gristmill_reset(self) -> None:
        CALLS.clear()

    def gristmill_priority(self) -> dict[str, list[str]]:
        """The providers of both norms, in this worker, in the order in which they are asked."""
        from vllm import ir

        return {op.name: op.get_priority() for op in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm)}
