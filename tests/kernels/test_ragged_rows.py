"""Rows that aligned vectors cover, though neither length nor address is a multiple of 16 bytes."""

from __future__ import annotations

import pytest
import torch

from gristmill.ops.rows.layout import ragged_layout, row_layout
from gristmill.ops.rows.problem import layout_of

BF16, F32 = torch.bfloat16, torch.float32


def rows(*shape: int, dtype: torch.dtype = BF16, shift: int = 0) -> torch.Tensor:
    """Contiguous, `shift` elements beyond a multiple of 16 bytes."""
    whole = torch.zeros(torch.Size(shape).numel() + 16, dtype=dtype)
    first = -whole.data_ptr() % 16 // whole.element_size() + shift
    return whole[first : first + torch.Size(shape).numel()].view(shape)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("columns", [1, 3, 7, 9, 100, 1001, 50257])
@pytest.mark.parametrize("shift", [0, 1, 3])
def test_vectors_reach_over_every_row(columns: int, shift: int, dtype: torch.dtype) -> None:
    """However a row lies, `vectors` aligned ones cover it; some row needs them all."""
    x, y = (rows(9, columns, dtype=dtype, shift=shift) for _ in range(2))
    layout = ragged_layout((x, None, y))
    assert layout is not None
    assert layout.ragged
    assert layout.vector == 16 // x.element_size()
    assert [view and view.access for view in layout.views] == [16, None, 16]
    touched = []
    for row in x:
        first = row.data_ptr() // 16
        touched.append((row.data_ptr() + columns * x.element_size() - 1) // 16 - first + 1)
    assert max(touched) <= layout.vectors <= max(touched) + 1


def test_rows_that_do_not_lie_alike_are_not_covered() -> None:
    assert ragged_layout((rows(4, 9), rows(4, 9, shift=1))) is None
    assert ragged_layout((rows(4, 9), rows(4, 10)[:, :9])) is None
    assert ragged_layout((rows(4, 9), rows(4, 17)[:, :9])) is not None  # 16 bytes further each
    assert ragged_layout((rows(1, 9), rows(1, 10)[:, :9])) is not None  # a stride of no row
    assert ragged_layout((rows(4, 9), rows(4, 9, dtype=F32))) is None
    assert ragged_layout((rows(9, 4).t(), rows(4, 9))) is None
    nested = rows(3, 5, 9).transpose(0, 1)
    assert ragged_layout((nested, nested)) is not None
    assert ragged_layout((nested, rows(5, 3, 9))) is None


def test_what_is_whole_stays_so() -> None:
    """Ragged rows are for kernels that ask for them, and where they are wider than plain ones."""
    odd, even = rows(4, 9), rows(4, 16)
    assert layout_of((odd, odd)) == (row_layout((odd, odd)), False)
    assert layout_of((even, even), ragged=True) == (row_layout((even, even)), False)
    layout, copied = layout_of((odd, odd), ragged=True)
    assert (layout.ragged, copied) == (True, False)
    layout, copied = layout_of((odd.t().contiguous().t(), odd), ragged=True)
    assert (layout.ragged, copied) == (True, True)
    layout, copied = layout_of((odd, rows(4, 9, dtype=F32)), ragged=True)
    assert (layout.ragged, layout.vector, copied) == (False, 1, False)
