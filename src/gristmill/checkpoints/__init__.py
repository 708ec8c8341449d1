"""NVFP4 checkpoints: those of ModelOpt and of compressed-tensors read, ModelOpt's written.

A weight on disk is what `NVFP4Tensor` holds: packed codes, block scales in row order, and a global
scale for each layer. Layers that run as one (q, k and v; gate and up; all experts) are read into
one tensor with a global scale per row, so nothing is rounded again.
"""

from gristmill.checkpoints.config import QuantizationConfig
from gristmill.checkpoints.reader import Checkpoint
from gristmill.checkpoints.writer import save_modelopt

__all__ = ["Checkpoint", "QuantizationConfig", "save_modelopt"]
