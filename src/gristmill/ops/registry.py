"""All ops, in the order in which they are documented, tested and measured."""

from __future__ import annotations

from gristmill.errors import ArgumentError
from gristmill.names import meant
from gristmill.ops.cross_entropy import (
    CROSS_ENTROPY,
    CROSS_ENTROPY_BACKWARD,
    CROSS_ENTROPY_ONE_PASS,
    CROSS_ENTROPY_ONE_PASS_,
    CROSS_ENTROPY_SHARD,
    SCALE_GRADIENT_,
)
from gristmill.ops.layer_norm import ADD_LAYER_NORM, LAYER_NORM, LAYER_NORM_BACKWARD
from gristmill.ops.layer_norm.op import ADD_LAYER_NORM_FP8, LAYER_NORM_FP8
from gristmill.ops.linear import LINEAR, LINEAR_WITH_PRE, MATMUL
from gristmill.ops.linear_cross_entropy import (
    LINEAR_CROSS_ENTROPY,
    LINEAR_CROSS_ENTROPY_BACKWARD,
)
from gristmill.ops.moe import MOE, MOE_BACKWARD
from gristmill.ops.nvfp4_linear import NVFP4_LINEAR, NVFP4_LINEAR_BACKWARD
from gristmill.ops.nvfp4_moe import NVFP4_MOE, NVFP4_MOE_BACKWARD
from gristmill.ops.op import Op
from gristmill.ops.rms_norm import ADD_RMS_NORM, FUSED_ADD_RMS_NORM_, RMS_NORM, RMS_NORM_BACKWARD
from gristmill.ops.rms_norm.op import ADD_RMS_NORM_FP8, RMS_NORM_FP8
from gristmill.ops.softmax import (
    LOG_SOFTMAX,
    LOG_SOFTMAX_BACKWARD,
    SOFTMAX,
    SOFTMAX_BACKWARD,
)
from gristmill.ops.topk_router import TOPK_ROUTER, TOPK_ROUTER_BACKWARD

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        RMS_NORM,
        ADD_RMS_NORM,
        FUSED_ADD_RMS_NORM_,
        RMS_NORM_BACKWARD,
        RMS_NORM_FP8,
        ADD_RMS_NORM_FP8,
        LAYER_NORM,
        ADD_LAYER_NORM,
        LAYER_NORM_BACKWARD,
        LAYER_NORM_FP8,
        ADD_LAYER_NORM_FP8,
        SOFTMAX,
        LOG_SOFTMAX,
        SOFTMAX_BACKWARD,
        LOG_SOFTMAX_BACKWARD,
        CROSS_ENTROPY,
        CROSS_ENTROPY_ONE_PASS,
        CROSS_ENTROPY_ONE_PASS_,
        CROSS_ENTROPY_BACKWARD,
        CROSS_ENTROPY_SHARD,
        SCALE_GRADIENT_,
        LINEAR_CROSS_ENTROPY,
        LINEAR_CROSS_ENTROPY_BACKWARD,
        LINEAR,
        LINEAR_WITH_PRE,
        MATMUL,
        MOE,
        MOE_BACKWARD,
        NVFP4_LINEAR,
        NVFP4_LINEAR_BACKWARD,
        NVFP4_MOE,
        NVFP4_MOE_BACKWARD,
        TOPK_ROUTER,
        TOPK_ROUTER_BACKWARD,
    )
}


def known_op(name: str) -> Op:
    """The op of this name; else an error that lists them and guesses which was meant."""
    if name not in OPS:
        raise ArgumentError(f"unknown op {name!r}{meant(name, OPS)}: there are {', '.join(OPS)}")
    return OPS[name]
