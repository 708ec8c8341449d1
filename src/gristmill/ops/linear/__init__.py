"""Linear layers with their activation, and products of matrices."""

from gristmill.ops.linear.op import LINEAR, LINEAR_WITH_PRE, MATMUL, linear, matmul

__all__ = ["LINEAR", "LINEAR_WITH_PRE", "MATMUL", "linear", "matmul"]
