"""How the experts that a router chose lie in memory, as kernels/cuda/moe_ids.cuh is told.

A slot is one entry of `topk_ids`: slot = token * topk + j. One whose id is negative, out of range,
or mapped to what is, takes no part.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

# Ids: the addresses of ids and map come first; then row_stride, column_stride, map_stride; topk,
# experts, mapped, dense.
CONSTANTS = struct.Struct("<3q4I")
BYTES = {torch.int32: 4, torch.int64: 8}


@dataclass(frozen=True)
class IdFacts:
    """Dtypes and strides, in elements, of `topk_ids` ``(M, k)`` and `expert_map` ``(n,)``."""

    dtype: torch.dtype
    tokens: int
    topk: int
    strides: tuple[int, int]
    map_dtype: torch.dtype | None = None
    mapped: int = 0
    map_stride: int = 1

    @classmethod
    def of(cls, topk_ids: torch.Tensor, expert_map: torch.Tensor | None = None) -> IdFacts:
        tokens, topk = topk_ids.shape
        strides = (topk_ids.stride(0), topk_ids.stride(1))
        if expert_map is None:
            return cls(topk_ids.dtype, tokens, topk, strides)
        mapped, stride = expert_map.shape[0], expert_map.stride(0)
        return cls(topk_ids.dtype, tokens, topk, strides, expert_map.dtype, mapped, stride)

    @property
    def slots(self) -> int:
        return self.tokens * self.topk

    @property
    def dense(self) -> bool:
        """Whether the id of a slot is at the slot's number."""
        row, column = self.strides
        return (row == self.topk or self.tokens == 1) and (column == 1 or self.topk == 1)

    @property
    def template(self) -> str:
        """Bytes of an id and of an entry of the map, as kernels are instantiated with."""
        return f"{BYTES[self.dtype]},{0 if self.map_dtype is None else BYTES[self.map_dtype]}"

    def pack(self, experts: int) -> bytes:
        """What a kernel is told beside the two addresses, for so many experts here."""
        sizes = (self.topk, experts, self.mapped, int(self.dense))
        return CONSTANTS.pack(*self.strides, self.map_stride, *sizes)
