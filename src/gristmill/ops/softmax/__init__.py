"""Softmax and log-softmax, with masks and causal limits, forward and backward."""

from gristmill.ops.softmax.op import (
    LOG_SOFTMAX,
    LOG_SOFTMAX_BACKWARD,
    SOFTMAX,
    SOFTMAX_BACKWARD,
    log_softmax,
    log_softmax_backward,
    softmax,
    softmax_backward,
)

__all__ = [
    "LOG_SOFTMAX",
    "LOG_SOFTMAX_BACKWARD",
    "SOFTMAX",
    "SOFTMAX_BACKWARD",
    "log_softmax",
    "log_softmax_backward",
    "softmax",
    "softmax_backward",
]
