"""RMSNorm, forward and backward, plain and with a residual."""

from gristmill.ops.rms_norm.op import (
    ADD_RMS_NORM,
    FUSED_ADD_RMS_NORM_,
    RMS_NORM,
    RMS_NORM_BACKWARD,
    add_rms_norm,
    fused_add_rms_norm_,
    rms_norm,
    rms_norm_backward,
)

__all__ = [
    "ADD_RMS_NORM",
    "FUSED_ADD_RMS_NORM_",
    "RMS_NORM",
    "RMS_NORM_BACKWARD",
    "add_rms_norm",
    "fused_add_rms_norm_",
    "rms_norm",
    "rms_norm_backward",
]
