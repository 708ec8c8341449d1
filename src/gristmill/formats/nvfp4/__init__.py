"""NVFP4: E2M1 elements, an E4M3 scale for every 16 of them, an fp32 scale above those."""

from gristmill.formats.nvfp4.quantize import quantize
from gristmill.formats.nvfp4.tensor import NVFP4Tensor, PackedNVFP4, dequantize
from gristmill.formats.nvfp4.tiles import swizzle, unswizzle

__all__ = ["NVFP4Tensor", "PackedNVFP4", "dequantize", "quantize", "swizzle", "unswizzle"]
