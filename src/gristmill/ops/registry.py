"""All ops, in the order in which they are documented, tested and measured."""

from __future__ import annotations

from gristmill.ops.nvfp4_linear import NVFP4_LINEAR, NVFP4_LINEAR_BACKWARD
from gristmill.ops.nvfp4_moe import NVFP4_MOE, NVFP4_MOE_BACKWARD
from gristmill.ops.op import Op
from gristmill.ops.rms_norm import ADD_RMS_NORM, FUSED_ADD_RMS_NORM_, RMS_NORM, RMS_NORM_BACKWARD

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        RMS_NORM,
        ADD_RMS_NORM,
        FUSED_ADD_RMS_NORM_,
        RMS_NORM_BACKWARD,
        NVFP4_LINEAR,
        NVFP4_LINEAR_BACKWARD,
        NVFP4_MOE,
        NVFP4_MOE_BACKWARD,
    )
}
