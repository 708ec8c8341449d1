"""Modules over our ops. What has a twin in torch is a subclass of it, and loads its state dicts."""

from gristmill.nn.cross_entropy import CrossEntropyLoss
from gristmill.nn.layer_norm import LayerNorm
from gristmill.nn.nvfp4_linear import NVFP4Linear
from gristmill.nn.nvfp4_moe import NVFP4MoE
from gristmill.nn.rms_norm import RMSNorm

__all__ = ["CrossEntropyLoss", "LayerNorm", "NVFP4Linear", "NVFP4MoE", "RMSNorm"]
