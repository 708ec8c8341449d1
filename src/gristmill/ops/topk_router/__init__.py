"""The experts of each token, from routing scores, forward and backward."""

from gristmill.ops.topk_router.op import (
    TOPK_ROUTER,
    TOPK_ROUTER_BACKWARD,
    topk_router,
    topk_router_backward,
)

__all__ = ["TOPK_ROUTER", "TOPK_ROUTER_BACKWARD", "topk_router", "topk_router_backward"]
