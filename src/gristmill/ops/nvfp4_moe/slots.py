"""Products of slots with the NVFP4 matrices of their experts, decoded in pieces."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gristmill.formats.nvfp4.tensor import BLOCK
from gristmill.ops import nvfp4_common as common
from gristmill.ops.experts.slots import GROUPS, SlotOrder, few
from gristmill.ops.nvfp4_common import Weight, arithmetic, decoding_bytes, pieces, product
from gristmill.ops.nvfp4_moe.semantics import Call

# A grouped product narrower than this leaves most of the kernel's tile empty; rather than that, a
# piece takes fewer experts at a time.
NARROW = 64
# What is made of a slot's value in a piece: two products, scales, biases and the results, in fp32.
SLOT_BYTES = 32


def some_tokens(call: Call, width: int) -> Iterator[slice]:
    """The tokens of a call, some at a time, where each slot has `width` values kept.

    So many that what is kept fits in a piece, and that pieces of results are not narrow: every
    piece of tokens decodes all experts again, but every piece of columns reads all its tokens.
    """
    tokens, per_token = call.topk_ids.shape
    kept = common.PIECE_BYTES // (width * arithmetic(call.hidden_states).itemsize)
    wide = common.PIECE_BYTES // 2 // (SLOT_BYTES * NARROW)
    for part in pieces(tokens, min(kept, wide) // per_token, 1):
        yield slice(part.start, part.stop)


class Slots(SlotOrder):
    """The slots of a call, and products with their experts' packed matrices."""

    def __init__(self, call: Call) -> None:
        self.few = few(call.topk_ids.numel(), call.experts)
        dtype = arithmetic(call.hidden_states)
        super().__init__(call.local_ids(), call.experts, dtype, in_order=not self.few)

    def pieces(self, inner: int, outer: int) -> Iterator[range]:
        """The columns of a result in pieces, for matrices of `inner` values a column."""
        each = inner * decoding_bytes(self.dtype)
        groups = self._at_a_time(each)
        half = common.PIECE_BYTES // 2
        most = min(half // (groups * each), half // (self.count * SLOT_BYTES))
        return pieces(outer, most, BLOCK)

    def times(
        self,
        values: torch.Tensor,
        weight: Weight,
        *,
        rows: range | None = None,
        columns: range | None = None,
        parts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Each slot's row of `values` times its expert's matrix, without the row scale.

        By `rows` of the weight, ``values @ w[rows].T``, or by its `columns`,
        ``values @ (parts * w[:, columns])``. Undefined where a slot has no expert.
        """
        width = weight.columns if columns is None else weight.rows
        most = self._at_a_time(width * decoding_bytes(self.dtype))

        def block(experts: slice | torch.Tensor) -> torch.Tensor:
            found = weight.blocks(self.dtype, rows, columns, experts)
            if parts is None:
                return found.transpose(-2, -1)
            return found.mul_(parts[experts].unsqueeze(-1))

        if self.ends is None:
            found = [
                product(values[own].unsqueeze(1), block(self.expert[own])).squeeze(1)
                for piece in pieces(self.count, most)
                for own in (slice(piece.start, piece.stop),)
            ]
            return found[0] if len(found) == 1 else torch.cat(found)
        return self.grouped(values, block, most)

    @property
    def _groups(self) -> int:
        return self.count if self.few else self.experts_there

    def _at_a_time(self, each: int) -> int:
        """How many matrices fit in a piece, at `each` bytes for a column of the result."""
        fit = common.PIECE_BYTES // 2 // (NARROW * each)
        return max(1, min(GROUPS, fit, self._groups))
