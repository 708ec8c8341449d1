"""The experts of a mixture with dense weights, forward and backward, and the function for all."""

from gristmill.ops.moe.op import MOE, MOE_BACKWARD, moe, moe_backward

__all__ = ["MOE", "MOE_BACKWARD", "moe", "moe_backward"]
