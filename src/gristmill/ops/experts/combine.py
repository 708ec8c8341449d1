"""What the experts made of each token, added up (kernels/cuda/moe_combine.cu)."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gristmill.jit import Program
from gristmill.ops import launch
from gristmill.ops.experts import ids as experts_ids
from gristmill.ops.experts.ids import IdFacts
from gristmill.select.device import Device

TYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "float"}
THREADS = 128  # as in the kernel

# CombineParams: ids, map and what IdFacts packs; partial, y, weights; and what is the same for all
# calls of a plan, packed once: y_stride, weights_row, weights_column; hidden, across.
CONSTANTS = struct.Struct("<3q2I")
PARAMS = struct.Struct(f"<QQ{experts_ids.CONSTANTS.size}s3Q{CONSTANTS.size}s")


@dataclass(frozen=True)
class Combine:
    """``y[token] = sum over j of weight * partial[row]``, in the order of j, in fp32, rounded once.

    Over slots that take part; what stands in the rows of others is not looked at. `partial` is
    dense ``(slots, hidden)``. A slot's row is that of its number, or with `sorted` that of its
    sorted position, `Routed.position_of`. `weights` is the dtype of topk_weights, None where they
    are in `partial` already. Strides are in elements; that of y is `hidden` unless it is given.
    """

    device: Device
    ids: IdFacts
    experts: int
    hidden: int
    partial: torch.dtype
    out: torch.dtype
    sorted: bool = False
    weights: torch.dtype | None = None
    weights_strides: tuple[int, int] = (0, 0)
    y_stride: int | None = None

    @property
    def columns(self) -> int:
        """Of a thread: as many as it reads at once, or one where rows do not allow that."""
        columns = 16 // self.partial.itemsize
        access = min(16, columns * self.out.itemsize)
        aligned = self._y_stride * self.out.itemsize % access == 0
        return columns if self.hidden % columns == 0 and aligned else 1

    @property
    def _y_stride(self) -> int:
        return self.hidden if self.y_stride is None else self.y_stride

    def program(self) -> Program:
        types = f"{TYPES[self.partial]},{TYPES[self.out]},{self.columns}"
        rows = "0,0" if self.sorted else self.ids.template
        weights = "Absent" if self.weights is None else TYPES[self.weights]
        return Program("moe_combine.cu", (f"moe_combine<{types},{rows},{weights}>",))

    def programs(self) -> tuple[Program, ...]:
        return (self.program(),)

    def prepare(self) -> Callable[..., None]:
        """``combine(stream, partial_at, y_at, ids_at, map_at=0, weights_at=0)``, of addresses.

        With the device current. `ids_at` is that of topk_ids, with `sorted` that of position_of.
        Ids, map and weights are read while the previous kernel may still run: they must have been
        written before that one began. Rows of y begin at multiples of 16 bytes, or of as many as
        four columns have.
        """
        program = self.program()
        across = math.ceil(self.hidden / (THREADS * self.columns))
        start = launch.prepare(
            launch.KernelCall(
                program,
                program.names[0],
                grid=self.ids.tokens * across,
                block=THREADS,
                shared=0,
                params=PARAMS,
                dependent=self.device.capability >= (9, 0),
            ),
            self.device.index,
        )
        of_ids = self.ids.pack(self.experts)
        constants = CONSTANTS.pack(self._y_stride, *self.weights_strides, self.hidden, across)

        def combine(
            stream: int,
            partial_at: int,
            y_at: int,
            ids_at: int,
            map_at: int = 0,
            weights_at: int = 0,
        ) -> None:
            start(stream, ids_at, map_at, of_ids, partial_at, y_at, weights_at, constants)

        return combine
