"""What runs over a process group of `torch.distributed`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gristmill.distributed.vocab_parallel import vocab_parallel_cross_entropy
from gristmill.ops.cross_entropy import CROSS_ENTROPY
from gristmill.ops.linear_cross_entropy import LINEAR_CROSS_ENTROPY

if TYPE_CHECKING:
    from gristmill.distributed.nvfp4_parallel import NVFP4ColwiseParallel, NVFP4RowwiseParallel

__all__ = ["NVFP4ColwiseParallel", "NVFP4RowwiseParallel", "vocab_parallel_cross_entropy"]


# What follows imports torch.distributed.tensor, which takes 0.7 s: when it is asked for.
def __getattr__(name: str) -> Any:
    if name in ("NVFP4ColwiseParallel", "NVFP4RowwiseParallel"):
        from gristmill.distributed import nvfp4_parallel

        return getattr(nvfp4_parallel, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _cross_entropy_of(*args: Any) -> Any:
    from gristmill.distributed.dtensor_loss import cross_entropy_of

    return cross_entropy_of(*args)


def _linear_cross_entropy_of(*args: Any) -> Any:
    from gristmill.distributed.dtensor_linear_loss import linear_cross_entropy_of

    return linear_cross_entropy_of(*args)


CROSS_ENTROPY.sharded = _cross_entropy_of
LINEAR_CROSS_ENTROPY.sharded = _linear_cross_entropy_of
