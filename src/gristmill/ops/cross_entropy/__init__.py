"""Cross entropy: forward, backward, both in one pass, and parts of it for sharded classes."""

from gristmill.ops.cross_entropy.op import (
    CROSS_ENTROPY,
    CROSS_ENTROPY_BACKWARD,
    CROSS_ENTROPY_ONE_PASS,
    CROSS_ENTROPY_ONE_PASS_,
    CROSS_ENTROPY_SHARD,
    SCALE_GRADIENT_,
    cross_entropy,
    cross_entropy_backward,
)

__all__ = [
    "CROSS_ENTROPY",
    "CROSS_ENTROPY_BACKWARD",
    "CROSS_ENTROPY_ONE_PASS",
    "CROSS_ENTROPY_ONE_PASS_",
    "CROSS_ENTROPY_SHARD",
    "SCALE_GRADIENT_",
    "cross_entropy",
    "cross_entropy_backward",
]
