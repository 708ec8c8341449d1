"""A linear layer over an NVFP4 weight, forward and backward."""

from gristmill.ops.nvfp4_linear.op import (
    NVFP4_LINEAR,
    NVFP4_LINEAR_BACKWARD,
    linear,
    linear_backward,
    linear_of,
)

__all__ = ["NVFP4_LINEAR", "NVFP4_LINEAR_BACKWARD", "linear", "linear_backward", "linear_of"]
