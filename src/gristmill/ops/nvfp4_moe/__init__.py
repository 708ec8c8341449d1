"""The experts of a mixture with NVFP4 weights, forward and backward."""

from gristmill.ops.nvfp4_moe.op import (
    NVFP4_MOE,
    NVFP4_MOE_BACKWARD,
    moe,
    moe_backward,
    moe_of,
)

__all__ = ["NVFP4_MOE", "NVFP4_MOE_BACKWARD", "moe", "moe_backward", "moe_of"]
