"""Ops that sum over what DTensors may have sharded.

A sharding rule tells where an op's results lie when each rank runs the op on its own part. That is
not enough for a loss: a mean has one denominator for the rows of all ranks, and the sum over
classes goes across them. Calls of such ops with DTensors go to a function that knows of ranks,
which `gristmill.distributed` puts here: ops know of none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gristmill.ops.op import Op


@dataclass(eq=False)
class ShardedOp(Op):
    """An op whose calls with DTensors are made by `sharded`, of the op's arguments and results."""

    sharded: Callable[..., Any] | None = None

    def dispatch(self, *args: Any) -> Any:
        if self.sharded is not None and any_dtensor(*args):
            return self.sharded(*args)
        return super().dispatch(*args)


def any_dtensor(*values: Any) -> bool:
    """Whether one of them is a DTensor; where nobody has imported these, none is."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(value, module.DTensor) for value in values)
