"""Tiles of 128 x 4 scales, against the byte offset of every one of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gristmill.errors import DtypeError
from gristmill.formats.nvfp4 import swizzle, unswizzle
from gristmill.formats.nvfp4.tiles import padded, take

SHAPES = [(1, 1), (127, 3), (128, 4), (129, 5), (32, 4), (300, 9), (256, 16), (1, 64), (640, 1)]


def offset(row: int, column: int, columns: int) -> int:
    """Of a scale, in bytes, with `columns` counting the padding."""
    tile = (row // 128) * (columns // 4) + column // 4
    return tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4


def some_scales(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(1, 127, shape, generator=generator).to(torch.uint8)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_scale_lies_at_its_offset_and_the_rest_is_zero(shape: tuple[int, int]) -> None:
    rows, columns = shape
    scales = some_scales(*shape)
    swizzled = swizzle(scales.view(torch.float8_e4m3fn))
    assert swizzled.dtype == torch.float8_e4m3fn
    tall, wide = padded(rows, columns)
    assert tall % 128 == 0
    assert 0 <= tall - rows < 128
    assert wide % 4 == 0
    assert 0 <= wide - columns < 4
    expected = [0] * (tall * wide)
    for row, line in enumerate(scales.tolist()):
        for column, scale in enumerate(line):
            expected[offset(row, column, wide)] = scale
    assert swizzled.view(torch.uint8).tolist() == expected


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stack", [(), (3,), (2, 3), (0,)])
def test_there_and_back(shape: tuple[int, int], stack: tuple[int, ...]) -> None:
    scales = some_scales(*stack, *shape).view(torch.float8_e4m3fn)
    swizzled = swizzle(scales)
    tall, wide = padded(*shape)
    assert swizzled.shape == (*stack, tall * wide)
    back = unswizzle(swizzled, *shape)
    assert back.is_contiguous()
    assert torch.equal(back.view(torch.uint8), scales.view(torch.uint8))


def test_each_matrix_of_a_stack_is_swizzled_by_itself() -> None:
    scales = some_scales(2, 3, 200, 6)
    swizzled = swizzle(scales)
    for one in range(2):
        for two in range(3):
            assert torch.equal(swizzled[one, two], swizzle(scales[one, two]))


def test_strided_scales() -> None:
    scales = some_scales(6, 260)
    assert torch.equal(swizzle(scales.t()), swizzle(scales.t().contiguous()))
    swizzled = swizzle(some_scales(130, 5))
    spread = torch.stack((swizzled, swizzled), dim=-1)[:, 1]
    assert torch.equal(unswizzle(spread, 130, 5), some_scales(130, 5))


@pytest.mark.parametrize("stack", [(), (2, 3)])
@pytest.mark.parametrize(
    ("rows", "columns"),
    [(range(300), range(9)), (range(120, 140), range(3, 8)), (range(299, 300), range(1))],
)
def test_a_part_is_taken_out_of_its_tiles(
    stack: tuple[int, ...], rows: range, columns: range
) -> None:
    scales = some_scales(*stack, 300, 9)
    expected = scales[..., rows.start : rows.stop, columns.start : columns.stop]
    taken = take(swizzle(scales).view(torch.float8_e4m3fn), rows, columns, 9)
    assert taken.dtype == torch.float8_e4m3fn
    assert torch.equal(taken.view(torch.uint8), expected)


def test_no_rows() -> None:
    assert swizzle(some_scales(0, 4)).shape == (0,)
    assert unswizzle(some_scales(0), 0, 4).shape == (0, 4)


@pytest.mark.parametrize("size", [0, 511, 513, 1024])
def test_a_wrong_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=r"unswizzle: 100 x 3 scales take 128 x 4 = 512 bytes"):
        unswizzle(torch.zeros(size, dtype=torch.uint8), 100, 3)


def test_a_wrong_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="swizzle: scales must have at least two dims"):
        swizzle(torch.zeros(512, dtype=torch.uint8))
    with pytest.raises(ValueError, match="unswizzle: 128 x 4"):
        unswizzle(torch.tensor(1, dtype=torch.uint8), 128, 4)


@pytest.mark.parametrize(
    ("scales", "got"), [(torch.ones(8, 4), r"torch\.float32"), ([[1.0]], "list")]
)
def test_scales_that_are_no_bytes(scales: Any, got: str) -> None:
    with pytest.raises(DtypeError, match=rf"^swizzle: scales must be .* E4M3 .*, got {got}"):
        swizzle(scales)
    with pytest.raises(DtypeError, match=rf"^unswizzle: swizzled must be .* E4M3 .*, got {got}"):
        unswizzle(scales, 8, 4)
