"""The cross entropy of a linear layer, forward and backward, without holding its logits."""

from gristmill.ops.linear_cross_entropy.op import (
    LINEAR_CROSS_ENTROPY,
    LINEAR_CROSS_ENTROPY_BACKWARD,
    linear_cross_entropy,
)

__all__ = ["LINEAR_CROSS_ENTROPY", "LINEAR_CROSS_ENTROPY_BACKWARD", "linear_cross_entropy"]
