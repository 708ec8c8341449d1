"""LayerNorm, forward and backward, plain and with a residual."""

from gristmill.ops.layer_norm.op import (
    ADD_LAYER_NORM,
    LAYER_NORM,
    LAYER_NORM_BACKWARD,
    add_layer_norm,
    layer_norm,
    layer_norm_backward,
)

__all__ = [
    "ADD_LAYER_NORM",
    "LAYER_NORM",
    "LAYER_NORM_BACKWARD",
    "add_layer_norm",
    "layer_norm",
    "layer_norm_backward",
]
