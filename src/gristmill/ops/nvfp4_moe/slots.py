"""Tokens by the expert that serves them, and products of each with its expert's matrix.

A slot is one entry of `topk_ids`. Few slots take the matrices of their own experts. Many are sorted
by expert, on the device, and multiplied by torch's grouped mm, which takes the sizes of the groups
from the device, too: nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from gristmill.formats.nvfp4.tensor import BLOCK
from gristmill.ops import nvfp4_common as common
from gristmill.ops.nvfp4_common import Weight, arithmetic, decoding_bytes, pieces, product
from gristmill.ops.nvfp4_moe.semantics import Call

grouped_mm: Callable[..., torch.Tensor] = getattr(F, "grouped_mm", None) or torch._grouped_mm

# Torch's kernel takes fewer groups than this.
GROUPS = 1023
# A grouped product narrower than this leaves most of the kernel's tile empty; rather than that, a
# piece takes fewer experts at a time.
NARROW = 64
# What is made of a slot's value in a piece: two products, scales, biases and the results, in fp32.
SLOT_BYTES = 32


def few(slots: int, experts: int) -> bool:
    """Whether slots rather than all experts are what is computed."""
    return slots <= experts


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


class Slots:
    """The slots of a call, in the order in which they are computed."""

    def __init__(self, call: Call) -> None:
        tokens, self.per_token = call.topk_ids.shape
        ids = call.local_ids().flatten()
        self.count, self.tokens, self.experts_there = len(ids), tokens, call.experts
        self.dtype = arithmetic(call.hidden_states)
        self.few = few(self.count, call.experts)
        if self.few:
            self._order = self._back = self._ends = None
        else:
            # Those without an expert come last, behind the end of the last group.
            keys, self._order = torch.sort(torch.where(ids < 0, call.experts, ids), stable=True)
            place = torch.arange(self.count, device=ids.device)
            self._back = torch.empty_like(place).scatter_(0, self._order, place)
            every = torch.arange(call.experts, device=ids.device)
            self._ends = torch.searchsorted(keys, every, right=True, out_int32=True)
            ids = ids[self._order]
        self.valid = (ids >= 0).unsqueeze(-1)
        self.expert = ids.clamp(min=0)

    def rows_of(self, values: torch.Tensor) -> torch.Tensor:
        """A row of tokens' values ``(M, ...)`` for each slot, in the dtype of the arithmetic."""
        if self._order is None:
            token = torch.arange(self.count, device=values.device) // self.per_token
        else:
            token = self._order // self.per_token
        return values.index_select(0, token).to(self.dtype)

    def column_of(self, values: torch.Tensor) -> torch.Tensor:
        """Values of slots ``(M, k)`` as ``(slots, 1)`` in fp32."""
        flat = values.flatten().float().unsqueeze(-1)
        return flat if self._order is None else flat[self._order]

    def in_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Values of slots ``(slots, n)`` as ``(M, k, n)``; zeros where there is no expert."""
        # What stands there is no number to count on: it is replaced, not multiplied.
        values = torch.where(self.valid, values, 0.0)
        if self._back is not None:
            values = values.index_select(0, self._back)
        return values.view(self.tokens, self.per_token, values.shape[-1])

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

        if self._ends is None:
            found = [
                product(values[own].unsqueeze(1), block(self.expert[own])).squeeze(1)
                for piece in pieces(self.count, most)
                for own in (slice(piece.start, piece.stop),)
            ]
            return found[0] if len(found) == 1 else torch.cat(found)
        return self._grouped(values, block, most, self._ends)

    def _grouped(
        self,
        values: torch.Tensor,
        block: Callable[[slice], torch.Tensor],
        most: int,
        ends: torch.Tensor,
    ) -> torch.Tensor:
        """A piece of experts at a time, the last ones first.

        The first group of a piece begins at the first row, whoever that belongs to: what it makes
        of the rows of earlier experts is replaced when their piece comes.
        """
        result: torch.Tensor | None = None
        for piece in reversed(list(pieces(self.experts_there, most))):
            own = slice(piece.start, piece.stop)
            found = grouped_mm(values, block(own), offs=ends[own])
            if result is None:
                result = found
            else:
                line = torch.arange(self.count, device=values.device).unsqueeze(-1)
                result = torch.where(line < ends[piece.stop - 1], found, result)
        if result is None:
            raise RuntimeError("a call without experts is not computed by slots")
        return result

    @property
    def _groups(self) -> int:
        return self.count if self.few else self.experts_there

    def _at_a_time(self, each: int) -> int:
        """How many matrices fit in a piece, at `each` bytes for a column of the result."""
        fit = common.PIECE_BYTES // 2 // (NARROW * each)
        return max(1, min(GROUPS, fit, self._groups))
