"""Tokens by the expert that serves them, by torch ops that never wait for the device.

A slot is one entry of `topk_ids`. Few slots take the matrices of their own experts. Many are sorted
by expert and multiplied by torch's grouped mm, which takes the sizes of the groups from the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

grouped_mm: Callable[..., torch.Tensor] = getattr(F, "grouped_mm", None) or torch._grouped_mm

# Torch's kernel takes fewer groups than this.
GROUPS = 1023


def few(slots: int, experts: int) -> bool:
    """Whether slots rather than all experts are what is computed."""
    return slots <= experts


class SlotOrder:
    """The slots of a call, in the order in which they are computed.

    `local_ids` ``(M, k)`` are places among `experts` matrices, or -1; values are computed in
    `dtype`. Where slots are sorted, `ends` are the ends of the experts' groups, else None.
    """

    def __init__(
        self, local_ids: torch.Tensor, experts: int, dtype: torch.dtype, *, in_order: bool
    ) -> None:
        """`in_order`: sorted by expert."""
        self.tokens, self.per_token = local_ids.shape
        ids = local_ids.flatten()
        self.count, self.experts_there, self.dtype = len(ids), experts, dtype
        self.ends: torch.Tensor | None = None
        self._order = self._back = None
        if in_order:
            # Those without an expert come last, behind the end of the last group.
            keys, self._order = torch.sort(torch.where(ids < 0, experts, ids), stable=True)
            place = torch.arange(self.count, device=ids.device)
            self._back = torch.empty_like(place).scatter_(0, self._order, place)
            every = torch.arange(experts, device=ids.device)
            self.ends = torch.searchsorted(keys, every, right=True, out_int32=True)
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

    def grouped(
        self, values: torch.Tensor, block: Callable[[slice], torch.Tensor], most: int
    ) -> torch.Tensor:
        """Each slot's row of `values`, sorted, times its expert's matrix: undefined if it has none.

        `block` gives the matrices of some experts, at most `most` at a time. The last ones come
        first: the first group of a piece begins at the first row, whoever that belongs to, and what
        it makes of the rows of earlier experts is replaced when their piece comes.
        """
        if self.ends is None or not self.experts_there:
            raise RuntimeError("only slots in order, and with experts, are multiplied in groups")
        result: torch.Tensor | None = None
        starts = range(0, self.experts_there, most)
        for start in reversed(starts):
            own = slice(start, min(start + most, self.experts_there))
            found = grouped_mm(values, block(own), offs=self.ends[own])
            if result is None:
                result = found
            else:
                line = torch.arange(self.count, device=values.device).unsqueeze(-1)
                result = torch.where(line < self.ends[own.stop - 1], found, result)
        assert result is not None
        return result

    def in_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Values of slots ``(slots, n)`` as ``(M, k, n)``; zeros where there is no expert."""
        # What stands there is no number to count on: it is replaced, not multiplied.
        values = torch.where(self.valid, values, 0.0)
        if self._back is not None:
            values = values.index_select(0, self._back)
        return values.view(self.tokens, self.per_token, values.shape[-1])
