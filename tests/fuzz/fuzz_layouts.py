"""Shapes, and where the numbers of a tensor lie in memory."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

LENGTHS = st.one_of(
    st.integers(1, 300),
    st.integers(1, 3),
    st.sampled_from([512, 520, 768, 1000, 1024, 1536, 2048, 2056, 3072, 4096, 5120, 8192, 12288]),
    st.integers(300, 20000),
)


@st.composite
def shapes(draw: Any, elements: int = 60000, rows: int = 300) -> tuple[int, ...]:
    """Rows of any length, few of them if they are long; now and then no rows at all."""
    columns = draw(LENGTHS)
    most = max(1, min(rows, elements // columns))
    leading = draw(st.lists(st.integers(1, most), min_size=0, max_size=3))
    while len(leading) > 1 and torch.Size(leading).numel() > most:
        leading.pop()
    if leading and draw(st.integers(0, 40)) == 40:
        leading[0] = 0
    return (*leading, columns)


def leadings(rows: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Dims before the last: none, one, or several, of at most so many rows."""
    few = max(1, round(rows ** (1 / 3)))
    return st.one_of(
        st.integers(1, rows).map(lambda count: (count,)),
        st.lists(st.integers(1, few), max_size=3).map(tuple),
    )


def laid_out(values: torch.Tensor, layout: str, by: int) -> torch.Tensor:
    """The same numbers, somewhere else in memory, or with their signs in torch's lazy bit.

    Of an expanded or overlapping tensor rows share numbers: some of them are others then.
    """
    if values.dim() == 0:
        return values
    if layout == "padded":
        wide = values.new_zeros((*values.shape[:-1], values.shape[-1] + by))
        wide[..., : values.shape[-1]] = values
        return wide[..., : values.shape[-1]]
    if layout == "shifted":
        flat = values.new_zeros(values.numel() + by)
        flat[by:] = values.reshape(-1)
        return flat[by:].view(values.shape)
    if layout == "permuted" and values.dim() > 2:
        return values.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "columns" and values.dim() > 1:
        return values.movedim(-1, 0).contiguous().movedim(0, -1)
    if layout == "negative" and values.is_floating_point():
        return torch._neg_view(values.neg())
    if layout == "expanded" and values.dim() > 1 and values.shape[0]:
        return values[:1].contiguous().expand(values.shape)
    if layout == "overlapping" and values.dim() > 1 and values.numel():
        strides, step = [1], min(by, values.shape[-1])
        for size in reversed(values.shape[1:-1]):
            strides.append(step)
            step *= size
        return values.contiguous().as_strided(values.shape, (step, *reversed(strides)))
    if layout == "every other":
        return values.repeat_interleave(2, -1)[..., ::2]
    return values
