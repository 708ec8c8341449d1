"""Several kernels of a user's own behind one call, and the right one run for every shape."""

from gristmill.multikernel.live import forget_plans, live
from gristmill.multikernel.multikernel import MultiKernel

__all__ = ["MultiKernel", "forget_plans", "live"]
