"""NVFP4 weights: made, read, and multiplied by.

A weight is E2M1 elements with an E4M3 scale for every 16 of them and an fp32 scale above those:
4.5 bits a value. `quantize` makes one, `linear` and `moe` run it.
"""

from gristmill.formats.nvfp4 import NVFP4Tensor, PackedNVFP4, dequantize, swizzle, unswizzle
from gristmill.formats.nvfp4.quantize import quantize
from gristmill.ops.nvfp4_linear import linear
from gristmill.ops.nvfp4_moe import moe

__all__ = [
    "NVFP4Tensor",
    "PackedNVFP4",
    "dequantize",
    "linear",
    "moe",
    "quantize",
    "swizzle",
    "unswizzle",
]
